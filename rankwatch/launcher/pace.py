"""How often a launcher looks into torchrun's store: quickly at first, then rarely. Pure."""

from __future__ import annotations

FIRST_S = 0.2
QUICK_S = 5.0
QUICK_LOOKS = 9
"""Half a minute: with the static rendezvous a new attempt first finds what the one before has left."""
CALM_S = 10.0
LONGEST_S = 60.0
FAILED_LOOKS, FAILED_S = 5, 60.0
"""After so many in a row, over so long, the store is gone for good."""


def pause_s(looks: int, failures: int, spread: float) -> float:
    """Seconds until the next look. looks: since the pace began anew; failures: in a row.

    spread: 0 to 1, drawn by each launcher, so that a thousand of them do not ask at the same moment.
    """
    if failures:
        pause = min(LONGEST_S, QUICK_S * 2.0 ** (failures - 1))
    elif looks < QUICK_LOOKS:
        pause = min(QUICK_S, FIRST_S * 2.0**looks)
    else:
        pause = CALM_S
    return pause * (0.8 + 0.4 * spread)


def refused_s(in_vain: int) -> float:
    """How long a refusal is no reason to look again, after so many in a row whose looks have changed nothing: anybody can be refused, all day."""
    return min(LONGEST_S, 2.0 * 2.0 ** min(in_vain, 10))


def hopeless(failures: int, failing_s: float) -> bool:
    """Whether looking again is in vain."""
    return failures >= FAILED_LOOKS and failing_s >= FAILED_S
