"""The incidents of a run in the monitor's hands: folded from verdicts, filled with evidence, written and told.

The life of an incident is decided in monitor/incidents.py; here is only what has to be done about each change, and what an incident that
is over keeps: the last picture from while it was open, not that of the recovery or of the job's end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankwatch import shown
from rankwatch.model import Action, CompileActivity, Incident, IncidentChange, JobSnapshot, RankState, Stack, Status, Verdict
from rankwatch.monitor import restarts
from rankwatch.monitor.announce import Announcer
from rankwatch.monitor.command import Call, IncidentCommand
from rankwatch.monitor.diagnose.stacks import group_stacks
from rankwatch.monitor.evidence import Evidence, reported_stacks
from rankwatch.monitor.files import RunFiles, as_json
from rankwatch.monitor.incidents import TORN_DOWN_S, Book, fold, graver
from rankwatch.monitor.packed import packed
from rankwatch.monitor.policy import Limits
from rankwatch.notify.direct import Direct
from rankwatch.report import incident as incident_report

REWRITE_EVERY_S = 5.0
WAITING_SHOWN = 8
BEFORE_DEATH_S = 2.0
MAX_TOLD = 256  # ids
RECORDERS_COME_S = 20.0  # those of 64 nodes one after the other, over a slow network
Recorders = Callable[[Iterable[int]], Mapping[int, Mapping[str, bytes]]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last look that showed the trouble, `at`. compiles: of each rank the longest compile seen, as the document shows it."""

    incident: Incident
    status: Status
    gone: frozenset[int]
    compiles: Mapping[str, Any]
    at: float


@dataclass(frozen=True, slots=True)
class _Written:
    at: float
    content: tuple[object, ...]


