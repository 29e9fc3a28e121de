"""One run of the job at one rung: `rankwatch torchrun ...` with a plan in its environment, its own run directory, and a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwatch.commands.ablation import records
from rankwatch.commands.ablation.judge import Run
from rankwatch.commands.faults.launch import incidents
from rankwatch.wire import env

PLAN, LOG, RUN_DIR, RECORDS = "plan.json", "output.log", "run", "ranks"
_POLL_S = 0.5
_LINGER_S = 120.0  # from the last rank's last step; ranks wait for each other up to 60 s of it
_END_S = 40.0  # torchrun gives its workers 30 s after SIGTERM


@dataclass(frozen=True, slots=True)
class Job:
    """The user's command and how it is run. torchrun: the words after the word torchrun. options: rankwatch's own, for the launcher."""

    torchrun: tuple[str, ...]
    options: tuple[str, ...]
    steps: int
    seed: int | None
    timeout_s: float


def run(job: Job, rung: str, folder: Path, *, eager: Sequence[str] = (), skip: Sequence[str] = ()) -> Run:
    """Start it, wait for its end or the time limit, read what the ranks recorded. A KeyboardInterrupt ends the job before it passes."""
    (folder / RECORDS).mkdir(parents=True)
    plan: dict[str, Any] = {
        "rung": rung, "steps": job.steps, "seed": job.seed, "eager": list(eager), "skip": list(skip), "records": str(folder / RECORDS),
    }  # fmt: skip
    (folder / PLAN).write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "rankwatch", *job.options, "--run-dir", str(folder / RUN_DIR), "--listen", "off", "torchrun", *job.torchrun]
    environ = {**os.environ, env.ABLATE_PLAN: str(folder / PLAN)}
    if job.seed is not None:
        environ.setdefault("PYTHONHASHSEED", str(job.seed % 2**32))
    began = time.monotonic()
    timed_out = lingers = False
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None and not timed_out and not lingers:
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    timed_out = time.monotonic() - began > job.timeout_s
                    lingers = _lingers(folder / RECORDS)
        finally:
            wall_s = time.monotonic() - began
            _end(process)
    found = sorted(incidents(folder / RUN_DIR), key=lambda doc: doc.get("opened_at") or 0.0)
    exit_code = 0 if lingers else process.returncode
    return Run(rung, str(folder), exit_code, wall_s, timed_out and not lingers, records.read(folder / RECORDS), found, lingers)


def _lingers(folder: Path) -> bool:
    """Whether every rank has long been done with its steps, and the job does not end: what it does after the loop is none of our business."""
    ranks = list(folder.glob("rank_*.jsonl"))
    try:
        done = [path.with_name(path.name + ".done").stat().st_mtime for path in ranks]
    except FileNotFoundError:
        return False
    return bool(done) and time.time() - max(done) > _LINGER_S


def _end(process: subprocess.Popen[bytes]) -> None:
    """As an operator would, then by force: the launcher's session holds all that it started."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet: the group is ours
        process.wait()
