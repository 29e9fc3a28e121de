"""A launcher and the one that judges the whole job: who speaks."""

import socket
import threading
import time

import pytest
from build_status import stuck_status
from launchers import Launcher

from rankwatch.model import JobSnapshot, NodeReport, Process, RankState, Stack
from rankwatch.monitor.nodes import questions
from rankwatch.monitor.nodes.connection import Connection, Names
from rankwatch.monitor.nodes.nudging import Stops
from rankwatch.monitor.nodes.peer import Peer
from rankwatch.monitor.nodes.together import Together
from rankwatch.monitor.workers import Worker, Workers


class Store:
    """A Directory. judge: what it has found."""

    ports = (0,)
    problem = notice = ""
    listed = fixed = False
    line = None
    refusal = "it waits for the newest one"
    on_change = None

    def __init__(self, judge=None):
        self.found = judge
        self.others = ()
        self.key, self.looks, self.drawn = "key", 0, "secret"
        self.published = threading.Event()
        self.told = []  # at which lines the judge has said that it is

    def start(self):
        pass

    def stop(self):
        pass

    def secret(self, wait_s=0):
        return self.drawn

    def judge(self):
        return self.found

    def peers(self):
        return self.others

    def refused(self):
        self.looks += 1

    def order_key(self):
        return self.key

    def is_judges(self, order_key):
        return order_key == self.key

    def publish(self, port, nonce, ranks, run_name=""):
        self.published.set()
        return True

    def judge_is_at(self, line):
        self.told.append(line)


def together(group_rank, judge=None, say=print):
    workers = Workers(0, group_rank, 2, 2, f"node{group_rank}", None, "", (Worker(group_rank, 0, 1),))
    return Together(workers, Store(judge), "", say, lambda: None, lambda: "")


