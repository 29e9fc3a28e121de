"""All but one rank end of a timeout that nobody saw coming: the one that did not speak is named, if its stack says that it was elsewhere."""

from dataclasses import replace

import pytest
from build_jobs import MONO, WALL, frames

from rankwatch.model import Crash, Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

LATE = Crash("RuntimeError", "[/w/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete")
LOST = Crash("RuntimeError", "[/w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5031.")
ENDING = "torchrun stops the workers after rank 0 failed"
ROUTER = ("@/lib/python3.11/threading.py:327:wait", "train.py:10:wait_for_router", "train.py:21:forward")
RECV = ("@/s/site-packages/torch/distributed/distributed_c10d.py:2500:recv", "train.py:30:exchange")


def rank(number, code=None, crash=None, stack=(), stack_at=0.5, **more):
    thread = Thread("MainThread", 1, frames(*stack))
    state = RankState(
        rank=number, node="node05", process=Process(100 + number, code is None, "S", exit_code=code, exited_at=None if code is None else MONO), stage="joined",
        groups=(Group("0", "default_pg", "gloo", (0, 1, 2), 60.0),), enqueued={"0": 7}, completed={"0": 7}, crash=crash,
        stack=Stack(100 + number, MONO + stack_at, (thread,), text="...") if stack else None,
    )  # fmt: skip
    return replace(state, **more)


def told(*ranks):
    """The ranks a moment after their ends, then at the end of the job, with who is left ended by torchrun."""
    state, verdicts = State(), ()
    over = [each if each.crash else replace(each, process=replace(each.process, alive=False, exit_code=-15, exited_at=MONO + 1.5)) for each in ranks]
    for at, nodes, final in ((0.6, ranks, False), (1.6, over, True)):
        snapshot = JobSnapshot(MONO + at, WALL + at, 3, 0, (NodeReport("node05", tuple(nodes)),), ending=ENDING if final else "", gap_s=0.5, final=final)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    return verdicts


def test_the_rank_that_spoke_of_no_timeout_is_named_with_the_line_where_it_was():
    (verdict,) = told(rank(0, 1, LATE), rank(1, stack=ROUTER), rank(2, 1, LATE))
    assert (verdict.verdict, verdict.cause, verdict.domain, verdict.culprit_ranks) == ("failed", "not_entered", "user_code", (1,))
    assert verdict.confidence == "likely"
    assert verdict.summary == "rank 1 was in train.py:10:wait_for_router when ranks 0,2 timed out, and most likely kept them waiting"
    assert not any("rank 1 is a consequence" in line for line in verdict.evidence)


def test_it_is_named_where_others_lost_who_had_timed_out():
    (verdict,) = told(rank(0, 1, LATE), rank(1, stack=ROUTER), rank(2, 1, LOST))
    assert verdict.culprit_ranks == (1,)


@pytest.mark.parametrize(
    "silent",
    [rank(1), rank(1, stack=ROUTER, stack_at=-9.0), rank(1, stack=RECV), rank(1, stack=ROUTER, enqueued={"0": 8}), rank(1, stack=("train.py:30:exchange",))],
    ids=["no stack", "an old stack", "it waits for a message", "it waits in a collective", "a native call of its own line, perhaps a handle's"],
)
def test_nobody_is_named_where_the_silent_rank_may_have_waited_too(silent):
    (verdict,) = told(rank(0, 1, LATE), silent, rank(2, 1, LATE))
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence) == ("unknown", (), "partial")


def test_a_connection_that_broke_says_nothing_of_who_computes():
    (verdict,) = told(rank(0, 1, LOST), rank(1, stack=ROUTER), rank(2, 1, LOST))
    assert (verdict.cause, verdict.culprit_ranks) == ("unknown", ())


def test_of_two_that_were_elsewhere_nobody_is_named():
    (verdict,) = told(rank(0, 1, LATE), rank(1, stack=ROUTER), rank(2, stack=ROUTER))
    assert (verdict.cause, verdict.culprit_ranks) == ("unknown", ())
