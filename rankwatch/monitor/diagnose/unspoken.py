"""Ranks that ended of a timeout, over a wait that nobody saw: the one rank that spoke of none, and was somewhere else, is who they waited for."""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import JobSnapshot, RankState
from rankwatch.monitor.diagnose import blame, frames, handles, inside, victims, words
from rankwatch.monitor.diagnose.blame import Judged
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import Death
from rankwatch.monitor.diagnose.work import fresh_stack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_JUST_BEFORE_S = 2.0  # a stack this much older than the first end still shows where a rank was then


def first(ranks: Mapping[int, RankState], ended: Mapping[int, Death], start: float) -> RankState | None:
    """The only rank that was outside of torch.distributed when the first timeout ended a rank at `start` (s); None where that is not known of all.

    ended: every rank that has ended of a lost peer. A connection that broke says nothing: whoever computes at that moment is silent too.
    """
    earliest = [rank for rank, death in ended.items() if death.at - start <= blame.SAME_DEATH_S]
    if not any((crash := ranks[rank].crash) is not None and victims.timed_out(crash) for rank in earliest):
        return None
    quiet = [rank for number, rank in ranks.items() if number not in ended]
    inside_it = {rank.rank: _inside(rank, start) for rank in quiet}
    outside = [rank for rank in quiet if inside_it[rank.rank] is False]
    if len(outside) != 1 or None in inside_it.values():
        return None
    found = outside[0]
    mates = {mate for rank in earliest for group in ranks[rank].groups for mate in group.ranks}
    return found if found.rank in mates else None


def judge(found: RankState, snapshot: JobSnapshot, ranks: Mapping[int, RankState], ended: Mapping[int, Death], bad: Mapping[int, Death], key: str) -> Judged:
    """found: of `first`."""
    them = tuple(sorted(ended))
    at = frames.where(found.stack.main) if found.stack is not None else ""
    lines = (
        f"{words.ranks_text(them)} ended of a timeout, or of the loss of who had; rank {found.rank} spoke of none",
        f"it was in {at}" if at else "it was outside of torch.distributed",
    )
    finding = Finding(found.rank, "not_entered", "user_code", at=at, limit="at_once", evidence=lines, confidence="likely")
    start = min(death.at for death in ended.values())
    verdict = blame.verdict(finding, (found.rank,), start, snapshot, ranks, {rank: death for rank, death in bad.items() if rank != found.rank}, key)
    where = f"in {at}" if at else "elsewhere"
    summary = f"rank {found.rank} was {where} when {words.ranks_text(them)} timed out, and most likely kept them waiting{words.seen(ranks, snapshot)}"
    return Judged(replace(verdict, summary=summary), weak=True)


def _inside(rank: RankState, start: float) -> bool | None:
    """Whether it waited for others itself; None where that is not known."""
    if rank.crash is not None or rank.stage != "joined" or blame.waits(rank) or victims.handles_a_loss(rank):
        return True
    stack = fresh_stack(rank, start - _JUST_BEFORE_S)
    if stack is None or handles.unread(rank, start - _JUST_BEFORE_S):
        return None
    if handles.message(rank, start - _JUST_BEFORE_S):
        return True
    return bool(frames.in_point_to_point(stack) or inside.call(stack) or inside.backward(stack)) or not frames.user_frames(stack.main)
