"""Waits in the store: ranks that start, or make a group, meet there and wait for who has not come."""

from __future__ import annotations

from typing import TypedDict

from rankwatch.model import JobSnapshot, RankState
from rankwatch.monitor.diagnose import early
from rankwatch.monitor.diagnose.mismatch import compare_members
from rankwatch.monitor.diagnose.state import State, WaitKey, age
from rankwatch.monitor.diagnose.views import alive
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def startup_waits(ranks: Mapping[int, RankState], snapshot: JobSnapshot, state: State, limits: Limits) -> tuple[list[Wait], dict[WaitKey, float]]:
    """Waits in the store: init_process_group while some have not called it, new_group while some have not.

    Also gives the first sight of each creation, to be kept in the state.
    """
    unknown = tuple(rank for rank in range(snapshot.world_size) if rank not in ranks or ranks[rank].agent in ("off", "silent"))
    joins, seen = _join_waits(ranks, snapshot, state, limits, unknown)
    creations, sights = _creation_waits(ranks, snapshot, state, limits, unknown)
    return _first_disagreement([*joins, *creations], ranks), {**seen, **sights}


def _join_waits(
    ranks: Mapping[int, RankState], snapshot: JobSnapshot, state: State, limits: Limits, unknown: tuple[int, ...]
) -> tuple[list[Wait], dict[WaitKey, float]]:
    """The wait in init_process_group, or with NCCL in the first collective after it."""
    now = snapshot.now
    joining = _joining(ranks, now)
    ahead = early.look(ranks, state.startups, now)
    calls: Mapping[int, str] = ahead.calls if ahead is not None else {}
    sights: dict[WaitKey, float] = {early.sight_key(rank): ahead.waiting[rank] for rank in calls} if ahead is not None else {}
    if not joining and ahead is None:
        return [], sights
    coming = dict(joining)
    if ahead is not None and (calls or not joining):
        coming |= ahead.waiting
    start = min(coming.values())
    if age(state.pauses, start, now) < limits.suspect_s:
        return [], sights
    missing = _not_come(ranks, coming, start) if joining else ahead.late if ahead is not None else ()
    told = Wait(
        ("init",), "init", "init_process_group", tuple(range(snapshot.world_size)), coming, missing, unknown, start, first=True,
        notice_s=limits.startup_notice_s,
        **_first_end({rank: (since, ranks[rank].timeouts.join_s, ranks[rank].timeouts.join_set_at) for rank, since in joining.items()}),
    )  # fmt: skip
    told.ask, told.presumed = ahead.ask if ahead is not None else (), not joining and not calls
    told.why = ahead.why if ahead is not None else ""
    return [told], sights


def _joining(ranks: Mapping[int, RankState], now: float) -> dict[int, float]:
    """Ranks in init_process_group of the job's world, since when."""
    joining = {rank: other.stage_since or now for rank, other in ranks.items() if other.stage == "joining" and alive(other)}
    elsewhere = {rank: other.join.since for rank, other in ranks.items() if other.join is not None and not other.join.ours and alive(other)}
    if elsewhere and not any(alive(other) and rank not in joining and rank not in elsewhere for rank, other in ranks.items()):
        joining |= elsewhere  # one rank may join a world of the job's own; where all do, the job has mistaken its world
    return joining


def _not_come(ranks: Mapping[int, RankState], coming: Mapping[int, float], start: float) -> tuple[int, ...]:
    """A rank that joined an earlier group and is still busy with it has not come either."""
    return tuple(
        sorted(
            rank for rank, other in ranks.items()
            if rank not in coming and other.agent not in ("off", "silent")
            and not (other.stage == "joined" and other.stage_since >= start - 1.0) and not early.at_its_first(other)
        )
    )  # fmt: skip


def _creation_waits(
    ranks: Mapping[int, RankState], snapshot: JobSnapshot, state: State, limits: Limits, unknown: tuple[int, ...]
) -> tuple[list[Wait], dict[WaitKey, float]]:
    """The waits in new_group, by the number of the group that is made."""
    found: list[Wait] = []
    sights: dict[WaitKey, float] = {}
    creating: dict[str, list[int]] = {}
    for rank, other in ranks.items():
        if other.group_in_creation and other.stage != "joining" and alive(other):
            creating.setdefault(other.group_in_creation, []).append(rank)
    for name, waiting in creating.items():
        key: WaitKey = ("creation", name)
        start = sights[key] = state.startups.get(key, snapshot.now)
        if age(state.pauses, start, snapshot.now) < limits.suspect_s:
            continue
        members = {member for rank in waiting for member in ranks[rank].creation_ranks}  # the others do not wait in it
        missing = tuple(
            sorted(
                rank for rank, other in ranks.items()
                if rank not in waiting and other.agent == "claimed" and (not members or rank in members) and all(group.name != name for group in other.groups)
            )
        )  # fmt: skip
        text = f"new_group (group {name})"
        told = Wait(
            key, "creation", text, tuple(range(snapshot.world_size)), dict.fromkeys(waiting, start), missing, unknown, start,
            first=True, name=name, notice_s=limits.startup_notice_s,
            **_first_end({rank: (start, ranks[rank].timeouts.creation_s, ranks[rank].timeouts.creation_set_at) for rank in waiting}),
        )  # fmt: skip
        told.mismatch = compare_members(_members_of(name, ranks))
        found.append(told)
    return found, sights


class _End(TypedDict):
    deadline: float | None
    timeout_s: float | None
    set_at: str


def _first_end(calls: Mapping[int, tuple[float, float | None, str]]) -> _End:
    """The first of these calls (start, timeout, line) that gives up: each waits in the store on its own."""
    ends = [(start + timeout, timeout, line) for start, timeout, line in calls.values() if timeout]
    deadline, timeout, line = min(ends, default=(None, None, ""))
    return {"deadline": deadline, "timeout_s": timeout, "set_at": line}


def _first_disagreement(found: list[Wait], ranks: Mapping[int, RankState]) -> list[Wait]:
    """Groups are numbered as they are made: once ranks disagree on one, every later one of the same number differs as a consequence.

    The first one may have come about all the same: some ranks got through it by chance.
    """
    odd = sorted((wait for wait in found if wait.kind == "creation" and wait.mismatch), key=lambda wait: (len(wait.name), wait.name))
    if not odd:
        return found
    made = {group.name for other in ranks.values() for group in other.groups if group.name.isdigit() and odd[0].name.isdigit()}
    for name in sorted((name for name in made if int(name) < int(odd[0].name)), key=int):
        if (earlier := compare_members(_members_of(name, ranks))) is not None:
            odd[0].mismatch, odd[0].name, odd[0].label = earlier, name, f"new_group (group {name})"
            break
    odd[0].waiters = {rank: since for wait in reversed(odd) for rank, since in wait.waiters.items()}
    return [wait for wait in found if wait is odd[0] or wait not in odd]


def _members_of(name: str, ranks: Mapping[int, RankState]) -> dict[int, tuple[int, ...]]:
    """Each rank's idea of who is in the group of this name, made or in the making."""
    made = {rank: group.ranks for rank, other in ranks.items() for group in other.groups if group.name == name and group.ranks}
    making = {rank: other.creation_ranks for rank, other in ranks.items() if other.group_in_creation == name and other.creation_ranks and alive(other)}
    return {**made, **making}
