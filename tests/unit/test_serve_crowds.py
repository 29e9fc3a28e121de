"""Crowds of clients that hang in every way: a scrape gets through all of them, and threads and memory stay bounded."""

import base64
import socket
import threading
import time

import pytest

from rankwatch.serve import acceptor, handler, http, names, server
from rankwatch.serve.connections import Connections
from rankwatch.serve.server import Response, Server

BODY = b"x" * 1_000_000
BIG = b"x" * 8_000_000  # more than the socket buffers of both sides take
HOW = {
    "says nothing": b"",
    "stops within the request line": b"GET /met",
    "stops within the headers": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-A: ",
    "does not read a page": b"GET /page HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "does not read its metrics": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "asks for a slow page": b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "announces a body": b"GET /page HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n",
}


class Crowd:
    """A server, and clients that connect, send and never read."""

    def __init__(self):
        self.release = threading.Event()
        self.clients = []
        routes = {"/metrics": self.metrics, "/page": lambda request: Response(BODY), "/big": lambda request: Response(BIG), "/slow": self.slow}
        self.server = Server("127.0.0.1:0", routes)
        assert self.server.start()

    def metrics(self, request):
        return Response(BODY)

    def slow(self, request):
        self.release.wait(30)
        return Response("slow\n")

    def join(self, data):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(("127.0.0.1", self.server.port))
        self.clients.append(client)
        if data:
            client.sendall(data)
        return client

    def scrape(self, target="/metrics"):
        """The status line and the length of the answer of a client that reads."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=20) as client:
            client.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: client.recv(1 << 20), b""))
        return answer[:12], len(answer.partition(b"\r\n\r\n")[2])

    def threads(self):
        return sum(thread.name == "rankwatch-http-connection" for thread in threading.enumerate())


@pytest.fixture
def crowd():
    one = Crowd()
    yield one
    one.release.set()
    one.server.stop()
    for client in one.clients:
        client.close()


@pytest.mark.parametrize("how", HOW)
def test_a_scrape_is_answered_while_200_clients_hang(crowd, how):
    for _ in range(200):
        crowd.join(HOW[how])
    assert crowd.scrape() == (b"HTTP/1.1 200", len(BODY))


def test_a_scrape_is_answered_while_more_clients_hang_than_may_be_connected(crowd, monkeypatch):
    for n in range(acceptor.MAX_CONNECTIONS + 50):
        crowd.join(list(HOW.values())[n % len(HOW)])
    assert crowd.scrape() == (b"HTTP/1.1 200", len(BODY))
    assert crowd.threads() <= acceptor.MAX_CONNECTIONS + server.AT_ONCE + server.OPEN_AT_ONCE


def test_a_file_server_that_hangs_takes_neither_the_other_pages_nor_scrapes_along(crowd):
    crowd.server._routes["/files/"] = crowd.slow
    for _ in range(40):
        crowd.join(b"GET /files/x HTTP/1.1\r\nHost: localhost\r\n\r\n")
    for target in ("/page", "/metrics"):
        assert crowd.scrape(target) == (b"HTTP/1.1 200", len(BODY))


def test_slow_readers_are_cut_when_their_answers_would_take_too_much_memory(crowd, monkeypatch):
    """32 answers of 8 MB against room for 5: without the bound each of 256 readers would hold a body of its own."""
    monkeypatch.setattr(acceptor, "MAX_SENDING_BYTES", 40_000_000)
    monkeypatch.setattr(handler.Handler, "timeout", 60)  # not what cuts them here
    tight = Crowd()
    try:
        for _ in range(32):
            tight.join(b"GET /big HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert tight.scrape() == (b"HTTP/1.1 200", len(BODY))
        until = time.monotonic() + 20
        while tight.threads() > 5:
            assert time.monotonic() < until, "the slow readers still hold their bodies"
            threading.Event().wait(0.02)
    finally:
        tight.release.set()
        tight.server.stop()
        for client in tight.clients:
            client.close()


class TestWhoGoes:
    """Decisions alone; connections are names."""

    def test_while_there_is_room_nobody(self):
        connections = Connections(2, 100)
        assert [connections.admit(name, 0.0, 8.0) for name in "ab"] == [None, None]

    def test_the_oldest_without_a_request_before_those_that_are_answered(self):
        connections = Connections(3, 100)
        for name in "abc":
            connections.admit(name, 0.0, 8.0)
        connections.working("a", 0.0, 30.0)
        assert connections.admit("d", 1.0, 8.0) == "b"
        assert connections.admit("e", 1.0, 8.0) == "c"

    def test_where_all_are_answered_the_oldest_so_that_the_number_stays_bounded(self):
        connections = Connections(2, 100)
        for name in "ab":
            connections.admit(name, 0.0, 8.0)
            connections.working(name, 0.0, 30.0)
        assert connections.admit("c", 1.0, 8.0) == "a"
        assert len(connections) == 2

    def test_one_that_was_cut_does_not_count_again(self):
        connections = Connections(1, 100)
        connections.admit("a", 0.0, 8.0)
        assert connections.admit("b", 0.0, 8.0) == "a"
        connections.working("a", 0.0, 30.0)  # its thread has not noticed yet
        assert connections.sending("a", 0.0, 50) == []
        assert connections.all() == ["b"]

    def test_the_longest_unread_answers_go_until_the_rest_fits(self):
        connections = Connections(9, 100)
        for n, name in enumerate("abcd"):
            connections.admit(name, 0.0, 8.0)
            connections.working(name, 0.0, 30.0)
            assert connections.sending(name, float(9 - n), 30) == (["c", "b"] if name == "e" else [] if name < "d" else ["c"])
        assert len(connections) == 3

    def test_an_answer_larger_than_all_room_goes_out_alone(self):
        connections = Connections(9, 100)
        for name in "ab":
            connections.admit(name, 0.0, 8.0)
            connections.working(name, 0.0, 30.0)
        connections.sending("a", 0.0, 60)
        assert connections.sending("b", 1.0, 500) == ["a"]
        assert connections.all() == ["b"]

    def test_what_has_been_read_no_longer_counts(self):
        connections = Connections(9, 100)
        for name in "ab":
            connections.admit(name, 0.0, 8.0)
        connections.sending("a", 0.0, 90)
        connections.reading("a", 1.0, 8.0)
        assert connections.sending("b", 2.0, 90) == []

    def test_each_part_has_its_own_time(self):
        connections = Connections(9, 100)
        connections.admit("a", 0.0, 8.0)
        assert connections.late(8.0) == []
        connections.working("a", 8.0, 30.0)
        assert connections.late(38.0) == []
        assert connections.late(38.1) == ["a"]
        assert connections.late(99.0) == []


class TestNames:
    RESOLV = "# x\nsearch cluster.local. example.org\ndomain lab\nnameserver 10.0.0.1\n"
    HOSTS = "127.0.0.1 localhost\n10.0.0.5 Node05.cluster.local node05 gateway  # node09\n10.0.0.9 node09\n"

    def test_a_machine_has_its_host_name_its_domains_and_its_aliases(self):
        wanted = {"node05", "node05.cluster.local", "node05.example.org", "node05.lab", "gateway"}
        assert names.names_of("node05", self.RESOLV, self.HOSTS) == wanted
        assert names.names_of("NODE05.cluster.local", self.RESOLV, self.HOSTS) == wanted

    def test_a_machine_called_localhost_has_none(self):
        assert names.names_of("localhost", self.RESOLV, self.HOSTS) == frozenset()
        assert names.names_of("", "", "") == frozenset()

    def test_no_name_server_is_asked(self, monkeypatch):
        monkeypatch.setattr(socket, "getaddrinfo", None)
        monkeypatch.setattr(socket, "gethostbyname", None)
        assert socket.gethostname().lower() in names.own_names() or socket.gethostname() == "localhost"


class TestBeyondLoopback:
    @pytest.fixture
    def get(self):
        running = Server(
            "0.0.0.0:0", {"/": lambda request: Response("page\n"), "/metrics": lambda request: Response("up 1\n")}, "t0ken", hosts=("jobs.example",)
        )
        running._hosts |= {"node05"}
        assert running.start()

        def status(host, target="/", authorization=""):
            credential = f"Authorization: {authorization}\r\n" if authorization else ""
            with socket.create_connection(("127.0.0.1", running.port), timeout=10) as client:
                client.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{credential}Connection: close\r\n\r\n".encode())
                return int(b"".join(iter(lambda: client.recv(4096), b"")).split()[1])

        yield status
        running.stop()

    BASIC = "Basic " + base64.b64encode(b"me:t0ken").decode()

    @pytest.mark.parametrize("host", ["node05", "node05:27435", "jobs.example", "10.1.2.3", "[fd00::5]:1", "localhost"])
    def test_its_names_and_every_literal_address_reach_a_page(self, get, host):
        assert get(host, authorization=self.BASIC) == 200
        assert get(host) == 401

    @pytest.mark.parametrize("host", ["evil.example", "node05.evil.example", "10.1.2.3.evil.example", "me@node05", "node05/x"])
    def test_another_name_reaches_no_page_and_is_asked_for_no_password(self, get, host):
        """A browser that was led here under a foreign name must not even show the prompt: its page could read what the password opens."""
        assert get(host) == 421
        assert get(host, authorization=self.BASIC) == 421

    def test_a_program_with_its_bearer_may_use_any_name_and_learns_that_it_is_the_wrong_one(self, get):
        """Nodes meet under names of a scheduler; 401 is what makes them ask for the new secret."""
        assert get("service.namespace.svc", authorization="Bearer t0ken") == 200
        assert get("service.namespace.svc", authorization="Bearer wrong") == 401

    def test_scrapes_and_health_checks_may_use_any_name(self, get):
        assert get("service.namespace.svc", "/metrics") == 200


class TestBearerUnderAForeignName:
    """What a page can do that was loaded from a name that now leads to us: it may add a Bearer of its own."""

    ROUTES = {"/": lambda request: Response("page\n"), "/metrics": lambda request: Response("up 1\n")}

    def ask(self, token, path, bearer, listen="127.0.0.1:0"):
        headers = {"host": "evil.example", "authorization": f"Bearer {bearer}"}
        return Server(listen, self.ROUTES, token).answer("GET", path, headers, "HTTP/1.1", "n")

    def test_it_opens_nothing_of_a_loopback_server_without_a_token(self):
        assert {self.ask(None, path, "x").status for path in self.ROUTES} == {421}

    def test_a_wrong_one_opens_nothing_and_prompts_for_no_password(self):
        for listen in ("127.0.0.1:0", "0.0.0.0:0"):
            answer = self.ask("t0ken", "/", "x", listen)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, 'Bearer realm="rankwatch"')
        assert self.ask("t0ken", "/metrics", "x").status == 421


class TestToken:
    def test_who_comes_without_it_is_told_where_it_lies(self):
        running = Server("127.0.0.1:0", {"/": lambda request: Response("page\n")}, "t0ken", token_at="/run/x/token")
        answer = running.answer("GET", "/", {"host": "localhost"}, "HTTP/1.1", "n")
        assert (answer.status, answer.body) == (
            401,
            f"the token is needed: as Bearer, or as the password of any user; it lies in /run/x/token on {socket.gethostname()}\n",
        )
        assert "t0ken" not in str(answer)

    @pytest.mark.parametrize("target", ["/?token=t0ken", "/?access_token=t0ken", "/t0ken", "/?authorization=Bearer%20t0ken"])
    def test_it_is_not_taken_from_an_address(self, target):
        running = Server("127.0.0.1:0", {"/": lambda request: Response("page\n")}, "t0ken")
        assert running.answer("GET", target, {"host": "localhost"}, "HTTP/1.1", "n").status == 401

    @pytest.mark.parametrize("given", ["t0ken", "t0keN", "", "t0ken-and-more"])
    def test_it_is_compared_in_constant_time_and_only_so(self, monkeypatch, given):
        compared = []
        real = http.hmac.compare_digest
        monkeypatch.setattr(http.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
        assert http.token_given({"authorization": f"Bearer {given}"}, "t0ken") is (given == "t0ken")
        assert compared == [(given.encode(), b"t0ken")]
