"""Waits that were told and are out of sight: their verdicts stay until somebody is seen to have got through.

After a pause of the monitor all ages restart, and for a moment no wait is old enough to be found. A node that does not answer takes its ranks out of
sight, those that are waited for or all that wait. Neither is a recovery.
"""

from __future__ import annotations

from rankwatch.model import RankState, Verdict
from rankwatch.monitor.diagnose import silence, unhealed
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.views import alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_LOOK_S = 1.0  # between two looks while something is open, at most


def of(last: Iterable[Verdict], verdicts: Iterable[Verdict], scene: Scene) -> list[Verdict]:
    """Of the verdicts of the look before, those that hold on. verdicts: of this look."""
    lost = unhealed.gone(last, verdicts)
    if not lost:
        return []
    pauses, unheard = scene.state.pauses, silence.unheard(scene.snapshot)
    settling = bool(pauses) and scene.now - pauses[-1][0] < scene.limits.suspect_s + _LOOK_S
    return [verdict for verdict in lost if (settling or _unheard(verdict, unheard)) and _lasts(verdict, unheard, scene)]


def idle_lasts(verdict: Verdict, scene: Scene) -> bool:
    """Whether a job that was told to stand still only seems to have done so for less long since a pause. Nothing has moved, as the caller knows."""
    return any(at > verdict.since for at, _ in scene.state.pauses) and scene.age(verdict.since) < scene.limits.idle_min_s


def _unheard(verdict: Verdict, unheard: frozenset[int]) -> bool:
    return not unheard.isdisjoint(verdict.culprit_ranks) or unheard.issuperset(verdict.waiting_ranks)


def _lasts(verdict: Verdict, unheard: frozenset[int], scene: Scene) -> bool:
    """Whether nobody has got through, and who waits and is seen is still there."""
    ranks, group = scene.ranks, verdict.group
    members = [ranks[rank] for rank in (*verdict.culprit_ranks, *verdict.waiting_ranks) if rank in ranks]
    if group is not None and group.seq and any(rank.completed.get(group.name, 0) >= group.seq for rank in members):
        return False
    seen = [ranks[rank] for rank in verdict.waiting_ranks if rank in ranks and rank not in unheard]
    return not seen or any(_is_in(rank, verdict) for rank in seen)


def _is_in(rank: RankState, verdict: Verdict) -> bool:
    group = verdict.group
    if not alive(rank):
        return False
    if group is None or not group.seq:
        return rank.stage == "joining" or bool(rank.group_in_creation)
    barrier = rank.barrier is not None and rank.barrier.inside and rank.barrier.group == group.name
    return barrier or rank.enqueued.get(group.name, 0) >= group.seq
