"""Two runs' numbers, rank by rank and step by step. Pure.

What counts as equal: two runs of the lowest rung differ by the job's own noise, the floor. A later rung differs at step n where a number
is further from the lowest rung's than  max(rtol x n, 4 x floor up to n),  relative to the larger of the two; rtol is 0.001 for float32,
0.03 for bfloat16, 0.01 for float16, 1e-6 for float64 (the coarsest that the job computes with), and grows with the step since training
amplifies rounding. Compared are loss, gradient norm, the gradient norm of each parameter (one below a hundredth of the largest is judged on the
scale of that hundredth; three times rtol) and parameter norm. Where the floor itself passes a quarter nothing is compared any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rankwatch.commands.ablation.records import RankRun, Step

RTOL = {"float64": 1e-6, "float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
FLOOR_FACTOR = 4.0
TOO_NOISY = 0.25
SMALL_GRADIENT = 0.01
PARAMETER_FACTOR = 3.0
QUANTITIES = ("loss", "grad_norm", "gradients", "param_norm")
WORDS = {"loss": "loss", "grad_norm": "gradient norm", "param_norm": "parameter norm"}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first number of one rank that differs. step from 1; where: "loss" or "gradient of blocks.3.weight". expected: the lowest rung's value."""

    rank: int
    line: int
    step: int
    where: str
    expected: float
    actual: float

    @property
    def nonfinite(self) -> bool:
        return not math.isfinite(self.actual)


@dataclass(frozen=True, slots=True)
class Floor:
    """Noise of the job itself: the largest relative difference of two equal runs, by quantity, up to each recorded step (line)."""

    noise: Mapping[str, Sequence[float]]
    rtol: float

    def tolerance(self, quantity: str, line: int) -> float | None:
        """Relative; None where the noise forbids a comparison."""
        known = self.noise[quantity]
        noise = known[min(line, len(known) - 1)] if known else 0.0
        if noise > TOO_NOISY:
            return None
        factor = PARAMETER_FACTOR if quantity == "gradients" else 1.0
        return max(self.rtol * factor * (line + 1), FLOOR_FACTOR * noise)

    @property
    def unseeded(self) -> bool:
        """Whether two equal runs differ at their first step already, beyond what rounding explains."""
        return any(self.noise[quantity] and self.noise[quantity][0] > self.rtol for quantity in ("loss", "grad_norm"))


def rtol_for(dtypes: set[str]) -> float:
    """Of the coarsest element type; float32's where none is known."""
    return max((RTOL[dtype] for dtype in dtypes if dtype in RTOL), default=RTOL["float32"])


def floor_of(one: Mapping[int, RankRun], other: Mapping[int, RankRun], rtol: float) -> Floor:
    """The noise between two equal runs, over all ranks."""
    lines = max((min(len(one[rank].steps), len(other[rank].steps)) for rank in one.keys() & other.keys()), default=0)
    noise: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES}
    for quantity in QUANTITIES:
        so_far = 0.0
        for line in range(lines):
            for rank in one.keys() & other.keys():
                if line < len(one[rank].steps) and line < len(other[rank].steps):
                    for _where, a, b, scale in _numbers(quantity, one[rank], one[rank].steps[line], other[rank].steps[line]):
                        if math.isfinite(a) and math.isfinite(b):
                            so_far = max(so_far, _relative(a, b, scale))
                        elif a != b and not (math.isnan(a) and math.isnan(b)):
                            so_far = math.inf
            noise[quantity].append(so_far)
    return Floor(noise, rtol)


def differences(lowest: Mapping[int, RankRun], run: Mapping[int, RankRun], floor: Floor) -> dict[int, Difference]:
    """rank -> its first difference from the lowest rung; a rank without one is absent."""
    found = {}
    for rank in sorted(lowest.keys() & run.keys()):
        difference = _first(lowest[rank], run[rank], floor)
        if difference is not None:
            found[rank] = difference
    return found


def compared(lowest: Mapping[int, RankRun], run: Mapping[int, RankRun], floor: Floor) -> int:
    """How many recorded steps could be compared on every rank that both runs have."""
    both = lowest.keys() & run.keys()
    counts = []
    for rank in both:
        lines = min(len(lowest[rank].steps), len(run[rank].steps))
        counts.append(next((line for line in range(lines) if floor.tolerance("loss", line) is None and floor.tolerance("grad_norm", line) is None), lines))
    return min(counts, default=0)


def first_nonfinite(run: RankRun) -> Step | None:
    """The first step of a rank whose loss, gradients or parameters are not finite."""
    for step in run.steps:
        if any(value is not None and not math.isfinite(value) for value in (step.loss, step.grad_norm, step.param_norm)):
            return step
    return None


def _first(lowest: RankRun, run: RankRun, floor: Floor) -> Difference | None:
    for line, (expected, actual) in enumerate(zip(lowest.steps, run.steps, strict=False)):
        for quantity in QUANTITIES:
            tolerance = floor.tolerance(quantity, line)
            worst: tuple[float, Difference] | None = None
            for where, a, b, scale in _numbers(quantity, lowest, expected, actual):
                if not math.isfinite(a):
                    return None  # the job's own; nothing after it can be compared
                if not math.isfinite(b):
                    return Difference(run.rank, line, expected.number, where, a, b)
                distance = _relative(a, b, scale)
                if tolerance is not None and distance > tolerance and (worst is None or distance > worst[0]):
                    worst = (distance, Difference(run.rank, line, expected.number, where, a, b))
            if worst is not None:
                return worst[1]
    return None


def _numbers(quantity: str, names: RankRun, one: Step, other: Step) -> list[tuple[str, float, float, float]]:
    """(where, a, b, least scale) of each number that both steps have."""
    if quantity != "gradients":
        a, b = getattr(one, quantity), getattr(other, quantity)
        return [] if a is None or b is None else [(WORDS[quantity], a, b, 0.0)]
    largest = max((norm for norm in one.grads if norm is not None and math.isfinite(norm)), default=0.0)
    return [
        (f"gradient of {names.name_of(number)}", a, b, SMALL_GRADIENT * largest)
        for number, (a, b) in enumerate(zip(one.grads, other.grads, strict=False))
        if a is not None and b is not None
    ]


def _relative(a: float, b: float, scale: float) -> float:
    largest = max(abs(a), abs(b), scale)
    return abs(a - b) / largest if largest > 0.0 else 0.0
