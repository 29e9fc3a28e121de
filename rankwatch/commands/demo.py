"""`rankwatch demo`: a real 4-rank DDP + torch.compile job on gloo with two planned troubles, and what rankwatch says of them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankwatch.config import Options

STUCK_AFTER_S = 12.0  # the default, 20 % of the group's 5 minutes, would make it a long demo
DEADLINE_S = 240.0  # on a slow machine the first compile alone may take a minute
JOB = Path(__file__).with_name("demo_job.py")

INTRODUCTION = """\
rankwatch demo: four ranks, DDP and torch.compile on gloo, about a minute.
  1. after 20 steps rank 1 recompiles alone    -> expect SLOW, cause=compiling: named, but nobody is paged
  2. ten steps later rank 2 never comes back   -> expect STUCK, cause=not_entered: this one pages
The job knows nothing of rankwatch; it is started as `rankwatch --stuck-after {stuck:g} torchrun --nproc-per-node 4 demo_job.py`.
What the ranks themselves print goes to {log}.
"""


def main(argv: list[str], options: Options) -> int:
    """`rankwatch [--run-dir DIR] demo`. 0: both troubles were named rightly, 2: wrong usage, 3: one was not."""
    parser = argparse.ArgumentParser(prog="rankwatch demo", description=__doc__, epilog="Exit codes: 0 both troubles named, 2 wrong usage, 3 one was not.")
    parser.parse_args(argv)
    return run(Path(options.run_dir or f"rankwatch-runs/demo-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"))


def run(run_dir: Path) -> int:
    """Run the job, narrate it, end it once both troubles were named. 0: both named rightly; 3: not."""
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "demo.log"
    print(INTRODUCTION.format(stuck=STUCK_AFTER_S, log=log), flush=True)
    command = [sys.executable, "-m", "rankwatch", "--run-dir", str(run_dir), "--stuck-after", f"{STUCK_AFTER_S:g}"]
    command += ["torchrun", "--nproc-per-node", "4", str(JOB)]
    job = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    telling = threading.Thread(target=_tell, args=(job, log), daemon=True)
    telling.start()
    try:
        stuck = _wait_for_stuck(job, run_dir)
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)  # a planned end, as Ctrl-C is
        try:
            job.wait(40)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
        telling.join(5)
    found = list(_incidents(run_dir))
    compiling = next((doc for doc in found if doc["cause"] == "compiling" and doc["culprit_ranks"] == [1]), None)
    print("\nWhat rankwatch found:")
    for doc in found:
        print(f"  {doc['verdict']:>9}  {doc['summary']}")
    if not (stuck and compiling):
        missed = " and ".join(name for name, doc in (("the lone recompile", compiling), ("the missing rank", stuck)) if not doc)
        print(f"\ndemo: {missed} was not named within {DEADLINE_S:.0f} s. Run `rankwatch doctor` to see what is off on this machine; the run is in {run_dir}.")
        return 3
    folder = run_dir / "incidents" / stuck["id"]
    print(
        f"\nWhere to look:\n"
        f"  {folder / 'index.html'}   the page for whoever is on call\n"
        f"  {folder / 'report.txt'}   the same as text\n"
        f"  {folder / 'stacks'}   py-spy stacks of the ranks that matter\n"
        f"  {run_dir / 'events.jsonl'}   everything that was seen\n"
        f"  rankwatch report {run_dir}\n"
    )
    return 0


def _tell(job: subprocess.Popen[bytes], log: Path) -> None:
    """Show rankwatch's own lines, keep everything in the log."""
    assert job.stdout is not None
    with job.stdout, log.open("wb") as file:
        for line in job.stdout:
            file.write(line)
            file.flush()
            if line.startswith(b"[rankwatch]"):
                print(line.decode("utf-8", "replace"), end="", flush=True)


def _wait_for_stuck(job: subprocess.Popen[bytes], run_dir: Path) -> dict[str, Any] | None:
    """The incident of the missing rank, with its stacks; None when the job ended or time ran out before."""
    end = time.monotonic() + DEADLINE_S
    while job.poll() is None and time.monotonic() < end:
        for doc in _incidents(run_dir):
            if doc["verdict"] == "stuck" and doc["culprit_ranks"] == [2] and any(doc["stacks"].values()):
                return doc
        time.sleep(0.2)
    return None


def _incidents(run_dir: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(run_dir.glob("incidents/*/incident.json")):
        try:
            yield json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # pruned this moment; files are replaced whole
