"""A rank that has left its process group and lives on: gloo closes its connections at that moment, and its peers die of the loss.

A victim whose own way out destroys the group as well has left too, a moment after the rank that it lost: of those that leave together
the first is the cause.
"""

from __future__ import annotations

from rankwatch.model import RankState
from rankwatch.monitor.diagnose import ends, frames
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import Death
from rankwatch.monitor.diagnose.views import alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

_LATE_S = 0.5  # how inexactly it is known when a victim was lost to
_TOGETHER_S = 2.0  # who leaves so soon after another one may follow it
_ADVICE = (
    "Find out why it left while the others went on: a condition that differs between ranks, or an exception on its way through a `finally`.",
    "Leave the loop on all ranks at once: reduce the flag that ends it, then call destroy_process_group.",
)


def first(
    ranks: Mapping[int, RankState], deaths: Mapping[int, Death], victims: Collection[int], start: float, follows: Callable[[RankState], bool]
) -> RankState | None:
    """Who left before the first victim's end at `start` (s) and is no victim: of the newest that left together, the first. None: nobody did.

    follows: whether the exception that a rank handles is itself of a lost peer.
    """
    mates = {mate for rank in victims for group in ranks[rank].groups for mate in group.ranks}
    gone = [rank for rank in ranks.values() if rank.rank not in victims and (not mates or rank.rank in mates) and left(rank, deaths.get(rank.rank))]
    gone = sorted((rank for rank in gone if rank.stage_since <= start + _LATE_S and not follows(rank)), key=lambda rank: (rank.stage_since, rank.rank))
    if not gone:
        return None
    found = gone[-1]
    for rank in reversed(gone):
        if found.stage_since - rank.stage_since > _TOGETHER_S:
            break
        found = rank
    return found


def left(rank: RankState, death: Death | None) -> bool:
    """Whether it has destroyed its groups and was alive after that, until torchrun has ended it perhaps."""
    return rank.stage == "left" and (alive(rank) or (death is not None and (death.after_ending or death.code == 0)))


def finding(rank: RankState) -> Finding:
    """What is said of it."""
    stack = rank.stack if rank.stack is not None and rank.stack.at >= rank.stage_since else None
    at = frames.where(stack.main) if stack is not None else ""
    held = f" while it handled {ends.said(rank.handling)}" if rank.handling is not None else ""
    lines = ["it has destroyed its process group, and its process lived on", *([f"it was in {at} after that"] if at else [])]
    lines += [f"its main thread handled {ends.said(rank.handling)}"] if rank.handling is not None else []
    missing = () if at else ("what it did after that: no stack of it was taken in time",)
    return Finding(
        rank.rank, "exited", "user_code", f"it left its process group{held}", at, "at_once", evidence=tuple(lines), missing_evidence=missing,
        confidence="likely", advice=_ADVICE,
    )  # fmt: skip
