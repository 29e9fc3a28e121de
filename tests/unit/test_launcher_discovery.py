"""How launchers find each other: what is asked of torchrun's store, what is published, what is believed."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace

import pytest

from rankwatch import __version__
from rankwatch.config import Options
from rankwatch.launcher import addresses, discovery, own_line, pace, torchrun
from rankwatch.launcher.announced import Announcement, AnnouncementError, decode
from rankwatch.launcher.discovery import Discovery
from rankwatch.launcher.listed import Listed
from rankwatch.monitor.nodes.peer import Peer

EVEN = 0.5  # the spread that changes nothing


class TCPStore:
    """Stands for torch's server and a connection to it. A get of a key that is not there would block, so it is an error; so is any other call."""

    def __init__(self, keys=None, host="10.0.0.1", port=29400):
        self.keys = {} if keys is None else keys
        self.host, self.port = host, port
        self.timeout = None
        self.dead = ""
        self.clones = []
        self.calls = []

    def clone(self):
        copy = TCPStore(self.keys, self.host, self.port)
        self.clones.append(copy)
        return copy

    def set_timeout(self, timeout):
        assert self.timeout is None, "set once, and on a clone only"
        self.timeout = timeout

    def check(self, keys):
        self._called("check", *keys)
        return all(key in self.keys for key in keys)

    def get(self, key):
        self._called("get", key)
        assert key in self.keys, f"get of {key!r} would block"
        return self.keys[key]

    def multi_get(self, keys):
        self._called("multi_get", *keys)
        assert all(key in self.keys for key in keys), f"multi_get of {keys!r} would block"
        return [self.keys[key] for key in keys]

    def set(self, key, value):
        self._called("set", key)
        self.keys[key] = value.encode()

    def _called(self, *call):
        assert self.timeout == timedelta(seconds=2), f"{call[0]} on a store without a deadline of ours"
        if self.dead:
            raise RuntimeError(self.dead)
        self.calls.append(call)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Job:
    """Launchers of one job around one store, looked at one by one: no thread runs."""

    def __init__(self, nnodes=2, store=None, **options):
        self.store, self.clock, self.reached = store or TCPStore(), Clock(), []
        self.changes = dict.fromkeys(range(nnodes), 0)
        self.launchers = [self.launcher(rank, nnodes, **options) for rank in range(nnodes)]

    def launcher(self, rank, nnodes, **options):
        launcher = Discovery(self.store, rank, nnodes, reach=self.reach, own_addresses=lambda host, port: (f"10.0.0.{rank + 1}",), clock=self.clock, **options)
        launcher._spread = EVEN
        launcher.on_change = lambda: self.changes.update({rank: self.changes[rank] + 1})
        return launcher

    def reach(self, host, port):
        self.reached.append((host, port))

    @property
    def links(self):
        return self.store.clones


def test_launchers_find_each_other_through_the_store():
    job = Job(3)
    judge, *members = job.launchers
    assert [launcher.look() for launcher in job.launchers] == [0.2, 0.2, 0.2]
    assert (judge.peers(), members[0].judge(), members[0].secret()) == ((), None, "")

    judge.publish(41000, "aaaa", (0, 1), "20260101T000000Z-job")
    judge.look()
    for rank, member in enumerate(members, 1):
        member.look()
        assert member.secret() == judge.secret() != ""
        assert member.judge() == Peer(0, judge_node(), ("10.0.0.1",), 41000, "aaaa", __version__, (0, 1))
        assert member.run_name(0) == "20260101T000000Z-job"
        member.publish(42000 + rank, f"n{rank}", (2 * rank, 2 * rank + 1))
        member.look()
    judge.look()
    assert [(peer.group_rank, peer.port, peer.nonce, peer.ranks) for peer in judge.peers()] == [(1, 42001, "n1", (2, 3)), (2, 42002, "n2", (4, 5))]
    assert judge.judge() is None
    assert job.changes == {0: 1, 1: 1, 2: 1}
    assert {launcher.problem for launcher in job.launchers} == {""}


def judge_node():
    import socket

    return socket.gethostname()


