"""One kept HTTP connection: its deadline, its limits, its addresses. Real sockets on loopback, servers of the test's own."""

import gzip
import socket
import threading
import time

import pytest
from launchers import LONG_S, SECRET, Launcher, Stranger, raw, says, silence, trickle

from rankwatch.monitor.nodes import connection as module
from rankwatch.monitor.nodes.connection import Connection, Names, Unanswered, unpacked

SHORT_S = 0.2


@pytest.fixture
def start():
    running = []

    def stranger(answer, **where):
        running.append(Stranger(answer, **where))
        return running[-1]

    yield stranger
    for each in running:
        each.stop()


def connect(port, *addresses):
    return Connection(addresses or ("127.0.0.1",), port, SECRET, Names())


def ask(connection, wait_s=LONG_S, max_bytes=1 << 20, target="/"):
    try:
        return connection.get(target, time.monotonic() + wait_s, max_bytes)
    finally:
        connection.close()


def why(connection, wait_s=LONG_S, **options):
    with pytest.raises(Unanswered) as error:
        ask(connection, wait_s, **options)
    return str(error.value).replace(str(connection.address), "ADDRESS")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_an_answer_comes_with_its_size_and_times(start):
    answer = ask(connect(start(says("hello")).port))
    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.sent_at <= answer.received_at
    assert answer.wire_bytes > len("hello")


def test_one_connection_serves_many_questions(start):
    stranger = start(says("hello"))
    connection = connect(stranger.port)
    for _ in range(5):
        connection.get("/", time.monotonic() + LONG_S)
    connection.close()
    assert stranger.asked == 5
    assert len(stranger.connections) == 1


def test_a_connection_that_was_closed_while_idle_is_opened_anew(start):
    stranger = start(says("hello", keep=False))
    connection = connect(stranger.port)
    for _ in range(3):
        assert connection.get("/", time.monotonic() + LONG_S).body == b"hello"
    connection.close()
    assert len(stranger.connections) == 3


def test_a_question_is_sent_again_when_the_old_connection_ends_under_it(start):
    """The other side closes in the moment in which we ask."""

    def answer(connection, stranger):
        if len(stranger.connections) == 1 and stranger.asked == 2:
            return False
        return says("hello")(connection, stranger)

    stranger = start(answer)
    connection = connect(stranger.port)
    assert [connection.get("/", time.monotonic() + LONG_S).body for _ in range(3)] == [b"hello"] * 3
    connection.close()
    assert len(stranger.connections) == 2


def test_a_new_connection_that_ends_is_not_tried_again(start):
    stranger = start(raw(b""))
    assert why(connect(stranger.port)) == "ADDRESS: it closed the connection"
    assert len(stranger.connections) == 1


def test_who_never_answers_is_given_up_at_the_deadline(start):
    assert why(connect(start(silence).port), SHORT_S) == "ADDRESS did not answer in time"


def test_who_sends_a_byte_now_and_then_is_given_up_at_the_same_deadline(start):
    assert why(connect(start(trickle).port), SHORT_S) == "ADDRESS did not answer in time"


