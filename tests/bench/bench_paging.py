"""How long from a rank that stops to the message that a person gets: by rules at two scrape intervals, and by the launcher itself. Prints one table.

  python tests/bench/bench_paging.py                   five runs each, about 8 minutes
  python tests/bench/bench_paging.py --runs 20 --wait 0s

A real job on gloo (tests/ranks/jobs/trouble.py), a real Prometheus and Alertmanager, and a webhook that notes when it was called. onset: the start of the
wait, as the incident has it. verdict: when it became `stuck`. --wait: Alertmanager's group_wait; that of dashboards/alertmanager.yml is 5 s, and a part of
each number. --fault: another job of trouble.py.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from jobs import Job, wait_for
from paging import Webhook, alertmanager, prometheus
from prometheus_server import free_port

PATHS = {"rules, 5 s": 5, "rules, 15 s": 15, "launcher": 0, "both, 15 s": 15}


def one(folder: Path, webhook: Webhook, target: str, manager: str, fault: str) -> tuple[float, float]:
    """(onset to verdict, verdict to message) of one job, in seconds."""
    folder.mkdir()
    options = ("--listen", target, *(("--alertmanager", manager) if manager else ()))
    before = len(webhook.sent)
    with Job(folder, "trouble.py", fault, "--timeout", "300", nproc=2, options=options, torchrun=("--master-port", str(free_port()))) as job:
        wait_for(lambda: len(webhook.sent) > before, 180, "a message")
        at = webhook.at[before]
        incident = job.incident(10, verdict="stuck")
        for pid in job.rank_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    stuck_at = next(change["at"] for change in incident["history"] if change["verdict"] == "stuck")
    return stuck_at - incident["since"], at - stuck_at


def measure(path: str, runs: int, fault: str, wait: str) -> str:
    """A row of the table."""
    every_s, direct = PATHS[path], path in ("launcher", "both, 15 s")
    rules = subprocess.run([sys.executable, "-m", "rankwatch", "rules", "export"], capture_output=True, text=True, check=True).stdout
    target = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        webhook = stack.enter_context(Webhook())
        manager = stack.enter_context(alertmanager(folder, webhook.address, wait))
        if every_s:
            stack.enter_context(prometheus(folder, target, rules, manager, every_s))
        found = []
        for run in range(runs):
            time.sleep(random.uniform(0, every_s))  # another phase of the scrapes
            found.append(one(folder / str(run), webhook, target, manager if direct else "", fault))
        seen, told = [each[0] for each in found], [each[1] for each in found]
        both = [sum(each) for each in found]
    cells = (f"{statistics.median(seen):.1f}", *(f"{statistics.median(each):.1f} / {max(each):.1f}" for each in (told, both)))
    return f"| {path} | {runs} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--fault", default="stopped")
    parser.add_argument("--wait", default="5s")
    parser.add_argument("--path", choices=PATHS, action="append", help="only this one; may be repeated")
    arguments = parser.parse_args()
    print(f"seconds, group_wait {arguments.wait}, fault {arguments.fault}")
    print("| path, scrape and evaluation | runs | onset to verdict, median | verdict to message, median / max | onset to message, median / max |")
    print("|---|---|---|---|---|", flush=True)
    for path in arguments.path or PATHS:
        print(measure(path, arguments.runs, arguments.fault, arguments.wait), flush=True)


if __name__ == "__main__":
    main()