def until(true):
    """Wait for what other threads do."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_the_first_launcher_judges_and_is_never_spoken_for():
    first = together(0)
    assert first.judges
    assert not first.spoken_for(1e9)
    assert not first.judge_is_gone(0.0)


def test_a_member_keeps_silent_as_long_as_it_may_still_be_found():
    member = together(1)
    assert member.spoken_for(member._started_at + 20)
    assert not member.spoken_for(member._started_at + 40)


def test_a_member_that_is_asked_is_spoken_for():
    member = together(1)
    member._offer.asked_at = 1000.0
    assert member.spoken_for(1014.0)
    assert not member.spoken_for(1016.0)


@pytest.mark.parametrize(("asked_at", "gone"), [(999.0, True), (1001.0, False)], ids=["before", "after"])
def test_a_judge_that_cannot_be_reached_is_gone_unless_it_has_asked_since(asked_at, gone):
    """And nobody waits for one that refuses."""
    member = together(1, Peer(0, "node0", ("127.0.0.1",), closed_port(), "n", "0.1.0"))
    member.start(lambda ranks: {})
    try:
        assert member._directory.published.wait(20)
        member._offer.asked_at = asked_at
        member.hand_over(60.0)
        assert member.judge_is_gone(1000.0) is gone
    finally:
        member.stop()


def test_a_judge_that_could_not_be_reached_is_hardly_waited_for_again():
    member = together(1, Peer(0, "node0", ("127.0.0.1",), closed_port(), "n", "0.1.0"))
    member.start(lambda ranks: {})
    waits = []
    try:
        assert member._directory.published.wait(20)
        member._offer.asked_at = time.monotonic()
        member._offer.nudge = lambda judge, secret, group_rank, wait_s: waits.append(wait_s) or "timed out"
        for _ in range(2):
            member.hand_over(60.0)
        member._offer.nudge = lambda judge, secret, group_rank, wait_s: waits.append(wait_s) or ""
        member._offer.put(NodeReport("node1", (), 1), ())
        member.hand_over(60.0)
    finally:
        member.stop()
    assert waits == [60.0, 0.2, 0.2]


def test_a_member_merges_nothing():
    snapshot = JobSnapshot(10.0, 1010.0, 2, 0, (NodeReport("node1", (), 1),))
    assert together(1).merge(snapshot) is snapshot


def test_a_judge_that_has_found_nobody_looks_at_its_own_ranks_at_its_own_pace():
    first = together(0)
    first.start(lambda ranks: {})
    assert first._directory.published.wait(10)
    assert not first.sets_pace
    first._directory.others = (Peer(1, "node1", ("127.0.0.1",), closed_port(), "nonce", "0"),)
    first._directory.on_change()
    end = time.monotonic() + 10
    while not first.sets_pace:
        assert time.monotonic() < end
        time.sleep(0.01)
    first.stop()


def status(member, secret, target="/peer/v1/hello"):
    """What a started member answers to somebody who has this secret."""
    assert member._directory.published.wait(20)
    names = Names(threads=1)
    connection = Connection(("127.0.0.1",), member._serving.server.port, secret, names)
    try:
        return connection.get(target, time.monotonic() + 10).status
    finally:
        connection.close()
        names.close()


def test_once_another_secret_is_known_the_one_before_is_refused():
    """Also when the launcher keeps its port, as --peer-address says."""
    member = together(1)
    member._directory.ports = (closed_port(),)
    member.start(lambda ranks: {})
    try:
        assert status(member, "secret") == 200
        member._directory.published.clear()
        member._directory.drawn = "the secret of the next attempt"
        member._directory.on_change()
        assert status(member, "secret") == 401
        assert status(member, "the secret of the next attempt") == 200
    finally:
        member.stop()


def test_whoever_is_refused_makes_a_launcher_look_for_the_newest_secret():
    """A judge with a new secret has come before the member knew it; a stranger who knocks again and again is no reason to look all the time."""
    member = together(1)
    member.start(lambda ranks: {})
    try:
        assert status(member, "secret") == 200
        assert member._directory.looks == 0
        for _ in range(5):
            assert status(member, "newer") == 401
        assert member._directory.looks == 1
    finally:
        member.stop()


def test_a_member_that_the_judge_refuses_looks_for_the_newest_secret():
    judge = Launcher(0, secret="newer")
    member = together(1, judge.peer())
    member.start(lambda ranks: {})
    try:
        assert member._directory.published.wait(20)
        member._offer.asked_at = time.monotonic()
        member.hand_over(60.0)
        assert member._directory.looks == 1
    finally:
        member.stop()
        judge.stop()


def test_an_order_is_taken_once_and_only_with_the_judges_own_key():
    """All launchers know the secret."""
    woken = threading.Event()
    member = together(1)
    member._wake = woken.set
    member.start(lambda ranks: {})
    try:
        member._offer.put(NodeReport("node1", (), 1), ())
        assert status(member, "secret") == 200
        member._directory.key = "the-judges-own"
        status(member, "secret", questions.report(None, 0, {}, "", questions.Order("another-members", (2,), "for fun")))
        assert member.take_order() is None
        assert not woken.is_set()
        status(member, "secret", questions.report(None, 0, {}, "", questions.Order("the-judges-own", (2,), "rank 2 calls barrier")))
        assert woken.is_set()
        order = member.take_order()
        assert (order.culprit_ranks, order.why) == ((2,), "rank 2 calls barrier")
        assert member.take_order() is None
        assert not member.judge_is_gone(1e9)  # it has ended the job, and says so
    finally:
        member.stop()


def test_the_judge_gives_its_order_to_all_and_a_launcher_that_judges_takes_none():
    other = Launcher(1)
    other.put()
    other.offer.is_judges = lambda key: key == "key"
    first = together(0)
    first._directory.drawn, first._directory.others = other.secret, (other.peer(),)
    first.start(lambda ranks: {})
    try:
        assert first._directory.published.wait(20)
        until = time.monotonic() + 20
        while first._puller is None or not any(state.pulls for state in first._puller.states()):
            assert time.monotonic() < until
            time.sleep(0.01)
        first.order_end((3,), "rank 3 is stopped")
        while (order := other.offer.take_order()) is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert (order.culprit_ranks, order.why) == ((3,), "rank 3 is stopped")
        assert first.take_order() is None
    finally:
        first.stop()
        other.stop()


def stopped(rank, stack=None):
    return RankState(rank, 0, process=Process(100 + rank, True, "T"), stack=stack)


def test_a_judge_is_told_at_once_of_a_stopped_rank_and_again_when_its_stack_is_there():
    stops = Stops()
    well = NodeReport("node1", (RankState(2, 0, process=Process(102, True, "S")), RankState(3, 1, process=Process(103, True, "R"))), 1)
    assert not any(stops.due(well, float(now)) for now in range(10))
    assert stops.due(NodeReport("node1", (stopped(2),), 1), 10.0)
    assert not stops.due(NodeReport("node1", (stopped(2),), 1), 11.0)
    assert stops.due(NodeReport("node1", (stopped(2, Stack(102, 11.5)),), 1), 12.0)
    assert not stops.due(NodeReport("node1", (stopped(2, Stack(102, 13.5)),), 1), 14.0)


def test_ranks_that_stop_and_go_on_all_the_time_are_told_twice_a_second_at_most():
    stops, told = Stops(), 0
    for tenth in range(100):
        ranks = (stopped(2),) if tenth % 2 else ()
        told += stops.due(NodeReport("node1", ranks, 1), tenth / 10)
    assert told <= 20


def asked(member, now, over=""):
    """The judge has pulled this member, with this said of its end."""
    member._offer.asked_at, member._offer.over = now, over


def test_a_member_that_was_ordered_to_end_its_workers_does_not_begin_to_speak():
    member, now = together(1), time.monotonic()
    asked(member, now)
    member._offer._order = questions.Order("key", (1,), "rank 1 is stopped")
    assert member.take_order() is not None
    assert member.spoken_for(now + 60.0)  # torchrun kills a stopped rank after 30 s
    assert not member.spoken_for(now + 200.0)


def test_a_judge_that_has_told_of_a_failed_job_and_ended_has_not_vanished():
    member, now = together(1), time.monotonic()
    asked(member, now, over="1")
    assert member.judge_has_ended
    assert member.judge_has_told(now + 60.0)
    assert member.spoken_for(now + 60.0)
    assert not member.judge_is_gone(now + 1.0)


def test_where_workers_run_on_long_after_it_their_node_speaks():
    member, now = together(1), time.monotonic() - 200.0
    asked(member, now, over="1")
    assert not member.spoken_for(now + 200.0)
    assert member.judge_is_gone(now + 1.0)


def test_what_fails_after_a_judge_has_ended_well_is_news():
    member, now = together(1), time.monotonic()
    asked(member, now, over="0")
    assert member.judge_has_ended
    assert not member.spoken_for(now + 20.0)
    assert member.judge_is_gone(now + 1.0)


def test_nobody_waits_for_a_judge_that_has_said_that_it_ends():
    member = together(1, Peer(0, "node0", ("127.0.0.1",), closed_port(), "n", "0.1.0"))
    member.start(lambda ranks: {})
    try:
        assert member._directory.published.wait(20)
        asked(member, time.monotonic(), over="1")
        member._offer.nudge = None
        member.hand_over(60.0)
    finally:
        member.stop()


@pytest.mark.parametrize(
    ("url", "node", "said"),
    [
        ("http://127.0.0.1:27435", "worker-0", "worker-0 (http://127.0.0.1:27435 there)"),
        ("http://127.0.0.1:27435", "node1", "http://127.0.0.1:27435"),
        ("http://worker-0:27435", "worker-0", "http://worker-0:27435"),
        ("", "worker-0", "worker-0"),
    ],
    ids=["elsewhere", "same host", "for all", "no page"],
)
def test_the_judges_page_is_told_with_its_machine_where_only_that_reaches_it(url, node, said):
    member = together(1, Peer(0, node, ("10.0.0.1",), 1, "n", "0.1.0"))
    member._offer.judge_url = url
    assert member.judge == said


def test_what_the_judge_has_open_and_that_it_ends_reaches_a_member():
    other = Launcher(1)
    other.put()
    first = together(0)
    first._directory.drawn, first._directory.others = other.secret, (other.peer(),)
    first.start(lambda ranks: {})
    try:
        assert first._directory.published.wait(20)
        until = time.monotonic() + 20
        while other.offer.open_there is None:
            first.tell_open(stuck_status().open_incidents, 11_564.0)
            if first._puller is not None:
                first._puller.pull_now(1.0)
            assert time.monotonic() < until
        assert [seen.verdict for seen in other.offer.open_there.seen] == ["stuck"]
        assert other.offer.over == ""
        first.tell_end(failed=True, wait_s=10.0)
        while not other.offer.over:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert other.offer.over == "1"
        assert other.offer.open_there is not None
    finally:
        first.stop()
        other.stop()


def test_a_launcher_whose_listed_port_is_taken_says_so_at_once_and_listens_once_it_is_free(monkeypatch):
    monkeypatch.setattr("rankwatch.monitor.nodes.together.LISTEN_AGAIN_S", 0.05)
    said = []
    member = together(1, say=said.append)
    store, holder = member._directory, socket.create_server(("", 0))
    store.ports = (holder.getsockname()[1],)

    def publish(port, nonce, ranks, run_name=""):
        found = port == store.ports[0]
        store.notice = "" if found else "the listed port is taken"
        if found:
            store.published.set()
        return found

    store.publish = publish
    member.start(lambda ranks: {})
    try:
        until(lambda: said)
        assert member._serving.server is None
        holder.close()
        assert store.published.wait(20)
        assert status(member, "secret") == 200
        assert said == ["the listed port is taken"]
    finally:
        holder.close()
        member.stop()


def test_by_a_list_nothing_is_ended_before_all_launchers_have_shown_that_they_are_of_this_job():
    other = Launcher(1)
    first, member = together(0), together(1)
    assert first.may_act
    assert member.may_act
    first._directory.listed = member._directory.listed = True
    assert not first.may_act
    assert not member.may_act
    member._offer.asked_at = 10.0
    assert member.may_act
    first._directory.drawn, first._directory.others = other.secret, (Peer(1, "node1", ("127.0.0.1",), other.server.port, "", ""),)
    first.start(lambda ranks: {})
    try:
        until(lambda: first._puller is not None and any(state.failures for state in first._puller.states()))  # it has no report yet
        assert not first.may_act
        other.put()
        until(lambda: first.may_act)
    finally:
        first.stop()
        other.stop()


def test_a_member_learns_from_the_judge_which_line_is_the_judges():
    member = together(1)
    member.start(lambda ranks: {})
    try:
        member._offer.put(NodeReport("node1", (), 1), ())
        assert status(member, "secret", questions.report(None, 0, {}, "", line=3)) == 200
        assert member._directory.told == [3]
    finally:
        member.stop()


def test_a_judge_that_is_asked_by_mistake_says_that_it_is_the_judge():
    first = together(0)
    first.start(lambda ranks: {})
    try:
        assert status(first, "secret", questions.report(None, 0, {}, "")) == questions.ITSELF
        assert first._offer.asked_at is None
    finally:
        first.stop()


def test_a_member_whose_token_file_has_another_text_than_the_judges_says_so_once_and_does_not_look_again():
    said, judge = [], Launcher(0, secret="another text")
    member = together(1, judge.peer(), said.append)
    member._directory.fixed, member._directory.refusal = True, "its --token-file has another text"
    member.start(lambda ranks: {})
    try:
        assert status(member, "another text") == 401
        until(lambda: said)
        member._offer.asked_at = time.monotonic()
        member.hand_over(60.0)
        assert said == ["the judge of the job on node0 and this launcher refuse each other: its --token-file has another text; this one judges its own ranks"]
        assert member._directory.looks == 0
    finally:
        member.stop()
        judge.stop()


def test_a_stranger_with_another_text_is_no_news_where_the_judge_has_the_same():
    said, judge, nudged = [], Launcher(0, secret="secret"), threading.Event()
    judge.offer.on_nudge = lambda node: nudged.set()
    member = together(1, judge.peer(), said.append)
    member._directory.fixed = True
    member.start(lambda ranks: {})
    try:
        assert status(member, "a guess") == 401
        assert nudged.wait(20)
        assert (said, member._directory.looks) == ([], 0)
    finally:
        member.stop()
        judge.stop()


def test_a_planned_end_of_one_node_explains_for_a_while_what_happens_on_the_others():
    other = Launcher(1)
    other.put(ending="because I say so")
    first = together(0)
    first._directory.drawn, first._directory.others = other.secret, (other.peer(),)
    first.start(lambda ranks: {})
    try:
        until(lambda: first._puller is not None and any(state.ending for state in first._puller.states()))
        merged = [first.merge(JobSnapshot(now, 1010.0, 2, 0, (NodeReport("node0", ()),))) for now in (10.0, 11.0, 100.0, 140.0, 1000.0)]
        assert [snapshot.ending for snapshot in merged] == ["", "because I say so", "because I say so", "", ""]
        assert [snapshot.leaving for snapshot in merged] == [{8, 9}] * 5
        assert [event["reason"] for event in first.take_endings()] == ["because I say so"]
    finally:
        first.stop()
        other.stop()
