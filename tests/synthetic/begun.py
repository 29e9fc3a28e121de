"""A World that is looked at in the midst of its job: what its ranks have done by then, worked out and not played."""

from __future__ import annotations

from collections import Counter
from random import Random

from parts import entered
from programs import Plan
from world import World


def begun_s(plan: Plan) -> float:
    """Seconds from the start of the attempt after which so many steps are done."""
    return plan.start_s + 1.0 + plan.begun * 1.1 * plan.step_s if plan.begun else 0.0


def begin(world: World, plan: Plan, rng: Random) -> None:
    """Every rank is at the start of the step after those: its groups are made, their numbers stand at what was called, its recorder holds the last step."""
    calls = [(item[1], item[2]) for item in plan.items if item[0] == "call"]
    per_step = Counter([key for key, _ in calls])
    done = {key: (plan.begun - 1) * count for key, count in per_step.items()}  # before the last step
    last = []  # its calls, with their numbers and how long ago they were
    for index, (key, call) in enumerate(calls):
        done[key] += 1
        last.append((key, call, done[key], plan.step_s * (1.0 - (index + 0.5) / len(calls))))
    comms = {family.key: [(members, world.comm(name, family.desc, 0, members, family.timeout_s)) for name, members in family.parts] for family in plan.families}
    for rank in world.ranks:
        late = rng.random() * 0.3
        rank.counted_at = world.start
        rank.cpu_s = 20.0 + 0.8 * world.start * (0.9 + 0.2 * rng.random())
        rank.steps, rank.step_s, rank.step_at = plan.begun, plan.step_s, world.start - 0.01 * rng.random()
        made_wall_at = world.wall + plan.start_s + late + world.offsets[rank.number]
        for key, parts in comms.items():
            comm = next((comm for members, comm in parts if rank.number in members), None)
            if comm is not None:
                world.give(rank, key, comm, made_wall_at, plan.begun * per_step[key])
        wall_at, groups = world.wall_of(rank), rank.groups
        for key, call, seq, ago in last:
            if key in groups:
                entry = entered(groups[key], rank.number, seq, call, wall_at - ago, world.start - ago)
                entry.done = True
                rank.entries.append(entry)
        rank.recorded = sum(rank.entered.values())
        world.settle(rank, plan.start_s + late)
