"""new_group on one side, a collective on the other; calls that complete out of order; a node whose own ranks are all stopped."""

from __future__ import annotations

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
