"""The table by cause over generated cases: `python tests/synthetic/table.py --cases 5000 --seed 1`.

Exit code 0 when no page or ticket named a wrong rank, no healthy job was paged and every fault was found; else 1, with a line for each such case.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from generate import KINDS, make
from scoring import Outcome, play, render, table

Argument = tuple[str, str, dict[str, Any]]  # kind, seed, and the rest of what `make` takes
CASES_A_PART = 50  # that a worker makes before it takes the next


def _strip(outcome: Outcome) -> Outcome:
    """Without the generator, which cannot go to another process."""
    outcome.case.snapshots, outcome.case.observer = iter(()), None
    outcome.case.plan = None  # type: ignore[assignment]
    return outcome


def _one(argument: Argument) -> tuple[Outcome, float]:
    """With the CPU seconds that it took to generate."""
    kind, seed, how = argument
    began = time.process_time()
    try:
        outcome = play(make(kind, seed, **how))
    except Exception as error:
        raise RuntimeError(f"{kind} seed {seed}") from error
    return _strip(outcome), time.process_time() - began - outcome.judged_s


@dataclass(frozen=True, slots=True)
class Generated:
    """Cases that were made without a judge: from when to when (monotonic), in how many CPU seconds, with how many snapshots."""

    began: float
    ended: float
    cpu_s: float
    snapshots: int


def _generate(arguments: list[Argument]) -> Generated:
    began, began_cpu_s = time.perf_counter(), time.process_time()
    snapshots = sum(1 for kind, seed, how in arguments for _ in make(kind, seed, **how).snapshots)
    return Generated(began, time.perf_counter(), time.process_time() - began_cpu_s, snapshots)


def _measure(arguments: list[Argument], workers: int) -> None:
    """Print how fast cases are made: by all workers together, their start not counted, and by a core."""
    parts = [arguments[start : start + CASES_A_PART] for start in range(0, len(arguments), CASES_A_PART)]
    with ProcessPoolExecutor(workers) as pool:
        made = list(pool.map(_generate, parts))
    took = max(part.ended for part in made) - min(part.began for part in made)
    snapshots = sum(part.snapshots for part in made)
    print(f"{len(arguments)} cases, {snapshots} snapshots in {took:.1f} s: {len(arguments) / took:.0f} cases/s by {workers} workers")
    print(_speed("generated", len(arguments), snapshots, sum(part.cpu_s for part in made)))


def _speed(what: str, cases: int, snapshots: int, cpu_s: float) -> str:
    return f"{what}: {cases / cpu_s:.0f} cases/s, {snapshots / cpu_s:.0f} snapshots/s, {1000 * cpu_s / snapshots:.2f} ms a snapshot (CPU, of one core)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", action="append", help="only this kind (several times); known: " + ", ".join(KINDS))
    parser.add_argument("--jobs", type=int, default=1, help="processes that play and judge")
    parser.add_argument("--size", type=int, help="ranks of each job; default: drawn, most often 2 to 8")
    parser.add_argument("--length", choices=("mixed", "brief", "whole"), default="mixed", help="of the jobs: around the fault only, or from start to end")
    parser.add_argument("--generate", action="store_true", help="only measure the generator")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes of --generate; default: one a core")
    options = parser.parse_args()
    kinds = options.kind or list(KINDS)
    how = {"size": options.size, "brief": {"mixed": None, "brief": True, "whole": False}[options.length]}
    arguments = [(kinds[number % len(kinds)], f"{options.seed}/{number}", how) for number in range(options.cases)]
    if options.generate:
        _measure(arguments, options.workers)
        return 0
    began = time.perf_counter()
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            played = list(pool.map(_one, arguments, chunksize=8))
    else:
        played = [_one(argument) for argument in arguments]
    took, outcomes = time.perf_counter() - began, [outcome for outcome, _ in played]
    failed = [outcome for outcome in outcomes if not outcome.ok and (outcome.case.truth.healthy or outcome.case.began_at is not None or outcome.pages)]
    print(render(table(outcomes)))
    snapshots = sum(outcome.snapshots for outcome in outcomes)
    print(f"{len(outcomes)} cases, {snapshots} snapshots in {took:.0f} s")
    print(_speed("generated", len(outcomes), snapshots, sum(cpu_s for _, cpu_s in played)))
    print(_speed("judged", len(outcomes), snapshots, sum(outcome.judged_s for outcome in outcomes)))
    for outcome in failed:
        print(outcome.line())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
