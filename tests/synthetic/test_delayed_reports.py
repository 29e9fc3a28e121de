"""The judge where every node's report has an age of its own, up to four seconds: no name is wrong and nobody is paged for nothing."""

from __future__ import annotations

import os
from itertools import chain
from random import Random

import pytest
from delayed import MOST_S, delayed, make_delayed, silenced
from generate import KINDS, make
from scoring import play

SEEDS = range(1, 200 if os.environ.get("RANKWATCH_HYPOTHESIS") == "long" else 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_late_reports_make_no_name_wrong_and_page_no_healthy_job(seed: int) -> None:
    outcomes = [play(make_delayed(kind, f"{seed}/{number}")) for number, kind in enumerate(KINDS)]
    assert [outcome.line() for outcome in outcomes if outcome.wrong or outcome.false_page] == []
    judged = [outcome for outcome in outcomes if outcome.case.truth.healthy or outcome.case.began_at is not None]
    missed = [outcome.line() for outcome in judged if not outcome.found]
    assert missed == []


def test_a_report_is_never_older_than_the_limit_and_never_goes_back() -> None:
    made: dict[str, float] = {}
    ages = []
    case = make("healthy plain", "ages/1", size=16)
    for snapshot in delayed(case.snapshots, Random(5), ranks_per_node=4):
        for node in snapshot.nodes:
            at = snapshot.now - node.report_age_s
            assert at >= made.get(node.node, at) - 1e-6
            made[node.node] = at
            ages.append(node.report_age_s)
    assert len(made) > 1
    assert MOST_S / 2 < max(ages) <= MOST_S + 1.0  # and the time to the next look


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_falls_silent_is_named_only_where_its_ranks_are_waited_for(seed: int) -> None:
    """Nobody is paged but for the planted rank, or for silent ranks while others wait for them: a job that gets on is never paged for a silence."""
    wrong = []
    for number, kind in enumerate(KINDS):
        rng = Random(f"silent/{seed}/{kind}")
        case = make(kind, f"silent {seed}/{number}", size=rng.choice((8, 12, 16)))
        first = next(case.snapshots)
        if case.observer is None or len(case.observer.sight.nodes) > 1:
            continue
        node = rng.randrange(1, case.plan.size // 4)
        case.snapshots = silenced(chain((first,), case.snapshots), node, rng.uniform(1.0, 12.0), 4)
        outcome = play(case)
        right = {*case.truth.culprits, *case.truth.tolerated}
        wrong += [outcome.line() for _, _, named in outcome.pages if not right.issuperset(named) and not (right & set(range(4 * node, 4 * node + 4)))]
    assert wrong == []
