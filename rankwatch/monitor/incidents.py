"""The life of incidents: opened once, updated, escalated, closed, re-armed. A pure fold over verdicts.

One verdict key is one open incident; of very many hangs alike most are told as one, see storms.py. It closes when its key has been away
for two looks; the same key later is a new incident. A rank that stalls again and again without a page, step after step, opens few incidents
all the same: from the fourth stall on the last one opens again (`times`), without a line each time.
History keeps every (verdict, cause, culprits) in order, so an escalation never loses what was said before. On closing, `verdict`
becomes `recovered` with the cost in rank-seconds; what it was before stands in the history. What is seen while a job is torn down, or just
before anybody says that it is, replaces no graver word: the incident ends as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

from rankwatch.model import PAGING, Change, CompileActivity, Incident, IncidentChange, JobSnapshot, RankState, Stack, Verdict, VerdictName
from rankwatch.monitor.diagnose import silence, words
from rankwatch.monitor.diagnose.stacks import group_stacks
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.storms import Storm, gather, rule
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_CLOSED = 50
MAX_HISTORY = 200
MAX_RENAMES = 5  # lines that name other culprits than the line before
REARM = 3  # so many stalls of the same ranks and cause are incidents of their own; further ones belong to the last of these ...
REST_S = 60.0  # ... unless the ranks rested for this long, and RESTS times as long as the stalls are apart ...
RESTS = 3.0
RARE_S = 3600.0  # ... or come this rarely
MAX_PEERS = 64  # waiting ranks whose host and pid are kept; culprits of whom every change is
_VAGUE = frozenset({"not_entered", "unknown"})
_CLOSE_AFTER = 2  # looks without the verdict
TORN_DOWN_S = 10.0  # so long before an end is known it may have begun: a rank that dies or is let go looks less stuck than it was
_SEVERITY: dict[VerdictName, int] = {"recovered": 0, "straggler": 1, "slow": 2, "timeout_imminent": 3, "diverged": 4, "stuck": 4, "failed": 5}


@dataclass(frozen=True, slots=True)
class _Life:
    """What the fold knows of an open incident beside itself."""

    absent: int = 0  # looks in a row without its verdict, the first of them at gone_at
    counted_at: float = 0.0  # up to here lost_rank_s is counted
    waiting: float = 0.0  # ranks that lose all their time, or so many shares of it
    since: float = float("inf")  # start of the earliest wait that it had
    gone_at: float | None = None
    told: tuple[int, ...] = ()  # who was blamed in the newest line
    renames: int = 0
    quiet: bool = False  # a stall that comes again and again: neither its opening nor its end is said
    gravest: Verdict | None = None  # as it was seen last, at gravest_at
    gravest_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Book:
    """All incidents of a run. `Book()` is empty. open: oldest first. closed: newest last, at most 50, of all attempts."""

    open: tuple[Incident, ...] = ()
    closed: tuple[Incident, ...] = ()
    opened: int = 0
    lives: Mapping[str, _Life] = field(default_factory=dict)
    forgotten: Mapping[VerdictName, int] = field(default_factory=dict)  # closed ones that are kept no more, by gravest verdict
    forgotten_lost_rank_s: float = 0.0
    storms: tuple[Storm, ...] = ()
    told: tuple[Verdict, ...] = ()  # the newest verdicts as incidents tell them: those of a storm as one

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

    verdicts: of this look. An `updated` change means that verdict, cause, culprits, waiting ranks or place differ from the look before, or that
    who is blamed now has to be said (`renamed`); ages and countdowns are brought up to date silently.
    """
    ranks, unheard = snapshot.ranks(), silence.unheard(snapshot)
    storms, told = gather(book.storms, verdicts, {incident.verdict.key for incident in book.open})
    current = {verdict.key: verdict for verdict in told}
    lost_now = 0.0 if snapshot.gap_s > limits.max_gap_s else 1.0  # nobody knows what the ranks did while we did not look
    changes: list[IncidentChange] = []
    kept: list[Incident] = []
    gone: list[tuple[Incident, _Life]] = []
    lives: dict[str, _Life] = {}
    for incident in book.open:
        life = book.lives.get(incident.id, _Life(counted_at=now))
        verdict = current.pop(incident.verdict.key, None)
        if life.gone_at is None or (verdict is not None and verdict.since <= life.gone_at):
            lost = incident.lost_rank_s + lost_now * life.waiting * max(0.0, now - life.counted_at)
            incident = replace(incident, lost_rank_s=lost)
        if verdict is None:
            if life.gone_at is None:
                life = replace(life, counted_at=now, gone_at=now)
            life = replace(life, absent=life.absent + 1)
            if life.absent >= _CLOSE_AFTER or snapshot.final:
                gone.append((incident, life))
            else:
                kept.append(incident)
                lives[incident.id] = life
            continue
        if (snapshot.ending or snapshot.final) and (before := _torn_down(verdict, life, ranks, now)) is not None:
            incident, verdict = replace(incident, history=_up_to(incident.history, before)), before
        if life.gravest is None or not graver(life.gravest, verdict):
            life = replace(life, gravest=verdict, gravest_at=now)
        newer = _update(incident, verdict, snapshot, ranks)
        life = replace(life, absent=0, gone_at=None, counted_at=now, waiting=_losing(verdict, unheard), since=min(life.since, verdict.since))
        if _escalates(verdict, incident):
            life = replace(life, quiet=False, told=verdict.culprit_ranks)
            changes.append(IncidentChange("escalated", newer))
        elif _renamed(verdict, incident, life):
            newer = replace(newer, was_ranks=life.told)
            life = replace(life, told=verdict.culprit_ranks, renames=life.renames + 1)
            changes.append(IncidentChange("updated", newer, renamed=True))
        elif _shown(verdict) != _shown(incident.verdict) or newer.final != incident.final:
            changes.append(IncidentChange("updated", newer))
        kept.append(newer)
        lives[incident.id] = life
    opened, closed = book.opened, list(book.closed)
    for verdict in current.values():
        rested = _recurs(verdict, closed, now)
        if rested is not None:
            closed.remove(rested)
            incident = _resume(rested, verdict, snapshot, now, ranks)
        else:
            opened += 1
            incident = _open(verdict, opened, snapshot, now, ranks)
        lives[incident.id] = _Life(
            0, now, _losing(verdict), since=verdict.since, told=verdict.culprit_ranks, quiet=rested is not None, gravest=verdict, gravest_at=now
        )
        kept.append(incident)
        changes.append(IncidentChange("opened", incident, quiet=rested is not None))
    for incident, life in gone:
        done = _close(incident, life, None if snapshot.final else _heir(incident, kept), snapshot, now)
        closed.append(done)
        changes.append(IncidentChange("closed", done, quiet=life.quiet))
    closed, forgotten = _bounded(closed)
    book = Book(tuple(kept), tuple(closed), opened, lives, dict(book.forgotten), book.forgotten_lost_rank_s, storms, told)
    return _remember(book, forgotten), tuple(changes)


