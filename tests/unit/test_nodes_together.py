"""A launcher and the one that judges the whole job: who speaks."""

import socket
import threading
import time

import pytest

from rankwatch.model import JobSnapshot, NodeReport
from rankwatch.monitor.nodes.peer import Peer
from rankwatch.monitor.nodes.together import Together
from rankwatch.monitor.workers import Worker, Workers


class Store:
    """A Directory. judge: what it has found."""

    port = 0
    problem = ""
    on_change = None

    def __init__(self, judge=None):
        self.found = judge
        self.others = ()
        self.published = threading.Event()

    def start(self):
        pass

    def stop(self):
        pass

    def secret(self, wait_s=0):
        return "secret"

    def judge(self):
        return self.found

    def peers(self):
        return self.others

    def refused(self):
        pass

    def publish(self, port, nonce, ranks, run_name=""):
        self.published.set()


def together(group_rank, judge=None):
    workers = Workers(0, group_rank, 2, 2, f"node{group_rank}", None, "", (Worker(group_rank, 0, 1),))
    return Together(workers, Store(judge), "", print, lambda: None, lambda: "")


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
