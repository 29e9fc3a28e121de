"""Lateness by status numbers alone: over a window in which a group moves, the rank that is never found waiting while all others often are.

Coarse, and blind to skews far below the time between two looks; but it needs no entries and compares no clocks.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rankwatch.monitor.diagnose.state import Looks
from rankwatch.monitor.diagnose.views import View
from rankwatch.monitor.policy import Limits

_MIN_LOOKS = 10
_MIN_COLLECTIVES = 8
_STREAK = 3
_SURE = 1.75  # as in arrivals.py, z = 3.5


def add(looks: Looks, view: View, now: float, limits: Limits) -> tuple[Looks, bool]:
    """With one more look, and whether a window in which the group moved has ended with it."""
    counts, last = dict(looks.waiting), dict(looks.last)
    for rank in view.waiters:
        done = view.members[rank].done
        if last.get(rank) != done:  # one long wait counts once: many short ones are what makes a straggler
            counts[rank], last[rank] = counts.get(rank, 0) + 1, done
    looks = replace(looks, looks=looks.looks + 1, waiting=counts, last=last)
    if now - looks.start < limits.straggler_window_s:
        return looks, False
    lowest = min(member.done for member in view.members.values())
    moved = looks.looks >= _MIN_LOOKS and lowest - looks.first_seq >= _MIN_COLLECTIVES
    fresh = Looks(now, last=last, first_seq=lowest)
    if not moved:
        return fresh, False
    culprit = _culprit(looks, view, limits.straggler_ratio)
    if culprit is None:
        return fresh, True
    before = looks if culprit == looks.culprit else Looks(now)
    waits = [counts.get(rank, 0) for rank in view.members if rank != culprit]
    ended = replace(
        fresh, culprit=culprit, streak=before.streak + 1, seen=before.seen + looks.looks, own=before.own + counts.get(culprit, 0),
        least=before.least + min(waits), total=before.total + sum(waits),
    )  # fmt: skip
    return ended, True


def restart(looks: Looks, view: View, now: float) -> Looks:
    """The window begins anew: in this one something else kept ranks waiting. What earlier ones have shown stands."""
    return replace(looks, start=now, looks=0, waiting={}, first_seq=min(member.done for member in view.members.values()))


def named(looks: Looks) -> int | None:
    """The rank that these looks prove late."""
    both = looks.own + looks.least
    sure = looks.least >= both / 2 + _SURE * math.sqrt(both)
    return looks.culprit if looks.streak >= _STREAK and sure else None


def _culprit(looks: Looks, view: View, ratio: float) -> int | None:
    never = [rank for rank in view.members if looks.waiting.get(rank, 0) * 20 <= looks.looks]
    often = [rank for rank in view.members if looks.waiting.get(rank, 0) >= ratio * looks.looks]
    return never[0] if len(never) == 1 and len(often) == len(view.members) - 1 else None
