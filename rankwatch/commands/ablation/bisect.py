"""Which frames have to run eagerly for the failure to go away, found by halves. Pure but for the oracle that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_CULPRITS = 4


@dataclass(slots=True)
class Bisection:
    """culprits: the units that have to be switched together; () where that was not found out, and why says what is in the way."""

    culprits: tuple[str, ...] = ()
    why: str = ""
    tried: list[tuple[tuple[str, ...], bool]] = field(default_factory=list)  # (switched units, still bad)


def bisect(units: Sequence[str], still_bad: Callable[[Sequence[str]], bool | None], most_runs: int) -> Bisection:
    """The smallest prefixes of `units` that make it good, one culprit after the other.

    still_bad(switched): whether the failure is there with these units switched; None where that could not be told. It is known to be there
    with none switched. Runs: about log2 of the number of units for each culprit, one before and one after.
    """
    result = Bisection()
    units = list(dict.fromkeys(units))

    def ask(switched: Sequence[str]) -> bool:
        for known, bad in result.tried:
            if set(known) == set(switched):
                return bad
        if len(result.tried) >= most_runs:
            raise _Stop(f"{most_runs} runs were not enough (--bisect-runs)")
        answer = still_bad(switched)
        if answer is None:
            raise _Stop(f"a run with {len(switched)} of {len(units)} switched could not be judged")
        result.tried.append((tuple(switched), answer))
        return answer

    try:
        if not units:
            raise _Stop("no frame was compiled")
        if ask(units):
            raise _Stop("the failure is there even with every frame switched: it is not in the code of a frame")
        found: list[str] = []
        while not found or ask(found):
            if len(found) == MOST_CULPRITS:
                raise _Stop(f"more than {MOST_CULPRITS} frames have to be switched")
            good, bad = len(units), 0  # units[:good] + found is good, units[:bad] + found is bad
            while good - bad > 1:
                middle = (good + bad) // 2
                if ask(list(dict.fromkeys([*units[:middle], *found]))):
                    bad = middle
                else:
                    good = middle
            found.append(units[good - 1])
        result.culprits = tuple(found)
    except _Stop as stop:
        result.why = str(stop)
    return result


class _Stop(Exception):
    """The bisection ends without an answer."""
