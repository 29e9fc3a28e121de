"""Waits that only stacks show: torch checks each collective ahead of it (TORCH_DISTRIBUTED_DEBUG=DETAIL), in messages that no recorder shows.

Who has come to a collective waits in the check for those that have not, so nothing is open anywhere and the numbers stand still. Once a rank's
numbers have, its stack is looked at: one that is seen inside a call of torch.distributed waits from then on, until its numbers move or a newer
stack shows it elsewhere; one that is seen in other code is missing. Which group a call is of, no stack tells: where it may be of several, only ranks
that are missing in all of them are named.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankwatch.model import Collective, RankState
from rankwatch.monitor.diagnose import frames, inside
from rankwatch.monitor.diagnose.state import State, WaitKey, age
from rankwatch.monitor.diagnose.views import GroupKey, View, alive
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.diagnose.work import fresh_stack
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TOGETHER_S = 1.0  # stacks of one request are taken within this time
_UNSEEN_S = 30.0  # so long the stacks of all members are waited for
_WHY = "torch checks each collective ahead of it (TORCH_DISTRIBUTED_DEBUG=DETAIL), which no recorder shows: who waits is known by the stacks"
_WHERE = "; they do not tell in which of these groups"


@dataclass(slots=True)
class Sights:
    """waits: of ranks that stand in a check. seen: since when each rank's numbers stand, and since when it was seen inside: to be kept in the state.

    ask: ranks whose stacks are needed. again: those of them that were seen elsewhere, and may have come since.
    """

    waits: list[Wait]
    seen: dict[WaitKey, float]
    ask: list[int]
    again: list[int]


@dataclass(frozen=True, slots=True)
class _Inside:
    call: str
    since: float


def look(views: Mapping[GroupKey, View], ranks: Mapping[int, RankState], state: State, now: float, limits: Limits) -> Sights:
    """Of all groups that are checked."""
    checked = [view for view in views.values() if any(member.group.checked for member in view.members.values())]
    members = {rank for view in checked for rank in view.members if rank in ranks and alive(ranks[rank])}
    sights = Sights([], {}, [], [])
    came: dict[int, _Inside] = {}
    elsewhere: set[int] = set()
    for rank in sorted(members):
        mark = _mark(ranks[rank])
        still: WaitKey = ("numbers", rank, *mark)
        since = sights.seen[still] = state.startups.get(still, now)
        if age(state.pauses, since, now) < limits.stack_s or ranks[rank].group_in_creation or ranks[rank].stage != "joined":
            continue
        sights.ask.append(rank)
        stack = fresh_stack(ranks[rank], since)
        if stack is None:
            continue
        call = _call(ranks[rank], since)
        if not call:
            elsewhere.add(rank)
            sights.again.append(rank)
            continue
        key: WaitKey = ("in a check", rank, *mark)
        entered = sights.seen[key] = state.startups.get(key, max(since, stack.at - _TOGETHER_S))
        came[rank] = _Inside(call, entered)
    found: dict[tuple[GroupKey, tuple[int, ...], bool], dict[int, _Inside]] = {}
    for rank, seen in came.items():
        told = _missed([view for view in checked if rank in view.members], came, elsewhere, age(state.pauses, seen.since, now) >= _UNSEEN_S)
        if told is not None:
            found.setdefault(told, {})[rank] = seen
    sights.waits += [_wait(views[key], missing, calls, sure, limits) for (key, missing, sure), calls in found.items()]
    return sights


def _mark(rank: RankState) -> tuple[int, ...]:
    """What changes whenever the rank does anything that is counted."""
    return (sum(rank.enqueued.values()), sum(rank.completed.values()), sum(rank.mixed.values()), rank.steps, len(rank.compiling))


def _call(rank: RankState, since: float) -> str:
    """The collective that its newest stack shows it in. An engine that runs backward may as well compute: two stacks have to show it there."""
    call = inside.call(rank.stack)
    if call:
        return "" if frames.in_point_to_point(rank.stack) else call
    before = rank.earlier_stack
    return "backward" if before is not None and before.at >= since and inside.backward(before) and inside.backward(rank.stack) else ""


def _missed(views: Sequence[View], came: Mapping[int, _Inside], elsewhere: set[int], late: bool) -> tuple[GroupKey, tuple[int, ...], bool] | None:
    """(the group that it most likely waits in, who is missing there, whether it can be no other); None while that cannot be said.

    views: its groups. late: stacks that have not come will not.
    """
    found: dict[GroupKey, frozenset[int]] = {}
    for view in views:
        if not late and any(member not in came and member not in elsewhere for member in view.members):
            return None
        if absent := elsewhere.intersection(view.members):
            found[view.key] = frozenset(absent)
    if not found:
        return None
    common = frozenset.intersection(*found.values())
    smallest = min(found, key=lambda key: (len(found[key]), key))
    return (smallest, tuple(sorted(common)), len(found) == 1) if common else None


def _wait(view: View, missing: tuple[int, ...], calls: Mapping[int, _Inside], sure: bool, limits: Limits) -> Wait:
    first = min(calls, key=lambda rank: (calls[rank].since, rank))
    since, group = calls[first].since, view.members[first].group
    seq = view.members[first].entered + 1
    entry = Collective(group.name, group.generation, seq, calls[first].call, timeout_s=group.timeout_s)
    return Wait(
        ("checked", *view.key, group.generation, seq), "collective", view.label, group.ranks, {rank: call.since for rank, call in calls.items()},
        missing, view.unknown, since, since + group.timeout_s if group.timeout_s else None, group.timeout_s, first=seq == 1, name=group.name, seq=seq,
        entry=entry, notice_s=limits.first_notice_s if seq == 1 else limits.notice_s, backend=group.backend, set_at=group.set_at,
        why=_WHY if sure else _WHY + _WHERE,
    )  # fmt: skip
