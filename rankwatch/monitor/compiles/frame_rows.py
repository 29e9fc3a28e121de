"""One frame of the compile document. Pure."""

from __future__ import annotations

from typing import Any

from rankwatch.monitor.compiles import rank_sets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwatch.monitor.compiles.frame import FrameBook
    from rankwatch.monitor.compiles.parts import Broken, FailedGuard

MAX_GUARDS = 12
MAX_BREAKS = 12
MAX_FAILURES = 8


def frame_row(frame: FrameBook, lost_rank_s: float, written: Callable[[int], str], note: str = "") -> dict[str, Any]:
    """Its row. lost_rank_s: what others have waited for it; note: words on who runs it."""
    own = frame.own
    slowest = max(own, key=lambda rank: (own[rank].seconds, -rank), default=None)
    place = frame.name.partition("@")[2]
    return {
        "frame": frame.name,
        "file_line": place,
        "ranks": written(frame.mask),
        "note": note,
        "compiles": max((part.compiles for part in own.values()), default=0),
        "recompiles": max((part.recompiles for part in own.values()), default=0),
        "steps_compiled": max((part.steps for part in own.values()), default=0),
        "last_step": max((part.last_step for part in own.values() if part.last_step is not None), default=None),
        "seconds_sum": round(sum(part.seconds for part in own.values()), 3),
        "seconds_max": round(own[slowest].seconds, 3) if slowest is not None else 0.0,
        "seconds_max_rank": slowest,
        "lost_rank_s": round(lost_rank_s, 3),
        "limit": frame.limit or None,
        "cache_size": max((part.cache_size for part in own.values()), default=0),
        "limited": written(frame.limited),
        "graphs": max((part.graphs for part in own.values()), default=0),
        "ops": frame.ops,
        "phases": {phase: round(seconds, 3) for phase, seconds in frame.phases.items()},
        "cache": {layer: dict(states) for layer, states in frame.caches.items()},
        "guards": [_guard(failed, written) for failed in _most(frame.guards.values())[:MAX_GUARDS]],
        "breaks": [_broken(broken, written) for broken in _most_broken(frame.breaks.values())[:MAX_BREAKS]],
        "failures": [{"type": broken.type, **_broken(broken, written)} for broken in _most_broken(frame.failures.values())[:MAX_FAILURES]],
        "last_reason": frame.last_reason,
    }


def _guard(failed: FailedGuard, written: Callable[[int], str]) -> dict[str, Any]:
    guard = failed.guard
    return {
        "class": guard.kind,
        "source": guard.source,
        "text": guard.text,
        "words": guard.words,
        "at": guard.at,
        "expected": guard.expected,
        "actual": guard.actual or None,  # torch tells it of tensors only
        "expected_before": [value for value in reversed(failed.expected) if value != guard.expected],
        "values": list(failed.values),
        "ranks": written(failed.mask),
        "count": failed.count,
        "rank_count": failed.mask.bit_count(),
        "key": failed.key or None,
    }


def _broken(broken: Broken, written: Callable[[int], str]) -> dict[str, Any]:
    return {"at": broken.at, "reason": broken.reason, "gb": broken.gb, "ranks": written(broken.mask), "count": broken.count, "key": broken.key or None}


def _most(guards: Any) -> list[FailedGuard]:
    return sorted(guards, key=lambda failed: (-failed.count, rank_sets.lowest(failed.mask), failed.guard.text))


def _most_broken(found: Any) -> list[Broken]:
    return sorted(found, key=lambda broken: (-broken.count, broken.at, broken.reason))
