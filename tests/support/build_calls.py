"""Recorder answers as torch writes them, and the histories that rankwatch makes of them: programs of calls in, JSON or snapshots out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from rankwatch.model import Group, JobSnapshot, NodeReport, Process, RankState, Verdict
from rankwatch.monitor.calls import CallLog, Kinds
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.recorder import RecorderView
from rankwatch.monitor.worker_server import GENERIC, NCCL

WALL = 1_796_000_000.0
MONO = 5_000.0

Call = tuple  # (operation, input sizes) or (operation, input sizes, dtype)


def entry(seq: int, call: Call, *, name="0", pg_id=0, record_id=None, at=0.0, backend="gloo", p2p=False, retired=True, **more) -> dict:
    """One entry, keys in torch's order."""
    op, sizes, dtype = (*call, "Float")[:3]
    kinds = [dtype] if sizes else []
    return {
        "collective_seq_id": seq, **more, "input_dtypes": kinds, "input_sizes": [list(size) for size in sizes], "is_p2p": p2p, "op_id": seq,
        "output_dtypes": kinds, "output_sizes": [list(size) for size in sizes], "p2p_seq_id": 0, "pg_id": pg_id, "process_group": [name, "undefined"],
        "profiling_name": f"{backend}:{op}", "record_id": seq - 1 if record_id is None else record_id, "retired": retired,
        "state": "completed" if backend == "nccl" else "scheduled", "thread_id": "1", "thread_name": "python", "time_created_ns": int((WALL + at) * 1e9),
        "time_discovered_completed_ns": 0, "time_discovered_started_ns": 0, "timeout_ms": 600000,
    }  # fmt: skip


def answer(entries: Sequence[dict]) -> bytes:
    """The whole document, without blanks."""
    return json.dumps({"comm_lib_version": "", "entries": list(entries), "nccl_comm_state": {}, "version": "2.10"}, separators=(",", ":")).encode()


class Rank:
    """One rank of a generated job: `program(number)` is its call at that number, in one group. It is read by what reads recorders in the product."""

    RING = 2000

    def __init__(self, rank: int, program: Callable[[int], Call], world: int, kinds: Kinds, backend: str = "gloo") -> None:
        self.rank, self.program, self.backend = rank, program, backend
        self.recorder = NCCL if backend == "nccl" else GENERIC
        self.groups: tuple[Group, ...] = (Group("0", "default_pg", backend, tuple(range(world)), 600.0),)
        self.view, self.log = RecorderView(), CallLog(kinds)
        self.entered = self.done = 0
        self.read_at: float | None = None

    def read(self, t: float, rate: float) -> None:
        numbers = range(max(1, self.entered - self.RING + 1), self.entered + 1)
        entries = [
            entry(n, self.program(n), backend=self.backend, at=t - (self.entered - n) / rate, retired=n <= self.done, name=self.groups[0].name) for n in numbers
        ]
        self.view.take({self.recorder: {"entries": entries[-300:]}}, self.groups, WALL + t)
        self.log.learn(self.recorder, self.log.scan(self.recorder, answer(entries)), self.groups)
        self.read_at = MONO + t

    def state(self, t: float, **more) -> RankState:
        name = self.groups[0].name
        return RankState(
            rank=self.rank, node="node05", process=Process(100 + self.rank, True, "S", 1.0, 1.0), heartbeat_at=MONO + t, groups=self.groups,
            collectives=self.view.collectives, collectives_at=self.read_at, calls=self.log.calls(self.groups), enqueued={name: self.entered},
            completed={name: self.done}, **more,
        )  # fmt: skip


class Job:
    """Ranks that call `program(rank)(number)` at `rate` numbers a second from t = 0 on; lead(rank, t): how far a rank is ahead.

    history_s: how often all are read without a reason, None for never (NCCL before torch 2.14). What diagnose wants is read at once.
    """

    def __init__(self, programs: Sequence[Callable[[int], Call]], rate: float, *, history_s: float | None = 5.0, backend="gloo", lead=None, skew=0) -> None:
        self.kinds = Kinds()
        self.ranks = [Rank(number, program, len(programs), self.kinds, backend) for number, program in enumerate(programs)]
        self.rate, self.history_s, self.lead, self.skew = rate, history_s, lead or (lambda rank, t: 0), skew
        self.state = State()
        self.told: dict[float, list[Verdict]] = {}
        self.reads = 0

    def play(self, until: float, start: float = 0.5, poll: float = 0.5) -> Job:
        t, next_history = start, start
        while t <= until:
            for rank in self.ranks:
                rank.entered = int(t * self.rate) + self.lead(rank.rank, t)
                rank.done = max(0, int(t * self.rate) - self.skew)
            if self.history_s is not None and t >= next_history:
                self.read(range(len(self.ranks)), t)
                next_history = t + self.history_s
            report = NodeReport("node05", tuple(rank.state(t) for rank in self.ranks))
            snapshot = JobSnapshot(MONO + t, WALL + t, len(self.ranks), 0, (report,), gap_s=poll)
            self.state, verdicts, wanted = diagnose(self.state, snapshot, snapshot.now, Limits())
            self.told[t] = list(verdicts)
            for want in wanted:
                if want.kind == "recorder":
                    self.read(want.ranks, t)
            t = round(t + poll, 3)
        return self

    def read(self, ranks, t: float) -> None:
        self.reads += 1
        for number in ranks:
            self.ranks[number].read(t, self.rate)

    def first(self) -> tuple[float, Verdict] | None:
        return next(((t, verdicts[0]) for t, verdicts in self.told.items() if verdicts), None)

    def kinds_told(self) -> list[tuple[str, tuple[int, ...]]]:
        return list(dict.fromkeys((v.verdict, v.culprit_ranks) for verdicts in self.told.values() for v in verdicts))
