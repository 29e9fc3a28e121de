"""The table by cause over generated cases: `python tests/synthetic/table.py --cases 5000 --seed 1`.

Exit code 0 when no page named a wrong rank, no healthy job was paged and every fault was found; else 1, with a line for each such case.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor

from generate import KINDS, Case, make
from scoring import Outcome, play, render, table


def _strip(outcome: Outcome) -> Outcome:
    """Without the generator, which cannot go to another process."""
    outcome.case.snapshots, outcome.case.observer = iter(()), None
    outcome.case.plan = None  # type: ignore[assignment]
    return outcome


def _one(argument: tuple[str, str]) -> Outcome:
    kind, seed = argument
    try:
        return _strip(play(make(kind, seed)))
    except Exception as error:
        raise RuntimeError(f"{kind} seed {seed}") from error


def _generate(kinds: list[str], seed: int, count: int) -> tuple[float, float, int]:
    """Seconds to make the cases, and to go through their snapshots without a judge; number of snapshots."""
    began = time.perf_counter()
    made: list[Case] = [make(kinds[number % len(kinds)], f"{seed}/{number}") for number in range(count)]
    planned = time.perf_counter()
    snapshots = sum(1 for case in made for _ in case.snapshots)
    return planned - began, time.perf_counter() - planned, snapshots


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", help="only this kind (several times); known: " + ", ".join(KINDS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--generate", action="store_true", help="only measure the generator")
    options = parser.parse_args()
    kinds = options.kind or list(KINDS)
    if options.generate:
        planned_s, played_s, snapshots = _generate(kinds, options.seed, options.cases)
        print(f"{options.cases / planned_s:.0f} cases/s planned")
        print(f"{options.cases / played_s:.0f} cases/s, {snapshots / played_s:.0f} snapshots/s played without a judge")
        return 0
    began = time.perf_counter()
    arguments = [(kinds[number % len(kinds)], f"{options.seed}/{number}") for number in range(options.cases)]
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(_one, arguments, chunksize=8))
    else:
        outcomes = [_one(argument) for argument in arguments]
    took = time.perf_counter() - began
    failed = [outcome for outcome in outcomes if not outcome.ok and (outcome.case.truth.healthy or outcome.case.began_at is not None or outcome.pages)]
    print(render(table(outcomes)))
    snapshots = sum(outcome.snapshots for outcome in outcomes)
    print(f"{len(outcomes)} cases, {snapshots} snapshots in {took:.0f} s: {len(outcomes) / took:.1f} cases/s, {snapshots / took:.0f} snapshots/s")
    for outcome in failed:
        print(outcome.line())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
