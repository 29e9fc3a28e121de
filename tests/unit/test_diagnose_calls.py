"""Calls that no recorder shows, or that habit explains: new_group, monitored_barrier, point-to-point, odd sizes between two ranks."""

from __future__ import annotations

from dataclasses import replace

from build_jobs import MONO, WALL, frames

from rankwatch.model import Collective, Group, JobSnapshot, Meeting, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

ALL = (0, 1, 2)
DEFAULT = Group("0", "default_pg", "gloo", ALL, 60.0)


def rank(number: int, t: float, lines: tuple[str, ...] = (), enqueued: int = 6, completed: int = 6, **more) -> RankState:
    stack = Stack(100 + number, MONO + t, (Thread("MainThread", 1, frames(*lines)),)) if lines else None
    state = RankState(
        rank=number, node="node05", process=Process(100 + number, True, "S", 1.0, 1.0), stage_since=MONO - 60, heartbeat_at=MONO + t, groups=(DEFAULT,),
        enqueued={"0": enqueued}, completed={"0": completed}, collectives_at=MONO + t, stack=stack,
    )  # fmt: skip
    return replace(state, **more)


def run(make, until, world=3):
    """Verdicts of each look, every half second."""
    state, told, t = State(), {}, 0.0
    while t <= until:
        snapshot = JobSnapshot(MONO + t, WALL + t, world, 0, (NodeReport("node05", tuple(make(t))),), gap_s=0.5, started_at=MONO - 60)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
        told[t] = verdicts
        t += 0.5
    return told


def kinds(told):
    return list(dict.fromkeys((v.verdict, v.cause, v.culprit_ranks) for verdicts in told.values() for v in verdicts))


def test_ranks_that_make_groups_in_different_orders_are_a_mismatch_of_the_odd_one():
    """Rank 0 has made [0, 1] as group 1 and makes [0, 1, 2] next; the others still make [0, 1, 2] as group 1: the store waits for ever."""

    def make(t):
        first = Group("1", "undefined", "gloo", (0, 1), 60.0)
        return [
            rank(0, t, groups=(DEFAULT, first), group_in_creation="2", creation_ranks=ALL),
            rank(1, t, group_in_creation="1", creation_ranks=ALL),
            rank(2, t, group_in_creation="1", creation_ranks=ALL),
        ]

    told = run(make, 6)
    assert kinds(told) == [("stuck", "mismatch", (0,))]
    at, verdict = next((t, verdicts[0]) for t, verdicts in told.items() if verdicts)
    assert at <= 3.0
    assert verdict.waiting_ranks == (1, 2)
    assert "rank 0 calls new_group of ranks 0-1, ranks 1-2 call new_group of ranks 0-2" in verdict.summary


def test_only_the_first_group_that_ranks_disagree_on_is_told():
    """Rank 1 got through by chance and makes its second group: that one differs as well, as a consequence."""

    def make(t):
        first, other = Group("1", "undefined", "gloo", (0, 1), 60.0), Group("1", "undefined", "gloo", ALL, 60.0)
        return [
            rank(0, t, groups=(DEFAULT, first), group_in_creation="2", creation_ranks=ALL),
            rank(1, t, groups=(DEFAULT, other), group_in_creation="2", creation_ranks=(0, 1)),
            rank(2, t, group_in_creation="1", creation_ranks=ALL),
        ]

    told = run(make, 6)
    assert kinds(told) == [("stuck", "mismatch", (0,))]
    assert [len(verdicts) for verdicts in told.values()][-1] == 1
    assert told[6.0][0].waiting_ranks == (1, 2)


def test_a_group_that_came_about_differently_by_chance_explains_the_next_one():
    """Ranks 1 and 2 got through their first group; rank 2, no member of the next one, has gone on and waits in training."""

    def make(t):
        first, other = Group("1", "undefined", "gloo", (0, 1), 60.0), Group("1", "undefined", "gloo", ALL, 60.0)
        return [
            rank(0, t, groups=(DEFAULT, first), group_in_creation="2", creation_ranks=ALL),
            rank(1, t, groups=(DEFAULT, other), group_in_creation="2", creation_ranks=(0, 1)),
            rank(2, t, groups=(DEFAULT, other)),
        ]

    told = run(make, 6)
    assert kinds(told) == [("stuck", "mismatch", (0,))]
    assert "ranks 1-2 call new_group of ranks 0-2" in told[6.0][0].summary
    assert told[6.0][0].waiting_ranks == (1,)


def test_ranks_that_make_the_same_group_at_different_times_are_no_mismatch():
    def make(t):
        made = Group("1", "undefined", "gloo", ALL, 60.0)
        return [rank(n, t, groups=(DEFAULT, made)) if n == 0 else rank(n, t, group_in_creation="1", creation_ranks=ALL) for n in ALL]

    assert kinds(run(make, 6)) == []


def meeting(calls: int = 1, inside: bool = True, timeout_s: float | None = 40.0) -> Meeting:
    return Meeting("0", calls, inside, MONO, timeout_s)


def test_a_rank_that_has_not_come_to_a_monitored_barrier_is_named():
    def make(t):
        return [rank(n, t, ("train.py:31:load_batch",)) if n == 1 else rank(n, t, barrier=meeting()) for n in ALL]

    told = run(make, 12)
    assert kinds(told) == [("slow", "not_entered", (1,)), ("stuck", "not_entered", (1,))]
    assert next(t for t, verdicts in told.items() if verdicts) == 5.0
    stuck = next((t, v) for t, verdicts in told.items() for v in verdicts if v.verdict == "stuck")
    assert stuck[0] == 8.0
    assert stuck[1].waiting_ranks == (0, 2)
    assert stuck[1].summary.startswith("rank 1 has not entered monitored_barrier #1 of default_pg (it is in train.py:31:load_batch) for 8 s")
    assert (stuck[1].group.op, stuck[1].timeout_s, stuck[1].timeout_left_s) == ("monitored_barrier", 40.0, 32.0)


