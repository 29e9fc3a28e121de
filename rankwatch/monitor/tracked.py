"""One rank between two polls: what is remembered of it, and what follows from that alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rankwatch.model import Crash, Group, Watchdog
from rankwatch.monitor import recorder
from rankwatch.monitor.calls import CallLog, Kinds, Scan
from rankwatch.monitor.device_times import DeviceTimes, Timed
from rankwatch.monitor.pool import Job
from rankwatch.monitor.slots import SlotReader
from rankwatch.monitor.watchdog_log import RankLog, fold
from rankwatch.monitor.worker_server import GENERIC, NCCL, WorkerServer
from rankwatch.monitor.workers import Worker

HEARTBEAT_STALE_S = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer of a rank's recorders. parsed: as JSON, whole or cut to the newest entries. scans, timed: what was recorded, and what has been
    retired with a duration, since the reading before.
    """

    documents: dict[str, bytes]
    parsed: dict[str, dict[str, Any]]
    scans: dict[str, Scan]
    log: CallLog  # of the process that was asked
    at: float
    wall_at: float
    whole: bool
    timed: tuple[Timed, ...] = ()


@dataclass(slots=True)
class Tracked:
    """What is remembered of one rank between two polls."""

    worker: Worker
    slot: SlotReader | None
    server: WorkerServer | None
    kinds: Kinds = field(default_factory=Kinds)
    log: CallLog = field(init=False)
    times: DeviceTimes = field(default_factory=DeviceTimes)
    nccl_timing: bool = False
    view: recorder.RecorderView = field(init=False)
    identity: tuple[int, int] = (0, 0)  # pid and start ticks of the process that all below belongs to
    busy: Job[None] | None = None
    quiet_until: float = 0.0  # no questions before: it did not answer
    status_at: float = -1e9
    full_at: float = -1e9
    ping_at: float = -1e9
    answered_at: float = -1e9  # when ping_ok was learnt
    ping_ok: bool | None = None
    nccl_status: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, bytes] = field(default_factory=dict)
    documents_at: float | None = None
    last_words: dict[str, Any] | None = None  # the slot's record that they came in
    witness: bool | None = None
    full_cost_s: float = 0.0
    witness_at: float = -1e9
    waits: dict[str, tuple[int, float]] = field(default_factory=dict)  # group with open operations -> last completed, since when unchanged
    was_child: bool = False
    exit_code: int | None = None
    exit_told: bool = False
    oom_killed: bool = False
    oom_note: str = ""
    crash: Crash | None = None
    crash_job: Job[Crash | None] | None = None
    output: RankLog = field(init=False)
    output_at: float = -1e9
    output_job: Job[str] | None = None
    watchdog: Watchdog = field(init=False)
    reading: Reading | None = None  # came in, and is not taken yet
    just_timed: tuple[Timed, ...] = ()  # of the reading that was taken last, to be joined with the other ranks'
    answer_s: float = 0.0  # how long the rank took for its newest answer
    history_cpu_s: float = 0.0  # what a reading for the history costs us

    def __post_init__(self) -> None:
        self.log, self.view = CallLog(self.kinds), recorder.RecorderView(self.nccl_timing)
        self.output = RankLog((self.worker.stderr, self.worker.stdout))
        self.watchdog = Watchdog(readable=self.output.known)

    def absorb(self) -> None:
        """Take the reading that has come in. The slot was read after it, so every group that it names is known by now."""
        reading, self.reading = self.reading, None
        if reading is None or self.slot is None or reading.log is not self.log:
            return
        groups = self.slot.state.groups
        for name, scan in reading.scans.items():
            self.log.learn(name, scan, groups)
            if scan.last >= 0 and not reading.whole:
                self.view.saw(name, scan.first, scan.last)
        self.view.take(reading.parsed, groups, reading.wall_at, reading.whole)
        self.times.learn(reading.timed)
        self.just_timed = reading.timed
        self.documents, self.documents_at = reading.documents, reading.at

    def hear_output(self, now: float) -> None:
        """Take what its log has said since."""
        if self.output_job is not None and self.output_job.done:
            self.watchdog = fold(self.watchdog, self.output_job.value or "", now)
            self.output_job = None

    def identify(self) -> None:
        """The claimed process stands for the rank; another one under the slot means that all remembered numbers are another's."""
        owner = self.slot.state.owner if self.slot is not None else {}
        pid, start_ticks = owner.get("pid"), owner.get("start_ticks")
        identity = (pid, start_ticks) if isinstance(pid, int) and isinstance(start_ticks, int) else (0, 0)
        if owner.get("state") == "loaded":
            identity = (0, 0)  # below a shell that may be any Python
        if identity != self.identity:
            self.identity = identity
            self.view, self.log, self.reading = recorder.RecorderView(self.nccl_timing), CallLog(self.kinds), None
            self.times, self.just_timed = DeviceTimes(), ()
            self.nccl_status, self.documents, self.documents_at, self.witness = {}, {}, None, None
            if self.server is not None:
                self.server.forget()

    def hear_last_words(self) -> None:
        """A rank that ends by an exception leaves its newest operations in the slot: its server stops before anybody can ask."""
        status = self.slot.state.recorder_status if self.slot is not None else {}
        if self.slot is None or status is self.last_words or not isinstance(status.get("entries"), list) or not status["entries"]:
            return
        self.last_words = status
        self.view.add(GENERIC, status, self.slot.state.groups)
        self.documents = {**self.documents, "last_words": json.dumps(status).encode()}
        self.documents_at = self.slot.state.heartbeat_at

    def groups(self) -> tuple[Group, ...]:
        """The groups that the rank is in now."""
        return self.slot.state.groups if self.slot is not None else ()

    def joined(self) -> bool:
        """It is in the process group (or was), so its worker server should run."""
        return self.slot is not None and self.slot.state.stage in ("joined", "left") and self.slot.state.owner.get("state") == "claimed"

    def safe_at_any_time(self) -> bool:
        """Up to torch 2.13 a dump of NCCL's entries may query the event of an operation that is being freed: there only on suspicion."""
        if self.slot is None or not self.has_nccl():
            return True
        numbers = str(self.slot.state.owner.get("torch", "")).split(".")[:2]
        return len(numbers) == 2 and all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) >= (2, 14)

    def has_nccl(self) -> bool:
        """Its operations are counted by NCCL's recorder, which only the socket shows."""
        return self.slot is not None and any("nccl" in group.backend for group in self.slot.state.groups)

    def unnamed(self) -> bool:
        """A group is counted whose name is not known yet: one full read tells, cheap while the recorder is young."""
        if self.slot is None:
            return False
        counted = self.slot.state.recorder_status.get("pg_status") or {}
        if len(self.slot.state.groups) < 2 and len(counted) < 2 and not any(group.generation for group in self.slot.state.groups):
            return False
        return not (self.view.names_all(GENERIC, self.slot.state.recorder_status) and self.view.names_all(NCCL, self.nccl_status))

    def numbers(self) -> tuple[dict[str, int], dict[str, int]]:
        """Last enqueued and completed by group: the cheap status, or the entries where these are ahead (a stale heartbeat)."""
        if self.slot is None:
            return {}, {}
        groups = recorder.twins(self.slot.state.groups)
        enqueued, completed = self.view.entry_numbers(groups)
        nccl = [group for group in groups if "nccl" in group.backend]
        others = [group for group in groups if "nccl" not in group.backend]
        for source, status, known in ((NCCL, self.nccl_status, nccl), (GENERIC, self.slot.state.recorder_status, others)):
            if not status:
                continue
            entered, done = self.view.numbers(source, status, known)
            for name in entered:
                enqueued[name] = max(enqueued.get(name, 0), entered[name])
                completed[name] = max(completed.get(name, 0), done[name])
        return enqueued, completed

    def mixed(self) -> dict[str, bool]:
        """RankState.mixed."""
        if self.slot is None:
            return {}
        groups = [group for group in recorder.twins(self.slot.state.groups) if "nccl" not in group.backend]
        return self.view.mixed(GENERIC, self.slot.state.recorder_status, groups)

    def notice_waits(self, now: float) -> None:
        """Note since when each group's open operations have not moved."""
        enqueued, completed = self.numbers()
        waits: dict[str, tuple[int, float]] = {}
        for name, entered in enqueued.items():
            done = completed.get(name, 0)
            if entered > done:
                before = self.waits.get(name)
                waits[name] = before if before is not None and before[0] == done else (done, now)
        self.waits = waits

    def stale(self, now: float) -> bool:
        """No Python thread of it has run lately: it holds the GIL in C, is stopped, or is dead."""
        beat = self.slot.state.heartbeat_at if self.slot is not None else None
        return beat is not None and now - beat > HEARTBEAT_STALE_S