def worst(incident: Incident) -> VerdictName:
    """The gravest verdict that the incident ever had."""
    return max((change.verdict for change in incident.history), key=_SEVERITY.__getitem__, default=incident.verdict.verdict)


def graver(one: Verdict, other: Verdict) -> bool:
    """Whether the first says worse than the second, or as bad with a cause where the second only says where a rank is."""
    return (_SEVERITY[one.verdict], one.cause not in _VAGUE) > (_SEVERITY[other.verdict], other.cause not in _VAGUE)


def paged(incident: Incident) -> bool:
    """Whether any of its verdicts was one that pages."""
    return any(change.verdict in PAGING for change in incident.history)


def _torn_down(verdict: Verdict, life: _Life, ranks: Mapping[int, RankState], now: float) -> Verdict | None:
    """The graver word that the incident had until the job's end began; None where it has none, or has it of ranks that were out of sight and are seen now."""
    gravest = life.gravest
    if gravest is None or now - life.gravest_at > TORN_DOWN_S or not graver(gravest, verdict):
        return None
    blind = bool(gravest.culprit_ranks) and set(gravest.unknown_ranks).issuperset(gravest.culprit_ranks)
    return None if blind and all(rank in ranks for rank in gravest.culprit_ranks) else gravest


def _up_to(history: tuple[Change, ...], verdict: Verdict) -> tuple[Change, ...]:
    """History without what came after this verdict."""
    told = (verdict.verdict, verdict.cause, verdict.culprit_ranks)
    last = max((place for place, change in enumerate(history) if (change.verdict, change.cause, change.culprit_ranks) == told), default=len(history) - 1)
    return history[: last + 1]


def _losing(verdict: Verdict, unheard: frozenset[int] = frozenset()) -> float:
    """How many rank-seconds a second the waiting ranks lose: those behind a straggler wait only a part of the time. unheard: ranks out of sight."""
    count = sum(rank not in unheard for rank in verdict.waiting_ranks) if unheard else len(verdict.waiting_ranks)
    return count * (verdict.straggling.cost_ratio if verdict.straggling is not None else 1.0)


