"""new_group on one side, a collective on the other; calls that complete out of order; a node whose own ranks are all stopped."""

from __future__ import annotations

import pytest
from build_jobs import MONO, WALL

from rankwatch.model import Collective, Group, JobSnapshot, NodeReport, Process, RankState
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits


def rank(number, world, creating=None, letter="S"):
    """creating: members of the group 1 that it makes; without, it waits in all_reduce #32."""
    number_in = 31 if creating else 32
    call = Collective("0", 0, 32, "all_reduce", ((4,),), ((4,),), ("Float",), WALL, 1800.0)
    return RankState(
        number, node="node05", process=Process(100 + number, True, letter), stage_since=MONO - 60, heartbeat_at=MONO, collectives_at=MONO + 1,
        groups=(Group("0", "default_pg", "gloo", tuple(range(world)), 1800.0),), enqueued={"0": number_in}, completed={"0": 31},
        collectives=() if creating else (call,), group_in_creation="1" if creating else None, creation_ranks=creating or (),
    )  # fmt: skip


def judge(*ranks, world, seconds=20):
    state, told = State(), []
    for look in range(seconds * 2):
        t = look / 2
        snapshot = JobSnapshot(MONO + t, WALL + t, world, 0, (NodeReport("node05", ranks),), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
        told += verdicts
    return told


def test_the_rank_that_skipped_a_new_group_is_named_and_the_others_wait():
    told = judge(rank(0, 3, (0, 1, 2)), rank(1, 3, (0, 1, 2)), rank(2, 3), world=3)
    assert {(v.verdict, v.cause, v.culprit_ranks) for v in told} == {("stuck", "mismatch", (2,))}
    assert told[-1].summary.startswith(
        "different operations: rank 2 skipped new_group (group 1), in which ranks 0-1 wait, and is in all_reduce #32 of default_pg; for "
    )


def test_the_rank_that_alone_makes_a_group_is_named():
    told = judge(rank(0, 3), rank(1, 3), rank(2, 3, (0, 1, 2)), world=3)
    assert {(v.verdict, v.cause, v.culprit_ranks) for v in told} == {("stuck", "mismatch", (2,))}
    assert told[-1].summary.startswith("different operations: rank 2 is in new_group (group 1) while ranks 0-1 are in all_reduce #32 of default_pg; for ")


def test_a_tie_names_both_sides():
    told = judge(rank(0, 2, (0, 1)), rank(1, 2), world=2)
    assert {(v.verdict, v.cause, v.culprit_ranks, v.confidence) for v in told} == {("stuck", "mismatch", (0, 1), "likely")}
    assert "rank 0 waits in new_group (group 1) for rank 1" in told[-1].summary


def test_a_node_whose_own_ranks_are_all_stopped_says_so_and_pages_nobody():
    told = judge(rank(2, 4, letter="T"), rank(3, 4, letter="T"), world=4)
    assert {(v.verdict, v.cause, v.culprit_ranks, v.confidence) for v in told} == {("slow", "stopped", (2, 3), "partial")}
    assert "(2 of 4 ranks seen)" in told[-1].summary


def asynchronous(number, completed, *flags):
    """Has issued #26, #27, ... of which these are done."""
    ops = ("reduce_scatter", "gather", "all_gather")
    calls = tuple(Collective("0", 0, 26 + n, ops[n], ((4,),), ((4,),), ("Float",), WALL, 600.0, done) for n, done in enumerate(flags))
    return RankState(
        number, node="node05", process=Process(100 + number, True, "S"), stage_since=MONO - 60, heartbeat_at=MONO, collectives_at=MONO + 1,
        groups=(Group("0", "dp", "gloo", (0, 1, 2), 600.0),), enqueued={"0": 25 + len(flags)}, completed={"0": completed}, collectives=calls,
    )  # fmt: skip


def test_who_has_done_a_later_call_out_of_order_does_not_prove_that_the_others_are_behind():
    told = judge(asynchronous(0, 27, False, True, False), asynchronous(1, 25, False, False), asynchronous(2, 25, False, False), world=3, seconds=140)
    assert {v.culprit_ranks for v in told} == {()}
    assert {v.cause for v in told} == {"all_entered"}


def test_who_has_it_done_by_its_own_entry_proves_that():
    told = judge(asynchronous(0, 26, True), asynchronous(1, 25, False), asynchronous(2, 25, False), world=3, seconds=140)
    assert told[-1].culprit_ranks == (1, 2)


def left(entered, done, ended_s):
    """Rank 0 has exited with 0 so many seconds before the first look; its last beat told these numbers."""
    gone = Process(100, False, exit_code=0, exited_at=MONO - ended_s)
    return RankState(
        0, node="node05", process=gone, stage="exiting", stage_since=MONO - ended_s - 0.1, heartbeat_at=MONO - ended_s - 0.4,
        groups=(Group("0", "dp", "gloo", (0, 1, 2, 3), 600.0),), enqueued={"0": entered}, completed={"0": done},
    )  # fmt: skip


def overtaken(number, called_s, read_s=1.0, before=True):
    """Waits in all_reduce #29, called so many seconds before the first look; broadcast #30, which it does not need rank 0 for, has completed."""
    marks = ((27, "all_reduce", before), (28, "broadcast", True), (29, "all_reduce", False), (30, "broadcast", True))
    calls = tuple(Collective("0", 0, seq, op, ((4,),), ((4,),), ("Float",), WALL - called_s - 0.5 * (29 - seq), 600.0, done) for seq, op, done in marks)
    return RankState(
        number, node="node05", process=Process(100 + number, True, "S"), stage_since=MONO - 60, heartbeat_at=MONO + 1, collectives_at=MONO + read_s,
        groups=(Group("0", "dp", "gloo", (0, 1, 2, 3), 600.0),), enqueued={"0": 30}, completed={"0": 30}, collectives=calls,
    )  # fmt: skip


@pytest.mark.parametrize(("entered", "done"), [(26, 26), (28, 28), (28, 27), (28, 26)])
@pytest.mark.parametrize("called_s", [2.0, 4.0], ids=["called after its end", "called before its end, read after it"])
def test_who_has_left_is_named_where_a_later_call_has_overtaken_the_one_that_needs_it(entered, done, called_s):
    told = judge(left(entered, done, 3.0), *(overtaken(number, called_s) for number in (1, 2, 3)), world=4)
    assert {(v.verdict, v.cause, v.culprit_ranks, v.waiting_ranks) for v in told} == {("stuck", "exited", (0,), (1, 2, 3))}
    assert told[-1].summary.startswith("rank 0 has not entered all_reduce #29 of dp (it ended with exit code 0) for ")


def test_what_was_read_before_that_end_proves_nothing():
    """It may have entered #29 at the last moment, and that may be done since."""
    assert judge(left(28, 28, 3.0), *(overtaken(number, 4.0, read_s=-2.5) for number in (1, 2, 3)), world=4) == []


def test_handles_that_are_always_dropped_prove_nothing_either():
    assert judge(left(28, 28, 3.0), *(overtaken(number, 4.0, before=False) for number in (1, 2, 3)), world=4) == []
