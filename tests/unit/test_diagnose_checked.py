"""TORCH_DISTRIBUTED_DEBUG=DETAIL: ranks wait in torch's checks, where nothing is open, and only stacks tell who has not come."""

from __future__ import annotations

from dataclasses import replace

from build_jobs import MONO, WALL, frames

from rankwatch.model import Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

C10D = "@torch/distributed/distributed_c10d.py"
WRAPPER = "@torch/distributed/c10d_logger.py:83:wrapper"
IN_REDUCE = (f"{C10D}:3245:all_reduce", WRAPPER, "train.py:21:step", "train.py:30:main")
IN_RECV = (f"{C10D}:2500:recv", WRAPPER, "train.py:25:exchange")
IN_BACKWARD = ("@torch/autograd/graph.py:841:_engine_run_backward", "@torch/autograd/__init__.py:354:backward", "train.py:22:step")
IN_OWN_CODE = ("/usr/lib/python3.11/threading.py:629:wait", "train.py:12:load_batch", "train.py:30:main")
COMPUTES = ("model.py:12:evaluate", "train.py:33:main")
WORLD = Group("0", "default_pg", "gloo", (0, 1, 2), 60.0, checked=(0, 1))
PAIR = Group("1", "undefined", "gloo", (0, 1), 60.0, checked=(2, 3))


def rank(number, t, lines, *, cpu=0.0, groups=(WORLD,), calls=40, every=10.0, looked_at=4.0):
    """Its stack is taken at looked_at and then every so often; all were in step until 0."""
    n = (t - looked_at) // every
    stacks = [
        Stack(100 + number, MONO + at, (Thread("MainThread", 100 + number, frames(*lines)),)) if at >= looked_at else None
        for at in (looked_at + n * every, looked_at + (n - 1) * every)
    ]
    process = Process(100 + number, True, "S", cpu_s=cpu * t, tree_cpu_s=cpu * t, main_cpu_s=cpu * t)
    counts = {group.name: calls for group in groups}
    return RankState(
        number, process=process, heartbeat_at=MONO + t, groups=groups, stack=stacks[0], earlier_stack=stacks[1], enqueued=counts, completed=counts,
        stage="joined", agent="claimed",
    )  # fmt: skip


def play(make, seconds, world=3):
    state, told, asked = State(), {}, set()
    for t in range(seconds):
        snapshot = JobSnapshot(MONO + t, WALL + t, world, 0, (NodeReport("", tuple(make(float(t)))),), gap_s=1.0)
        state, verdicts, wanted = diagnose(state, snapshot, snapshot.now, Limits())
        told[t] = verdicts
        asked |= {rank for want in wanted if want.kind == "stacks" for rank in want.ranks}
    return told, asked


def test_a_rank_that_is_elsewhere_while_others_stand_in_a_check_is_named_and_then_paged():
    told, asked = play(lambda t: [rank(0, t, IN_REDUCE), rank(1, t, IN_OWN_CODE), rank(2, t, IN_REDUCE)], 40)
    assert asked == {0, 1, 2}
    kinds = {(each.verdict, each.cause, each.culprit_ranks) for verdicts in told.values() for each in verdicts}
    assert kinds == {("slow", "not_entered", (1,)), ("stuck", "not_entered", (1,))}
    assert min(t for t, verdicts in told.items() if verdicts) <= 10
    assert min(t for t, verdicts in told.items() if verdicts and verdicts[0].verdict == "stuck") <= 25
    (verdict,) = told[39]
    assert verdict.confidence == "likely"
    assert verdict.waiting_ranks == (0, 2)
    assert verdict.summary.startswith("rank 1 has not entered all_reduce #41 of default_pg (it is in train.py:12:load_batch)")
    assert any("DETAIL" in line for line in verdict.evidence)


def test_one_that_works_meanwhile_is_no_page():
    told, _ = play(lambda t: [rank(0, t, COMPUTES, cpu=0.9), rank(1, t, IN_REDUCE), rank(2, t, IN_REDUCE)], 30)
    assert {(each.verdict, each.culprit_ranks) for verdicts in told.values() for each in verdicts} == {("slow", (0,))}


def test_it_is_over_when_the_numbers_move():
    def make(t):
        if t < 15:
            return [rank(0, t, IN_REDUCE), rank(1, t, IN_OWN_CODE), rank(2, t, IN_REDUCE)]
        return [rank(number, t, IN_REDUCE, calls=40 + int(t) - 14) for number in range(3)]

    told, _ = play(make, 30)
    assert told[14]
    assert told[29] == ()


def test_nothing_is_said_where_all_are_in_a_call_and_where_all_compute():
    for lines in (IN_REDUCE, COMPUTES):
        told, _ = play(lambda t, lines=lines: [rank(number, t, lines, cpu=0.5) for number in range(3)], 30)
        assert not any(told.values())


def test_a_wait_for_a_message_is_no_wait_in_a_check():
    told, _ = play(lambda t: [rank(0, t, IN_RECV), rank(1, t, COMPUTES, cpu=0.02), rank(2, t, IN_RECV)], 40)
    assert not any(told.values())


def test_without_the_checks_no_stack_is_asked_for():
    plain = replace(WORLD, checked=())
    told, asked = play(lambda t: [rank(n, t, IN_OWN_CODE if n == 1 else IN_REDUCE, groups=(plain,)) for n in range(3)], 40)
    assert not any(told.values())
    assert asked == set()


def test_of_several_groups_only_a_rank_that_is_missing_in_all_is_named():
    """Rank 2 has no part in the pair, in which rank 1 may wait for rank 0."""

    def make(t):
        return [rank(0, t, IN_OWN_CODE, groups=(WORLD, PAIR)), rank(1, t, IN_REDUCE, groups=(WORLD, PAIR)), rank(2, t, IN_OWN_CODE, groups=(WORLD,))]

    told, _ = play(make, 40)
    assert {each.culprit_ranks for verdicts in told.values() for each in verdicts} == {(0,)}


def test_a_backward_counts_as_a_wait_once_two_stacks_show_it():
    told, _ = play(lambda t: [rank(0, t, IN_BACKWARD), rank(1, t, IN_OWN_CODE), rank(2, t, IN_BACKWARD)], 60)
    first = min(t for t, verdicts in told.items() if verdicts)
    assert first >= 14
    assert told[59][0].culprit_ranks == (1,)


def test_stacks_that_do_not_come_name_nobody_at_first():
    def make(t):
        return [rank(0, t, IN_REDUCE), replace(rank(1, t, IN_OWN_CODE), stack=None, earlier_stack=None), rank(2, t, IN_REDUCE)]

    told, _ = play(make, 60)
    assert not any(told.values())