def _shown(verdict: Verdict) -> tuple[object, ...]:
    return (verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.waiting_ranks, verdict.at, verdict.places, verdict.domain, verdict.confidence)


def _escalates(verdict: Verdict, incident: Incident) -> bool:
    """Worse than at the look before, and news: a verdict that comes back was said."""
    worse = _SEVERITY[verdict.verdict] > _SEVERITY[incident.verdict.verdict]
    return worse and all(change.verdict != verdict.verdict for change in incident.history)


def _renamed(verdict: Verdict, incident: Incident, life: _Life) -> bool:
    """Others are blamed than was said, in two looks, and it was not said too often."""
    return verdict.culprit_ranks != life.told and verdict.culprit_ranks == incident.verdict.culprit_ranks and life.renames < MAX_RENAMES


def _recurs(verdict: Verdict, closed: Sequence[Incident], now: float) -> Incident | None:
    """The closed incident that goes on in this verdict: the same ranks have been slow for the same cause again and again, this one included.

    A stall is an incident of its own at first, and again after a rest that is long against the stalls so far.
    """
    if verdict.verdict in PAGING:
        return None
    same = [incident for incident in closed if _alike(verdict, incident) and not paged(incident) and not incident.final]
    if len(same) < REARM:
        return None
    recent = same[-REARM:]
    every_s = (now - recent[0].opened_at) / sum(incident.times for incident in recent)
    rest_s = now - (recent[-1].closed_at or now)
    return recent[-1] if every_s <= RARE_S and rest_s <= max(REST_S, RESTS * every_s) else None


def _alike(verdict: Verdict, incident: Incident) -> bool:
    """Of the same ranks, attempt and rule, and for a cause that the incident had, as far as one is known: it takes a moment to sharpen."""
    if incident.verdict.culprit_ranks != verdict.culprit_ranks or _rule(incident.verdict) != _rule(verdict):
        return False
    had = {change.cause for change in incident.history}
    return verdict.cause in _VAGUE or verdict.cause in had or had <= _VAGUE


def _rule(verdict: Verdict) -> str:
    """`a0-hang-` of `a0-hang-12`."""
    return rule(verdict.key)


def _heir(incident: Incident, others: Iterable[Incident]) -> Incident | None:
    """The open incident that this one has turned out to be a part of: its culprits and some of its waiting ranks are in there now."""
    old = incident.verdict
    for other in others:
        if _rule(other.verdict) != _rule(old):
            continue
        inside = {*other.verdict.culprit_ranks, *other.verdict.waiting_ranks}
        if old.culprit_ranks and inside.issuperset(old.culprit_ranks) and not set(old.waiting_ranks).isdisjoint(other.verdict.waiting_ranks):
            return other
    return None


def _bounded(closed: list[Incident]) -> tuple[list[Incident], list[Incident]]:
    """At most MAX_CLOSED, and those that had to go: oldest first, of those that never paged as long as there are any."""
    kept, dropped = list(closed), []
    while len(kept) > MAX_CLOSED:
        victim = next((incident for incident in kept if not paged(incident)), kept[0])
        kept.remove(victim)
        dropped.append(victim)
    return kept, dropped


def _remember(book: Book, dropped: Iterable[Incident]) -> Book:
    """The book with what these incidents leave behind: one by its gravest verdict, and the cost."""
    counts, lost = dict(book.forgotten), book.forgotten_lost_rank_s
    for incident in dropped:
        counts[worst(incident)] = counts.get(worst(incident), 0) + 1
        lost += incident.lost_rank_s
    return replace(book, forgotten=counts, forgotten_lost_rank_s=lost)


def _with_change(history: tuple[Change, ...], verdict: Verdict, snapshot: JobSnapshot) -> tuple[Change, ...]:
    """History with one more change. Its times never run backwards, whatever the clock does; the first word of each verdict always stays."""
    at = max(snapshot.wall_at, history[-1].at_wall) if history else snapshot.wall_at
    history = (*history, Change(at, verdict.verdict, verdict.cause, verdict.culprit_ranks))
    if len(history) <= MAX_HISTORY:
        return history
    seen = {history[0].verdict}
    for place, change in enumerate(history[1:], 1):
        if change.verdict in seen:
            return (*history[:place], *history[place + 1 :])
        seen.add(change.verdict)
    return history