def test_ranks_that_leave_a_monitored_barrier_one_by_one_are_not_missed():
    """The first ones are out, or in the next one already."""

    def make(t):
        return [rank(0, t, barrier=meeting(2, inside=False)), rank(1, t, barrier=meeting(1, inside=False)), rank(2, t, barrier=meeting(1))]

    assert kinds(run(make, 12)) == []


def test_a_collective_against_a_monitored_barrier_of_the_same_group_is_a_mismatch():
    def make(t):
        call = Collective("0", 0, 7, "all_reduce", ((4,),), dtypes=("Float",), created_wall_at=WALL, timeout_s=60.0)
        odd = rank(1, t, ("@torch/distributed/distributed_c10d.py:3252:all_reduce", "train.py:50:step"), enqueued=7, collectives=(call,))
        line = ("@torch/distributed/distributed_c10d.py:5420:monitored_barrier", "train.py:51:main")
        return [odd if n == 1 else rank(n, t, line, barrier=meeting()) for n in ALL]

    told = run(make, 6)
    assert kinds(told) == [("stuck", "mismatch", (1,))]
    assert next(t for t, verdicts in told.items() if verdicts) <= 5.0


def test_the_only_absent_rank_waits_in_recv_and_is_named_without_certainty():
    def make(t):
        call = Collective("0", 0, 7, "all_reduce", ((4,),), dtypes=("Float",), created_wall_at=WALL, timeout_s=60.0)
        waits = ("@torch/distributed/distributed_c10d.py:2600:recv", "train.py:52:exchange")
        inside = ("@torch/distributed/distributed_c10d.py:3252:all_reduce", "train.py:50:step")
        return [rank(0, t, waits)] + [rank(n, t, inside, enqueued=7, collectives=(call,)) for n in (1, 2)]

    told = run(make, 7)
    verdict = told[7.0][0]
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence, verdict.at) == ("not_entered", (0,), "partial", "train.py:52:exchange")
    assert "it waits in recv, called from train.py:52:exchange" in verdict.summary
    assert verdict.missing_evidence == ("the peer of recv: gloo's recorder shows no point-to-point calls",)


def sized(odd_size: int, usual_size: int, before: tuple[int, ...]):
    """Two ranks whose all_reduce #7 differs in size; sizes of the six calls before, alike on both."""

    def make(t):
        past = tuple(
            Collective("0", 0, seq, "all_reduce", ((size,),), dtypes=("Float",), created_wall_at=WALL - 9, done=True) for seq, size in enumerate(before, 1)
        )
        calls = [Collective("0", 0, 7, "all_reduce", ((size,),), dtypes=("Float",), created_wall_at=WALL, timeout_s=60.0) for size in (usual_size, odd_size)]
        return [rank(n, t, enqueued=7, collectives=(*past, calls[n]), groups=(replace(DEFAULT, ranks=(0, 1)),)) for n in (0, 1)]

    return make


def test_between_two_ranks_the_size_that_was_never_used_before_is_the_odd_one():
    told = run(sized(400, 100, (100,) * 6), 6, world=2)
    assert kinds(told) == [("stuck", "mismatch", (1,))]
    verdict = told[6.0][0]
    assert (verdict.confidence, verdict.waiting_ranks) == ("likely", (0,))


def test_between_two_ranks_whose_sizes_are_both_usual_both_are_named():
    """A rank that skipped a bucket is shifted: either size is everyday."""
    told = run(sized(400, 100, (100, 400) * 3), 6, world=2)
    assert kinds(told) == [("stuck", "mismatch", (0, 1))]


def absent(lines: tuple[str, ...], **more):
    def make(t):
        call = Collective("0", 0, 7, "all_reduce", ((4,),), dtypes=("Float",), created_wall_at=WALL, timeout_s=60.0)
        return [rank(1, t, lines, **more) if n == 1 else rank(n, t, enqueued=7, collectives=(call,)) for n in ALL]

    return run(make, 7)[7.0][0]


def test_a_script_that_has_ended_but_waits_for_its_thread_is_told_as_that():
    verdict = absent(("@threading.py:1590:_shutdown",))
    assert verdict.cause == "not_entered"
    assert "its script has ended, and Python waits for a thread that does not" in verdict.summary


def test_a_dataset_that_runs_in_the_rank_itself_is_the_users_code():
    lines = ("train.py:162:__getitem__", "@torch/utils/data/_utils/fetch.py:54:fetch", "@torch/utils/data/dataloader.py:757:_next_data", "train.py:167:epoch")
    verdict = absent(lines)
    assert (verdict.cause, verdict.domain, verdict.at) == ("data_loading", "user_code", "train.py:162:__getitem__")
    assert "it makes its next batch itself, in train.py:162:__getitem__" in verdict.summary


def test_a_frame_of_the_agent_is_not_the_users_line():
    verdict = absent(("@torch/distributed/distributed_c10d.py:1899:new_group", "rankwatch/agent/probes/collectives.py:110:wrapped", "train.py:9:main"))
    assert verdict.at == "train.py:9:main"
