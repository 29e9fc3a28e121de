"""Faults, planted into a healthy Plan at a random moment of a random rank. Each function gives back the Truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from random import Random

import activities
from activities import Act
from parts import Call, Rank
from programs import Family, Op, Plan, forever
from truth import Truth, imminent_s, io_s, pause_s, quiet_s
from world import World

Planter = Callable[[Random, Plan], Truth]
MARK: Op = ("mark", "fault")
_LOOK_S = 8.0  # the judge needs a look at CPU and bytes, and some polls


def place(rng: Random, plan: Plan, rank: int | None = None) -> tuple[int, int, int]:
    """A rank, a step and an item of it, not before the first step is over."""
    return (rng.randrange(plan.size) if rank is None else rank, plan.moment(rng, 2, 8), rng.randint(0, len(plan.items)))


def due(plan: Plan, after_s: float) -> float:
    """A page is due after this, or when the smallest timeout is imminent."""
    return min(after_s, imminent_s(min(family.timeout_s for family in plan.families))) + _LOOK_S


def absence(
    fault: str, make: Callable[[Random], Act], *, allowed_s: Callable[[float], float] = quiet_s, lasting: bool = True, also: tuple[str, ...] = ()
) -> Planter:  # fmt: skip
    """One rank, sometimes two, get lost in something for ever. lasting: it is judged by its silence, not only by the timeout.

    allowed_s: how long it may be silent under a timeout.
    """

    def plant(rng: Random, plan: Plan) -> Truth:
        rank, step, index = place(rng, plan)
        act = make(rng).below(())
        ranks = [rank]
        if plan.size > 2 and rng.random() < 0.15:
            ranks.append(rng.choice([other for other in range(plan.size) if other != rank]))
            plan.barriers.add(step)
            index = 0
        for each in ranks:
            plan.inserts.setdefault((each, step, index), []).extend([MARK, forever(act)])
        longest = max(family.timeout_s for family in plan.families)
        after = allowed_s(longest) if lasting else inf
        return Truth(fault, (fault, *also), tuple(sorted(ranks)), due_s=due(plan, after))

    return plant


def compiling_slowly(rng: Random, plan: Plan) -> Truth:
    """A recompile on one rank that gets on, and outlives the timeout."""
    rank, step, index = place(rng, plan)
    plan.inserts[rank, step, index] = [MARK, forever(activities.compiling(rng, recompile=True))]
    return Truth("compiling", ("compiling",), (rank,), due_s=due(plan, inf))


def compile_hung(rng: Random, plan: Plan) -> Truth:
    rank, step, index = place(rng, plan)
    plan.inserts[rank, step, index] = [MARK, forever(activities.compile_hung(rng))]
    return Truth("compile hung", ("compiling",), (rank,), due_s=due(plan, 60.0))


# -- what one rank calls -------------------------------------------------------------------------------------------------------


def mismatch(rng: Random, plan: Plan) -> Truth:
    """Some ranks of a group call something else where the others agree: another operation, size or dtype."""
    calls = [
        (index, item) for index, item in enumerate(plan.items)
        if item[0] == "call" and item[2].op in ("all_reduce", "_all_gather_base", "_reduce_scatter_base") and item[2].mode != "leak"
    ]  # fmt: skip
    if not calls:
        plan.items.insert(2, ("call", "0", Call(line=58)))
        calls = [(2, plan.items[2])]
    index, (_, key, call) = rng.choice(calls)
    members = rng.choice(plan.family(key).parts)[1]
    step = plan.moment(rng, 4, 9)
    kind = rng.choice(("op", "size", "dtype"))
    other = {
        "op": replace(call, op=rng.choice([op for op in ("all_reduce", "barrier", "_all_gather_base", "broadcast") if op != call.op])),
        "size": replace(call, sizes=(call.sizes[0] + rng.choice((1, 7, 512)),)),
        "dtype": replace(call, dtype="Double"),
    }[kind]
    if other.op == "barrier":
        other = replace(other, sizes=())
    if other.op == "broadcast":
        other = replace(other, root=0)
    count = 1 if len(members) < 4 or rng.random() < 0.7 else rng.randint(1, len(members) // 2)
    odd = tuple(sorted(rng.sample(members, count)))
    for rank in odd:
        plan.replaces[rank, step, index] = [MARK, ("call", key, other)]
    tie = 2 * len(odd) >= len(members)
    return Truth("mismatch", ("mismatch",), odd, members if tie else (), due_s=_LOOK_S, unhealable=True)


def deadlock(rng: Random, plan: Plan) -> Truth:
    """Two to four groups in a ring, one rank in each two neighbours, and every one calls its own group first."""
    count = rng.randint(2, min(4, plan.size))
    ring = rng.sample(range(plan.size), count)
    whole = count == 2 and plan.size > 2 and rng.random() < 0.6  # the default group is one of the two
    number = 1 + sum(len(family.parts) for family in plan.families[1:])
    keys = []
    for i in range(count):
        members = tuple(sorted({ring[i], ring[(i + 1) % count]}))
        if whole and i == 1:
            keys.append("0")
            continue
        keys.append(f"ring{i}")
        plan.families.append(Family(f"ring{i}", "undefined", ((str(number), members),), plan.timeout_s))
        number += 1
    calls = {key: ("call", key, Call(sizes=(256 + i,), line=55 + i)) for i, key in enumerate(keys)}
    at = len(plan.items) - 1
    plan.items[at:at] = [calls[key] for key in dict.fromkeys(keys)]
    step = plan.moment(rng, 3, 8)
    first = at
    for i, rank in enumerate(ring):
        mine = [keys[i], keys[i - 1]]
        for offset in range(len(calls)):
            plan.replaces[rank, step, first + offset] = [] if offset else [MARK, calls[mine[0]], calls[mine[1]]]
    return Truth("group_order_deadlock", ("group_order_deadlock",), tuple(sorted(ring)), due_s=_LOOK_S + 8.0, unhealable=True)


# -- ends ----------------------------------------------------------------------------------------------------------------------


def _early(rng: Random, plan: Plan, fault: str, how: list[Op], causes: tuple[str, ...]) -> Truth:
    rank, step, index = place(rng, plan)
    plan.inserts[rank, step, index] = [MARK, *how]
    return Truth(fault, causes, (rank,), due_s=_LOOK_S, unhealable=True)


def exited_0(rng: Random, plan: Plan) -> Truth:
    return _early(rng, plan, "exited 0", [("exit", 0)], ("exited",))


def exited_bad(rng: Random, plan: Plan) -> Truth:
    return _early(rng, plan, "exited non-0", [("exit", rng.choice((1, 3, 42)))], ("exited",))


def crashed(rng: Random, plan: Plan) -> Truth:
    kind, message = rng.choice(
        (
            ("ValueError", "bad batch"), ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."), ("KeyError", "'label'"),
            ("OSError", "[Errno 28] No space left on device"), ("ConnectionResetError", "[Errno 104] Connection reset by peer"),
        )
    )  # fmt: skip
    return _early(rng, plan, "crashed", [("raise", kind, message, "train.py:33:load_batch")], ("crashed",))


def from_outside(fault: str, strike: Callable[[Random, World, Rank], None], causes: tuple[str, ...], due_s: float) -> Planter:
    """Something happens to a rank at a moment that its program does not choose."""

    def plant(rng: Random, plan: Plan) -> Truth:
        rank, step, _ = place(rng, plan)
        delay = rng.uniform(0.0, 1.3 * plan.step_s)

        def hit(world: World, victim: Rank) -> None:
            if victim.alive and victim.stage == "joined":
                world.marks.setdefault("fault", world.now)
                world.reached.add(victim.number)
                strike(rng, world, victim)

        def aim(world: World, victim: Rank) -> None:
            world.at(world.now + delay, hit, world, victim)

        plan.inserts[rank, step, 0] = [("do", aim)]
        return Truth(fault, causes, (rank,), due_s=due_s, unhealable=True)

    return plant


def _kill(rng: Random, world: World, rank: Rank) -> None:
    world.end(rank, -9)


def _oom(rng: Random, world: World, rank: Rank) -> None:
    world.end(rank, -9, oom_killed=True)


def _segv(rng: Random, world: World, rank: Rank) -> None:
    world.end(rank, rng.choice((-11, -7, -8)))


def _stop(rng: Random, world: World, rank: Rank) -> None:
    world.stop(rank)


def in_kernel(rng: Random, plan: Plan) -> Truth:
    """The process sits in the kernel for ever, wherever it was."""
    truth = from_outside("uninterruptible", lambda r, world, rank: world.stop(rank, activities.in_kernel(r)), ("uninterruptible",), 0.0)(rng, plan)
    return replace(truth, due_s=due(plan, quiet_s(max(family.timeout_s for family in plan.families)) + 5.0), unhealable=False)


def network(rng: Random, plan: Plan) -> Truth:
    """All have entered, and the group's connections or one rank's device do nothing any more."""
    device = plan.nccl and rng.random() < 0.5
    key = rng.choice([item[1] for item in plan.items if item[0] == "call"])
    rank, step, _ = place(rng, plan)
    rank = rng.choice(rng.choice(plan.family(key).parts)[1])
    delay = rng.uniform(0.0, plan.step_s)

    def hit(world: World, victim: Rank) -> None:
        if key not in victim.groups:
            return
        world.marks.setdefault("fault", world.now)
        world.reached.add(victim.number)
        if device:
            world.block_device(victim)
        else:
            world.hang(victim.groups[key])

    plan.inserts[rank, step, 0] = [("do", lambda world, victim: world.at(world.now + delay, hit, world, victim))]
    longest = max(family.timeout_s for family in plan.families)
    after = max(quiet_s(longest), min(30.0, 0.5 * longest))
    return Truth("all_entered device" if device else "all_entered", ("all_entered",), (), (rank,) if device else (), due_s=due(plan, after) + 8.0)


# -- beginnings ----------------------------------------------------------------------------------------------------------------


def never_joins(rng: Random, plan: Plan) -> Truth:
    """On gloo, which meets in the store. With NCCL the others wait in their first collective, which no recorder shows before it has begun."""
    plan.nccl = False
    rank = rng.randrange(plan.size)
    plan.timeout_s = max(plan.timeout_s, 300.0)
    plan.families[0].timeout_s = plan.timeout_s
    plan.inserts[rank, -2, 0] = [MARK, forever(activities.asleep(rng))]
    return Truth("store_wait init", ("store_wait",), (rank,), due_s=120.0 + _LOOK_S + 4.0)


def no_new_group(rng: Random, plan: Plan) -> Truth:
    plan.nccl = False
    if len(plan.families) < 2:
        plan.families.append(Family("late", "undefined", (("1", tuple(range(plan.size))),), plan.timeout_s))
    for family in plan.families[1:]:
        family.timeout_s = max(family.timeout_s, 300.0)
    rank = rng.choice(plan.families[1].parts[0][1])
    plan.inserts[rank, -1, 0] = [MARK, forever(activities.asleep(rng))]
    return Truth("store_wait new_group", ("store_wait",), (rank,), due_s=120.0 + _LOOK_S + 6.0)


# -- no hang, and all the same ---------------------------------------------------------------------------------------------------


def diverged(rng: Random, plan: Plan) -> Truth:
    """NCCL: one rank leaves a call out in one step, and from then on all pair wrong things without noticing."""
    size = plan.size
    plan.nccl, plan.accumulate = True, 1
    plan.families = plan.families[:1]
    plan.step_s = min(plan.step_s, 0.8)
    plan.items = [("work", 0.5, activities.compute())]
    count = rng.randint(2, 6)
    for index in range(count):
        plan.items.append(("call", "0", Call("all_reduce", (1000 * (index + 1) + rng.randrange(500),), mode="async", line=50 + index)))
    plan.items += [("wait",), ("work", 0.2, activities.optimizer())]
    rank, step = rng.randrange(size), plan.moment(rng, 3, 8)
    plan.replaces[rank, step, rng.randint(1, count)] = [MARK]
    return Truth("diverged", ("mismatch",), (rank,), tuple(range(size)) if size == 2 else (), due_s=20.0, unhealable=True)


def straggler(rng: Random, plan: Plan) -> Truth:
    rank = rng.randrange(plan.size)
    plan.accumulate, plan.step_s = 1, min(plan.step_s, 0.7)
    plan.items = [item for item in plan.items if item[0] not in ("send", "recv")]
    if not any(item[0] == "call" and item[1] == "0" for item in plan.items):
        plan.items.insert(2, ("call", "0", Call()))
    plan.items = [("call", item[1], replace(item[2], op="all_reduce", sizes=(4096,))) if item[0] == "call" else item for item in plan.items]
    plan.inserts[rank, 0, 0] = [MARK]
    plan.slower[rank] = max(0.3, plan.step_s * rng.uniform(0.4, 1.0))
    return Truth("straggler", ("not_entered",), (rank,), must="ticket", due_s=60.0)


FAULTS: dict[str, Planter] = {
    "not_entered": absence("not_entered", activities.asleep),
    "spinning": absence("not_entered", activities.spinning, lasting=False),
    "data_loading": absence("data_loading", activities.loader_stuck, allowed_s=pause_s),
    "checkpointing": absence("checkpointing", activities.save_stalled, allowed_s=io_s),
    "external_io": absence("external_io", activities.transfer_stalled, allowed_s=io_s),
    "debugger": absence("debugger", activities.breakpoint_, lasting=False),
    "gil_held": absence("gil_held", activities.native_hold, lasting=False),
    "compiling": compiling_slowly,
    "compile_hung": compile_hung,
    "mismatch": mismatch,
    "deadlock": deadlock,
    "exited_0": exited_0,
    "exited_bad": exited_bad,
    "crashed": crashed,
    "crashed_signal": from_outside("crashed", _segv, ("crashed",), _LOOK_S),
    "killed": from_outside("killed", _kill, ("killed",), _LOOK_S),
    "oom_killed": from_outside("oom_killed", _oom, ("oom_killed",), _LOOK_S),
    "stopped": from_outside("stopped", _stop, ("stopped",), _LOOK_S + 4.0),
    "uninterruptible": in_kernel,
    "all_entered": network,
    "init": never_joins,
    "new_group": no_new_group,
    "diverged": diverged,
    "straggler": straggler,
}
