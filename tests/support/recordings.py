"""Real jobs that were recorded, cut small, played back to diagnose over fake time: what their monitor would have seen.

A recording (data/recorded/*.json) holds a job's recorder answers (its newest entries), py-spy samples, and, for NCCL, a look a second at
process state, CPU, heartbeat and status numbers. Times are seconds from the fault. A rank stands still after it, so one answer serves.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankwatch.model import Group, JobSnapshot, NodeReport, Process, RankState, Stack, Verdict
from rankwatch.monitor.calls import CallLog, Kinds
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.pyspy import threads_of
from rankwatch.monitor.recorder import RecorderView
from rankwatch.monitor.worker_server import GENERIC, NCCL

DATA = Path(__file__).parent / "data" / "recorded"
MONO = 5_000.0
PID = 4000


class Recording:
    """One recorded job. `play` gives the verdicts of each look, by seconds from the fault."""

    def __init__(self, name: str, **more: Any) -> None:
        """more: fields of every RankState that were not recorded (steps, cudagraph)."""
        self.data = json.loads((DATA / f"{name}.json").read_text())
        self.world, self.backend = self.data["world"], self.data["backend"]
        self.fault_wall_at = self.data["fault_wall_at"]
        self.more = more
        self.stacks: dict[int, list[Stack]] = {rank: [] for rank in range(self.world)}
        self.views = {rank: RecorderView() for rank in range(self.world)}
        kinds = Kinds()
        self.logs = {rank: CallLog(kinds) for rank in range(self.world)}
        self.read_at: dict[int, float] = {}
        self.exits: dict[int, int] = {}

    def play(self, start: float, until: float, poll: float = 0.5, limits: Limits | None = None) -> dict[float, tuple[Verdict, ...]]:
        state, told, t = State(), {}, start
        while t <= until:
            snapshot = self.snapshot(t, poll)
            state, verdicts, wanted = diagnose(state, snapshot, snapshot.now, limits or Limits())
            told[round(t, 2)] = verdicts
            for want in wanted:
                for rank in want.ranks:
                    self.fetch(want.kind, rank, t)
            t += poll
        return told

    def group(self) -> Group:
        return Group("0", "default_pg", self.backend, tuple(range(self.world)), self.data["timeout_s"], 0, self.fault_wall_at - 30)

    def snapshot(self, t: float, poll: float) -> JobSnapshot:
        ranks = tuple(self.rank(number, t) for number in range(self.world))
        return JobSnapshot(MONO + t, self.fault_wall_at + t, self.world, 0, (NodeReport("node0", ranks),), gap_s=poll, started_at=MONO - 60)

    def rank(self, number: int, t: float) -> RankState:
        letter, cpu, beat_age, enqueued, completed = self.look(number, t)
        code = self.exits.get(number)
        alive = letter not in ("", "Z") and code is None
        stacks = self.stacks[number]
        return RankState(
            rank=number, node="node0", stage="joined", groups=(self.group(),), heartbeat_at=MONO + t - beat_age, ping_ok=True,
            process=Process(PID + number, alive, letter, cpu, cpu, exit_code=code, exited_at=MONO + t if code is not None else None),
            enqueued={"0": enqueued}, completed={"0": completed}, collectives=self.views[number].collectives,
            collectives_at=self.read_at.get(number), calls=self.logs[number].calls((self.group(),)),
            stack=stacks[-1] if stacks else None, earlier_stack=stacks[-2] if len(stacks) > 1 else None, **self.more,
        )  # fmt: skip

    def look(self, number: int, t: float) -> tuple[str, float, float, int, int]:
        """(state letter, CPU seconds, age of the heartbeat, last enqueued, last completed) at that moment."""
        if "looks" not in self.data:  # recorded once: the rank stands
            counts = self.data["recorder"][str(number)]["pg_status"]["0"]
            return "S", 1.0, 0.2, counts["last_enqueued_collective"], counts["last_completed_collective"]
        rows = [row for row in self.data["looks"] if row[0] <= t] or self.data["looks"][:1]
        lived = [row for row in rows if row[1][str(number)][3] is not None] or self.data["looks"][:1]
        at, ranks = lived[-1]
        letter, cpu, beat_age, enqueued, completed, _error = ranks[str(number)]
        if rows[-1] is not lived[-1] and self.exits.get(number) is not None:
            letter = ""
        late = t - at if beat_age > 1.0 else 0.0
        return "R" if letter == "t" else letter, cpu, beat_age + late, enqueued, completed

    def fetch(self, kind: str, rank: int, t: float) -> None:
        if kind == "recorder":
            recorder = NCCL if self.backend == "nccl" else GENERIC
            self.views[rank].take({recorder: self.data["recorder"][str(rank)]}, (self.group(),), self.fault_wall_at + t)
            log = self.logs[rank]
            log.learn(recorder, log.scan(recorder, json.dumps(self.data["recorder"][str(rank)]).encode()), (self.group(),))
            self.read_at[rank] = MONO + t
        elif kind == "stacks" and (samples := self.data["stacks"][str(rank)]):
            document = samples[min(len(self.stacks[rank]), len(samples) - 1)]
            pids = list(dict.fromkeys(thread["pid"] for thread in document))
            found = [Stack(pid, MONO + t, threads_of([each for each in document if each["pid"] == pid], pid)) for pid in pids]
            main = next((stack for stack in found if stack.main and stack.main[-1].name == "<module>"), found[0])
            self.stacks[rank].append(replace(main, subprocesses=tuple(stack for stack in found if stack is not main)))


def kinds(told: dict[float, tuple[Verdict, ...]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Distinct (verdict, cause, culprits) in the order in which they were said."""
    return list(dict.fromkeys((v.verdict, v.cause, v.culprit_ranks) for verdicts in told.values() for v in verdicts))


def first(told: dict[float, tuple[Verdict, ...]], verdict: str) -> tuple[float, Verdict]:
    """When a verdict of this name was first said, and it."""
    return next((t, v) for t, verdicts in told.items() for v in verdicts if v.verdict == verdict)