def test_a_body_that_does_not_end_is_given_up(start):
    assert why(connect(start(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", keep=True)).port), SHORT_S) == "ADDRESS did not finish its answer in time"
    assert (
        why(connect(start(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")).port))
        == "ADDRESS closed the connection 6 bytes before the end of its answer"
    )


def test_nobody_listens():
    assert why(connect(free_port())) == "ADDRESS: connection refused"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (raw(b"SSH-2.0-OpenSSH_9.6\r\n\r\n"), "what answers at ADDRESS does not speak HTTP"),
        (raw(b"HTTP/1.1 OK\r\n\r\n"), "what answers at ADDRESS does not speak HTTP"),
        (raw(b"HTTP/1.1 99999999999999999999 OK\r\n\r\n"), "what answers at ADDRESS does not speak HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\n\r\nabc"), "ADDRESS does not say how long its answer is"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"), "ADDRESS does not say how long its answer is"),
        (raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"), "ADDRESS does not say how long its answer is"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc"), "ADDRESS answers with more than it has announced"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\nabc"), "ADDRESS answers with 99999999 bytes, more than the 1048576 that are taken"),
        (raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000), "ADDRESS answers with a head of more than 16384 bytes"),
        (raw(b"HTTP/1.1 200"), "ADDRESS closed the connection in its answer"),
        (says(b"no gzip", "Content-Encoding: gzip"), "ADDRESS answers with a damaged gzip body (Error -3 while decompressing data: incorrect header check)"),
        (says(gzip.compress(b"hello")[:-6], "Content-Encoding: gzip"), "ADDRESS answers with a gzip body that is cut off"),
        (says(gzip.compress(b"0" * (1 << 21)), "Content-Encoding: gzip"), "ADDRESS answers with more than 1048576 bytes once unpacked"),
    ],
)
def test_what_is_no_answer_is_said(start, answer, reason):
    assert why(connect(start(answer).port)) == reason


def test_a_gzip_bomb_is_never_unpacked():
    bomb = gzip.compress(gzip.compress(bytes(64 << 20)))
    assert len(unpacked(bomb, 1 << 20, "x")) < 1 << 20  # a bomb within a bomb is only bytes
    with pytest.raises(Unanswered, match="more than 1000 bytes"):
        unpacked(gzip.compress(bytes(64 << 20)), 1000, "x")


def test_the_first_address_that_answers_is_kept(start):
    stranger = start(says("hello"), host="127.0.0.2")
    connection = connect(stranger.port, "127.0.0.1", "127.0.0.2")
    for _ in range(2):
        assert connection.get("/", time.monotonic() + LONG_S).body == b"hello"
    assert connection.address == f"127.0.0.2:{stranger.port}"
    connection.close()


def test_after_all_addresses_failed_the_next_try_begins_with_another_one():
    port = free_port()
    connection = connect(port, "127.0.0.1", "127.0.0.2")
    assert why(connection) == f"127.0.0.1:{port}: connection refused; ADDRESS: connection refused"
    assert connection.host == "127.0.0.2"
    connection.turn()
    assert connection.host == "127.0.0.1"


def test_an_address_that_swallows_connections_leaves_time_for_the_next_one(start):
    """A full backlog answers no SYN, as a firewall does."""
    stranger = start(says("hello"), host="127.0.0.2")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", stranger.port))
        deaf.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", stranger.port))
        assert ask(connect(stranger.port, "127.0.0.1", "127.0.0.2"), 1.0).body == b"hello"
        for filler in fillers:
            filler.close()


def test_a_name_server_that_does_not_answer_holds_nobody_up(monkeypatch, start):
    stranger, over = start(says("hello"), host="127.0.0.2"), threading.Event()

    def hung(host, port, type=0, flags=0):
        if flags:
            raise OSError("no number")
        over.wait(LONG_S)
        return []

    names = Names()
    monkeypatch.setattr(module.socket, "getaddrinfo", hung)
    with pytest.raises(OSError, match="node05 was not found in time"):
        names("node05", 80, 0.01)
    over.set()
    monkeypatch.undo()
    assert ask(Connection(("node.invalid", "127.0.0.2"), stranger.port, SECRET, names)).body == b"hello"
    names.close()


def test_what_is_no_address_is_left_out(start):
    stranger = start(says("hello"))
    assert ask(connect(stranger.port, "127.0.0.1\r\nX: y", "", "a b", "127.0.0.1")).body == b"hello"
    assert "nowhere.invalid" in why(connect(stranger.port, "\n"))


def test_ipv6_addresses_are_spoken_to():
    try:
        launcher = Launcher(listen="[::]:0")
    except AssertionError:
        pytest.skip("this machine has no IPv6")
    for address in ("::1", "127.0.0.1"):  # one listener for both
        answer = ask(connect(launcher.server.port, address), target="/peer/v1/hello")
        assert answer.status == 200
    launcher.stop()


def test_a_call_under_way_can_be_cut_from_another_thread(start):
    asked = threading.Event()

    def answer(connection, stranger):
        asked.set()
        return silence(connection, stranger)

    connection, said = connect(start(answer).port), []
    caller = threading.Thread(target=lambda: said.append(why(connection)))
    caller.start()
    assert asked.wait(LONG_S)
    connection.cut()
    caller.join(LONG_S)
    assert said == ["ADDRESS: it closed the connection"]