def test_the_secret_has_256_bits_and_each_attempt_draws_its_own():
    """Of one launcher, too, that judges again."""
    first, second = Job().launchers[0].secret(), Job().launchers[0].secret()
    assert first != second
    assert len(bytes.fromhex(first)) == len(bytes.fromhex(second)) == 32


def test_a_member_that_finds_the_secret_of_the_attempt_before_takes_the_new_one_once_it_is_refused():
    """The static rendezvous keeps the keys."""
    before = Job()
    judge, _ = before.launchers
    judge.publish(41000, "old", (0,))
    judge.look()

    again = Job(store=before.store)
    judge, member = again.launchers
    member.look()
    assert (member.judge().nonce, member.secret()) == ("old", before.launchers[0].secret())
    judge.publish(41001, "new", (0,))
    judge.look()
    member.refused()
    member.look()
    assert (member.judge().nonce, member.secret()) == ("new", judge.secret())
    assert again.changes[1] == 2


def test_an_order_is_the_judges_by_a_key_that_is_never_published():
    job = Job(3)
    judge, member, other = job.launchers
    assert not member.is_judges(judge.order_key())  # nothing has been found
    judge.publish(41000, "n", (0,))
    judge.look()
    member.look()
    assert member.is_judges(judge.order_key())
    assert not any(member.is_judges(key) for key in (judge.secret(), other.order_key(), "", "x"))
    assert other.order_key() == ""
    assert judge.order_key() not in str(job.store.keys)


def test_launchers_that_are_listed_give_and_take_no_orders(tmp_path):
    judge, member = (Listed("a:1,b:2", lambda: "the text", rank, 2) for rank in (0, 1))
    assert judge.order_key() == ""
    assert not member.is_judges("")


def test_the_launcher_of_another_node_draws_the_secret_when_it_becomes_group_rank_0():
    """Every round of c10d has a store prefix of its own: nothing of the round before is found there."""
    first, second = Job(3), Job(2)
    assert first.launchers[1].secret() == ""
    judge, member = second.launchers
    judge.publish(41000, "n", (0,))
    judge.look()
    member.look()
    assert member.secret() == judge.secret() != first.launchers[0].secret()


def test_a_node_that_comes_late_is_found_and_those_before_it_are_kept():
    job = Job(4)
    judge = job.launchers[0]
    for rank in (3, 1):
        job.launchers[rank].publish(42000, f"n{rank}", (rank,))
        job.launchers[rank].look()
        judge.look()
    assert [peer.group_rank for peer in judge.peers()] == [1, 3]
    assert job.changes[0] == 2
    judge.look()
    assert job.changes[0] == 2  # nothing is new


def test_a_launcher_that_publishes_anew_is_told_of_and_the_others_see_it():
    job = Job()
    judge, member = job.launchers
    judge.publish(41000, "old", (0,))
    judge.look()
    member.look()
    judge.publish(41001, "new", (0,))
    judge.look()
    member.look()
    assert (member.judge().port, member.judge().nonce) == (41001, "new")
    assert job.changes[1] == 2


def test_no_key_is_read_that_is_not_there_and_all_others_in_few_calls():
    job = Job(200)
    for rank in range(1, 200):
        if rank != 150:
            job.launchers[rank].publish(42000, "n", (rank,))
            job.launchers[rank].look()
    judge = job.launchers[0]
    judge.look()
    assert len(judge.peers()) == 198
    calls = [call[0] for call in job.links[-1].calls]
    assert calls.count("multi_get") == 4
    assert calls.count("check") == 4 + 64  # the keys of one batch one by one
    assert judge.operations.calls == len(calls)
    assert judge.operations.bytes > 198 * 100


def test_the_store_of_torchrun_itself_is_never_asked():
    job = Job()
    for launcher in job.launchers:
        launcher.publish(41000, "n", (0,))
        launcher.look()
    assert job.store.calls == []
    assert job.store.timeout is None
    assert [len(link.calls) > 0 for link in job.links] == [True, True]


def test_every_look_first_sees_whether_anybody_listens_there():
    job = Job()
    judge = job.launchers[0]
    judge.look()
    judge.look()
    assert job.reached == [("10.0.0.1", 29400)] * 2
    assert len(job.links) == 1


