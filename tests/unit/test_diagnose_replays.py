"""A job that replays its collectives in CUDA graphs stops: the rank that does not replay any more is named, and jobs that only look like it are not.

Recorded with two GPUs (cases 10, 10b, 10c of ground truth: rank 1 sleeps in wait_input, rank 0 waits on its device), and small pictures of four ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recordings import MONO, Recording, first, kinds

from rankwatch.model import Collective, Frame, Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread, Verdict
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

STEP_S = 0.03
TWO_GRAPHS = {"recordings": 0, "captures": 1}


class Stepping(Recording):
    """A recording whose ranks have made a step every 30 ms up to the fault."""

    def rank(self, number: int, t: float) -> RankState:
        at = min(t, 0.0)
        return replace(super().rank(number, t), steps=int(1000 + at / STEP_S), last_step_at=MONO + at, step_s=STEP_S, cudagraph=TWO_GRAPHS)


def test_the_rank_that_stopped_replaying_is_named_within_seconds_and_no_timeout_is_promised():
    told = Stepping("nccl_10_cudagraph_stop").play(-5, 43)
    assert kinds(told) == [("slow", "not_entered", (1,)), ("stuck", "not_entered", (1,))]
    at, verdict = first(told, "slow")
    assert 5 <= at <= 10
    assert verdict.waiting_ranks == (0,)
    assert verdict.at == "10_cudagraph_stop.py:21:wait_input"
    assert "no timeout will come" in verdict.summary
    assert (verdict.confidence, verdict.timeout_s) == ("partial", None)
    assert any("CUDA graph" in line for line in verdict.missing_evidence)
    at, verdict = first(told, "stuck")
    assert 30 <= at <= 32
    assert any("no timeout ends it" in line for line in verdict.advice)


@pytest.mark.parametrize("name", ["nccl_10b_cudagraph_stop_eager_log", "nccl_10c_cudagraph_stop_abort_log"])
def test_an_eager_operation_behind_the_replay_is_called_a_symptom_and_the_culprit_stays(name):
    told = Stepping(name).play(-5, 16)
    assert {kind[2] for kind in kinds(told)} == {(1,)}
    at, verdict = first(told, "slow")
    assert at <= 10
    assert "wait_input" in verdict.at
    assert "that operation is a symptom" in verdict.summary
    assert any("Its abort may never return" in line for line in verdict.advice)


@pytest.mark.parametrize("name", ["nccl_11_cudagraph_rerecord", "nccl_12_healthy"])
@pytest.mark.parametrize("poll", [0.25, 0.5, 1.0])
def test_healthy_jobs_with_cuda_graphs_are_left_alone(name, poll):
    class Healthy(Recording):
        def rank(self, number: int, t: float) -> RankState:
            return replace(super().rank(number, t), steps=int(5000 + t / STEP_S), last_step_at=MONO + t, step_s=STEP_S, cudagraph=TWO_GRAPHS)

    assert kinds(Healthy(name).play(-8, 26, poll)) == []


# -- four ranks -------------------------------------------------------------------------------------------------------------------


WAIT, SLEEP, EVAL = "train.py:25:step", "train.py:21:wait_input", "eval.py:9:score"


class Picture:
    """Ranks that all made their last step at t = 0. at: line of each; spins: whose main thread runs; the rest sleeps and uses no CPU."""

    def __init__(self, at: tuple[str, ...], spins: tuple[int, ...], *, entries: tuple[float, ...] = (), seen: int | None = None, **more: Any) -> None:
        self.at, self.spins, self.more = at, spins, more
        self.seen = len(at) if seen is None else seen
        self.group = Group("0", "default_pg", "nccl", tuple(range(len(at))), 600.0, 0, 1.0)
        self.entries = tuple(Collective("0", 0, n, "all_reduce", created_wall_at=1e9 + t, timeout_s=600.0, done=True) for n, t in enumerate(entries, 1))
        self.stacks: dict[int, list[Stack]] = {rank: [] for rank in range(len(at))}
        self.native: dict[int, Stack] = {}
        self.read: dict[int, float] = {}
        self.asked: list[str] = []

    def frames(self, rank: int, t: float) -> tuple[Frame, ...]:
        file, line, name = self.at[rank].split(":")
        return (Frame(name, f"/job/{file}", int(line)), Frame("<module>", "/job/train.py", 40))

    def rank(self, rank: int, t: float) -> RankState:
        spins, stacks, steps = rank in self.spins, self.stacks[rank], int(1000 + min(t, 0.0) / STEP_S)
        cpu = 5.0 + (t if spins else 0.002 * t)
        read = self.read.get(rank)
        state = RankState(
            rank=rank, node="n0", groups=(self.group,), heartbeat_at=MONO + t - 0.2, ping_ok=True,
            process=Process(9 + rank, True, "R" if spins else "S", cpu, cpu),
            steps=steps, last_step_at=MONO + min(t, 0.0), step_s=STEP_S, cudagraph=TWO_GRAPHS, enqueued={"0": len(self.entries)},
            completed={"0": len(self.entries)}, collectives=self.entries if read else (), collectives_at=read, native_stack=self.native.get(rank),
            stack=stacks[-1] if stacks else None, earlier_stack=stacks[-2] if len(stacks) > 1 else None,
        )  # fmt: skip
        return replace(state, **self.more)

    def play(self, until: float, limits: Limits | None = None) -> dict[float, tuple[Verdict, ...]]:
        state, told, t = State(), {}, -2.0
        while t <= until:
            ranks = tuple(self.rank(rank, t) for rank in range(self.seen))
            snapshot = JobSnapshot(MONO + t, 1e9 + t, len(self.at), 0, (NodeReport("n0", ranks),), gap_s=0.5, started_at=MONO - 60)
            state, told[t], wanted = diagnose(state, snapshot, snapshot.now, limits or Limits())
            for want in wanted:
                self.asked.append(want.kind)
                for rank in want.ranks:
                    main = Thread("MainThread", 9 + rank, self.frames(rank, t), active=rank in self.spins)
                    if want.kind == "stacks":
                        self.stacks[rank].append(Stack(9 + rank, MONO + t, (main,)))
                    elif want.kind == "native_stack":
                        name = "cudaStreamSynchronize" if self.at[rank] == WAIT else "clock_nanosleep"
                        main = replace(main, frames=(Frame(name, "lib.so", 0), *main.frames))
                        self.native[rank] = Stack(9 + rank, MONO + t, (main,), native=True)
                    else:
                        self.read[rank] = MONO + t
            t += 0.5
        return told


def test_of_four_ranks_the_one_is_named_with_native_proof_it_is_likely():
    told = Picture((WAIT, WAIT, SLEEP, WAIT), (0, 1, 3)).play(150)
    assert kinds(told) == [("slow", "not_entered", (2,)), ("stuck", "not_entered", (2,))]
    at, verdict = first(told, "slow")
    assert at <= 10
    assert verdict.waiting_ranks == (0, 1, 3)
    at, verdict = first(told, "stuck")
    assert 120 <= at <= 125  # 20 % of the timeout of 600 s
    assert verdict.confidence == "likely"
    assert "cudaStreamSynchronize" in " ".join(verdict.evidence)


def test_waiters_that_sleep_are_told_from_the_culprit_by_their_native_stacks():
    """cudaDeviceScheduleBlockingSync: nobody spins."""
    told = Picture((WAIT, WAIT, SLEEP, WAIT), ()).play(60)
    assert kinds(told) == [("slow", "not_entered", (2,))]


def test_where_all_wait_on_their_devices_nobody_is_named():
    told = Picture((WAIT,) * 4, (0, 1, 2, 3)).play(130)
    assert kinds(told) == [("slow", "unknown", ())]
    assert first(told, "slow")[0] >= 60


def test_where_all_sleep_nobody_is_named():
    told = Picture((SLEEP,) * 4, ()).play(130)
    assert {kind[2] for kind in kinds(told)} <= {()}


def test_a_rank_that_works_is_not_said_to_have_stopped():
    """Rank 2 runs Python: an evaluation on one rank while the others wait in what their graph holds. It may take its time."""

    class Evaluating(Picture):
        def frames(self, rank: int, t: float) -> tuple[Frame, ...]:
            found = super().frames(rank, t)
            return (replace(found[0], line=int(t) % 7 + 1), *found[1:]) if rank == 2 else found

    told = Evaluating((WAIT, WAIT, EVAL, WAIT), (0, 1, 2, 3)).play(130)
    assert kinds(told) == []


def test_two_of_four_that_stopped_are_no_majority_to_wait_for_them():
    told = Picture((WAIT, WAIT, SLEEP, SLEEP), (0, 1)).play(50)
    assert kinds(told) == []


def test_steps_that_are_made_with_recorded_collectives_do_not_hang_in_a_graph():
    """DDP with reduce-overhead: two all_reduce a step. Rank 2 waits for a file while the others evaluate: nobody knows for whom the job waits."""
    entries = tuple(-n * STEP_S / 2 for n in range(60, 0, -1))
    told = Picture((WAIT, WAIT, SLEEP, WAIT), (0, 1, 3), entries=entries).play(50)
    assert kinds(told) == []


def test_a_loss_that_is_reduced_now_and_then_does_not_hide_it():
    told = Picture((WAIT, WAIT, SLEEP, WAIT), (0, 1, 3), entries=(-30.0, -1.5, -0.2)).play(20)
    assert kinds(told) == [("slow", "not_entered", (2,))]


def test_without_cuda_graphs_or_steps_nothing_is_said_so_soon():
    assert kinds(Picture((WAIT, WAIT, SLEEP, WAIT), (0, 1, 3), cudagraph={"recordings": 0, "skips": 4}).play(50)) == []
    job = Picture((WAIT, WAIT, SLEEP, WAIT), (0, 1, 3), steps=0, last_step_at=None, step_s=None)
    assert kinds(job.play(200)) == []
    assert "native_stack" not in job.asked


def test_with_ranks_unseen_it_never_pages():
    told = Picture((WAIT, WAIT, SLEEP, WAIT), (0, 1, 3), seen=3).play(200)
    assert {kind[0] for kind in kinds(told)} == {"slow"}


def test_slow_steps_are_given_twenty_of_them():
    assert kinds(Picture((WAIT, WAIT, SLEEP, WAIT), (0, 1, 3), step_s=3.0).play(55)) == []


def test_an_operation_of_the_others_behind_the_replay_does_not_hide_the_one_that_stopped():
    """Ranks 0 and 1 have entered an all_reduce of a group of their own behind the replay; rank 2 is not in that group."""

    class Behind(Picture):
        def rank(self, rank: int, t: float) -> RankState:
            state = super().rank(rank, t)
            if rank > 1:
                return state
            pair = Group("5", "pair", "nccl", (0, 1), 600.0, 0, 1.0)
            entry = Collective("5", 0, 3, "all_reduce", ((1,),), ((1,),), ("Float",), 1e9, 600.0)
            entered = 3 if t >= 0 else 2
            return replace(
                state, groups=(*state.groups, pair), enqueued={**state.enqueued, "5": entered}, completed={**state.completed, "5": 2},
                collectives=(*state.collectives, *([entry] if state.collectives_at and t >= 0 else [])),
            )  # fmt: skip

    told = Behind((WAIT, WAIT, SLEEP, WAIT), (0, 1, 3)).play(60)
    assert kinds(told) == [("slow", "not_entered", (2,))]
    verdict = first(told, "slow")[1]
    assert "all_reduce #3 of pair is open only behind it" in verdict.summary
    assert "whose own timeout never comes" in verdict.summary
