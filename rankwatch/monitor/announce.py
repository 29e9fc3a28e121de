"""When to say what on stderr. The words are notify/lines.py's; a thread of its own does the writing, a full pipe stops nobody else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from rankwatch.model import PAGING, Incident, IncidentChange, JobSnapshot, RankState, Status
from rankwatch.monitor.compiles.news import MAX_NEWS, news
from rankwatch.notify import lines

REPEAT_AT_S = (60.0, 300.0, 900.0)
REPEAT_EVERY_S = 900.0
STEPPING_BY_COLLECTIVES = 20
QUEUE_LINES = 1000
WORTH_SAYING_S = 1.0
JUST_SAID_S = 10.0
MAX_SAID = 256  # incidents, beside those that the Status still holds


class Out(Protocol):
    """A stream, or rankwatch.stderr's."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> None: ...


class Announcer:
    """Says each thing once: what is watched, that all ranks step, each verdict (again at 1, 5, 15 min), the end."""

    def __init__(self, out: Out, log_format: str = "logfmt", blind_after_s: float = 30.0) -> None:
        self._out = out
        self._blind_after_s = blind_after_s
        self._json = log_format == "json"
        self._queue: queue.Queue[str | threading.Event] = queue.Queue(QUEUE_LINES)
        self._thread: threading.Thread | None = None
        self._watching = False
        self._stepping = False
        self._blind: set[int] = set()
        self._repeats: dict[str, int] = {}
        self._said: dict[str, str] = {}  # incident -> where its report lies
        self._said_at: dict[str, float] = {}  # incident -> when its newest verdict was said
        self._advised: dict[str, tuple[float, str]] = {}  # incident -> when which advice was given
        self._news: set[str] = set()
        self._stepped_at: dict[int, float] = {}
        self._speaks = True
        self._left_alone = False  # it was another launcher that spoke for the job before
        self.dropped = 0

    def notice(self, text: str) -> None:
        """One line about rankwatch itself."""
        self._put(lines.notice(text, as_json=self._json))

    def speak(self, speaks: bool, status: Status, anew: bool = False, ended: bool = False, last_words: Sequence[str] = ()) -> None:
        """Whether this launcher speaks for the job. While another one does only notices are said; after that, what is open then is said first.

        anew: other workers run from now on, under a judge of their own. ended: the other one has said that it ends. last_words: what it had found open.
        """
        if anew:
            if speaks and not self._speaks:
                self._watching = self._stepping = False  # the first lines were another launcher's
            self._left_alone = False
        elif speaks and not self._speaks:
            gone = "has ended" if ended else "has stopped asking"
            alone = "" if last_words or status.open_incidents else "; alone it may see no trouble between nodes"
            self.notice(f"the launcher of group rank 0 {gone}: this one judges its own ranks, and their incidents are told here{alone}")
            for line in last_words:
                self.notice(line)
            self._left_alone = self._speaks = True
            for incident in status.open_incidents:
                if incident.id in self._said:  # what is opened at this very look is said with its change
                    self._say(lines.verdict(incident, status, self._said[incident.id], as_json=self._json))
        elif not speaks and self._left_alone:
            self._left_alone = False
            self.notice("the launcher of group rank 0 asks again: it tells the incidents of the whole job")
        self._speaks = speaks

    def look(self, status: Status, settled: bool) -> None:
        """After every look: the first line once everything is known (settled), the second once all ranks step, BLIND ranks, repeats."""
        snapshot = status.snapshot
        if snapshot is None:
            return
        ranks = tuple(snapshot.ranks().values())
        if not self._watching and settled:
            self.watching(status)
        if not self._stepping:
            self._look_for_steps(ranks, status, snapshot)
        for rank in ranks:
            alive = rank.process is not None and rank.process.alive
            if rank.agent == "silent" and alive and snapshot.now - snapshot.started_at >= self._blind_after_s and rank.rank not in self._blind:
                self._blind.add(rank.rank)
                self._say(lines.blind(rank.rank, rank.agent_detail, as_json=self._json))
        for incident in status.open_incidents:
            self._repeat(incident, status, snapshot.now)
        self._tell_news(status)

    def watching(self, status: Status) -> None:
        """The first line, if it was not said yet."""
        if not self._watching:
            self._watching = True
            self._say(lines.watching(status, as_json=self._json))

    def changed(self, change: IncidentChange, status: Status, report: str = "") -> None:
        """A verdict line when an incident opens, gets worse or ends. report: path of its report."""
        self.watching(status)
        self._said[change.incident.id] = report
        if status.snapshot is not None:  # the next repeat counts from this line
            self._said_at[change.incident.id] = status.snapshot.now
            self._repeats.pop(change.incident.id, None)
        if len(self._said) > MAX_SAID:
            known = {incident.id for incident in (*status.open_incidents, *status.closed_incidents)} | {change.incident.id}
            self._said = {name: path for name, path in self._said.items() if name in known}
            self._repeats = {name: count for name, count in self._repeats.items() if name in known}
            self._said_at = {name: at for name, at in self._said_at.items() if name in known}
            self._advised = {name: advised for name, advised in self._advised.items() if name in known}
        judged = change.incident.verdict
        if judged.verdict in PAGING and judged.advice and status.snapshot is not None and change.incident.closed_at is None:
            self._advised[change.incident.id] = status.snapshot.now, judged.advice[0]
        self._say(lines.verdict(change.incident, status, report, as_json=self._json))

    def numerics(self, kind: str, ranks: tuple[int, ...], step: int, words: str, status: Status) -> None:
        """A number that is not finite, or parameters that differ between replicas."""
        self._say(lines.numerics(kind, ranks, step, words, status, as_json=self._json))

    def acted(self, incident: Incident, status: Status, report: str = "") -> None:
        """What rankwatch does about an incident."""
        self._say(lines.action(incident, status, report, as_json=self._json))

    def ended(self, status: Status, failed: bool, log_tails: Mapping[int, str], on_screen: Collection[int] = ()) -> None:
        """The last line; after a failed job the block that names the culprit first. on_screen: ranks whose stderr comes out here."""
        if status.snapshot is not None:
            self.watching(status)  # a job that was over before everything was known
        self._say(lines.done(status, as_json=self._json))
        if failed:
            now = status.snapshot.now if status.snapshot is not None else 0.0
            said = {incident: advice for incident, (at, advice) in self._advised.items() if now - at <= JUST_SAID_S}
            self._say(lines.failed_block(status, log_tails, said=said, on_screen=on_screen, as_json=self._json))

    def restarted(self) -> None:
        """Other processes run under the ranks from now on."""
        self._blind.clear()
        self._stepped_at.clear()

    def flush(self, deadline_s: float) -> bool:
        """Whether everything said so far has been written within deadline_s."""
        done = threading.Event()
        try:
            self._queue.put_nowait(done)
        except queue.Full:
            return False
        self._start()
        return done.wait(deadline_s)

    def _tell_news(self, status: Status) -> None:
        for one in news(status.compile):
            if one.key not in self._news and len(self._news) < MAX_NEWS:
                self._news.add(one.key)
                self._say(lines.compiles(one.kind, one.frame, one.ranks, one.words, status, as_json=self._json))

    def _repeat(self, incident: Incident, status: Status, now: float) -> None:
        if incident.id not in self._said:
            return
        open_s = now - self._said_at.get(incident.id, incident.opened_at)
        due = sum(open_s >= at_s for at_s in REPEAT_AT_S) + max(0, int((open_s - REPEAT_AT_S[-1]) // REPEAT_EVERY_S))
        if due > self._repeats.get(incident.id, 0):  # of those that were due while it rested, only the last one
            self._repeats[incident.id] = due
            self._say(lines.verdict(incident, status, self._said[incident.id], due, as_json=self._json))

    def _look_for_steps(self, ranks: tuple[RankState, ...], status: Status, snapshot: JobSnapshot) -> None:
        for rank in ranks:
            if _steps(rank):
                self._stepped_at.setdefault(rank.rank, rank.last_step_at if rank.steps == 1 and rank.last_step_at is not None else snapshot.now)
        if not self._watching or len(ranks) < snapshot.world_size or len(self._stepped_at) < len(ranks):
            return
        self._stepping = True
        first, slowest = min(self._stepped_at.values()), max(self._stepped_at, key=lambda rank: self._stepped_at[rank])
        by_s = self._stepped_at[slowest] - first
        after_s = self._stepped_at[slowest] - snapshot.started_at
        if by_s >= WORTH_SAYING_S:
            self._say(lines.stepping(status, after_s=after_s, slowest_rank=slowest, slowest_by_s=by_s, as_json=self._json))
        else:
            self._say(lines.stepping(status, after_s=after_s, as_json=self._json))

    def _say(self, text: str) -> None:
        if self._speaks:
            self._put(text)

    def _put(self, text: str) -> None:
        if not text:
            return
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self.dropped += 1
            return
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="rankwatch-lines", daemon=True)
            self._thread.start()

    def _write(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                # One write for a whole line: ranks write to the same stderr.
                self._out.write(item if item.endswith("\n") else item + "\n")
                self._out.flush()
            except Exception:  # stderr is closed or full, or not what it seems; files and pages still tell
                self.dropped += 1


def _steps(rank: RankState) -> bool:
    """It trains: an optimizer step was seen, or so many collectives that start-up alone does not explain them. Never said of one without agent."""
    if rank.steps >= 1:
        return True
    return not rank.compiling and max(rank.completed.values(), default=0) >= STEPPING_BY_COLLECTIVES