def test_a_store_that_is_gone_is_asked_ever_more_rarely_and_then_left_alone_with_all_that_is_known():
    job = Job()
    judge, member = job.launchers
    judge.publish(41000, "aaaa", (0,))
    judge.look()
    member.look()
    calls = len(job.links[1].calls)

    def refused(host, port):
        raise ConnectionRefusedError(111, "Connection refused")

    member._store._reach = refused
    pauses = []
    for _ in range(20):
        job.clock.now += 10
        pause = member.look()
        if pause is None:
            break
        pauses.append(pause)
        job.clock.now += pause
        assert member.problem == "torchrun's store cannot be asked ([Errno 111] Connection refused)"
    assert pauses == [5, 10, 20, 40]
    assert len(job.links[1].calls) == calls
    assert member.problem.startswith("torchrun's store is gone ([Errno 111] Connection refused): launchers that have not been found until now")
    assert member.secret() == judge.secret()
    assert member.judge().nonce == "aaaa"


def test_a_call_that_fails_gives_the_connection_up_and_the_next_look_makes_another():
    job = Job()
    judge = job.launchers[0]
    judge.look()
    job.links[0].dead = "Broken pipe\n#0 frame of C++"
    assert judge.look() == 5
    assert judge.problem == "torchrun's store cannot be asked (Broken pipe)"
    assert judge.look() == pytest.approx(0.4)
    assert len(job.links) == 2
    assert judge.problem == ""


def test_a_call_that_does_not_return_is_a_problem_with_its_time():
    job = Job()
    member = job.launchers[1]
    member._store._calling_since = job.clock.now
    assert member.problem == ""
    job.clock.now += 90
    assert member.problem == "torchrun's store has not answered for 90 s"


def test_a_refusal_makes_it_look_quickly_again():
    job = Job()
    member = job.launchers[1]
    pauses = [member.look() for _ in range(12)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5, 10, 10, 10])
    member.refused()
    assert member._wake.is_set()
    assert member.look() == pytest.approx(0.2)


def looks(launcher, clock, lasts_s, refused_every_s):
    """How often a launcher that is refused all the time looks, as its thread does it."""
    count, until, look_at, refused_at = 0, clock.now + lasts_s, clock.now, clock.now
    while clock.now < until:
        if clock.now >= refused_at:
            refused_at += refused_every_s
            launcher.refused()
        if clock.now >= look_at or launcher._wake.is_set():
            launcher._wake.clear()
            count, look_at = count + 1, clock.now + launcher.look()
        clock.now += 0.1
    return count


def test_refusals_after_which_nothing_is_new_are_ever_rarer_a_reason_to_look():
    """Anybody who can connect is refused as often as he likes."""
    job = Job()
    judge, member = job.launchers
    judge.publish(41000, "aaaa", (0,))
    judge.look()
    quiet = looks(member, job.clock, 70, 1e9)
    again = Job()
    again.launchers[0].publish(41000, "aaaa", (0,))
    again.launchers[0].look()
    assert looks(again.launchers[1], again.clock, 70, 1.0) <= quiet + 10
    assert looks(again.launchers[1], again.clock, 600, 1.0) <= 60 + 12


def test_news_make_the_next_refusal_a_reason_again():
    job = Job()
    judge, member = job.launchers
    judge.publish(41000, "aaaa", (0,))
    judge.look()
    looks(member, job.clock, 100, 1.0)
    judge.publish(41001, "bbbb", (0,))
    judge.look()
    member.look()
    member.refused()
    assert member.look() == 0.2


def test_pauses_differ_between_launchers():
    assert [pace.pause_s(20, 0, spread) for spread in (0.0, 1.0)] == pytest.approx([8, 12])
    assert [pace.pause_s(0, failures, EVEN) for failures in (1, 2, 10)] == [5, 10, 60]


def test_nothing_is_told_after_the_stop():
    job = Job()
    judge, member = job.launchers
    member.publish(1, "n", (1,))
    member.look()
    judge.stop()
    judge.look()
    assert job.changes[0] == 0
    assert judge.secret(60) != ""
    member.stop()
    assert (member.secret(60), member.run_name(60)) == ("", "")


