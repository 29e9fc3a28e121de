"""How long steps take before the first compile, while something compiles, and after the last one. Pure; each rank's newest samples are kept.

The rank tells its number of steps and the time of the last one; it is polled, so that of quick steps only some are seen. A compile that ended
when `step` steps were done has made step number `step + 1` longer.
"""

from __future__ import annotations

from statistics import median
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SAMPLES = 32
MAX_COMPILING = 64  # newest steps in which something was compiled
FEW = 5  # samples since the last compile that say less than those before it


class Stepping:
    """One rank's steps."""

    __slots__ = ("after", "before", "compiling", "count", "during", "first", "last", "last_at", "older")

    def __init__(self) -> None:
        self.count = 0
        self.last_at: float | None = None
        self.first: int | None = None  # steps done when the first compile ended
        self.last: int | None = None  # the same of the last
        self.compiling: list[int] = []
        self.before: list[float] = []
        self.during: list[float] = []
        self.after: list[float] = []
        self.older: list[float] = []  # between compiles

    def compiled(self, step: int) -> None:
        """A compile has ended when `step` steps were done."""
        if self.first is None:
            self.first = step
        if self.last is None or step > self.last:
            self.last = step
            self.older = [*self.older, *self.after][-MAX_SAMPLES:]
            self.after = []
            self.compiling = [*self.compiling, step][-MAX_COMPILING:]

    def look(self, count: int, last_at: float | None, step_s: float | None) -> None:
        """What the rank tells now."""
        advanced = count - self.count
        if advanced <= 0 or step_s is None or last_at is None:
            if advanced != 0:
                self.count, self.last_at = count, last_at
            return
        if count - 1 in self.compiling:
            _add(self.during, step_s)
        elif self.first is None or count - 1 < self.first:
            _add(self.before, step_s)
        else:
            if self.last_at is not None:
                self._missed(count, last_at, step_s, advanced)
            _add(self.after if self.last is not None and count - 1 > self.last else self.older, step_s)
        self.count, self.last_at = count, last_at

    def _missed(self, count: int, last_at: float, step_s: float, advanced: int) -> None:
        """One of several steps since the look before has compiled: what all took, less what each of the others does."""
        compiling = sum(self.count <= step < count - 1 for step in self.compiling)
        if compiling == 1 and self.last_at is not None:
            left = last_at - self.last_at - (advanced - 1) * step_s
            if left > step_s:
                _add(self.during, left)

    def medians(self) -> tuple[float | None, float | None, float | None]:
        """(before, during, after), None where nothing is known."""
        after = self.after if len(self.after) >= FEW else [*self.older, *self.after]
        return _median(self.before), _median(self.during), _median(after)


def document(steppings: Iterable[Stepping]) -> dict[str, Any]:
    """{before_s, during_s, after_s, since_compile, last_compile_step} of these ranks together: medians of their medians."""
    known = [stepping for stepping in steppings if stepping.count or stepping.first is not None]
    medians = [stepping.medians() for stepping in known]
    words = ("before_s", "during_s", "after_s")
    columns = {word: _median([row[place] for row in medians if row[place] is not None]) for place, word in enumerate(words)}
    last = max((stepping.last for stepping in known if stepping.last is not None), default=None)
    count = max((stepping.count for stepping in known), default=0)
    return {
        **{word: None if value is None else round(value, 6) for word, value in columns.items()},
        "since_compile": max(0, count - last) if last is not None else count,
        "last_compile_step": last,
    }


def _add(samples: list[float], value: float) -> None:
    samples.append(value)
    if len(samples) > MAX_SAMPLES:
        del samples[0]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
