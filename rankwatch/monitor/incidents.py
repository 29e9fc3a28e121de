"""The life of incidents: opened once, updated, escalated, closed, re-armed. A pure fold over verdicts.

One verdict key is one open incident. It closes when its key has been away for two looks; the same key later is a new incident.
History keeps every (verdict, cause, culprits) in order, so an escalation never loses what was said before. On closing, `verdict`
becomes `recovered` with the cost in rank-seconds; what it was before stands in the history.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from rankwatch.model import PAGING, Change, CompileActivity, Incident, IncidentChange, JobSnapshot, RankState, Stack, Verdict, VerdictName
from rankwatch.monitor.diagnose.stacks import group_stacks
from rankwatch.monitor.policy import Limits
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_CLOSED = 50
MAX_HISTORY = 200
MAX_PEERS = 64  # waiting ranks whose host and pid are kept
_CLOSE_AFTER = 2  # looks without the verdict
_SEVERITY: dict[VerdictName, int] = {"recovered": 0, "straggler": 1, "slow": 2, "timeout_imminent": 3, "diverged": 4, "stuck": 4, "failed": 5}


@dataclass(frozen=True, slots=True)
class _Life:
    """What the fold knows of an open incident beside itself."""

    absent: int = 0  # looks in a row without its verdict
    counted_at: float = 0.0  # up to here lost_rank_s is counted
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Book:
    """All incidents of a run. `Book()` is empty. open: oldest first. closed: newest last, at most 50, of all attempts."""

    open: tuple[Incident, ...] = ()
    closed: tuple[Incident, ...] = ()
    opened: int = 0
    lives: Mapping[str, _Life] = field(default_factory=dict)

    def with_evidence(self, incident_id: str, stacks: Mapping[int, Stack] | None = None, recorder_files: Iterable[str] = ()) -> Book:
        """The book with stacks and recorder files added to one incident, open or closed; unchanged when the id is unknown."""
        files = tuple(recorder_files)

        def add(incident: Incident) -> Incident:
            if incident.id != incident_id:
                return incident
            merged = _merge(incident.stacks, stacks or {})
            names = tuple(dict.fromkeys((*incident.recorder_files, *files)))
            groups = group_stacks(merged, incident.verdict.culprit_ranks, incident.verdict.waiting_ranks)
            return replace(incident, stacks=merged, recorder_files=names, stack_groups=groups)

        return replace(self, open=tuple(map(add, self.open)), closed=tuple(map(add, self.closed)))


def fold(book: Book, verdicts: Iterable[Verdict], snapshot: JobSnapshot, now: float, limits: Limits) -> tuple[Book, tuple[IncidentChange, ...]]:
    """The book after one look, and what changed in it, closings last.

    verdicts: of this look. limits: not needed yet; part of the contract. An `updated` change means that verdict, cause, culprits, waiting ranks
    or place differ from the look before; ages and countdowns are brought up to date silently.
    """
    del limits
    ranks = snapshot.ranks()
    current = {verdict.key: verdict for verdict in verdicts}
    changes: list[IncidentChange] = []
    kept: list[Incident] = []
    closed: list[Incident] = []
    lives: dict[str, _Life] = {}
    for incident in book.open:
        life = book.lives.get(incident.id, _Life(counted_at=now))
        verdict = current.pop(incident.verdict.key, None)
        if verdict is None:
            life = replace(life, absent=life.absent + 1)
            if life.absent >= _CLOSE_AFTER or snapshot.final:
                done = _close(incident, life, snapshot, now)
                closed.append(done)
                changes.append(IncidentChange("closed", done))
            else:
                kept.append(incident)
                lives[incident.id] = life
            continue
        lost = incident.lost_rank_s + life.waiting * max(0.0, now - life.counted_at)
        newer = _update(incident, verdict, snapshot, ranks, lost)
        lives[incident.id] = _Life(0, now, len(verdict.waiting_ranks))
        if _SEVERITY[verdict.verdict] > _SEVERITY[incident.verdict.verdict]:
            changes.append(IncidentChange("escalated", newer))
        elif _shown(verdict) != _shown(incident.verdict) or newer.final != incident.final:
            changes.append(IncidentChange("updated", newer))
        kept.append(newer)
    opened = book.opened
    for verdict in current.values():
        opened += 1
        incident = _open(verdict, opened, snapshot, now, ranks)
        lives[incident.id] = _Life(0, now, len(verdict.waiting_ranks))
        kept.append(incident)
        changes.append(IncidentChange("opened", incident))
    changes.sort(key=lambda change: change.kind == "closed")
    return Book(tuple(kept), (*book.closed, *closed)[-MAX_CLOSED:], opened, lives), tuple(changes)


def worst(incident: Incident) -> VerdictName:
    """The gravest verdict that the incident ever had."""
    return max((change.verdict for change in incident.history), key=_SEVERITY.__getitem__, default=incident.verdict.verdict)


def paged(incident: Incident) -> bool:
    """Whether any of its verdicts was one that pages."""
    return any(change.verdict in PAGING for change in incident.history)


def _shown(verdict: Verdict) -> tuple[object, ...]:
    return (verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.waiting_ranks, verdict.at, verdict.domain, verdict.confidence)


def _change(verdict: Verdict, snapshot: JobSnapshot) -> Change:
    return Change(snapshot.wall_at, verdict.verdict, verdict.cause, verdict.culprit_ranks)


def _open(verdict: Verdict, number: int, snapshot: JobSnapshot, now: float, ranks: Mapping[int, RankState]) -> Incident:
    stamp = datetime.fromtimestamp(snapshot.wall_at, timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    waited = max(0.0, now - verdict.since)
    blank = Incident(
        id=f"{stamp}-{number}", verdict=verdict, opened_at=now, opened_wall_at=snapshot.wall_at, updated_wall_at=snapshot.wall_at, history=(),
        since_wall_at=snapshot.wall_at - waited,
    )  # fmt: skip
    return _update(blank, verdict, snapshot, ranks, waited * len(verdict.waiting_ranks))


def _update(incident: Incident, verdict: Verdict, snapshot: JobSnapshot, ranks: Mapping[int, RankState], lost_rank_s: float) -> Incident:
    history = incident.history
    last = history[-1] if history else None
    if last is None or (last.verdict, last.cause, last.culprit_ranks) != (verdict.verdict, verdict.cause, verdict.culprit_ranks):
        history = (*history, _change(verdict, snapshot))[-MAX_HISTORY:]
    told = [rank for rank in (*verdict.culprit_ranks, *verdict.waiting_ranks[:MAX_PEERS]) if rank in ranks]
    samples = {rank: stack for rank in told if (stack := ranks[rank].stack) is not None and stack.at >= verdict.since}
    stacks = _merge(incident.stacks, samples)
    same = stacks.keys() == incident.stacks.keys() and all(stacks[rank] is incident.stacks[rank] for rank in stacks)
    roles = (verdict.culprit_ranks, verdict.waiting_ranks) == (incident.verdict.culprit_ranks, incident.verdict.waiting_ranks)
    groups = incident.stack_groups if same and roles else group_stacks(stacks, verdict.culprit_ranks, verdict.waiting_ranks)
    compiling: dict[int, CompileActivity] = dict(incident.compiling)
    for rank in verdict.culprit_ranks:
        if rank in ranks and ranks[rank].compiling:
            compiling[rank] = min(ranks[rank].compiling, key=lambda each: each.started_at)
    nodes = {rank: ranks[rank].node for rank in told if ranks[rank].node}
    pids = {rank: process.pid for rank in told if (process := ranks[rank].process) is not None}
    return replace(
        incident, verdict=verdict, updated_wall_at=snapshot.wall_at, history=history, stacks=stacks, stack_groups=groups, compiling=compiling,
        lost_rank_s=lost_rank_s, hosts={**incident.hosts, **nodes}, pids={**incident.pids, **pids}, final=incident.final or snapshot.final,
    )  # fmt: skip


def _close(incident: Incident, life: _Life, snapshot: JobSnapshot, now: float) -> Incident:
    old = incident.verdict
    lost = incident.lost_rank_s + life.waiting * max(0.0, now - life.counted_at)
    lasted = max(0.0, now - old.since)
    count = len(old.waiting_ranks)
    who = f"{count} waiting rank{'' if count == 1 else 's'} lost {lost:.0f} rank-s" if count else "no rank lost time"
    verdict = replace(old, verdict="recovered", summary=f"recovered after {lasted:.0f} s ({who}): {old.summary}", timeout_left_s=None)
    return replace(
        incident, verdict=verdict, history=(*incident.history, _change(verdict, snapshot))[-MAX_HISTORY:], lost_rank_s=lost, updated_wall_at=snapshot.wall_at,
        closed_at=now, closed_wall_at=snapshot.wall_at,
    )  # fmt: skip


def _merge(before: Mapping[int, Stack], newer: Mapping[int, Stack]) -> dict[int, Stack]:
    """Newest sample per rank; an empty one never replaces one that shows something, a Python-only one never a native one."""
    merged = dict(before)
    for rank, stack in newer.items():
        old = merged.get(rank)
        if old is None or (stack.main and (stack.native or not old.native)) or (not old.main and stack.at >= old.at):
            merged[rank] = stack
    return merged


def describe(incident: Incident) -> str:
    """`slow compiling rank 3`, for lists."""
    return f"{incident.verdict.verdict} {incident.verdict.cause} rank {compress(incident.verdict.culprit_ranks)}"