@pytest.mark.parametrize("kind", ["FileStore", "HashStore", "EtcdStore"])
def test_a_store_that_has_no_connection_of_its_own_to_give_is_left_alone(kind):
    class Prefix:
        def __init__(self, store):
            self.underlying_store = store

        def clone(self):
            raise AssertionError("its clone would be the store itself")

    member = Discovery(Prefix(Prefix(type(kind, (), {})())), 1, 2)
    assert member.look() is None
    assert member.problem == f"launchers cannot find each other through torchrun's {kind}: give --peers and --token-file on every node"
    assert (member.secret(60), member.run_name(60)) == ("", "")


# -- a token file


def test_with_a_token_file_no_secret_enters_the_store():
    job = Job(token=lambda: "the text")
    judge, member = job.launchers
    assert judge.secret() == ""
    judge.look()
    assert judge.secret() == "the text"
    judge.publish(41000, "aaaa", (0,))
    judge.look()
    member.look()
    assert member.secret() == "the text"
    assert b"the text" not in b"".join(job.store.keys.values())
    assert b"secret" not in b"".join(job.store.keys.values())


def test_a_secret_from_a_token_file_is_told_to_stay():
    job = Job(token=lambda: "the text")
    judge, member = job.launchers
    assert judge.fixed
    assert not member.fixed  # it has not found the judge
    judge.publish(41000, "aaaa", (0,))
    judge.look()
    member.look()
    assert member.fixed
    assert judge.refusal == member.refusal == "its --token-file has another text"
    drawn = Job()
    assert not any(launcher.fixed for launcher in drawn.launchers)


def test_a_member_without_the_judges_token_file_says_so():
    job = Job(token=lambda: "the text")
    judge = job.launchers[0]
    judge.publish(41000, "aaaa", (0,))
    judge.look()
    bare = job.launcher(1, 2)
    bare.look()
    assert bare.secret() == ""
    assert bare.problem == f"{judge_node()} has a --token-file and this launcher has none: give the same here"


def test_a_member_with_a_token_file_of_its_own_takes_the_judges_secret():
    job = Job()
    judge = job.launchers[0]
    judge.publish(41000, "aaaa", (0,))
    judge.look()
    member = job.launcher(1, 2, token=lambda: "the text")
    member.look()
    assert member.secret() == judge.secret()


def test_a_token_file_that_cannot_be_read_is_a_problem_and_read_again():
    def read():
        raise ValueError("t is empty; put a token into it")

    job = Job(token=read)
    judge = job.launchers[0]
    assert judge.look() == 10
    assert judge.problem == "--token-file t is empty; put a token into it"
    judge._read_token = lambda: "text"
    judge.look()
    assert judge.secret() == "text"


# -- announcements

PEER = Peer(3, "node3", ("10.0.0.3", "fd00::3"), 41000, "abcd", "1.0", (24, 25, 26))


@pytest.mark.parametrize("mine", [Announcement(PEER), Announcement(PEER, "s" * 64, run_name="20260101-job"), Announcement(PEER, token=True)])
def test_an_announcement_is_read_as_it_was_written(mine):
    assert decode(mine.encode().encode(), 3) == mine


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2, "version": "9.0"}, "it is of rankwatch '9.0' in schema 2, this one reads 1"),
        ({"port": 0}, "its port is 0"),
        ({"port": True}, "its port is True"),
        ({"port": "1" * 1000}, "its port is"),
        ({"addresses": []}, "it names no address"),
        ({"addresses": ["a/b", "x y", 7]}, "it names no address"),
        ({"addresses": "10.0.0.1"}, "it names no address"),
        ({"nonce": None}, "its nonce cannot be read"),
        ({"secret": "two words"}, "its secret cannot be read"),
        ({"secret": "x" * 5000}, "its secret cannot be read"),
        ({"ranks": "0-99999999"}, "its ranks are '0-99999999'"),
    ],
)
def test_what_is_no_announcement_is_refused_in_words(change, words):
    document = {**json.loads(Announcement(PEER).encode()), **change}
    with pytest.raises(AnnouncementError) as error:
        decode(json.dumps(document).encode(), 3)
    assert words in str(error.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b" " * 70_000])
