"""Cases from seeds: a random job, what was planted into it, and what a monitor sees of it, look by look.

    for case in cases(seed=1, count=100):
        for snapshot in case.snapshots:
            ... diagnose(...)
            case.want(wanted, held)

The same seed gives the same job whatever the poll interval, the clocks' zero or the judge's questions are.

Most cases are brief: they begin in the midst of the job, a few steps before the fault, and are looked at closely only around it. The others are
played from the start of the job, with looks as close as a launcher's, up to what the watchdogs make of it. `brief` picks one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import faults
import healthy
import programs
from begun import begin, begun_s
from observer import Observer
from programs import Plan
from sight import Sight
from truth import Truth, imminent_s
from world import World

from rankwatch.model import JobSnapshot, Want

KINDS: tuple[str, ...] = (*faults.FAULTS, *(f"healthy {name}" for name in healthy.HEALTHY))
_FROM_START = ("init", "new_group", "healthy late_start", "healthy long_compile", "healthy restart")
_RESTS = ("killed", "crashed", "exited_bad")  # what the first attempt of a restart ends of


class Case:
    """One job. `snapshots` can be gone through once. began_at: when the fault set in (monotonic, as in the snapshots), None before."""

    def __init__(self, name: str, truth: Truth, plan: Plan, play: Iterator[JobSnapshot]) -> None:
        self.name, self.truth, self.plan, self.snapshots = name, truth, plan, play
        self.observer: Observer | None = None
        self.began_at: float | None = None

    def want(self, wants: Iterable[Want], held: bool = False) -> None:
        """Evidence that the judge asks for after the snapshot that it got last; held: it waits for what dying ranks say."""
        if self.observer is not None:
            self.observer.want(wants, held)


def cases(seed: int, count: int, kinds: Sequence[str] = KINDS, **how: Any) -> Iterator[Case]:
    """`count` cases, the kinds in turn. Nothing is simulated before a case's snapshots are asked for. how: as for `make`."""
    for number in range(count):
        yield make(kinds[number % len(kinds)], f"{seed}/{number}", **how)


def make(
    kind: str, seed: str, *, size: int | None = None, nccl: bool | None = None, timeout_s: float | None = None, poll_s: float = 0.5,
    clock_shift_s: float = 0.0, ends_s: float | None = None, brief: bool | None = None,
) -> Case:  # fmt: skip
    """The case of this kind and seed. poll_s: between two looks. clock_shift_s: added to all clocks. ends_s: when a healthy job is ended.

    brief: as above; None: nine of ten are.
    """
    rng = Random(f"{kind}/{seed}")
    if kind == "restart":
        kind = "healthy restart"
    brief = rng.random() < 0.9 if brief is None else brief
    plan = programs.draw(rng, f"{kind}/{seed}", size=size, nccl=nccl, timeout_s=timeout_s, brief=brief)
    if plan.brief and kind not in _FROM_START and rng.random() < 0.85:
        plan.begun = rng.randint(*rng.choice(((2, 19), (20, 400), (400, 20_000))))
    if kind.startswith("healthy "):
        name = kind.removeprefix("healthy ")
        healthy.HEALTHY[name](rng, plan)
        truth = healthy.truth(name)
        if plan.brief:
            ends = 1.2 * plan.compile_s + plan.start_s * (not plan.begun) + 1.5 + plan.step_s * rng.uniform(3.5, 6.0) + _added_s(plan)
        else:
            ends = 2.0 * plan.compile_s + rng.uniform(35.0, 80.0)
    else:
        truth = faults.FAULTS[kind](rng, plan)
        ends = 3600.0
        if truth.must == "page" and (not truth.unhealable or truth.fault == "stopped") and any(item[0] == "recv" for item in plan.items):
            truth = replace(truth, must="perhaps")  # gloo's recorder shows no point-to-point call: who waits for whom may not be seen at all
        if truth.must == "page" and not truth.unhealable and kind not in _FROM_START and not all(_waited_for(plan, rank) for rank in truth.culprits):
            truth = replace(truth, must="perhaps")  # the others call on and on, and drop the handles: its absence holds nobody up
    if kind == "healthy restart":
        truth = replace(faults.FAULTS[rng.choice(_RESTS)](rng, plan), fault="restart")
        ends = 3600.0
    sight = _sight(rng, plan, kind, poll_s, clock_shift_s, ends_s or ends)
    if truth.must == "ticket" and len(sight.nodes) > 1:
        truth = replace(truth, must="perhaps")  # late reports blur who was found waiting, and clocks of two nodes differ
    if kind == "healthy pauses":
        starts = (rng.uniform(2.0, 4.0), rng.uniform(7.0, 10.0)) if plan.brief else (rng.uniform(8.0, 15.0), rng.uniform(25.0, 35.0))
        longest_s = 0.3 * plan.timeout_s + 5.0
        longest_s = min(longest_s, 25.0) if plan.brief else longest_s
        sight.pauses = tuple((start, rng.uniform(3.0, longest_s), rng.random() < 0.5) for start in starts)
        sight.ends_at = max(sight.ends_at, 11.0 * plan.brief) + sum(length for _, length, _ in sight.pauses) * plan.brief
    if kind == "healthy silent_nodes" and len(sight.nodes) > 1:
        start, length = (rng.uniform(1.0, 4.0), rng.uniform(5.0, 12.0)) if plan.brief else (rng.uniform(8.0, 15.0), rng.uniform(5.0, 40.0))
        sight.silences = ((rng.randrange(1, len(sight.nodes)), start, start + length),)
        sight.ends_at += length * plan.brief
    if kind == "healthy planned_end":
        sight.ends_at = rng.uniform(2.0, 8.0) if plan.brief else rng.uniform(5.0, 20.0)
        sight.ending = rng.choice(("SIGTERM to the launcher", "SIGINT to the launcher", "the rendezvous asks for new members"))
    case = Case(f"{kind} seed {seed}", truth, plan, iter(()))
    case.snapshots = _play(case, rng.random(), sight, kind == "healthy restart")
    return case


