"""What every rank did over the last ten minutes, for the incident page: a bounded row of looks, of which only those that differ are kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rankwatch import shown
from rankwatch.model import PhaseLook
from rankwatch.wire.ranks import compress

SPAN_S = 600.0
EVERY_S = 1.0
RANKS_PER_S = 500  # 16,384 ranks are looked at every 33 s: working out what they all do takes half a second
MAX_LOOKS = 600


def due(looks: tuple[PhaseLook, ...], world_size: int, wall_at: float) -> bool:
    """Whether it is time for another look."""
    return not looks or not 0 <= wall_at - looks[-1].seen_wall < max(EVERY_S, world_size / RANKS_PER_S)


def extended(looks: tuple[PhaseLook, ...], views: Mapping[int, shown.RankView], world_size: int, wall_at: float) -> tuple[PhaseLook, ...]:
    """The looks with one more, if anything has changed, without those that ended more than SPAN_S ago; at most MAX_LOOKS."""
    kinds: dict[str, list[int]] = {}
    for rank, view in views.items():
        kinds.setdefault(view.kind or view.phase, []).append(rank)
    if silent := [rank for rank in range(world_size) if rank not in views]:
        kinds["no_report"] = silent
    now = tuple(sorted((kind, compress(ranks)) for kind, ranks in kinds.items()))
    if looks and looks[-1].seen_wall > wall_at:  # the wall clock was set back: what was remembered is in the future
        looks = ()
    same = bool(looks) and looks[-1].kinds == now
    looks = (*looks[:-1], replace(looks[-1], seen_wall=wall_at)) if same else (*looks, PhaseLook(wall_at, now, wall_at))
    first = next((index for index in range(len(looks) - 1) if looks[index + 1].at_wall > wall_at - SPAN_S), len(looks) - 1)
    return looks[max(first, len(looks) - MAX_LOOKS) :]