def test_rubbish_is_refused(raw):
    with pytest.raises(AnnouncementError):
        decode(raw, 0)


def test_words_for_people_are_printable_and_short_and_new_fields_are_left_out():
    document = {**json.loads(Announcement(PEER).encode()), "node": "a\x1b[31m\n" + "b" * 500, "addresses": ["10.0.0.1"] * 50, "colour": "red"}
    peer = decode(json.dumps(document).encode(), 3).peer
    assert peer.node == "a[31m" + "b" * 195
    assert len(peer.addresses) == 8


def test_rubbish_in_the_store_is_a_problem_and_harms_nobody_else():
    job = Job(3)
    judge, good, _ = job.launchers
    good.publish(42000, "n1", (1,))
    good.look()
    job.store.keys["rankwatch/node/2"] = b"\x00"
    assert judge.look() is not None
    assert [peer.group_rank for peer in judge.peers()] == [1]
    assert judge.problem == "what node 2 has announced cannot be used: it is no JSON"
    job.store.keys["rankwatch/judge"] = b"[]"
    good.look()
    assert good.problem == "what the judge's launcher has announced cannot be used: it is no JSON object"


# -- addresses


def never():
    raise AssertionError("nobody needs it")


@pytest.mark.parametrize(
    ("given", "local", "routed", "default", "name", "chosen"),
    [
        ("node5", "10.1.0.5", ["10.0.0.5"], never, never, ("node5",)),
        ("", "10.1.0.5", [], never, never, ("10.1.0.5",)),
        ("", "", ["10.0.0.5", "fd00::5"], never, never, ("10.0.0.5", "fd00::5")),
        ("", "", ["127.0.0.1"], lambda: ["10.0.0.5", "127.0.0.1"], never, ("10.0.0.5", "127.0.0.1")),
        ("", "localhost", [], lambda: ["10.0.0.5"], never, ("10.0.0.5", "localhost")),
        ("", "", ["127.0.0.1"], lambda: ["127.0.0.1", "::1"], lambda: "node5.cluster", ("node5.cluster", "127.0.0.1")),
        ("", "", ["127.0.0.1"], list, lambda: "", ("127.0.0.1",)),
        ("", "", [], list, lambda: "", ()),
    ],
)
def test_the_address_that_others_reach_comes_first_and_no_more_is_looked_up_than_needed(given, local, routed, default, name, chosen):
    assert addresses.choose(given, local, routed, default, name) == chosen


def test_the_route_to_loopback_begins_at_loopback():
    assert addresses.routed("127.0.0.1", 9) == ("127.0.0.1",)
    assert addresses.routed("no such host", 9) == ()


def test_a_launcher_without_any_address_is_a_problem_of_its_own():
    job = Job()
    judge = job.launchers[0]
    judge._own_addresses = lambda host, port: ()
    judge.publish(41000, "aaaa", (0,))
    judge.look()
    assert job.store.keys == {}
    assert judge.problem == "this machine has no address that other nodes reach: give --peer-address HOST"


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node0:1,node1:2", (("node0", 1), ("node1", 2))),
        ("# all\n10.0.0.1:5 # first\n\n[fd00::2]:6\n", (("10.0.0.1", 5), ("fd00::2", 6))),
    ],
)
def test_a_list_gives_host_and_port_in_the_order_of_nodes(text, nodes):
    assert addresses.listed(text) == nodes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it names no node"),
        ("# none\n", "it names no node"),
        ("a:1\nb", "line 2: 'b' is not accepted; it takes HOST:PORT: a port of its own"),
        ("a:1,b:70000", "line 1: 'b:70000' is not accepted"),
        ("a:1\na:1", "line 2: 'a:1' stands there twice"),
    ],
)
def test_a_list_that_cannot_be_read_names_the_line(text, words):
    with pytest.raises(ValueError, match=words):
        addresses.listed(text)


# -- lists instead of the store


