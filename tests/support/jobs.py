"""Runs `rankwatch torchrun` on a job of tests/ranks/jobs and looks at what a person would see. Every wait has a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOBS = Path(__file__).parents[1] / "ranks" / "jobs"


def wait_for(what: Callable[[], Any], deadline_s: float, why: str) -> Any:
    """The first true answer of `what()`; AssertionError with `why` after deadline_s."""
    end = time.monotonic() + deadline_s
    while True:
        if answer := what():
            return answer
        assert time.monotonic() < end, f"not within {deadline_s} s: {why}"
        time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    """Direct children, as the kernel lists them."""
    out: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            out += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return out


class Job:
    """A running `rankwatch torchrun`. Use as a context manager: nothing of it outlives the block."""

    def __init__(
        self, tmp_path: Path, *job: str, nproc: int = 3, options: tuple[str, ...] = (), env: dict[str, str] | None = None, torchrun: tuple[str, ...] = ()
    ) -> None:
        self.nproc = nproc
        self.run_dir = tmp_path / "run"
        self.output = tmp_path / "output.log"
        if job[0].endswith(".py"):
            job = (str(JOBS / job[0]), *job[1:])
        command = [sys.executable, "-m", "rankwatch", "--run-dir", str(self.run_dir), *options]
        command += ["torchrun", "--nproc-per-node", str(nproc), *torchrun, *job]
        self.started = time.time()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **(env or {})},
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        ranks = [pid for child in children_of(self.process.pid) for pid in (child, *children_of(child))]
        for pid in (self.process.pid, *ranks):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith("[rankwatch]")]

    def rank_pids(self) -> list[int]:
        return children_of(self.process.pid)

    def training(self, deadline_s: float = 60) -> None:
        """Returns once every rank has said that it trains."""

        def all_train() -> bool:
            return self.text.count(" trains") >= self.nproc or self.process.poll() is not None

        wait_for(all_train, deadline_s, "all ranks train")

    def incidents(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.run_dir.glob("incidents/*/incident.json"))]

    def incident(self, deadline_s: float, **want: Any) -> dict[str, Any]:
        """The first incident that has all of `want`, e.g. verdict="stuck", cause="exited"."""

        def found() -> dict[str, Any] | None:
            return next((doc for doc in self.incidents() if all(doc.get(key) == value for key, value in want.items())), None)

        try:
            return wait_for(found, deadline_s, f"incident with {want}")  # type: ignore[no-any-return]
        except AssertionError as error:
            seen = [(doc["verdict"], doc["cause"], doc["culprit_ranks"], doc["summary"]) for doc in self.incidents()]
            raise AssertionError(f"{error}; seen {seen}\n{self.text[-3000:]}") from None

    def end(self, deadline_s: float = 60) -> int:
        """Exit code, once the launcher has ended by itself."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s} s\n{self.text[-3000:]}") from None