def _open(verdict: Verdict, number: int, snapshot: JobSnapshot, now: float, ranks: Mapping[int, RankState]) -> Incident:
    stamp = datetime.fromtimestamp(snapshot.wall_at, timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    waited = max(0.0, now - verdict.since)
    blank = Incident(
        id=f"{stamp}-{number}", verdict=verdict, opened_at=now, opened_wall_at=snapshot.wall_at, updated_wall_at=snapshot.wall_at, history=(),
        since_wall_at=snapshot.wall_at - waited, lost_rank_s=waited * _losing(verdict),
    )  # fmt: skip
    return _update(blank, verdict, snapshot, ranks)


def _resume(incident: Incident, verdict: Verdict, snapshot: JobSnapshot, now: float, ranks: Mapping[int, RankState]) -> Incident:
    """The same stall once more: open again, with its history and cost."""
    lost = incident.lost_rank_s + max(0.0, now - max(verdict.since, incident.closed_at or 0.0)) * _losing(verdict)
    again = replace(incident, closed_at=None, closed_wall_at=None, kept={}, stacks=dict(incident.stacks), times=incident.times + 1, lost_rank_s=lost)
    return _update(again, verdict, snapshot, ranks)


def _update(incident: Incident, verdict: Verdict, snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> Incident:
    history = incident.history
    last = history[-1] if history else None
    if last is None or (last.verdict, last.cause) != (verdict.verdict, verdict.cause) or _others(last.culprit_ranks, verdict.culprit_ranks):
        history = _with_change(history, verdict, snapshot)
    told = [rank for rank in (*verdict.culprit_ranks, *verdict.waiting_ranks[:MAX_PEERS]) if rank in ranks]
    samples = {rank: stack for rank in told if (stack := ranks[rank].stack) is not None and stack.at >= verdict.since}
    stacks = _merge(incident.stacks, samples)
    same = stacks.keys() == incident.stacks.keys() and all(stacks[rank] is incident.stacks[rank] for rank in stacks)
    roles = (verdict.culprit_ranks, verdict.waiting_ranks) == (incident.verdict.culprit_ranks, incident.verdict.waiting_ranks)
    groups = incident.stack_groups if same and roles and incident.stack_groups else group_stacks(stacks, verdict.culprit_ranks, verdict.waiting_ranks)
    compiling: dict[int, CompileActivity] = dict(incident.compiling)
    for rank in verdict.culprit_ranks:
        if rank in ranks and ranks[rank].compiling:
            compiling[rank] = min(ranks[rank].compiling, key=lambda each: each.started_at)
    nodes = {rank: ranks[rank].node for rank in told if ranks[rank].node}
    if any(rank not in ranks for rank in verdict.culprit_ranks):
        blamed = set(verdict.culprit_ranks)
        nodes.update((rank, node.node) for node in snapshot.nodes for rank in node.silent_ranks if rank in blamed)
    pids = {rank: process.pid for rank in told if (process := ranks[rank].process) is not None}
    earliest = incident.opened_wall_at - max(0.0, incident.opened_at - verdict.since) if incident.times == 1 else incident.since_wall_at
    return replace(
        incident, verdict=verdict, since_wall_at=min(incident.since_wall_at or earliest, earliest),
        updated_wall_at=max(snapshot.wall_at, incident.updated_wall_at), history=history, stacks=stacks, stack_groups=groups,
        compiling=compiling, hosts={**incident.hosts, **nodes}, pids={**incident.pids, **pids}, final=incident.final or snapshot.final,
    )  # fmt: skip


def _others(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether others are blamed now. Of very many the coming and going of some is not kept: 200 changes of 2,000 ranks would be megabytes."""
    return before != now and min(len(before), len(now)) <= MAX_PEERS


def _close(incident: Incident, life: _Life, heir: Incident | None, snapshot: JobSnapshot, now: float) -> Incident:
    """Over: it has healed, or is a part of `heir` from now on. The end is the first look that did not show it."""
    old, lost = incident.verdict, incident.lost_rank_s
    lasted = max(0.0, (now if life.gone_at is None else life.gone_at) - min(life.since, old.since))
    count = len(old.waiting_ranks)
    who = f"{count} waiting rank{'' if count == 1 else 's'} lost {lost:.0f} rank-s" if count else "no rank lost time"
    often = f" for the {incident.times}th time" if incident.times > 1 else ""
    text = f"recovered after {lasted:.0f} s{often} ({who}): {old.summary}"
    if heir is not None:
        text = f"is part of incident {heir.id} after {lasted:.0f} s ({who}): {old.summary}"
    verdict = replace(old, verdict="recovered", summary=text, timeout_left_s=None, advice=words.afterwards(old.advice))
    wall_at = max(snapshot.wall_at, incident.updated_wall_at)
    return replace(
        incident, verdict=verdict, history=_with_change(incident.history, verdict, snapshot), updated_wall_at=wall_at, closed_at=now, closed_wall_at=wall_at,
        into=heir.id if heir is not None else "",
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