def listed(given, rank, nnodes, here, token="the text", identity="", holder=lambda port: "nobody"):
    """One launcher that has read its list. here: the host that is this machine."""
    launcher = Listed(given, lambda: token, rank, nnodes, identity, is_own=lambda host: host == here, holder=holder)
    launcher.look()
    return launcher


def test_with_a_list_the_launchers_know_each_other_from_it():
    given = "node0:1000,node1:1001,node2:1002"
    judge, member = (listed(given, rank, 3, f"node{rank}") for rank in (0, 1))
    for launcher in (judge, member):
        assert launcher.publish(launcher.ports[0], "n", (0,))
    assert (judge.ports, member.ports) == ((1000,), (1001,))
    assert [(peer.group_rank, peer.node, peer.addresses, peer.port, peer.nonce) for peer in judge.peers()] == [
        (1, "node1", ("node1",), 1001, ""),
        (2, "node2", ("node2",), 1002, ""),
    ]
    assert (judge.judge(), member.judge().port, member.peers()) == (None, 1000, ())
    assert (member.secret(), member.run_name(60), member.problem, member.notice) == (judge.secret(), "", "", "")


def test_jobs_with_one_list_and_token_file_have_secrets_of_their_own():
    given = "node0:1000,node1:1001"
    first, second = (listed(given, 0, 2, "node0", identity=identity).secret() for identity in ("none node0:29500 ", "none node0:29501 "))
    assert len(first) == 64
    assert first != second
    assert first == listed(given, 1, 2, "node1", identity="none node0:29500 ").secret()
    assert first != listed(given, 1, 2, "node1", token="another text", identity="none node0:29500 ").secret()
    assert first != "the text"


def test_a_group_rank_need_not_be_the_place_in_the_list():
    """c10d sorts nodes by the texts of their addresses."""
    given = "10.77.0.2:4100,10.77.0.10:4100,10.77.0.1:4100"
    judge, member = listed(given, 0, 3, "10.77.0.1"), listed(given, 2, 3, "10.77.0.2")
    assert judge.publish(4100, "n", ())
    assert member.publish(4100, "n", ())
    assert (judge.line, member.line) == (2, 0)
    assert sorted(peer.addresses for peer in judge.peers()) == [("10.77.0.10",), ("10.77.0.2",)]
    assert len({peer.group_rank for peer in judge.peers()} - {0}) == 2
    member.judge_is_at(7)  # no such line
    member.judge_is_at(2)
    assert member.judge().addresses == ("10.77.0.1",)


def test_a_listed_port_that_is_taken_is_told_on_that_node_at_once():
    member = listed("node0:1000,node1:1001", 1, 2, "node1", holder=lambda port: f"pid 7 (holds {port})")
    assert not member.publish(1002, "n", ())
    assert member.notice == (
        "--peers lists port 1001 for this node, and it is taken by pid 7 (holds 1001) (by another job's launcher?): "
        "the others do not find this launcher; give each job ports of its own"
    )
    assert member.publish(1001, "n", ())
    assert member.notice == member.problem == ""


def test_a_launcher_that_does_not_know_its_own_line_asks_all():
    """Its machine has other addresses than those that are listed; the launcher itself then answers that it is itself."""
    judge = listed("10.1.0.1:4100,10.1.0.2:4100", 0, 2, "nobody")
    judge.publish(4100, "n", ())
    assert len(judge.peers()) == 2


@pytest.mark.parametrize(
    ("nodes", "rank", "given", "own", "lines"),
    [
        ([("a", 1), ("b", 1), ("c", 1)], 0, ("", None), {"c"}, (2,)),
        ([("a", 1), ("b", 1), ("b", 2), ("b", 3)], 2, ("", None), {"b"}, (2, 1, 3)),
        ([("a", 1), ("b", 1)], 1, ("", None), set(), ()),
        ([("a", 1), ("b", 1)], 1, ("a", None), {"b"}, (0,)),
        ([("a", 1), ("a", 2)], 0, ("a", 2), {"b"}, (1,)),
        ([("127.0.0.1", 1), ("127.0.0.1", 2)], 1, ("", None), set(), (1, 0)),
    ],
)
def test_own_lines_are_known_by_address_and_the_place_of_the_group_rank_comes_first(nodes, rank, given, own, lines, monkeypatch):
    monkeypatch.setattr(own_line, "own_names", lambda: (frozenset(("127.0.0.1",)), frozenset(("this-machine",))))
    assert own_line.candidates(nodes, rank, given, own.__contains__) == lines