class Cases:
    """All incidents of this run. Called from the loop's thread only."""

    def __init__(self, files: RunFiles, announcer: Announcer, command: IncidentCommand, evidence: Evidence, direct: Direct) -> None:
        self.book = Book()
        self.speaks = True  # False while another launcher judges the whole job: evidence is kept, nobody is called
        self._files = files
        self._announcer = announcer
        self._command = command
        self._direct = direct
        self._evidence = evidence
        self._written: dict[str, _Written] = {}
        self._seen: dict[str, _Seen] = {}
        self._untold: set[str] = set()  # opened while another launcher spoke for the job
        self._told: set[str] = set()  # open ones that the command and the webhooks have been told of: they hear of the end too
        self._restarted: tuple[IncidentChange, ...] = ()  # what is over once the restart that has closed it gets anywhere

    def judge(self, verdicts: tuple[Verdict, ...], snapshot: JobSnapshot, limits: Limits) -> tuple[IncidentChange, ...]:
        """Fold the verdicts of one look into the incidents; what has changed."""
        self.book, changes = fold(self.book, verdicts, snapshot, snapshot.now, limits)
        for change in changes:
            if change.kind == "opened":
                self._evidence.forget_native(change.incident.verdict.culprit_ranks)
        closed = {change.incident.id for change in changes if change.kind == "closed"}
        if closed or snapshot.ending or snapshot.final:
            over = tuple(self._keep(incident, snapshot) for incident in self.book.open) if snapshot.ending or snapshot.final else self.book.open
            ended = tuple(self._keep(incident, snapshot) if incident.id in closed else incident for incident in self.book.closed)
            self.book = replace(self.book, open=over, closed=ended)
            for incident_id in closed:
                self._seen.pop(incident_id, None)
        return tuple(replace(change, incident=self._newest(change.incident)) for change in changes)

    def act(self, incident_id: str, action: Action, status: Status) -> None:
        """Record what is done about an open incident: in its document, as an event, as a line."""
        self.book = replace(self.book, open=tuple(replace(incident, action=action) if incident.id == incident_id else incident for incident in self.book.open))
        incident = next((incident for incident in self.book.open if incident.id == incident_id), None)
        if incident is None:
            return
        self._write(incident, status)
        fields = {"incident": incident_id, "taken": action.taken, "why": action.why, "culprit_ranks": list(incident.verdict.culprit_ranks)}
        self._files.event(action.at_wall, "action", fields)
        self._announcer.acted(incident, status, self._report(incident_id, status))

    def take_over(self, status: Status) -> None:
        """Nobody else speaks for the job any more: call the user's command, tell the webhooks of what has been opened in silence and is open still."""
        for incident in self.book.open:
            if incident.id in self._untold:
                self._call("opened", incident, status, "")
        self._untold.clear()

    def end_attempt(self, snapshot: JobSnapshot, limits: Limits) -> tuple[IncidentChange, ...]:
        """Close everything: the processes that it was about are gone, and new ones run under their ranks.

        That it is over is said and written once these have completed something: a restart may hang in the same place.
        """
        self.book = replace(self.book, open=tuple(replace(incident, final=False) for incident in self.book.open))
        changes = self.judge((), replace(snapshot, final=True), limits)
        closed = {change.incident.id for change in changes}
        self._replace(restarts.restarted(incident, snapshot) for incident in self.book.closed if incident.id in closed)
        self._restarted += tuple(replace(change, incident=self._newest(change.incident)) for change in changes)
        self._replace(restarts.not_over(incident) for incident in self.book.closed if incident.id in closed)
        return tuple(replace(change, incident=self._newest(change.incident), quiet=True) for change in changes)

    def job_ended(self, status: Status) -> None:
        """The last rewrite: documents of incidents that were open until now, or closed at the last look, say how the job ended.

        Those that nobody was told the end of are closed with it: the user's command is called once more for each.
        """
        at = status.snapshot.now if status.snapshot is not None else 0.0
        if status.exit_code == 0:
            self._replace(change.incident for change in self._restarted)
        restarted = {change.incident.id for change in self._restarted}
        for incident in (*self.book.open, *(incident for incident in self.book.closed if incident.closed_at == at or incident.id in restarted)):
            self._write(incident, status)
        told = [incident for incident in self.book.open if incident.id not in self.book.lives or not self.book.lives[incident.id].quiet]
        told += [self._newest(change.incident) for change in self._restarted if not change.quiet]
        for incident in told:
            self._files.event(shown.now_wall(status), "incident_closed", self._fields(incident, incident_report.closed_by(incident, status) or ""))
        told = told if self.speaks else [incident for incident in told if incident.id in self._told]
        if self.speaks or told:
            self._command.finish(self._last_call(incident, status) for incident in told)
            for incident in told:
                self._direct.changed("closed", incident, status, incident_report.closed_by(incident, status) or "")
            self._direct.finish()

    def _last_call(self, incident: Incident, status: Status) -> Call:
        reason = incident_report.closed_by(incident, status) or ""
        return Call("closed", incident.id, lambda: as_json(incident_report.to_json(incident, status)), reason, self._document(incident))

    def _document(self, incident: Incident) -> str:
        """Where its incident.json is, or will be in a moment."""
        return self._files.path_of(incident.id, "incident.json") if self._files.known(incident.id) else ""

    def ranks_to_dump(self, changes: Iterable[IncidentChange]) -> tuple[int, ...]:
        """Whose stacks a new or a worse incident shows: the culprits and some of those that wait for them."""
        ranks: list[int] = []
        for change in changes:
            if (change.kind in ("opened", "escalated") and not change.quiet) or change.renamed:
                ranks += _shown(change.incident)
        return tuple(dict.fromkeys(ranks))

    def attach(self, changes: Iterable[IncidentChange], recorders: Recorders, status: Status) -> bool:
        """Put stacks and recorder files that are there into the open incidents; whether any changed. recorders: gives the newest raw ones.

        A stack stays as first taken until the incident gets worse: one that was taken after the trouble has passed shows nothing.
        """
        worse = {change.incident.id for change in changes if change.kind == "escalated"}
        attached = False
        for incident in self.book.open:
            # Of a death everybody's last stack is worth keeping: torchrun ends the others at once.
            dead = incident.verdict.verdict == "failed"
            ranks = (
                tuple(status.snapshot.ranks()) if dead and status.snapshot is not None else (*incident.verdict.culprit_ranks, *incident.verdict.waiting_ranks)
            )
            not_before = incident.verdict.since - (BEFORE_DEATH_S if dead else 0.0)
            reported = reported_stacks(status.snapshot.ranks(), ranks, not_before) if status.snapshot is not None else {}
            stacks = {**reported, **self._evidence.latest(ranks, not_before)}
            news = {rank: stack for rank, stack in stacks.items() if _adds(stack, incident.stacks.get(rank), incident.id in worse)}
            names = self._recorder_files(incident, ranks, recorders, status, anew=incident.id in worse)
            if news or (names and names != incident.recorder_files):
                self.book = self.book.with_evidence(incident.id, stacks=news, recorder_files=names)
                attached = True
        return attached

    def _recorder_files(self, incident: Incident, ranks: tuple[int, ...], recorders: Recorders, status: Status, anew: bool) -> tuple[str, ...]:
        """The names of the incident's recorder files, where some are written now. Those of other nodes come a moment later than our own."""
        now = status.snapshot.now if status.snapshot is not None else 0.0
        there = () if anew else incident.recorder_files
        if not self._files.admit(incident) or (there and now - incident.opened_at > RECORDERS_COME_S):
            return ()
        shown_ranks = self._files.ranks_shown(incident, ranks, status)  # of 16,384 that wait nobody fetches every recorder
        missing = [rank for rank in shown_ranks if not any(name.startswith(f"fr/rank_{rank}.") for name in there)]
        return (*there, *self._files.recorders(incident, status, recorders(missing))) if missing else ()

    def tell(self, changes: Iterable[IncidentChange], status: Status) -> None:
        """Write what has changed, say it once, start the user's command. `status` is the one that pages and metrics show now."""
        snapshot = status.snapshot
        if snapshot is None:
            return
        changed = {change.incident.id: change for change in changes}
        self._look(status, snapshot)
        if any(snapshot.attempt > restarts.attempt_of(change.incident) for change in self._restarted) and restarts.gets_on(snapshot):
            over, self._restarted = self._restarted, ()
            self._replace(change.incident for change in over)
            for done in over:
                self._write(done.incident, status)
                if not done.quiet:
                    self._announce(done, status)
        for incident in self.book.open:
            change = changed.get(incident.id)
            written = self._written.get(incident.id)
            news = change is not None and change.kind != "updated"
            if news or written is None or written.content != _content(incident) or snapshot.now - written.at >= REWRITE_EVERY_S:
                self._write(incident, status)
        for change in changed.values():
            if change.kind == "closed":
                self._write(change.incident, status)
                self._written.pop(change.incident.id, None)
            if (change.kind != "updated" and not change.quiet) or change.renamed:
                self._announce(replace(change, incident=self._newest(change.incident)), status)
        waits = {change.incident.id for change in self._restarted}
        self.book = replace(self.book, closed=tuple(incident if incident.id in waits else packed(incident) for incident in self.book.closed))
        if self.speaks:
            self._direct.look(status)
        else:
            self._direct.rest()

    def _look(self, status: Status, snapshot: JobSnapshot) -> None:
        """Remember this look for the incidents whose trouble it still shows."""
        if snapshot.ending or snapshot.final:
            return
        current, ranks = {verdict.key for verdict in status.verdicts}, snapshot.ranks()
        for incident in self.book.open:
            before, told = self._seen.get(incident.id), _shown(incident)
            gone = frozenset(rank for rank in told if rank in ranks and _gone(ranks[rank]))
            if incident.verdict.key not in current:
                continue
            if before is not None and graver(before.incident.verdict, incident.verdict) and snapshot.now - before.at <= TORN_DOWN_S:
                continue  # the end may have begun: what it was is worth more than what it seems to be now
            if before is not None and before.incident.verdict.verdict == incident.verdict.verdict and gone - before.gone:
                continue  # the end has begun, though nobody has said so yet
            rows = {
                str(rank): incident_report.compile_row(activity, status) for rank in incident.verdict.culprit_ranks if (activity := _compiles(ranks.get(rank)))
            }
            longest = dict(before.compiles) if before is not None else {}
            longest.update((rank, row) for rank, row in rows.items() if row["elapsed_s"] >= longest.get(rank, row)["elapsed_s"])
            self._seen[incident.id] = _Seen(incident, status, gone, longest, snapshot.now)

    def _keep(self, incident: Incident, snapshot: JobSnapshot) -> Incident:
        """The incident with the picture from before its end."""
        seen = self._seen.get(incident.id)
        if seen is None:
            return incident
        kept = incident.kept
        if not kept:
            kept = incident_report.picture(seen.incident, seen.status)
            kept = {**kept, "compile": {**kept["compile"], **seen.compiles}}
        stacks = {**incident.stacks, **seen.incident.stacks}
        groups = group_stacks(stacks, incident.verdict.culprit_ranks, incident.verdict.waiting_ranks)
        return replace(incident, kept=incident_report.with_crashes(kept, incident, snapshot), stacks=stacks, stack_groups=groups)

    def _write(self, incident: Incident, status: Status) -> None:
        now = status.snapshot.now if status.snapshot is not None else 0.0
        self._written[incident.id] = _Written(now, _content(incident))
        self._files.incident(incident, status)

    def _announce(self, change: IncidentChange, status: Status) -> None:
        incident = change.incident
        self._announcer.changed(change, status, self._report(incident.id, status))
        reason = (incident_report.closed_by(incident, status) or "") if change.kind == "closed" else ""
        self._files.event(incident.updated_wall_at, f"incident_{change.kind}", self._fields(incident, reason))
        over, told = change.kind == "closed", incident.id in self._told
        if self.speaks or (over and told):
            self._call(change.kind, incident, status, reason)
        elif not over and not told:
            self._untold.add(incident.id)
        if over:
            self._untold.discard(incident.id)
            self._told.discard(incident.id)

    def _call(self, kind: str, incident: Incident, status: Status, reason: str) -> None:
        """Whoever is called beside the lines on stderr."""
        self._told.add(incident.id)
        if len(self._told) > MAX_TOLD:
            self._told &= {known.id for known in (*self.book.open, *self.book.closed)}
        self._command.run(kind, incident.id, lambda: as_json(incident_report.to_json(incident, status)), reason, self._document(incident))
        self._direct.changed(kind, incident, status, reason)

    def _report(self, incident_id: str, status: Status) -> str:
        """What a line names: the page in the archive where that has a link, else report.txt; "" where nothing is written."""
        if not self._files.known(incident_id):
            return ""
        return shown.page_url(status.job, incident_id) if shown.archived(status.job) else self._files.path_of(incident_id, "report.txt")

    def _fields(self, incident: Incident, reason: str) -> Mapping[str, object]:
        """What events.jsonl says of an incident. reason: why it is closed."""
        verdict = incident.verdict
        return {
            "incident": incident.id,
            "verdict": verdict.verdict,
            "cause": verdict.cause,
            "domain": verdict.domain,
            "culprit_ranks": list(verdict.culprit_ranks),
            "waiting_ranks": list(verdict.waiting_ranks),
            "summary": incident_report.summary(verdict),
            **({"reason": reason} if reason else {}),
        }

    def _replace(self, newer: Iterable[Incident]) -> None:
        """Put these in the place of the closed incidents with their ids."""
        by_id = {incident.id: incident for incident in newer}
        self.book = replace(self.book, closed=tuple(by_id.get(incident.id, incident) for incident in self.book.closed))

    def _newest(self, incident: Incident) -> Incident:
        return next((other for other in (*self.book.open, *self.book.closed) if other.id == incident.id), incident)


def _gone(rank: RankState) -> bool:
    return rank.stage in ("left", "exiting") or (rank.process is not None and not rank.process.alive)


def _compiles(rank: RankState | None) -> CompileActivity | None:
    return min(rank.compiling, key=lambda activity: activity.started_at, default=None) if rank is not None else None


def _adds(stack: Stack, before: Stack | None, worse: bool) -> bool:
    if before is None or (not before.threads and bool(stack.threads)) or (stack.native and not before.native):
        return True
    return worse and stack.at > before.at and bool(stack.threads)


def _content(incident: Incident) -> tuple[object, ...]:
    """What makes a rewrite worth while at once, beside changes of the verdict: who is blamed and what evidence there is."""
    stacks = tuple((rank, bool(stack.threads), stack.native) for rank, stack in sorted(incident.stacks.items()))
    return (incident.verdict.culprit_ranks, stacks, incident.recorder_files)


def _shown(incident: Incident) -> tuple[int, ...]:
    return (*incident.verdict.culprit_ranks, *incident.verdict.waiting_ranks[:WAITING_SHOWN])
