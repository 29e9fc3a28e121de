"""Parts of the compile document that add up ranks. Pure."""

from __future__ import annotations

from typing import Any

from rankwatch import shown
from rankwatch.monitor.compiles import rank_sets
from rankwatch.monitor.compiles.told import COUNTS, STATES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwatch.model import RankState, Waited
    from rankwatch.monitor.compiles.book import Book

MAX_GROUPS = 64  # of ranks that tell different things

Groups = dict[str, tuple[int, Any]]
"""key -> ranks that tell the same, and what."""


def group(groups: Groups, key: str, rank: int, value: Any) -> None:
    """This rank tells `value`."""
    if key in groups or len(groups) < MAX_GROUPS:
        groups[key] = (groups.get(key, (0, None))[0] | 1 << rank, value)


def written_groups(groups: Groups, written: Callable[[int], str]) -> dict[str, Any]:
    """{"0-3": value}, the largest set first."""
    ordered = sorted(groups.values(), key=lambda one: (-one[0].bit_count(), rank_sets.lowest(one[0])))
    return {written(mask): value for mask, value in ordered}


def ranks_part(book: Book, ranks: Mapping[int, RankState], compared: Sequence[int], written: Callable[[int], str]) -> dict[str, Any]:
    """`ranks`: who has asked for compiles, who is not seen, and what was lost."""
    requested: Groups = {}
    disabled: Groups = {}
    stance: Groups = {}
    blind: list[int] = []
    suppress: list[int] = []
    lost = 0
    for rank, state in ranks.items():
        told = book.ranks[rank].told
        if told is not None:
            if told.requested_key:
                group(requested, told.requested_key, rank, told.requested)
            if told.disabled:
                group(disabled, told.disabled, rank, told.disabled)
            if told.stance:
                group(stance, told.stance, rank, told.stance)
            if told.suppresses:
                suppress.append(rank)
        probe = state.probes.get("compile")
        if state.agent in ("off", "silent") or (isinstance(probe, dict) and probe.get("status") in ("off", "missing", "failed")):
            blind.append(rank)
        lost += state.events_lost
    everybody = rank_sets.bits(ranks)
    incomplete = [f"{shown.plural(lost, 'event')} of {rank_sets.words(book.lost)} lost before they were read"] if book.lost else []
    if refused := book.refused + sum(frame.dropped for frame in book.frames.values()):
        incomplete.append(f"{shown.plural(refused, 'fact')} beyond what is kept of a rank or a frame")
    return {
        "requested": written_groups(requested, written),
        "disabled": written_groups(disabled, written),
        "stance": written_groups(stance, written),
        "suppress_errors": written(rank_sets.bits(suppress)),
        "no_probe": written(rank_sets.bits(blind)),
        "with_events": written(book.with_events & everybody),
        "by_record": written(everybody & ~book.with_events),
        "compared": [written(cluster) for cluster in compared[:MAX_GROUPS]],
        "events_lost": lost,
        "events_lost_ranks": written(book.lost),
        "incomplete": "; ".join(incomplete),
    }


def lost_by_frame(waiting: Sequence[Waited]) -> dict[str, float]:
    """frame -> rank-seconds that others have waited for its compiles."""
    lost: dict[str, float] = {}
    for row in waiting:
        frame = row.reason.partition("compiling ")[2]
        if frame and not frame.startswith("at ") and row.reason.startswith(("compiling ", "recompiling ")):
            lost[frame] = lost.get(frame, 0.0) + row.rank_s
    return lost


def totals(book: Book, ranks: Mapping[int, RankState], waiting: Sequence[Waited]) -> dict[str, Any]:
    """`totals`."""
    known = [(rank, told) for rank in ranks if (told := book.ranks[rank].told) is not None]
    counts = [max(column) for column in zip(*(told.counts for _rank, told in known), strict=True)] or [0] * len(COUNTS)
    phases: dict[str, float] = {}
    caches: dict[str, dict[str, int]] = {}
    for _rank, told in known:
        for phase, seconds in told.phases.items():
            if seconds > phases.get(phase, 0.0):
                phases[phase] = seconds
        for (layer, state), count in told.caches.items():
            caches.setdefault(layer, dict.fromkeys(STATES, 0))[state] += count
    slowest = max(known, key=lambda one: (one[1].seconds, -one[0]), default=None)
    guards: dict[str, int] = {}
    for frame in book.frames.values():
        for (kind, _source), failed in frame.guards.items():
            guards[kind] = guards.get(kind, 0) + failed.count
    waited_s = sum((row.rank_s for row in waiting if row.reason.startswith(("compiling", "recompiling"))), 0.0)
    return {
        **dict(zip(COUNTS, counts, strict=True)),
        "compile_s": round(sum(told.seconds for _rank, told in known), 3),
        "compile_max_s": round(slowest[1].seconds, 3) if slowest is not None else 0.0,
        "compile_max_rank": slowest[0] if slowest is not None and slowest[1].seconds else None,
        "phases": {phase: round(seconds, 3) for phase, seconds in list(phases.items())[:32]},
        "cache": caches,
        "guards": dict(sorted(guards.items())),
        "waited_rank_s": round(waited_s, 3),
    }