def test_a_name_of_this_machine_is_known_without_asking_anybody(monkeypatch):
    monkeypatch.setattr(own_line, "own_names", lambda: (frozenset(("10.0.0.5",)), frozenset(("node05",))))
    assert own_line.candidates([("node04.cluster", 1), ("node05.cluster", 1)], 0, ("", None), never) == (1,)


@pytest.mark.parametrize(
    ("given", "rank", "nnodes", "problem"),
    [
        ("node0:1,node1:1", 2, 3, "--peers lists 2 nodes, none is this machine, and this is node 2, counted from 0: add it"),
        ("node0:1,node1:1", 0, 3, "--peers lists 2 of 3 nodes: add the others"),
        ("node0:1,node1:1", 0, 2, "--peers lists port 1 for this node, and it is taken by nobody (by another job's launcher?): "),
        ("/nope", 0, 2, "--peers: /nope cannot be read (No such file or directory); write HOST:PORT of each node into it, in the order of --node-rank"),
    ],
)
def test_a_list_that_does_not_fit_the_job_is_a_problem(given, rank, nnodes, problem):
    launcher = listed(given, rank, nnodes, "nobody")
    if nnodes == 2:
        launcher.publish(7, "n", ())
    assert launcher.problem.startswith(problem)


def test_a_list_without_a_token_file_gives_no_secret():
    launcher = Listed("node0:1,node1:1", None, 0, 2)
    launcher.look()
    assert launcher.secret(60) == ""
    assert launcher.problem.startswith("--peers needs --token-file")


# -- the options


def start(**changes):
    return SimpleNamespace(**{"store": TCPStore(), "group_rank": 1, "nnodes": 2, "local_addr": None, "identity": "", **changes})


def test_the_options_decide_between_store_and_list_and_the_port():
    assert isinstance(discovery.directory(start(), Options()), Discovery)
    assert discovery.directory(start(), Options()).port == 0
    assert discovery.directory(start(), Options(peer_address="node1:41000")).port == 41000
    assert isinstance(discovery.directory(start(), Options(peers="a:1,b:2", token_file="t")), Listed)


def worker_group(round_=None, port=29500, run_id="none"):
    state = {"_state_holder": SimpleNamespace(state=SimpleNamespace(round=round_))} if round_ is not None else {}
    handler = SimpleNamespace(get_run_id=lambda: run_id, **state)
    return SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler), master_addr="node0", master_port=port)


def test_jobs_and_rounds_of_a_rendezvous_are_told_apart():
    groups = [worker_group(), worker_group(port=29501), worker_group(run_id="exp1"), worker_group(1), worker_group(2)]
    found = [torchrun._identity(group) for group in groups]
    assert len(set(found)) == len(found)
    assert found[0] == torchrun._identity(worker_group())
    assert torchrun._identity(SimpleNamespace(spec=groups[0].spec))  # a torch that does not tell where the ranks meet


def test_a_given_address_is_published_alone():
    launcher = discovery.directory(start(group_rank=0), Options(peer_address="node0.cluster:41000"))
    launcher._store._reach = lambda host, port: None
    launcher.publish(41000, "aaaa", (0,))
    launcher.look()
    assert decode(launcher._store._store.keys["rankwatch/judge"], 0).peer.addresses == ("node0.cluster",)


def test_torchruns_local_addr_is_published(monkeypatch):
    launcher = discovery.directory(start(group_rank=0, local_addr="10.9.0.1"), Options())
    monkeypatch.setattr(addresses, "routed", lambda host, port: never())
    launcher._store._reach = lambda host, port: None
    launcher.publish(41000, "aaaa", (0,))
    launcher.look()
    assert decode(launcher._store._store.keys["rankwatch/judge"], 0).peer.addresses == ("10.9.0.1",)
