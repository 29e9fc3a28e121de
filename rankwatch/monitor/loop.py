"""The monitor: one daemon thread that looks, judges and tells. The only wiring of reader, diagnosis, incidents and surfaces.

The launcher's calls are commands in its queue. What may be slow runs elsewhere: files in the writer, stacks and sockets in pools, lines in
the announcer, each with a bound, so that nothing but the judging itself delays the next look.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rankwatch import stderr
from rankwatch.config import Options
from rankwatch.model import Action, JobInfo, JobSnapshot, NodeReport, RankState, Status, Verdict, Want
from rankwatch.monitor import failure, heap, published
from rankwatch.monitor.action import ExitRequest
from rankwatch.monitor.announce import Announcer, Out
from rankwatch.monitor.capabilities import settled
from rankwatch.monitor.cases import Cases
from rankwatch.monitor.command import IncidentCommand
from rankwatch.monitor.compile_watch import CompileWatch
from rankwatch.monitor.diagnose import State, diagnose, ledger, repeats
from rankwatch.monitor.evidence import Evidence
from rankwatch.monitor.exits import ExitWatch
from rankwatch.monitor.files import RunFiles
from rankwatch.monitor.gathering import Gathering
from rankwatch.monitor.nodes.together import Directory
from rankwatch.monitor.numerics import Numerics, records_of
from rankwatch.monitor.on_demand import Found, OnDemand
from rankwatch.monitor.on_stuck import OnStuck
from rankwatch.monitor.other_nodes import OtherNodes
from rankwatch.monitor.outside import Outside
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.reader import Reader
from rankwatch.monitor.second_opinions import SecondOpinions
from rankwatch.monitor.stacks import StackCapture
from rankwatch.monitor.watch_thread import ERRORS_IN_A_ROW, POLL_EVIDENCE_S, WatchThread
from rankwatch.monitor.web import Web
from rankwatch.monitor.workers import Workers
from rankwatch.monitor.writer import Writer

POLL_S = 0.5
POLL_OPEN_S = 0.25
POLL_NODES_S = 2.5  # of the judge of many nodes, should no round of reports come: otherwise each round is looked at once
SETTLED_AFTER_S = 20.0
ASKED_WAIT_S = 2.0  # for a look that is under way when somebody asks for stacks
STOP_WAIT_S = {True: 0.2, False: 2.0}  # after success, after failure
LATE_FILES_S = 0.7  # beyond that, for files that are not on disk yet
LAST_HUNG_S = 1.0  # at the end nothing is left to wait for
SHORT_JOB_S, SHORT_JOB_WAIT_S = 10.0, 5.0  # one that is over before we have begun to look still leaves its record and its last line


class Monitor:
    """Watches the workers of one launcher. Its methods may be called from the launcher's main thread, return within their bound and never raise."""

    def __init__(self, options: Options, job: JobInfo, limits: Limits, out: Out | None = None) -> None:
        self.status = Status(job=job, snapshot=None)
        self._limits = limits
        self._announcer = Announcer(out if out is not None else stderr.current(), options.log_format, limits.blind_after_s)
        self._writer = Writer(job.run_dir, self._announcer.notice)
        self._outside = Outside(options, job, self._shown, lambda: self._web.served_at, self._announcer.notice)
        self._files = RunFiles(self._writer, archive=self._outside.archive)
        self._capture = StackCapture()
        self._evidence = Evidence(self._capture)
        self._opinions = SecondOpinions(os.environ, options.no_probe)
        self._command = IncidentCommand(options.on_incident, self._announcer.notice)
        self._cases = Cases(self._files, self._announcer, self._command, self._evidence, self._outside.direct)
        self._web = Web(options, self._files, self._shown, self._announcer.notice)
        self._on_demand = OnDemand(
            self._shown, self._find_asked, self._capture, self._files, self._announcer.notice, lambda: self._web.token_at, lambda: self._web.served_at
        )
        self._exits = ExitWatch(self._on_exit)
        self._thread = WatchThread(self._tick, self._poll_s, lambda: self._evidence.pending, self._take_evidence, self._tell_error)
        self._nodes = OtherNodes(self._cases, self._announcer, self._files, self._thread.look_now, lambda: self.status.job.status_url)
        self._reader: Reader | None = None
        self._gathering: Gathering | None = None
        self._state = State()
        self._numerics = Numerics()
        self._compiles = CompileWatch(self._files)
        self._wants: tuple[Want, ...] = ()
        self._ending = ""
        self._failure_seen = False  # before any planned end: what follows such an end is nobody's fault
        self._failed_at: float | None = None  # the first failure that the launcher has told of, in this attempt
        self._looked_at: float | None = None
        self._cpu_at_start_s = time.process_time()
        self._started_at = 0.0
        self._acts = options.on_stuck == "exit"
        self._on_stuck = OnStuck(limits, self._writer)

    @property
    def exit_request(self) -> ExitRequest | None:
        """What `--on-stuck exit` asks the launcher for."""
        return self._on_stuck.request

    # -- the launcher's side -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; the workers may start later."""
        if not self._thread.running:
            self._started_at = time.monotonic()
            heap.keep_large_apart()
            self._thread.start()

    def workers_started(self, workers: Workers, directory: Directory | None = None) -> None:
        """These workers run now. directory: where the launchers of the other nodes are found."""
        self._thread.send(lambda: self._take_workers(workers, directory))

    def workers_failing(self, exits: Mapping[int, int], deadline_s: float) -> None:
        """These ranks have exited badly (rank -> exit code) and torchrun is about to end the others: look now, while they live."""
        known, until = dict(exits), time.monotonic() + deadline_s
        self._thread.send(lambda: self._look_at_failure(known, until), deadline_s)

    def ending(self, reason: str) -> None:
        """A planned end, or torchrun's own stop of the workers, begins."""
        self._thread.send(lambda: self._end(reason))

    def workers_stopped(self, reason: str) -> None:
        """The workers are gone."""
        self._thread.send(lambda: self._files.event(time.time(), "workers_stopped", {"reason": reason}))

    def restarting(self, attempt: int) -> None:
        """New workers follow."""
        self._thread.send(lambda: self._restart(attempt))

    def stop(self, exit_code: int | None) -> None:
        """Judge once more, write and say what is left. At most 0.2 s after success, 2 s after failure; 5 s where the job took less than ten;
        0.7 s more where the run directory is slow, end_wait_s more for what else was asked for and is slow."""
        short = time.monotonic() - self._started_at < SHORT_JOB_S
        wait_s = SHORT_JOB_WAIT_S if short else STOP_WAIT_S[exit_code == 0]
        until = time.monotonic() + wait_s
        self._thread.send(lambda: self._finish(exit_code, until), wait_s + LATE_FILES_S + self._outside.end_wait_s)
        self._thread.stop()

    # -- the thread --------------------------------------------------------------------------------------------------------

    def _poll_s(self) -> float:
        """Until the next look, if nothing calls for one before."""
        if self._nodes.sets_pace:
            return POLL_NODES_S
        return POLL_OPEN_S if self._cases.book.open else POLL_S

    def _tell_error(self, text: str, last: bool) -> None:
        health = self.status.health
        self.status = replace(self.status, health=replace(health, errors=health.errors + 1, last_error=text))
        if text != health.last_error:
            self._announcer.notice(f"monitor error: {text}; the job is not affected")
        if last:
            self._announcer.notice(f"supervision off: {ERRORS_IN_A_ROW} errors in a row, the last: {text}; the job runs on; please report this")

    def _tick(self, urgent: bool = False, final: bool = False, restarting: bool = False) -> None:
        """One look at everything: read, judge, fetch, publish, tell."""
        reader, gathering = self._reader, self._gathering
        if reader is None or gathering is None or self._thread.off:
            return
        began = time.monotonic()
        self._evidence.collect()
        suspected = bool(self._wants or self._cases.book.open)
        asked = gathering.asked_here(self._wants)
        report = self._evidence.into(reader.read(asked, urgent, final))
        snapshot = self._opinions.into(self._snapshot(reader, report, final, restarting), suspected)
        snapshot, events = self._nodes.exchange(snapshot, reader.take_events(), self._ending)
        self._state, verdicts, self._wants = diagnose(self._state, snapshot, snapshot.now, self._limits)
        changes = self._cases.judge(verdicts, snapshot, self._limits)
        if not final:
            gathering.fetch(self._wants, asked, self._cases.ranks_to_dump(changes), suspected or reader.suspicious)
            gathering.test_once(report)
        self._cases.attach(changes, self._recorders, self.status)
        self._compare_numbers(snapshot)
        self._publish(snapshot, verdicts, time.monotonic() - began)
        self._nodes.look_around(snapshot, self._ending, self.status)
        self._cases.tell(changes, self.status)
        self._thread.guarded(lambda: self._look_at_compiles(events, snapshot))
        for event in events:
            if event.get("kind") != "text":  # its place is compile/texts.jsonl
                self._files.event(event.pop("wall_ns", snapshot.wall_at * 1e9) / 1e9, str(event.pop("kind", "event")), event)
        self._announcer.look(self.status, self._settled(snapshot))
        self._writer.check()
        if not final:
            self._files.state(self._shown(), snapshot.now)
        if self._acts and not self._ending and not final and self._nodes.may_act:
            self._consider(snapshot)
        self._nodes.obey(snapshot, self._ending, self._on_stuck if self._acts else None)

    def _snapshot(self, reader: Reader, report: NodeReport, final: bool, restarting: bool) -> JobSnapshot:
        now = time.monotonic()
        gap_s = now - self._looked_at if self._looked_at is not None else 0.0
        self._looked_at = now
        workers = reader.workers
        return JobSnapshot(
            now, time.time(), workers.world_size, workers.attempt, (report,), self._ending, gap_s, reader.started_at, final, restarting, workers.environment
        )

    def _compare_numbers(self, snapshot: JobSnapshot) -> None:
        """`--probe numerics`: what is not finite, and whose parameters differ, is said once."""
        for found in self._numerics.look(records_of(snapshot.ranks()), snapshot.now, snapshot.final):
            self._files.event(snapshot.wall_at, "numerics", {"what": found.kind, "ranks": found.ranks, "step": found.step, "why": found.words})
            self._announcer.numerics(found.kind, found.ranks, found.step, found.words, self.status)
        self.status = replace(self.status, numerics=self._numerics.document())

    def _look_at_compiles(self, events: list[dict[str, Any]], snapshot: JobSnapshot) -> None:
        document = self._compiles.look(events, snapshot, snapshot.ranks(), self.status)
        self.status = replace(self.status, compile=document)

    def _consider(self, snapshot: JobSnapshot) -> None:
        gathering = self._evidence.pending or any(want.kind != "ping" for want in self._wants)
        request = self._on_stuck.consider(snapshot, self._cases.book.open, gathering)
        if request is not None:
            self._failure_seen = True  # the job fails by this; the block at its end names the culprit
            self._cases.act(request.incident, Action("exit", snapshot.wall_at, request.why), self.status)
            self._nodes.order_end(request.culprit_ranks, request.why)

    def _settled(self, snapshot: JobSnapshot) -> bool:
        known = self._nodes.all_seen(snapshot) and settled(tuple(snapshot.ranks().values())) and self._evidence.self_test is not None
        return known or snapshot.now - snapshot.started_at > SETTLED_AFTER_S

    def _take_evidence(self) -> None:
        """Between two looks: stacks that have come in go into the open incidents at once; nothing is judged."""
        if self._evidence.collect() and self._cases.attach((), self._recorders, self.status):
            self.status = replace(self.status, open_incidents=self._cases.book.open)
            self._cases.tell((), self.status)

    def _recorders(self, ranks: Iterable[int]) -> dict[int, dict[str, bytes]]:
        return self._gathering.recorders(ranks) if self._gathering is not None else {}

    def _states(self) -> dict[int, RankState]:
        return self.status.snapshot.ranks() if self.status.snapshot is not None else {}

    def _find_asked(self, ranks: Iterable[int], native: bool) -> Found | None:
        """The processes of ranks whose stacks a person asks for (any thread); None where this thread does not answer in time."""
        found: list[Found] = []

        def find() -> None:
            if self._gathering is not None:
                found.append(self._gathering.on_demand(ranks, native))

        self._thread.send(find, ASKED_WAIT_S)
        return found[0] if found else None

    def _shown(self) -> Status:
        """The Status for pages and metrics (any thread)."""
        return self._nodes.shown(self.status)

    def _publish(self, snapshot: JobSnapshot, verdicts: tuple[Verdict, ...], took_s: float) -> None:
        health = replace(
            self.status.health,
            polls=self.status.health.polls + 1,
            last_poll_s=took_s,
            cpu_s=time.process_time() - self._cpu_at_start_s,
            events_lost=sum(rank.events_lost for rank in snapshot.ranks().values()),
            writes_dropped=self._writer.dropped + self._outside.failed,
            stack_dumps=dict(self._capture.counts),
            last_stack_dump_s=self._capture.last_s,
            store_calls=self._nodes.store[0],
            store_bytes=self._nodes.store[1],
            notifications={**self._outside.direct.counts, **self._command.counts},
        )
        self.status = published.status(self.status, snapshot, verdicts, self._cases.book, health, self._web.url, self._files.home, self._evidence.self_test)
        capabilities = {**self.status.job.capabilities, **self._opinions.capabilities(), **self._nodes.capabilities()}
        job = replace(self.status.job, capabilities=capabilities, archive_failed=self._outside.archive_failed)
        self.status = replace(self.status, job=job, waiting=ledger.rows(self._state.ledger, over=snapshot.final))

    # -- the launcher's calls, in the thread ---------------------------------------------------------------------------------

    def _take_workers(self, workers: Workers, directory: Directory | None = None) -> None:
        self._end_attempt()
        if workers.group_rank == 0:
            self._files.prefix = ""
            self._thread.guarded(self._claim_archive)
        elif self._files.prefix == "":
            self._files.prefix = published.node_prefix(workers.node)
            self.status = replace(self.status, job=replace(self.status.job, archive_url=""))  # the archive is the first node's, which has the whole job
        self._reader = reader = Reader(workers)
        self._nodes.begin(workers, directory, self._writer.root, reader.raw_recorders, self.status)
        self._gathering = Gathering(self._evidence, reader, self._nodes.together, self._states)
        self._state, self._wants, self._ending, self._looked_at = State(ledger=self._state.ledger, past=repeats.ended(self._state)), (), "", None
        self._on_stuck.begin()
        self._numerics = Numerics()
        self._compiles.begin(workers.attempt)
        self._failure_seen, self._failed_at = False, None
        self._evidence.forget()
        self._opinions.forget()
        self._announcer.restarted()
        for worker in workers.workers:
            self._exits.add(worker.pid)
        self._files.event(time.time(), "workers_started", {"attempt": workers.attempt, "pids": {worker.rank: worker.pid for worker in workers.workers}})
        self._thread.guarded(self._web.start)
        self._thread.guarded(lambda: self._outside.begin(self.status.job, judges=self._nodes.judges))
        self._thread.guarded(lambda: self._on_demand.begin(workers))
        job = replace(self.status.job, status_url=self._web.url, world_size=workers.world_size, nnodes=workers.nnodes, run_dir=self._files.home)
        self._nodes.tell_leavers(workers, self.status.job.nnodes)
        self.status = replace(self.status, job=job, state="starting")
        self._files.run(self.status)

    def _claim_archive(self) -> None:
        self.status = replace(self.status, job=replace(self.status.job, archive_url=self._outside.claim_archive()))

    def _on_exit(self, pid: int, code: int | None) -> None:
        """A child has ended (exit watch's thread): note its code and look at once, torchrun may reap it within 0.1 s."""
        reader = self._reader
        if reader is not None:
            reader.exited_pid(pid, code)
            self._thread.send(self._tick)

    def _look_at_failure(self, exits: Mapping[int, int], until: float) -> None:
        reader, gathering = self._reader, self._gathering
        if reader is None or gathering is None:
            return
        reader.exited(exits)
        self._failed_at = self._failed_at or time.monotonic()
        self._failure_seen = self._failure_seen or not self._ending
        gathering.everybody()
        self._nodes.newest(until - time.monotonic())
        self._tick(urgent=True)
        self._nodes.hand_over(until - time.monotonic())
        self._evidence.wait(until - time.monotonic() - 0.1)
        self._take_evidence()
        while self._state.failure_held and time.monotonic() < until - 0.2:
            time.sleep(POLL_EVIDENCE_S)  # what its peers say as they end decides who is named
            self._nodes.newest(POLL_EVIDENCE_S)
            self._tick(urgent=True)
        self._writer.flush(max(0.0, until - time.monotonic() - 0.05))

    def _end(self, reason: str) -> None:
        if not self._ending:
            self._ending = reason
            self._files.event(time.time(), "ending", {"reason": reason})

    def _end_attempt(self) -> None:
        """The last look at workers that others follow; what was wrong with them ends with them."""
        if self._reader is None:
            return
        self._thread.guarded(lambda: self._tick(final=True, restarting=True))
        self._reader.close()
        self._reader = None
        self._nodes.part()
        if self.status.snapshot is not None:
            changes = self._cases.end_attempt(self.status.snapshot, self._limits)
            self.status = replace(self.status, open_incidents=self._cases.book.open, closed_incidents=self._cases.book.closed, verdicts=())
            self._cases.tell(changes, self.status)

    def _restart(self, attempt: int) -> None:
        self._end_attempt()
        self.status = replace(self.status, state="restarting", restarts=self.status.restarts + 1)
        self._files.event(time.time(), "restarting", {"attempt": attempt})
        self._files.run(self.status)

    def _finish(self, exit_code: int | None, until: float) -> None:
        """The last look, the last files, the last lines."""
        failed = exit_code != 0
        began = self._failed_at or time.monotonic()
        if failed:
            self._nodes.newest((until - time.monotonic()) / 3)
        self._thread.guarded(lambda: self._tick(final=True))
        self._nodes.end(failed, began, self._failure_seen, self.status)
        self.status = replace(self.status, state="failed" if failed else "done", exit_code=exit_code)
        self._cases.job_ended(self.status)
        told_at = time.monotonic()
        self._thread.guarded(lambda: self._outside.tell_pod(self._cases.speaks))
        until += time.monotonic() - told_at
        self._outside.finish()
        self._files.event(time.time(), "end", {"exit_code": exit_code})
        self._files.run(self.status)
        self._files.state(self._shown(), time.monotonic(), final=True)
        shown_at = time.monotonic()
        shown_status = self._with_files((until - shown_at) * 0.4)
        if self._reader is not None:
            blame = failed and (self._failure_seen or not self._ending)
            tails = failure.log_tails(self._reader.workers.workers, (until - time.monotonic()) / 2) if blame else {}
            self._announcer.ended(shown_status, blame, tails, [worker.rank for worker in self._reader.workers.workers if not worker.stderr])
        self._nodes.tell_end(failed, (until - time.monotonic()) / 3)
        self._announcer.flush(max(0.02, (until - time.monotonic()) / 2))
        if not self._writer.flush(max(0.02, until + LATE_FILES_S - time.monotonic() - 0.1)):
            self._announcer.notice(f"not everything could be written to {self._writer.root}: it has not answered in time; files of this run are missing there")
            self._announcer.flush(0.05)
        self._command.finished(until - time.monotonic())  # that its last calls have begun; they may outlive us
        for late in self._outside.wait(until, LATE_FILES_S, shown_at):
            self._announcer.notice(late)
        self._announcer.flush(0.05)
        self._thread.stop()
        self._nodes.part()
        self._web.stop()
        self._outside.stop()
        self._on_demand.stop()
        self._exits.close()
        self._opinions.close()

    def _with_files(self, wait_s: float) -> Status:
        """The status for the last lines, which name files: where they are, or no place where it hangs."""
        if not self._writer.flush(max(0.02, wait_s / 2)):
            self._writer.check(LAST_HUNG_S)
            if not self._writer.flush(max(0.02, wait_s / 2)) and self._writer.hangs(LAST_HUNG_S):
                return replace(self.status, job=replace(self.status.job, run_dir=""))
        return replace(self.status, job=replace(self.status.job, run_dir=self._files.home))
