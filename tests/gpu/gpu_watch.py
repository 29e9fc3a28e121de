"""One job under rankwatch, and what of it appears on disk while it runs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from enacting import Processes
from gpu_output import ROOT, environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

POLL_S = 0.2
WATCHDOG = b"Watchdog caught collective operation timeout"
ABORTS = (b"taking the entire process down", b"To avoid data inconsistency", b"Abort START")


@dataclass(slots=True)
class State:
    """One state in which one incident file was seen. at: when it lay on disk, unix seconds; decided_at: when rankwatch decided so."""

    id: str
    at: float
    decided_at: float
    verdict: str
    cause: str
    culprits: list[int]
    summary: str
    confidence: str
    timeout_left_s: float | None = None

    def __str__(self) -> str:
        return f"{self.verdict}/{self.cause}{self.culprits}"


@dataclass(slots=True)
class Seen:
    """All that one run has left so far. Times are unix seconds of the first look that showed it."""

    states: list[State] = field(default_factory=list)
    stack_at: dict[int, list[float]] = field(default_factory=dict)  # rank -> its stack is on disk, one time for each incident that has it
    recorder_at: dict[int, list[float]] = field(default_factory=dict)
    compile_looks: list[tuple[float, str]] = field(default_factory=list)  # of rank 1, as its incident tells it
    watchdog_at: float | None = None
    abort_at: float | None = None
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)


class Running:
    """`rankwatch torchrun` (plain: torchrun alone) on a job of jobs/. Use as a context manager: nothing of it outlives the block."""

    def __init__(
        self, folder: Path, job: list[str], num_ranks: int, env: dict[str, str] | None = None, options: tuple[str, ...] = (), *, plain: bool = False
    ) -> None:
        self.folder, self.run_dir, self.log = folder, folder / "run", folder / "output.log"
        self.truth = folder / "truth"
        self.truth.mkdir(parents=True)
        self.seen = Seen()
        self._mtimes: dict[Path, int] = {}
        self._log_read = 0
        self._processes = Processes()
        launcher = [sys.executable, "-m", "rankwatch", "--run-dir", str(self.run_dir), *options, "torchrun"]
        if plain:
            launcher = [sys.executable, "-m", "torch.distributed.run"]
        command = [*launcher, "--standalone", "--nproc-per-node", str(num_ranks), *job, "--truth", str(self.truth)]
        self.began = time.time()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True,
                env=environment({**(env or {}), "ENACT_MARK": self._processes.mark}),
            )  # fmt: skip
        self._processes.launchers.append(self.process)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(4)
            except subprocess.TimeoutExpired:
                self._processes.send(signal.SIGKILL, "ranks")
        self._processes.end()

    @property
    def wall_s(self) -> float:
        return time.time() - self.began

    def state(self) -> dict[str, Any]:
        """/api/v1/state, {} while nothing answers there."""
        url = re.search(rb"status (http://[^\s;]+)", self.log.read_bytes())
        if url is None:
            return {}
        try:
            with urllib.request.urlopen(f"{url[1].decode()}/api/v1/state", timeout=5) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError):
            return {}

    def rank_pids(self) -> list[int]:
        return self._processes.ranks()

    def truths(self, event: str) -> list[dict[str, Any]]:
        """What the job itself has written of one event, oldest first."""
        found = []
        for path in sorted(self.truth.glob("rank*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    one = json.loads(line)
                except ValueError:
                    continue  # being written
                if one.get("event") == event:
                    found.append(one)
        return sorted(found, key=lambda one: float(one["t"]))

    def look(self) -> Seen:
        """Read what is new on disk."""
        now = time.time()
        for path in sorted(self.run_dir.glob("incidents/*/incident.json")):
            try:
                mtime = path.stat().st_mtime_ns
                if self._mtimes.get(path) == mtime:
                    continue
                doc = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            self._mtimes[path] = mtime
            self._take(path.parent.name, doc, now)
        for kind, found in (("stacks", self.seen.stack_at), ("fr", self.seen.recorder_at)):
            for path in self.run_dir.glob(f"incidents/*/{kind}/rank_*"):
                if path not in self._mtimes:
                    self._mtimes[path] = 0
                    found.setdefault(int(path.name.partition("_")[2].partition(".")[0]), []).append(now)
        self._read_log(now)
        return self.seen

    def _take(self, name: str, doc: dict[str, Any], now: float) -> None:
        self.seen.documents[name] = doc
        history = doc.get("history") or [{"at": doc["opened_at"]}]
        state = State(
            name, now, float(history[-1]["at"]), doc["verdict"], doc["cause"], sorted(doc["culprit_ranks"]), doc["summary"], doc["confidence"],
            doc.get("timeout_left_s"),
        )  # fmt: skip
        last = next((one for one in reversed(self.seen.states) if one.id == name), None)
        if last is None or str(last) != str(state):
            # a state that came and went between two looks is in the history
            known = sum(one.id == name for one in self.seen.states)
            for change in history[known:-1]:
                missed = State(
                    name, now, float(change["at"]), change["verdict"], change["cause"], sorted(change["culprit_ranks"]), doc["summary"], doc["confidence"]
                )
                if last is None or str(missed) != str(last):
                    self.seen.states.append(missed)
                    last = missed
            self.seen.states.append(state)
        for row in [doc.get("compile", {}).get("1")]:
            if row:
                text = " ".join(filter(None, (row["frame"], row["compile_id"], row["phase"], row.get("raw_phase", ""), row.get("detail", ""))))
                if not self.seen.compile_looks or text != self.seen.compile_looks[-1][1]:
                    self.seen.compile_looks.append((now, text))

    def _read_log(self, now: float) -> None:
        with self.log.open("rb") as log:
            log.seek(max(0, self._log_read - 100))
            new = log.read()
            self._log_read = log.tell()
        if self.seen.watchdog_at is None and WATCHDOG in new:
            self.seen.watchdog_at = now
        if self.seen.abort_at is None and any(words in new for words in ABORTS):
            self.seen.abort_at = now
