"""Real jobs that were recorded, cut small, played back to diagnose over fake time: what their monitor would have seen.

A recording (data/recorded/*.json) holds a job's recorder answers (its newest entries), py-spy samples, and, for NCCL, a look a second at
process state, CPU, heartbeat and status numbers. Times are seconds from the fault. A rank stands still after it, so one answer serves; where
it does not, `recorder` has several, each with the moment from which it holds. `compiling` has the regions of a compile (torch's own names, "" between
two), `witness` what torch's wait counters said, `log` the lines that torch printed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankwatch.model import CompileActivity, Group, JobSnapshot, NodeReport, Process, RankState, Stack, Verdict, Watchdog
from rankwatch.monitor.calls import CallLog, Kinds
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.pyspy import threads_of
from rankwatch.monitor.recorder import RecorderView
from rankwatch.monitor.watchdog_log import fold
from rankwatch.monitor.worker_server import GENERIC, NCCL
from rankwatch.wire.phases import phase_of

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
        return JobSnapshot(
            MONO + t, self.fault_wall_at + t, self.world, 0, (NodeReport("node0", ranks),), gap_s=poll, started_at=MONO - 60,
            environment=self.data.get("env", {}),
        )  # fmt: skip

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
            watchdog=self.watchdog(number, t), compiling=self.compiling(number, t), compile_witness=_at(self.data.get("witness", {}).get(str(number), ()), t),
            stack=stacks[-1] if stacks else None, earlier_stack=stacks[-2] if len(stacks) > 1 else None, **self.more,
        )  # fmt: skip

    def watchdog(self, number: int, t: float) -> Watchdog:
        """What the rank's log says by then; not redirected where nothing of it was kept, or `log` is taken out of the data."""
        found = Watchdog(readable="log" in self.data)
        for at, line in self.data.get("log", {}).get(str(number), ()):
            if at <= t:
                found = fold(found, line, MONO + at)
        return found

    def compiling(self, number: int, t: float) -> tuple[CompileActivity, ...]:
        """The compile that the rank is in at that moment, with the region since when."""
        found = self.data.get("compiling", {}).get(str(number))
        if found is None or not (raw := _at(found["regions"], t)):
            return ()
        since = max(at for at, _ in found["regions"] if at <= t)
        began = MONO + found["regions"][0][0]
        return (CompileActivity(found["id"], "forward", found["frame"], phase_of(raw), raw, began, MONO + since),)

    def answer(self, rank: int, t: float) -> dict[str, Any]:
        """What the rank's recorder answers at that moment."""
        known = self.data["recorder"][str(rank)]
        return known if isinstance(known, dict) else (_at(known, t) or known[0][1])

    def look(self, number: int, t: float) -> tuple[str, float, float, int, int]:
        """(state letter, CPU seconds, age of the heartbeat, last enqueued, last completed) at that moment."""
        if "looks" not in self.data:  # recorded once: the rank stands
            counts = self.answer(number, t)["pg_status"]["0"]
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
            document = self.answer(rank, t)
            self.views[rank].take({recorder: document}, (self.group(),), self.fault_wall_at + t)
            log = self.logs[rank]
            log.learn(recorder, log.scan(recorder, json.dumps(document).encode()), (self.group(),))
            self.read_at[rank] = MONO + t
        elif kind == "stacks" and (samples := self.data["stacks"][str(rank)]):
            sample = samples[min(len(self.stacks[rank]), len(samples) - 1)]
            pids = list(dict.fromkeys(thread["pid"] for thread in sample))
            found = [Stack(pid, MONO + t, threads_of([each for each in sample if each["pid"] == pid], pid)) for pid in pids]
            main = next((stack for stack in found if stack.main and stack.main[-1].name == "<module>"), found[0])
            self.stacks[rank].append(replace(main, subprocesses=tuple(stack for stack in found if stack is not main)))


def _at(rows: Sequence[Sequence[Any]], t: float) -> Any:
    """The value that holds at `t`, of rows (from when, value); None before the first."""
    return next((value for at, value in reversed(rows) if at <= t), None)


def kinds(told: dict[float, tuple[Verdict, ...]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Distinct (verdict, cause, culprits) in the order in which they were said."""
    return list(dict.fromkeys((v.verdict, v.cause, v.culprit_ranks) for verdicts in told.values() for v in verdicts))


def first(told: dict[float, tuple[Verdict, ...]], verdict: str) -> tuple[float, Verdict]:
    """When a verdict of this name was first said, and it."""
    return next((t, v) for t, verdicts in told.items() for v in verdicts if v.verdict == verdict)
