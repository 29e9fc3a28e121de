"""What `rankwatch ablate` found, as text for people and as JSON. Pure.

ablate.json: {schema, code, conclusion, layer, rung, below, command [word], steps, seed, torch, world_size, asked [{backend, level}],
floor {quantity: noise at the last compared step}, rtol, runs [{rung, again, folder, outcome, words, exit_code, wall_s, timed_out, lingered,
steps, graphs, pace {median_s, low_s, high_s, steps}|null, ratio|null, error, at, rank|null, frame, differences [{rank, step, where, expected,
actual}], nonfinite {rank: step}, ranks [{rank, loss [], grad_norm []}], incidents [{verdict, cause, culprit_ranks, summary}]}],
bisection {culprits, why, runs [{folder, switched, bad}]}|null, next [str]}. Losses, norms and differences that are not finite are texts
("nan", "inf"), any other such number is null; keys are only ever added.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rankwatch.commands.ablation import compare
from rankwatch.commands.ablation.bisect import Bisection
from rankwatch.commands.ablation.compare import Floor
from rankwatch.commands.ablation.judge import Conclusion, Outcome, Pace, Run
from rankwatch.commands.ablation.ladder import Asked
from rankwatch.shown import clean

SCHEMA = 1
_WIDTH = 27
_FASTER, _SLOWER = 0.97, 1.03


@dataclass(frozen=True, slots=True)
class Shown:
    """All that a report is made of. runs: the lowest rung twice, then each rung, then the repeat of the blamed one; repeats: which of them are repeats."""

    command: Sequence[str]
    steps: int
    seed: int | None
    folder: str
    runs: Sequence[tuple[Run, Outcome]]
    repeats: frozenset[int]
    floor: Floor | None
    asked: Asked
    conclusion: Conclusion
    bisection: Bisection | None
    bisection_folders: Sequence[str]
    next_steps: Sequence[str]


def render(shown: Shown) -> str:
    """The report for people, lines of at most 200 characters except where one text is longer."""
    ranks = max((len(run.ranks) for run, _found in shown.runs), default=0)
    torch = next((one.torch for run, _found in shown.runs for one in run.ranks.values() if one.torch), "?")
    seed = "as the job sets it" if shown.seed is None else str(shown.seed)
    lines = [
        f"rankwatch ablate: {shlex.join(shown.command)}",
        f"{ranks} rank{'s' if ranks != 1 else ''}, torch {torch}, {shown.steps} optimizer steps a run, seed {seed}, torch.compile asked for: "
        + (", ".join(shown.asked.backends) or "nothing that was seen"),
        "",
        f"{'rung':{_WIDTH}} {'outcome':14} {'steps':>5} {'graphs':>6}  {'step time (quartiles)':28} {'of the lowest':22} what was seen",
    ]
    base = next((found.pace for _run, found in shown.runs), None)
    for number, (run, found) in enumerate(shown.runs):
        name = run.rung + (" (again)" if number in shown.repeats else "")
        speed = _pace(found.pace)
        ratio = _ratio(found.pace, base, verdict=number > 1) if number else ""
        lines.append(f"{name:{_WIDTH}} {found.kind:14} {run.steps:>5} {run.graphs:>6}  {speed:28} {ratio:22} {clean(found.words)[:240]}".rstrip())
    lines += ["", clean(shown.conclusion.words)]
    lines += _trajectories(shown)
    if shown.floor is not None:
        lines += ["", _floor_words(shown.floor)]
    if shown.bisection is not None:
        lines += ["", *_bisection_words(shown.bisection)]
    if shown.next_steps:
        lines += ["", "next:", *(f"  {number}. {line}" for number, line in enumerate(shown.next_steps, 1))]
    lines += ["", f"all of it: {shown.folder} (ablate.json, report.txt, and of each run output.log, plan.json, ranks/, run/)"]
    return "\n".join(lines) + "\n"


def to_json(shown: Shown) -> dict[str, Any]:
    """ablate.json."""
    base = next((found.pace for _run, found in shown.runs), None)
    bisection = shown.bisection
    return {
        "schema": SCHEMA,
        "code": shown.conclusion.code,
        "conclusion": shown.conclusion.words,
        "layer": shown.conclusion.layer,
        "rung": shown.conclusion.rung,
        "below": shown.conclusion.below,
        "command": list(shown.command),
        "steps": shown.steps,
        "seed": shown.seed,
        "torch": next((one.torch for run, _found in shown.runs for one in run.ranks.values() if one.torch), ""),
        "world_size": max((len(run.ranks) for run, _found in shown.runs), default=0),
        "asked": [{"backend": name, "level": level} for name, level in zip(shown.asked.backends, shown.asked.levels, strict=True)],
        "floor": {} if shown.floor is None else {quantity: _plain(noise[-1]) if noise else 0.0 for quantity, noise in shown.floor.noise.items()},
        "rtol": None if shown.floor is None else shown.floor.rtol,
        "runs": [_run(run, found, number in shown.repeats, base) for number, (run, found) in enumerate(shown.runs)],
        "bisection": None
        if bisection is None
        else {
            "culprits": list(bisection.culprits),
            "why": bisection.why,
            "runs": [
                {"folder": folder, "switched": list(switched), "bad": bad}
                for folder, (switched, bad) in zip(shown.bisection_folders, bisection.tried, strict=False)
            ],
        },
        "next": list(shown.next_steps),
    }


def finite(document: Any) -> Any:
    """The same document with null for each number that JSON has not."""
    if isinstance(document, dict):
        return {key: finite(value) for key, value in document.items()}
    if isinstance(document, list):
        return [finite(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def _run(run: Run, found: Outcome, again: bool, base: Pace | None) -> dict[str, Any]:
    nonfinite = {rank: step.number for rank, one in run.ranks.items() if (step := compare.first_nonfinite(one)) is not None}
    return {
        "rung": run.rung,
        "again": again,
        "folder": run.folder,
        "outcome": found.kind,
        "words": found.words,
        "exit_code": run.exit_code,
        "wall_s": round(run.wall_s, 3),
        "timed_out": run.timed_out,
        "lingered": run.lingered,
        "steps": run.steps,
        "graphs": run.graphs,
        "pace": found.pace and {"median_s": found.pace.median_s, "low_s": found.pace.low_s, "high_s": found.pace.high_s, "steps": found.pace.steps},
        "ratio": round(found.pace.median_s / base.median_s, 4) if found.pace and base and base.median_s > 0 else None,
        "error": found.error,
        "at": found.at,
        "rank": found.rank,
        "frame": found.frame,
        "differences": [
            {"rank": one.rank, "step": one.step, "where": one.where, "expected": _plain(one.expected), "actual": _plain(one.actual)}
            for one in found.differences.values()
        ],
        "nonfinite": {str(rank): step for rank, step in nonfinite.items()},
        "ranks": [
            {"rank": rank, "loss": [_plain(step.loss) for step in one.steps], "grad_norm": [_plain(step.grad_norm) for step in one.steps]}
            for rank, one in run.ranks.items()
        ],
        "incidents": [{key: doc.get(key) for key in ("verdict", "cause", "culprit_ranks", "summary")} for doc in run.incidents],
    }


def _trajectories(shown: Shown) -> list[str]:
    """The blamed rung's loss beside the lowest's, on the rank that differs first."""
    blamed = next((pair for pair in shown.runs if pair[0].rung == shown.conclusion.rung and pair[1].differences), None)
    if blamed is None or not shown.conclusion.layer:
        return []
    run, found = blamed
    first = min(found.differences.values(), key=lambda one: (one.line, one.rank))
    expected, actual = shown.runs[0][0].ranks[first.rank].steps, run.ranks[first.rank].steps
    lines = ["", f"rank {first.rank}:  step   loss {shown.runs[0][0].rung:>14} {run.rung:>28}   gradient norm {shown.runs[0][0].rung:>12} {run.rung:>28}"]
    start = max(0, min(first.line - 1, len(actual) - 5))
    for one, other in list(zip(expected, actual, strict=False))[start : start + 5]:
        loss = f"{_value(one.loss):>14} {_value(other.loss):>28}"
        norm = f"{_value(one.grad_norm):>12} {_value(other.grad_norm):>28}"
        lines.append(f"{'':8} {one.number:>4}        {loss}                 {norm}")
    return lines


def _bisection_words(found: Bisection) -> list[str]:
    if found.why:
        return [f"bisect: no frame was named: {found.why} ({len(found.tried)} runs)"]
    one = len(found.culprits) == 1
    subject = "this frame runs" if one else f"these {len(found.culprits)} frames run"
    return [f"bisect: the failure goes away when {subject} eagerly ({len(found.tried)} runs):", *(f"  {unit}" for unit in found.culprits)]


def _floor_words(floor: Floor) -> str:
    noise = ", ".join(f"{compare.WORDS.get(quantity, quantity)} {values[-1]:.2g}" for quantity, values in floor.noise.items() if values)
    return (
        f"noise between two equal runs (largest relative difference): {noise or 'nothing to compare'}; tolerance {floor.rtol:g} x step, or four times the noise"
    )


def _pace(speed: Pace | None) -> str:
    if speed is None:
        return "not measured"
    unit, factor = ("ms", 1e3) if speed.median_s < 1 else ("s", 1.0)
    return f"{speed.median_s * factor:.3g} {unit} ({speed.low_s * factor:.3g}-{speed.high_s * factor:.3g})"


def _ratio(speed: Pace | None, base: Pace | None, verdict: bool) -> str:
    """`x 0.71 faster`, `x 1.02 not faster`: faster and slower only where also the quartiles are apart. The repeat of the lowest rung gets no verdict."""
    if speed is None or base is None or base.median_s <= 0:
        return ""
    ratio = speed.median_s / base.median_s
    if not verdict:
        return f"x {ratio:.2f}"
    if ratio < _FASTER and speed.high_s < base.low_s:
        return f"x {ratio:.2f} faster"
    if ratio > _SLOWER and speed.low_s > base.high_s:
        return f"x {ratio:.2f} slower"
    return f"x {ratio:.2f} not faster"


def _value(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
