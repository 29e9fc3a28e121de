"""Ranks that wait for some that have not joined: early ones of NCCL, and those that a stale store has let through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from build_jobs import MONO, WALL, frames

from rankwatch.model import Collective, Group, JobSnapshot, Join, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.diagnose.views import build
from rankwatch.monitor.policy import Limits

IN_BARRIER = ("@torch/distributed/distributed_c10d.py:5000:barrier", "@torch/distributed/c10d_logger.py:83:wrapper", "train.py:20:setup")
AT_WORK = ("train.py:24:build_model", "train.py:70:<module>")
IMPORTS = ("train.py:3:<module>",)
WORLD = (0, 1, 2)


def stack(number, lines, at):
    return Stack(100 + number, MONO + at, (Thread("MainThread", 100 + number, frames(*lines)),))


def joined(number, t, lines=IN_BARRIER, *, backend="nccl", world=WORLD, sampled=True, **fields):
    """Has joined at 0; its stack is taken every ten seconds."""
    taken = stack(number, lines, t - t % 10) if sampled and t >= 4 else None
    group = Group("0", "default_pg", backend, world, 600.0)
    process = Process(100 + number, True, "S")
    return RankState(number, node="node05", process=process, stage_since=MONO, heartbeat_at=MONO + t, groups=(group,), stack=taken, **fields)


def late(number, t, stage="armed", cpu=0.0, **fields):
    process = Process(100 + number, True, "S", cpu_s=cpu, tree_cpu_s=cpu)
    agent = "armed" if stage == "armed" else "claimed"
    return RankState(number, node="node05", agent=agent, process=process, stage=stage, stage_since=MONO, stack=stack(number, IMPORTS, t - t % 10), **fields)


def play(make, seconds, attempt=0, world=3):
    """Looks every half second; first moment of each kind of verdict, the last verdict and everything that was asked for."""
    state, kinds, last, asked = State(), {}, None, set()
    for look in range(int(seconds * 2)):
        t = look / 2
        snapshot = JobSnapshot(MONO + t, WALL + t, world, attempt, (NodeReport("node05", tuple(make(t))),), gap_s=0.5)
        state, verdicts, wanted = diagnose(state, snapshot, snapshot.now, Limits())
        asked |= {(want.kind, rank) for want in wanted for rank in want.ranks}
        for verdict in verdicts:
            last = verdict
            kinds.setdefault((verdict.verdict, verdict.cause, verdict.culprit_ranks), t)
    return kinds, last, asked


def test_a_rank_that_never_joins_an_nccl_world_is_named_with_what_it_does():
    kinds, verdict, asked = play(lambda t: [joined(0, t), joined(1, t), late(2, t)], 150)
    assert list(kinds) == [("slow", "store_wait", (2,)), ("stuck", "store_wait", (2,))]
    assert 10.0 <= kinds["slow", "store_wait", (2,)] <= 14.0
    assert kinds["stuck", "store_wait", (2,)] >= 120.0  # as for any start
    assert verdict.summary.startswith("rank 2 has not called init_process_group (it is in train.py:3:<module>) for ")
    assert verdict.waiting_ranks == (0, 1)
    assert "ranks 0-1 are in barrier: NCCL connects the ranks of a group in its first collective" in verdict.evidence
    assert {("stacks", 0), ("stacks", 1), ("stacks", 2)} <= asked


def test_a_late_rank_that_imports_is_never_paged():
    kinds, _, _ = play(lambda t: [joined(0, t), joined(1, t), late(2, t, cpu=0.5 * t)], 300)
    assert list(kinds) == [("slow", "store_wait", (2,))]


def test_joined_ranks_at_work_wait_for_nobody():
    assert play(lambda t: [joined(0, t, AT_WORK), joined(1, t, AT_WORK), late(2, t)], 200)[0] == {}


def test_without_stacks_nobody_is_said_to_wait():
    assert play(lambda t: [joined(0, t, sampled=False), joined(1, t, sampled=False), late(2, t)], 200)[0] == {}


def test_only_those_in_a_call_are_said_to_wait():
    _, verdict, _ = play(lambda t: [joined(0, t, AT_WORK), joined(1, t), late(2, t)], 30)
    assert verdict.waiting_ranks == (1,)


def test_a_rank_that_ended_well_before_it_joined_is_named():
    ended = Process(102, False, exit_code=0, exited_at=MONO + 2.0)
    kinds, verdict, _ = play(lambda t: [joined(0, t), joined(1, t), replace(late(2, t), stage="exiting", process=ended)], 30)
    assert [kind for kind in kinds if kind[0] == "stuck"] == [("stuck", "exited", (2,))]
    assert verdict.summary.startswith("rank 2 has not called init_process_group (")


def test_ranks_that_leave_wait_for_nobody():
    leaving = ("@torch/distributed/distributed_c10d.py:2200:destroy_process_group", "train.py:30:main")
    ended = Process(102, False, exit_code=0, exited_at=MONO + 2.0)
    kinds, _, _ = play(lambda t: [joined(0, t, leaving), joined(1, t, leaving), replace(late(2, t), stage="exiting", process=ended)], 30)
    assert kinds == {}


@pytest.mark.parametrize("fields", [{"steps": 3}, {"completed": {"0": 4}, "enqueued": {"0": 4}}])
def test_ranks_that_have_worked_together_do_not_wait_for_one_to_join(fields):
    assert play(lambda t: [joined(0, t, **fields), joined(1, t, **fields), late(2, t)], 100)[0] == {}


def test_a_rank_that_is_no_member_is_not_waited_for():
    assert play(lambda t: [joined(0, t, world=(0, 1)), joined(1, t, world=(0, 1)), late(2, t)], 100)[0] == {}


def test_a_recorded_first_collective_waits_for_the_rank_that_has_not_joined():
    call = Collective("0", 0, 1, "all_reduce", ((4,),), ((4,),), ("Float",), WALL, 600.0)
    fields = {"enqueued": {"0": 1}, "completed": {"0": 0}, "collectives": (call,), "collectives_at": MONO + 2.0}
    kinds, verdict, _ = play(lambda t: [joined(0, t, **fields), joined(1, t, **fields), late(2, t)], 30)
    assert [kind[1:] for kind in kinds] == [("not_entered", (2,))]
    assert (verdict.waiting_ranks, verdict.confidence) == ((0, 1), "likely")


# -- gloo ------------------------------------------------------------------------------------------------------------------


def in_first(number, t):
    call = Collective("0", 0, 1, "all_reduce", ((4,),), ((4,),), ("Float",), WALL + 1.0, 600.0)
    return joined(number, t, backend="gloo", enqueued={"0": 1}, completed={"0": 0}, collectives=(call,), collectives_at=MONO + 3.0)


def joins(number, t):
    return late(number, t, "joining", join=Join(True, number, 3, "node05:29500", True, MONO, True))


def test_after_a_restart_one_rank_in_a_collective_and_two_in_init_are_one_hang_of_the_store():
    kinds, verdict, _ = play(lambda t: [joins(0, t), in_first(1, t), joins(2, t)], 60, attempt=1)
    assert list(kinds) == [("slow", "store_wait", ()), ("stuck", "store_wait", ())]
    assert "stale store of the attempt before" in verdict.summary
    assert verdict.waiting_ranks == (0, 1, 2)
    assert "1 more group waits behind it" in verdict.evidence
    assert verdict.unknown_ranks == ()


def test_a_rank_that_joined_long_before_the_others_has_come():
    kinds, _, _ = play(lambda t: [replace(joins(0, t), stage_since=MONO + 5.0), in_first(1, t), replace(joins(2, t), stage_since=MONO + 5.0)], 60, attempt=1)
    assert {kind[1:] for kind in kinds} == {("store_wait", ())}


def views(attempt, *ranks):
    snapshot = JobSnapshot(MONO, WALL, 3, attempt, (NodeReport("node05", ranks),))
    (view,) = build(snapshot, {rank.rank: rank for rank in ranks}).values()
    return view.missing, view.unknown


def test_a_rank_that_joins_is_missing_in_what_others_have_begun():
    assert views(0, joins(0, 5), in_first(1, 5), joins(2, 5)) == ((0, 2), ())


def test_a_rank_whose_gloo_world_exists_without_its_agent_works_where_nobody_sees():
    assert views(0, late(0, 5), in_first(1, 5), in_first(2, 5)) == ((), (0,))
    assert views(1, late(0, 5), in_first(1, 5), in_first(2, 5)) == ((0,), ())


def test_a_group_in_which_something_has_completed_has_all_its_members():
    worked = replace(in_first(1, 5), enqueued={"0": 2}, completed={"0": 1})
    assert views(1, late(0, 5), worked, in_first(2, 5))[1] == (0,)
