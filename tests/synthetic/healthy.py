"""Healthy jobs that look stuck: what a step may have in it, kept as short as the table of design section 4 allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import activities
from parts import BARRIER
from programs import Plan
from truth import Truth, imminent_s, quiet_s

Shaper = Callable[[Random, Plan], None]


def _shortest(plan: Plan) -> float:
    return min(family.timeout_s for family in plan.families)


def plain(rng: Random, plan: Plan) -> None:
    """Nothing happens."""


def long_compile(rng: Random, plan: Plan) -> None:
    """All ranks compile in the first step, for as long as the timeout lets their skew be."""
    plan.compile_s = rng.uniform(10.0, min(60.0, 2.0 * imminent_s(_shortest(plan))))


def recompile(rng: Random, plan: Plan) -> None:
    """One rank compiles again, and gets on."""
    seconds = rng.uniform(0.2, 0.8) * imminent_s(_shortest(plan))
    plan.inserts[rng.randrange(plan.size), plan.soon(4), rng.randint(0, len(plan.items))] = [
        ("work", min(seconds, 60.0), activities.compiling(rng, recompile=True))
    ]


def checkpoints(rng: Random, plan: Plan) -> None:
    """Rank 0 saves, the others wait for it."""
    seconds = min(rng.uniform(0.2, 0.8) * min(0.5 * _shortest(plan), imminent_s(_shortest(plan))), 50.0)
    for step in (plan.soon(3), plan.soon(8)):
        plan.inserts[0, step, 0] = [("work", seconds, activities.saving(rng))]
        plan.barriers.update((step, step + 1))


def uploads(rng: Random, plan: Plan) -> None:
    seconds = min(rng.uniform(0.2, 0.8) * min(0.5 * _shortest(plan), imminent_s(_shortest(plan))), 50.0)
    plan.inserts[0, plan.soon(4), len(plan.items)] = [("work", seconds, activities.uploading(rng))]


def evaluation(rng: Random, plan: Plan) -> None:
    """Rank 0 evaluates in Python while the others wait in a barrier."""
    step = plan.soon(5)
    plan.inserts[0, step, 0] = [("work", min(rng.uniform(0.3, 0.8) * imminent_s(_shortest(plan)), 50.0), activities.python_work())]
    plan.barriers.add(step + 1)


def hiccups(rng: Random, plan: Plan) -> None:
    """Now and then one rank's next batch is late."""
    for step in map(plan.soon, (3, 6, 9)):
        seconds = rng.uniform(0.2, 0.7) * quiet_s(_shortest(plan))
        plan.inserts[rng.randrange(plan.size), step, 0] = [("work", min(seconds, 20.0), replace(activities.loader_stuck(rng), cpu=0.0))]


def collections(rng: Random, plan: Plan) -> None:
    """Long garbage collections: no other thread runs meanwhile."""
    for step in map(plan.soon, (3, 5, 7)):
        seconds = rng.uniform(0.2, 0.7) * quiet_s(_shortest(plan))
        plan.inserts[rng.randrange(plan.size), step, rng.randint(0, len(plan.items))] = [("work", min(seconds, 12.0), activities.garbage_collection())]


def rotating(rng: Random, plan: Plan) -> None:
    """Another rank is late at each step."""
    for step in range(15 if plan.brief else 80):
        plan.inserts[step % plan.size, step, len(plan.items)] = [("work", rng.uniform(0.2, 0.8) * plan.step_s, activities.compute(plan.outer))]


def late_start(rng: Random, plan: Plan) -> None:
    plan.late[rng.randrange(plan.size)] = rng.uniform(2.0, min(45.0, 0.7 * imminent_s(_shortest(plan))))


def churn(rng: Random, plan: Plan) -> None:
    """Groups come and go."""
    if len(plan.families) > 1 and rng.random() < 0.6:
        plan.churn = plan.moment(rng, 3, 6)
    else:
        plan.rejoin = plan.moment(rng, 3, 6)


def staggered(rng: Random, plan: Plan) -> None:
    """The job ends, one rank long after the other."""
    plan.steps, plan.stagger_s = plan.moment(rng, 5, 15), rng.uniform(10.0, 60.0)


def short_and_rude(rng: Random, plan: Plan) -> None:
    """Ranks end without destroy_process_group."""
    plan.steps, plan.destroys = plan.moment(rng, 5, 15), False


def skewed(rng: Random, plan: Plan) -> None:
    """Every rank takes its time, some seconds between the first and the last."""
    for step in range(2, 30, 4):
        for rank in range(plan.size):
            if rng.random() < 0.5:
                plan.inserts[rank, step, 0] = [("work", rng.uniform(0.0, 3.0), activities.compute(plan.outer))]
    plan.items.insert(0, ("call", "0", BARRIER))


HEALTHY: dict[str, Shaper] = {
    "plain": plain,
    "long_compile": long_compile,
    "recompile": recompile,
    "checkpoints": checkpoints,
    "uploads": uploads,
    "evaluation": evaluation,
    "hiccups": hiccups,
    "collections": collections,
    "rotating": rotating,
    "late_start": late_start,
    "churn": churn,
    "staggered": staggered,
    "rude_end": short_and_rude,
    "skewed": skewed,
    "pauses": plain,
    "silent_nodes": plain,
    "planned_end": plain,
    "restart": plain,
}


def truth(name: str) -> Truth:
    return Truth(f"healthy {name}", must="nothing")
