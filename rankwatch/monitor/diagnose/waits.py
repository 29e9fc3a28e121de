"""Who waits for whom: one node per group with a wait in it, from collectives and barriers; those of a start are in starts.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rankwatch.model import Collective, JobSnapshot, RankState
from rankwatch.monitor.diagnose import clocks, timeouts
from rankwatch.monitor.diagnose.mismatch import Mismatch, compare
from rankwatch.monitor.diagnose.state import Open, State, WaitKey, age
from rankwatch.monitor.diagnose.views import EXCHANGES, GroupKey, View, alive, label
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class Wait:
    """One group in which ranks wait. missing: ranks that are known not to have come; with none and no unknown, all are in.

    since: start of the earliest waiter's wait. deadline: monotonic time of the first watchdog, with the timeout it belongs to.
    unread: members of which the recorder must still be read before anything about operations can be said.
    """

    key: WaitKey
    kind: Literal["collective", "creation", "init", "barrier"]
    label: str
    ranks: tuple[int, ...]
    waiters: Mapping[int, float]  # rank -> since
    missing: tuple[int, ...]
    unknown: tuple[int, ...]
    since: float
    deadline: float | None = None
    timeout_s: float | None = None
    first: bool = False
    name: str = ""
    seq: int = 0
    entry: Collective | None = None
    mismatch: Mismatch | None = None
    behind: tuple[int, ...] = ()  # all entered: ranks that have not done it while others have, or whose device has not started it
    behind_why: str = ""
    stalled: tuple[int, ...] = ()  # waiters whose own device has not started it either: they sit in earlier work
    unread: tuple[int, ...] = ()
    view: View | None = None
    notice_s: float = 0.0
    backend: str = ""
    maybe_s: float = 0.0  # how much later than `deadline` the watchdog may come
    set_at: str = ""  # line of the job that has set the timeout
    ask: tuple[int, ...] = ()  # waiters whose stacks have to show that they wait
    presumed: bool = False  # no stack has shown it yet: nothing is said of it
    why: str = ""  # how it is known that they wait, where that is not their call
    silent: tuple[int, ...] = ()  # places in JobSnapshot.nodes: it is for ranks of these nodes, which do not answer, and for no others
    silent_ranks: tuple[int, ...] = ()  # these ranks

    @property
    def starting(self) -> bool:
        """Whether it is a rendezvous in the store."""
        return self.kind in ("creation", "init")

    @property
    def on_nccl(self) -> bool:
        """Of a group with both ("cpu:gloo,cuda:nccl", torch's default) this is so for NCCL's side."""
        return "nccl" in self.backend and ":gloo" not in self.name


def track_opens(before: State, views: Mapping[GroupKey, View], offsets: Mapping[int, float], snapshot: JobSnapshot) -> dict[tuple[int, str, int], Open]:
    """Since when each open entry has been open: the recorder's word if it was read, else our first sight. Never changes once sure."""
    opens: dict[tuple[int, str, int], Open] = {}
    ranks = snapshot.ranks()
    for view in views.values():
        for rank in view.waiters:
            member = view.members[rank]
            entry = member.open
            seq = entry.seq if entry else member.done + 1
            key = (rank, view.group.name, member.group.generation)
            old = before.opens.get(key)
            if old is not None and old.seq == seq and (old.sure or entry is None):
                opens[key] = old
                continue
            same = old is not None and old.seq == seq
            since, sure, seen_at = old.since if old is not None and same else snapshot.now, False, old.seen_at if old is not None and same else snapshot.now
            created_wall_at = snapshot.wall_at - (snapshot.now - since)
            if entry is not None and entry.created_wall_at:
                created_wall_at = entry.created_wall_at
                since, sure = clocks.mono(before, snapshot, created_wall_at, offsets.get(rank, 0.0), ranks[rank].node), True
            timeout = (entry.timeout_s if entry else None) or member.group.timeout_s
            more, maybe = timeouts.extension(ranks[rank], member, seq, since, created_wall_at, before.extensions)
            timeout = timeout + more if timeout else None
            opens[key] = Open(seq, since, sure, since + timeout if timeout else None, timeout, maybe, seen_at)
    return opens


def collective_waits(
    views: Mapping[GroupKey, View], opens: Mapping[tuple[int, str, int], Open], state: State, now: float, limits: Limits
) -> tuple[list[Wait], dict[WaitKey, float]]:
    """Groups in which somebody has waited for at least suspect_s.

    Where everybody is in, the wait counts from the last one's entry, or from our first sight of that: until then it was a wait for the
    last one. These moments are given back as well, to be kept in the state.
    """
    found: list[Wait] = []
    sights: dict[WaitKey, float] = {}
    for view in views.values():
        if not view.waiters:
            continue
        aged: dict[int, float] = {}
        deadline, timeout, maybe, set_at = None, None, 0.0, view.group.set_at
        for rank in view.waiters:
            wait = opens[(rank, view.group.name, view.members[rank].group.generation)]
            if age(state.pauses, wait.since, now) < limits.suspect_s:
                continue
            aged[rank] = wait.since
            if wait.deadline is not None and (deadline is None or wait.deadline < deadline):
                deadline, timeout, maybe = wait.deadline, wait.timeout_s, wait.maybe_s
                set_at = view.members[rank].group.set_at or set_at
        if not aged:
            continue
        at = view.at_frontier()
        entry = next((at[rank] for rank in sorted(aged) if rank in at), None) or next(
            (member.open for rank in sorted(aged) if (member := view.members[rank]).open), None
        )
        told = Wait(
            key=("collective", *view.key, view.group.generation, view.frontier), kind="collective", label=view.label, ranks=view.group.ranks, waiters=aged,
            missing=view.missing, unknown=view.unknown, since=min(aged.values()), deadline=deadline,
            timeout_s=timeout or view.group.timeout_s, maybe_s=maybe, set_at=set_at, first=view.first,
            name=view.group.name, seq=view.frontier, entry=entry, view=view, backend=view.group.backend,
            notice_s=limits.first_notice_s if view.first else limits.notice_s,
        )  # fmt: skip
        told.mismatch = compare(at) if len(at) > 1 else None
        told.unread = tuple(rank for rank, member in view.members.items() if (member.entered >= view.frontier or rank in view.unsettled) and rank not in at)
        if told.missing:
            told.stalled = tuple(rank for rank in sorted(aged) if (held := view.members[rank].open) is not None and held.started is False)
        if not told.missing and not told.mismatch:
            _all_in(told, view, at, limits)
            key = ("all in", *told.key)
            entries = [opens[(rank, view.group.name, view.members[rank].group.generation)] for rank in view.waiters]
            sure = len(entries) == len(view.members) and all(each.sure for each in entries)
            if not told.unknown:
                told.since = sights[key] = state.startups.get(key, max(each.since for each in entries) if sure else now)
        found.append(told)
    return found, sights


def _all_in(wait: Wait, view: View, at: Mapping[int, Collective], limits: Limits) -> None:
    soon_s, wait.notice_s = wait.notice_s, max(limits.all_entered_notice_s, wait.notice_s)
    undone = tuple(sorted(rank for rank, member in view.members.items() if not member.stale and member.done < view.frontier))
    # a broadcast is over at its root, a reduce everywhere else, while the others still wait: that says nothing of them
    exchange = all(entry.op in EXCHANGES for entry in at.values())
    # a later number may have completed out of order: only their own entries prove that the others have this one done
    proven = all(rank in at and at[rank].done for rank, member in view.members.items() if not member.stale and member.done >= view.frontier)
    if len(undone) < len(view.members) and not wait.unknown and not view.unsettled and exchange and proven:
        wait.behind, wait.behind_why = undone, "others have completed it"
        return
    started = {rank for rank, entry in at.items() if entry.started}
    idle = tuple(sorted(rank for rank, entry in at.items() if entry.started is False))
    if started and idle:
        wait.behind, wait.behind_why = idle, "its device has not started it while others have: earlier work on that device blocks it"
        wait.notice_s = soon_s  # who it waits for is known, and that it is no long transfer


def barrier_waits(ranks: Mapping[int, RankState], snapshot: JobSnapshot, state: State, limits: Limits) -> list[Wait]:
    """Waits in gloo's monitored_barrier, which is point-to-point inside: no recorder shows it, the agent does."""
    found = []
    calls = {(meeting.group, meeting.calls) for other in ranks.values() if (meeting := other.barrier) is not None and meeting.inside and alive(other)}
    for name, number in sorted(calls):
        inside = {
            rank: meeting for rank, other in ranks.items()
            if (meeting := other.barrier) is not None and meeting.inside and (meeting.group, meeting.calls) == (name, number) and alive(other)
        }  # fmt: skip
        group = next((group for rank in inside for group in ranks[rank].groups if group.name == name), None)
        if group is None:
            continue
        known = [rank for rank in group.ranks if rank in ranks and ranks[rank].agent == "claimed"]
        missing = tuple(rank for rank in known if rank not in inside and not _has_been_in(ranks[rank], name, number))
        since = min(meeting.since for meeting in inside.values())
        if not missing or age(state.pauses, since, snapshot.now) < limits.suspect_s:
            continue
        timeout = next((meeting.timeout_s for meeting in inside.values() if meeting.timeout_s), None)
        found.append(
            Wait(
                ("barrier", name, number), "barrier", label(group), group.ranks, {rank: meeting.since for rank, meeting in inside.items()}, missing,
                tuple(rank for rank in group.ranks if rank not in known), since, since + timeout if timeout else None, timeout, name=name, seq=number,
                notice_s=limits.notice_s, backend=group.backend,
            )
        )  # fmt: skip
    return found


def _has_been_in(rank: RankState, name: str, number: int) -> bool:
    """Whether it has left this call already. Of another group's barrier only its newest call is known."""
    meeting = rank.barrier
    return meeting is not None and meeting.group == name and meeting.calls >= number
