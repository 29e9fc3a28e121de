"""torch names who is to blame in what the other ranks raise: a mismatch that it has checked for, a monitored barrier that somebody has not passed."""

from __future__ import annotations

import pytest
from build_jobs import MONO, WALL, frames

from rankwatch.model import Crash, Group, JobSnapshot, Meeting, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

WORLD = Group("0", "default_pg", "gloo", (0, 1, 2), 60.0)
LATE_PAIR = Group("1", "undefined", "gloo", (1, 2), 60.0)
REDUCE = (
    "ALLREDUCE, TensorShape=[1000], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, layout=Strided (default), "
    "requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))"
)
BROADCAST = REDUCE.replace("ALLREDUCE", "BROADCAST")
REACHED = (
    "Rank {} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n "
    "Original exception: \n[unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete"
)


def differs(place, call, other, number=20, rubbish="SequenceNumber=0OpType=REDUCE"):
    mine = f"SequenceNumber={number}, OpType={call}" if "," in call else f"SequenceNumber={number}OpType={call}"
    return (
        f"Detected mismatch between collectives on ranks. Rank {place} is running collective: CollectiveFingerPrint({mine}), "
        f"but Rank {other} is running collective: CollectiveFingerPrint({rubbish}).Collectives differ in the following aspects: \t Sequence number: 20vs 0"
    )[:500]


def rank(number, message="", groups=(WORLD,), code=1, at="train.py:20:train", stack=(), **more):
    """With a message: ended by a RuntimeError."""
    crash = Crash("RuntimeError", message, at, at_wall=WALL - 1.0) if message else None
    process = Process(100 + number, not message, exit_code=code if message else None, exited_at=MONO if message else None)
    sample = Stack(100 + number, MONO - 3.0, (Thread("MainThread", 100 + number, frames(*stack)),)) if stack else None
    stage = "exiting" if message else "joined"
    return RankState(number, process=process, heartbeat_at=MONO, groups=groups, crash=crash, stage=stage, agent="claimed", stack=sample, **more)


def failed(*ranks, world=3):
    """What is said of them once the job is over."""
    state, verdicts = State(), ()
    for t in (0.0, 0.5, 4.0):
        snapshot = JobSnapshot(
            MONO + t, WALL + t, world, 0, (NodeReport("", ranks),), ending="a rank failed" if t else "", final=t == 4.0, gap_s=0.5
        )  # fmt: skip
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    return verdicts[0] if verdicts else None


def test_the_rank_that_calls_something_else_is_named_by_its_own_words():
    """What the others say of it is rubbish: a barrier is shorter than a reduction, and read as another call."""
    told = failed(rank(0, differs(0, REDUCE, 2)), rank(1, differs(1, REDUCE, 2)), rank(2, differs(2, "BARRIER", 0), at="train.py:44:evaluate"))
    assert (told.verdict, told.cause, told.culprit_ranks, told.at) == ("failed", "mismatch", (2,), "train.py:44:evaluate")
    assert told.confidence == "certain"
    assert "rank 2 calls #20: barrier, ranks 0-1 call #20: allreduce of [1000] Float" in told.summary
    assert "REDUCE" not in told.summary


def test_without_a_majority_both_sides_are_named():
    pair = Group("0", "default_pg", "gloo", (0, 1), 60.0)
    told = failed(rank(0, differs(0, REDUCE, 1), (pair,)), rank(1, differs(1, BROADCAST, 0), (pair,)), world=2)
    assert (told.cause, told.culprit_ranks, told.confidence) == ("mismatch", (0, 1), "likely")


def test_a_rank_that_has_lost_its_connection_before_it_could_speak_is_named_by_all_others():
    lost = "[pair.cc:537] Read error [127.0.0.1]:37511: Connection reset by peer."
    told = failed(rank(0, differs(0, REDUCE, 2)), rank(1, differs(1, REDUCE, 2)), rank(2, lost))
    assert (told.cause, told.culprit_ranks, told.confidence) == ("mismatch", (2,), "likely")


def test_numbers_in_a_group_are_not_ranks_of_the_world():
    told = failed(rank(0), rank(1, differs(0, REDUCE, 1), (WORLD, LATE_PAIR)), rank(2, differs(1, BROADCAST, 0), (WORLD, LATE_PAIR)))
    assert told.culprit_ranks == (1, 2)
    assert "group 1" in told.summary


def test_calls_that_differ_in_their_number_alone_may_be_messages_that_torch_counts():
    told = failed(*(rank(number, differs(number, "BARRIER", 2 if number < 2 else 0, 5 if number < 2 else 4)) for number in range(3)))
    assert (told.cause, told.culprit_ranks, told.confidence) == ("mismatch", (2,), "likely")
    assert "sends, receives and monitored_barrier" in told.advice[0]


def test_an_error_of_the_jobs_own_comes_first():
    own = rank(1, "bad batch")
    told = failed(rank(0, differs(0, REDUCE, 2)), own, rank(2, differs(2, "BARRIER", 0)))
    assert told.cause == "crashed"


@pytest.mark.parametrize("words", ["[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 60000 ms", "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 6 ms"])
def test_who_has_not_come_to_a_barrier_is_named(words):
    asleep = rank(1, stack=("/usr/lib/python3.11/threading.py:629:wait", "train.py:12:load_batch"))
    told = failed(rank(0, words), asleep, rank(2, REACHED.format(2)))
    assert (told.verdict, told.cause, told.culprit_ranks, told.at, told.domain) == ("failed", "not_entered", (1,), "train.py:12:load_batch", "user_code")
    assert told.confidence == "likely"
    assert set(told.waiting_ranks) >= {0, 2}


def test_several_may_not_have_come():
    assert failed(rank(0, "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 60000 ms"), rank(1), rank(2)).culprit_ranks == (1, 2)


def test_rank_0_of_the_group_is_named_where_all_others_have_waited_for_it():
    assert failed(rank(0), rank(1, REACHED.format(1)), rank(2, REACHED.format(2))).culprit_ranks == (0,)


def test_rank_0_is_not_named_by_one_of_several_nor_while_it_waits_itself():
    told = failed(rank(0), rank(1), rank(2, REACHED.format(2)))
    assert told is None or told.culprit_ranks != (0,)
    inside = rank(0, barrier=Meeting("0", 1, True, MONO - 60.0, 1800.0))
    told = failed(inside, rank(1, REACHED.format(1)), rank(2, REACHED.format(2)))
    assert told is None or told.culprit_ranks != (0,)


def test_the_barrier_of_a_smaller_group_names_ranks_of_the_world():
    told = failed(rank(0), rank(1, "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 4000 ms", (WORLD, LATE_PAIR)), rank(2, groups=(WORLD, LATE_PAIR)))
    assert told.culprit_ranks == (2,)


def test_groups_that_would_name_different_ranks_name_nobody():
    other = Group("2", "undefined", "gloo", (1, 0), 60.0)
    told = failed(rank(0), rank(1, "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 4000 ms", (WORLD, LATE_PAIR, other)), rank(2))
    assert told is None or told.culprit_ranks == ()
