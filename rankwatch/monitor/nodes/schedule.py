"""When a node is pulled, for how long it is waited for, and from when on it is silent. Pure."""

from __future__ import annotations

PERIOD_S = 2.0
HURRY_S = 1.0  # while something is suspected
FEW_NODES = 32  # of so few twice as often: a rank is then named almost as soon as on one node, for 3 % of a core
TRY_S = 1.5  # connecting and answering together
ROUND_S = 3.0  # a round is over by then, whoever has not answered
STALE_S = 10.0
BACKOFF_MOST_S = 10.0
SLOW_S = 0.5
COST_FACTOR = 3.0  # pulling takes at most a third of a core ...
COSTLY_PERIOD_S = 4.0  # ... unless reports would grow old over it
WAVE_NODES = 32
WAVE_S = 0.02
NUDGE_GAP_S = 0.25
ASK_AGAIN_S = 1.0


def period_s(suspected: bool, cost_s: float, nodes: int) -> float:
    """From the start of one round of so many nodes to the next. cost_s: CPU time that the round before took."""
    wanted_s = (HURRY_S if suspected else PERIOD_S) / (2 if nodes <= FEW_NODES else 1)
    return max(wanted_s, min(COSTLY_PERIOD_S, COST_FACTOR * cost_s))


def backoff_s(failures: int) -> float:
    """How long a node is left alone after so many failures in a row."""
    return min(BACKOFF_MOST_S, 2.0 ** (failures - 1)) if failures else 0.0


def awaited(failures: int, took_s: float) -> bool:
    """Whether a round waits for a node's answer: one that has failed or was slow at the pull before does not hold up the others' news."""
    return not failures and took_s < SLOW_S


def wave_s(place: int, nodes: int, most_s: float = PERIOD_S / 2) -> float:
    """How long after the start of a round the node at this place is asked: 32 at once, so that thousands of answers do not meet in one switch."""
    waves = (nodes - 1) // WAVE_NODES + 1
    return (place // WAVE_NODES) * min(WAVE_S, most_s / waves)


def nudge_at(now: float, began_at: float) -> float:
    """When a nudged node is pulled: at once, unless that was just done."""
    return max(now, began_at + NUDGE_GAP_S)
