"""Random programs of training jobs: which groups there are, what a step calls, and what else ranks do between the steps.

A Plan is drawn from a seed and stays plain data until it is played, so that faults can be planted into it: `inserts` come before an item
of one rank's step, `replaces` instead of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle
from random import Random
from typing import Any

import activities
from activities import PLAIN, WRAPPED, Act, Frames
from parts import BARRIER, Call

Op = tuple[Any, ...]
Place = tuple[int, int, int]  # rank, step, index of the item
Timed = tuple[str, float, Any]  # kind of an item, seconds of a piece of work, its Act or else the item
_ALL = ("all_reduce", "all_reduce", "_all_gather_base", "_reduce_scatter_base", "all_to_all")


@dataclass(slots=True)
class Family:
    """Groups that ranks know by one key: the tensor-parallel group of each, say. parts: disjoint members, with the group's name."""

    key: str
    desc: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    timeout_s: float

    def of(self, rank: int) -> tuple[int, ...]:
        return next((members for _, members in self.parts if rank in members), ())


@dataclass(slots=True)
class Plan:
    """items of a step: ("work", share of step_s, Act), ("call", key, Call), ("wait",), ("send" | "recv", offset of the peer).

    brief: only what is around a fault is played, and looked at no more often than the judge needs. begun: steps that were done before anybody
    looks, 0 from the start of the job. Steps are counted from there.
    """

    size: int
    nccl: bool
    timeout_s: float
    step_s: float
    seed: str
    families: list[Family]
    items: list[Op]
    steps: int = 1000
    start_s: float = 2.0
    compile_s: float = 0.0  # of the first step, on every rank
    late: dict[int, float] = field(default_factory=dict)  # seconds by which a rank comes later to init_process_group
    slower: dict[int, float] = field(default_factory=dict)  # seconds that a rank needs more for a step
    accumulate: int = 1  # collectives only every so many steps
    inserts: dict[Place, list[Op]] = field(default_factory=dict)
    replaces: dict[Place, list[Op]] = field(default_factory=dict)
    barriers: set[int] = field(default_factory=set)  # steps that begin with a barrier of all
    churn: int = 0  # every so many steps a group is made anew
    rejoin: int = 0  # every so many steps all groups are
    stagger_s: float = 2.0  # ranks end over this long
    outer: Frames = PLAIN
    destroys: bool = True
    brief: bool = False
    begun: int = 0

    def moment(self, rng: Random, low: int, high: int) -> int:
        """A step for something to happen in."""
        return rng.randint(1, 2) if self.brief else rng.randint(low, high)

    def soon(self, step: int) -> int:
        return max(1, step // 2) if self.brief else step

    def family(self, key: str) -> Family:
        return next(family for family in self.families if family.key == key)


def draw(rng: Random, seed: str, *, size: int | None = None, nccl: bool | None = None, timeout_s: float | None = None, brief: bool = False) -> Plan:
    """A healthy job. size: ranks, most often few. A brief one has long timeouts less often: they are waited for."""
    if size is None:
        size = rng.choice((2, 2, 3, 4, 4, 4, 5, 6, 8, 8, 8, 12, 16, 24)) if rng.random() < 0.96 else rng.choice((32, 64))
    if nccl is None:
        nccl = rng.random() < 0.5
    if timeout_s is None:
        short = (12.0, 20.0, 30.0, 30.0, 45.0, 60.0, 60.0, 90.0, 120.0)
        timeout_s = rng.choice((*short, *short, 300.0, 600.0) if brief else (*short, 300.0, 600.0))
    families = [Family("0", "default_pg", (("0", tuple(range(size))),), timeout_s)]
    if size >= 4 and rng.random() < 0.6:
        families += _mesh(rng, size, timeout_s)
    elif size >= 3 and rng.random() < 0.3:
        members = tuple(sorted(rng.sample(range(size), rng.randint(2, size - 1))))
        families.append(Family("sub", "undefined", (("1", members),), rng.choice((timeout_s, 2 * timeout_s))))
    plan = Plan(size, nccl, timeout_s, rng.uniform(0.3, 1.6), seed, families, [], outer=PLAIN if rng.random() < 0.7 else WRAPPED, brief=brief)
    plan.items = _items(rng, plan)
    plan.start_s = rng.uniform(0.5, 4.0)
    plan.stagger_s = rng.uniform(0.1, 6.0)
    if rng.random() < 0.25:
        plan.accumulate = rng.randint(2, 4)
    return plan


def _mesh(rng: Random, size: int, timeout_s: float) -> list[Family]:
    """Tensor, data and sometimes pipeline groups: every rank is in one of each."""
    widths = [width for width in (2, 3, 4, 8) if size % width == 0 and size // width >= 2] or [size]
    inner = rng.choice(widths)
    number, families = 1, []
    for key, parts in (
        ("tp", [tuple(range(start, start + inner)) for start in range(0, size, inner)]),
        ("dp", [tuple(range(start, size, inner)) for start in range(inner)]),
    ):
        parts = [part for part in parts if len(part) > 1]
        if parts:
            families.append(Family(key, key, tuple((str(number + i), part) for i, part in enumerate(parts)), timeout_s))
            number += len(parts)
    return families


def _items(rng: Random, plan: Plan) -> list[Op]:
    """One step: load, forward, collectives between pieces of work, optimizer."""
    keys = [family.key for family in plan.families]
    meshed = "tp" in keys and "dp" in keys
    chosen = ["tp", "dp"] if meshed else ["0"]
    chosen += [rng.choice(keys) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    rng.shuffle(chosen)
    outer, work = plan.outer, [rng.uniform(0.2, 1.0) for _ in chosen]
    items: list[Op] = [("work", 0.05, activities.loading(outer)), ("work", 0.3, activities.compute(outer))]
    if not plan.nccl and plan.size >= 3 and rng.random() < 0.12:
        items += [("recv", -1), ("work", 0.1, activities.compute(outer)), ("send", 1)]
    seen: set[str] = set()
    handles = False
    for index, (key, share) in enumerate(zip(chosen, work, strict=True)):
        line = 46 + index
        mode = rng.choice(("sync", "sync", "async")) if not plan.nccl else rng.choice(("sync", "async", "async"))
        if key in seen and rng.random() < 0.35:
            op = rng.choice(("broadcast", "reduce", "gather"))
        elif key in seen and rng.random() < 0.2:
            op = "barrier"
        else:
            op = rng.choice(_ALL)
        seen.add(key)
        sizes = () if op == "barrier" else (rng.choice((1, 128, 1024, 4096, 65536, 1 << 20)) * rng.randint(1, 9),)
        if mode == "async" and not plan.nccl and rng.random() < 0.1:
            mode = "leak"
        handles = handles or mode == "async"
        call = Call(op, sizes, rng.choice(("Float", "BFloat16", "Float")), mode, rng.randrange(8), line, mode == "async", rng.uniform(0.001, 0.02))
        items += [("call", key, call), ("work", 0.3 * share / len(chosen), activities.compute(outer))]
    if handles:
        items.append(("wait",))
    items.append(("work", 0.1, activities.optimizer(outer)))
    return items


_drawn = Random(1)
JITTERS = tuple(_drawn.random() for _ in range(509))  # drawn once for all: each rank takes them from a place of its own


def _jitters(place: int) -> Iterator[float]:
    return chain(JITTERS[place:], cycle(JITTERS))


def program(plan: Plan, rank: int, place: float) -> Iterator[Op]:
    """What one rank of the plan does. place: where in the jitters rank 0 begins, 0..1."""
    jitters = _jitters((int(place * 509) + 131 * rank) % 509)
    if not plan.begun:
        yield ("work", plan.start_s * (0.7 + 0.6 * next(jitters)) + plan.late.get(rank, 0.0), activities.IMPORTING)
        yield from plan.inserts.get((rank, -2, 0), ())
        yield ("join", plan.timeout_s)
        yield from plan.inserts.get((rank, -1, 0), ())
        yield from _groups(plan, rank, plan.families[1:])
    step = made = 0
    planted = {where for each, where, _ in (*plan.inserts, *plan.replaces) if each == rank}
    share_s = plan.step_s / plan.accumulate
    items = [_timed(item, share_s) for item in plan.items]
    calls_nothing = [item for item in items if item[0] in ("work", "send", "recv")]
    while step < plan.steps:
        if step in plan.barriers:
            yield ("call", "0", BARRIER)
        if step == 0 and plan.compile_s:
            rng = Random(f"{plan.seed}/{rank}")
            yield ("work", plan.compile_s * (0.85 + 0.3 * next(jitters)), activities.compiling(rng, splits=rng.choice((0, 3))))
        for micro in range(plan.accumulate):
            last = micro == plan.accumulate - 1
            for what, seconds, item in calls_nothing if not last else _planted(plan, rank, step, items) if step in planted else items:
                if what == "work":
                    yield ("work", seconds * (0.9 + 0.2 * next(jitters)), item)
                elif what == "send" or what == "recv":
                    yield from _pipeline(plan, rank, step, micro, item)
                else:
                    yield item
        if step in planted:
            yield from plan.inserts.get((rank, step, len(items)), ())
        if rank in plan.slower:
            yield ("work", plan.slower[rank], activities.compute(plan.outer))
        yield ("step",)
        step += 1
        if plan.churn and step % plan.churn == 0:
            yield ("call", "0", BARRIER)
            for family in plan.families[1:]:
                if family.of(rank):
                    yield ("destroy", family.key)
            made += sum(len(family.parts) for family in plan.families[1:])
            yield from _groups(plan, rank, plan.families[1:], made)
        if plan.rejoin and step % plan.rejoin == 0:
            yield ("call", "0", BARRIER)
            yield ("destroy", None)
            yield ("work", 0.1 + 0.9 * next(jitters), activities.python_work(plan.outer))
            yield ("join", plan.timeout_s)
            made = 0
            yield from _groups(plan, rank, plan.families[1:])
    yield ("call", "0", BARRIER)
    if plan.destroys:
        yield ("destroy", None)
        yield ("work", plan.stagger_s * next(jitters), activities.python_work(plan.outer))
    yield ("exit", 0)


def _timed(item: Op, share_s: float) -> Timed:
    return ("work", share_s * item[1], item[2]) if item[0] == "work" else (item[0], 0.0, item)


def _planted(plan: Plan, rank: int, step: int, items: Sequence[Timed]) -> Iterator[Timed]:
    """The items of a step of this rank, and what was planted there."""
    for index, item in enumerate(items):
        at = (rank, step, index)
        for op in plan.inserts.get(at, ()):
            yield ("planted", 0.0, op)
        if at not in plan.replaces:
            yield item
        for op in plan.replaces.get(at, ()):
            yield ("planted", 0.0, op)


def _groups(plan: Plan, rank: int, families: Sequence[Family], made: int = 0) -> Iterator[Op]:
    """torch numbers groups as they are made, so one that is made again has another name; a new default group begins anew."""
    for family in families:
        for name, members in family.parts:
            yield ("group", family.key, str(int(name) + made), family.desc, members, family.timeout_s)


def _pipeline(plan: Plan, rank: int, step: int, micro: int, item: Op) -> Iterator[Op]:
    """Stages in a row: each rank takes from the one before and gives to the next."""
    peer = rank + item[1]
    if 0 <= peer < plan.size:
        low = min(rank, peer)
        yield (item[0], f"{low}/{step}/{micro}")


def forever(act: Act) -> Op:
    return ("work", float("inf"), act)