def _waited_for(plan: Plan, rank: int) -> bool:
    """Whether some call of a step makes others wait for this rank."""
    return any(item[0] == "call" and item[2].mode != "leak" and rank in plan.family(item[1]).of(rank) for item in plan.items)


def _added_s(plan: Plan) -> float:
    """How much longer a healthy job takes for what was put into its steps, at most; many small pieces run side by side."""
    seconds = [float(op[1]) for ops in plan.inserts.values() for op in ops if op[0] == "work"]
    return sum(seconds) / (1 if len(seconds) < 5 else plan.size) + max(plan.late.values(), default=0.0)


def _sight(rng: Random, plan: Plan, kind: str, poll_s: float, clock_shift_s: float, ends: float) -> Sight:
    count = rng.choice((1, 1, 1, 2, 2, 4, 8)) if plan.size >= 4 else rng.choice((1, 1, 1, 2))
    count = min(count, plan.size)
    bounds = [round(i * plan.size / count) for i in range(count + 1)]
    nodes = tuple(tuple(range(bounds[i], bounds[i + 1])) for i in range(count))
    return Sight(
        nodes, poll_s=poll_s, pull_s=rng.uniform(0.6, 2.2), errors_s=tuple(rng.uniform(-0.03, 0.03) if i else 0.0 for i in range(count)),
        history=rng.random() < 0.7 or not plan.nccl or kind in ("diverged", "straggler"), suspicion=rng.random() < 0.7, compile_probe=rng.random() < 0.9,
        mono_shift_s=clock_shift_s, ends_at=ends, slow_s=rng.uniform(0.8, 1.9) if plan.brief and kind.startswith("healthy") else 1.9,
    )  # fmt: skip


def _play(case: Case, salt: float, sight: Sight, restart: bool) -> Iterator[JobSnapshot]:
    plan, began = case.plan, 0.0
    rng = Random(f"{plan.seed}/{salt}")
    ahead = [0.0] + [rng.choice((0.0, rng.uniform(-0.5, 0.5), rng.uniform(-90.0, 90.0))) for _ in sight.nodes[1:]]
    offsets = tuple(ahead[node] for node, ranks in enumerate(sight.nodes) for _ in ranks)
    start, brief = begun_s(plan), plan.brief
    second = replace(sight) if restart else sight
    sight.ends_at += start
    if brief and case.truth.healthy:
        sight.slow_after_s = start + 3.0
    sight.silences = tuple([(node, start + low, start + high) for node, low, high in sight.silences])
    sight.pauses = tuple([(start + at, length, everything) for at, length, everything in sight.pauses])
    for attempt in range(1 + restart):
        world = World(
            plan.size, partial(programs.program, plan, place=rng.random()), Random(rng.random()), nccl=plan.nccl, timing=plan.nccl and rng.random() < 0.4,
            lenient=case.truth.fault == "diverged", buffer=rng.choice((2000, 2000, 64)), offsets=offsets, wall_shift_s=sight.mono_shift_s + began, start=start,
        )  # fmt: skip
        if plan.begun:
            begin(world, plan, rng)
        if attempt == 1:
            sight = second
            sight.ends_at = rng.uniform(6.0, 12.0) if brief else rng.uniform(20.0, 40.0)
        observer = case.observer = Observer(world, sight, Random(rng.random()), attempt, began)
        whole = (plan.timeout_s <= 60.0 and (not brief or rng.random() < 0.3)) or rng.random() < (0.02 if brief else 0.15)
        whole = whole and case.truth.fault not in ("diverged", "straggler")
        settled = False
        near_s = rng.uniform(3.0, 8.0) if brief else 45.0  # looks are close for so long after the onset
        for snapshot in observer.snapshots():
            if case.began_at is None and "fault" in world.marks:
                case.began_at = observer.mono + world.marks["fault"]
                if case.truth.fault != "straggler":
                    sight.slow_after_s = world.now + near_s
            yield snapshot
            if not settled and case.began_at is not None and attempt == 0:
                settled = True
                if restart:
                    sight.ends_at = world.now + 8.0  # a rank's end on another node takes a while to be seen
                else:
                    sight.ends_at = max(case.began_at - observer.mono + _watched_s(plan, case.truth, whole), world.now + 0.1)
        world.close()
        began += world.now + rng.uniform(1.0, 3.0)
        plan.inserts.clear()
        plan.replaces.clear()


def _watched_s(plan: Plan, truth: Truth, whole: bool) -> float:
    """How long the job is looked at after the onset. whole: until the watchdogs have ended it, and what comes of that."""
    timeouts = [family.timeout_s for family in plan.families]
    after_s = max(truth.due_s + 25.0, 45.0)
    if plan.brief and truth.must != "ticket":
        after_s = max(truth.due_s + 8.0, min(truth.due_s + 25.0, 6.0 + imminent_s(min(timeouts))))
    return after_s + (max(timeouts) + 20.0 if whole else 0.0)
