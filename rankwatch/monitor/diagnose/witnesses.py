"""Whether evidence that two looks have to agree on was seen twice: a node's report that is the same as at the look before is no second witness."""

from __future__ import annotations

from rankwatch.monitor.diagnose.views import alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankwatch.monitor.diagnose.scene import Scene

_WAITING = -1  # any one of the ranks that wait
_MOST = 64
_SAME_S = 1e-3  # two reports are made further apart; the arithmetic of an age is not that far off


def of(culprits: Sequence[int], waiting: Iterable[int], scene: Scene) -> dict[int, float]:
    """When each culprit was seen, and the waiting rank that was seen last. An end is seen once and for all, a rank without a report not at all."""
    seen = {rank: scene.seen_at(rank) for rank in culprits[:_MOST] if rank in scene.ranks and alive(scene.ranks[rank])}
    return {**seen, _WAITING: max((scene.seen_at(rank) for rank in waiting if rank in scene.ranks), default=scene.now)}


def anew(before: Mapping[int, float], now: Mapping[int, float]) -> bool:
    """Whether every one was seen again since."""
    return all(at > before.get(who, float("-inf")) + _SAME_S for who, at in now.items())
