"""Real jobs that are stopped as a whole, by the scheduler or with their machine: nobody is paged, then or afterwards."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from jobs import Job, wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow_ranks]
PAUSE_S = 15.0

SCRIPT = """import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
print("rank", dist.get_rank(), "trains", flush=True)
end = time.monotonic() + float(os.environ["TRAIN_S"])
going = torch.ones(1)
while going.item():
    going.fill_(time.monotonic() < end)
    dist.all_reduce(going, op=dist.ReduceOp.MIN)
    time.sleep(0.05)
dist.destroy_process_group()
"""


def stop_for(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "plain.py"
    path.write_text(SCRIPT)
    return str(path)


def changes(job: Job) -> list[tuple[str, str, str]]:
    return [(change["verdict"], change["cause"], doc["domain"]) for doc in job.incidents() for change in doc["history"]]


def test_a_launcher_that_was_stopped_with_its_ranks_pages_nobody(tmp_path: Path, script: str) -> None:
    with Job(tmp_path, script, nproc=3, env={"TRAIN_S": str(PAUSE_S + 15)}) as job:
        job.training()
        stop_for([job.process.pid, *job.rank_pids()], PAUSE_S)
        assert job.end(120) == 0, job.text
        assert changes(job) == [], job.text


def test_ranks_that_are_stopped_without_their_launcher_are_a_suspended_job(tmp_path: Path, script: str) -> None:
    with Job(tmp_path, script, nproc=3, env={"TRAIN_S": str(PAUSE_S + 15)}) as job:
        job.training()
        stop_for(job.rank_pids(), PAUSE_S)
        wait_for(lambda: any(" RECOVERED " in line for line in job.lines()), 60, "the end of the suspension is said")
        assert job.end(120) == 0, job.text
        assert changes(job) == [("slow", "stopped", "scheduler"), ("recovered", "stopped", "scheduler")], job.text
        assert any(" SLOW rank=0-2 " in line and " cause=stopped domain=scheduler " in line for line in job.lines()), job.text
        assert json.loads((job.run_dir / "run.json").read_text())["verdicts"] == {"slow": 1}
