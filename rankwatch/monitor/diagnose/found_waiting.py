"""Lateness by status numbers alone: over a window in which a group moves, the rank that is never found waiting while all others often are.

Coarse, and blind to skews far below the time between two looks; but it needs no entries and compares no clocks.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rankwatch.monitor.diagnose.state import Looks, Pool
from rankwatch.monitor.diagnose.views import View
from rankwatch.monitor.policy import Limits

_MIN_LOOKS = 10
_MIN_COLLECTIVES = 8
_STREAK = 3
_MEMORY = 12  # windows; then what they have shown counts for half
_APART = 3  # times as often the others are found waiting
_SELDOM = 20  # one look in so many, at most, finds a straggler itself waiting
_SURE = 1.75  # as in arrivals.py, z = 3.5


def ends(looks: Looks, now: float, limits: Limits) -> bool:
    """Whether a look now is the last one of the window."""
    return now - looks.start >= limits.straggler_window_s


def add(looks: Looks, view: View, now: float, limits: Limits, suspect: int | None = None) -> tuple[Looks, bool]:
    """With one more look, and whether a window in which the group moved has ended with it. suspect: who comes last by arrival times, asked where `ends`."""
    counts, last = dict(looks.waiting), dict(looks.last)
    for rank in view.waiters:
        done = view.members[rank].done
        if last.get(rank) != done:  # one long wait counts once: many short ones are what makes a straggler
            counts[rank], last[rank] = counts.get(rank, 0) + 1, done
    looks = replace(looks, looks=looks.looks + 1, waiting=counts, last=last)
    if not ends(looks, now, limits):
        return looks, False
    lowest = min(member.done for member in view.members.values())
    moved = looks.looks >= _MIN_LOOKS and lowest - looks.first_seq >= _MIN_COLLECTIVES
    fresh = Looks(now, last=last, first_seq=lowest, pool=looks.pool)
    if not moved:
        return fresh, False
    if suspect is not None:
        fresh = replace(fresh, pool=_pooled(looks, suspect))
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
    return looks.culprit if looks.streak >= _STREAK and _proven(looks.own, looks.least) else None


def backed(looks: Looks, view: View, limits: Limits) -> tuple[int, int, int, int] | None:
    """The rank whose arrivals show it late, where all windows since then prove the same together: it, collectives at which it and the one that waits

    least beside it were found waiting, looks. An NCCL group gives about ten numbers a window, so that chance alone breaks many a streak.
    """
    pool = looks.pool
    if pool is None or pool.windows < _STREAK or pool.suspect not in view.members:
        return None
    own = pool.waits.get(pool.suspect, 0)
    least = min(pool.waits.get(rank, 0) for rank in view.members if rank != pool.suspect)
    seldom = pool.seen / _SELDOM
    never = own <= seldom + math.sqrt(seldom) and _APART * own <= least  # one standard deviation: as in a window of its own
    often = least >= limits.straggler_ratio * pool.seen
    return (pool.suspect, own, least, pool.seen) if never and often and _proven(own, least) else None


def _proven(own: int, least: int) -> bool:
    both = own + least
    return least >= both / 2 + _SURE * math.sqrt(both)


def _pooled(looks: Looks, suspect: int) -> Pool:
    before = looks.pool if looks.pool is not None and looks.pool.suspect == suspect else Pool(suspect)
    share = 2 if before.windows >= _MEMORY else 1
    waits = {rank: before.waits.get(rank, 0) // share + looks.waiting.get(rank, 0) for rank in before.waits.keys() | looks.waiting.keys()}
    return Pool(suspect, before.windows // share + 1, before.seen // share + looks.looks, waits)


def _culprit(looks: Looks, view: View, ratio: float) -> int | None:
    never = [rank for rank in view.members if looks.waiting.get(rank, 0) * _SELDOM <= looks.looks]
    often = [rank for rank in view.members if looks.waiting.get(rank, 0) >= ratio * looks.looks]
    return never[0] if len(never) == 1 and len(often) == len(view.members) - 1 else None
