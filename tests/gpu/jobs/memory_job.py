"""One rank on one GPU that steps, then `caught`: an allocation that fails and is caught; `uncaught`: one that ends it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from parts import Job, Training

STEPS_S = 24.0
"""The agent reads every 10 s."""


def numbers() -> dict[str, int]:
    stats = torch.cuda.memory_stats()
    names = {"allocated": "allocated_bytes", "reserved": "reserved_bytes", "active": "active_bytes", "inactive_split": "inactive_split_bytes"}
    return {ours: stats[f"{theirs}.all.current"] for ours, theirs in names.items()} | {"ooms": stats["num_ooms"], "device": torch.cuda.current_device()}


def main() -> None:
    job = Job()
    job.join()
    job.note("process", pid=os.getpid(), threads=len(list(Path("/proc/self/task").iterdir())))
    training = Training(job)
    kept = torch.empty(3 << 28, dtype=torch.uint8, device=job.device)
    end = time.monotonic() + STEPS_S
    while time.monotonic() < end:
        training.step()
    job.sync()
    job.note("numbers", numbers=numbers(), threads=len(list(Path("/proc/self/task").iterdir())))
    while not (job.options.truth / "go_on").exists():
        training.step()
    if job.kind == "caught":
        try:
            torch.empty(10**12, dtype=torch.uint8, device=job.device)
        except torch.OutOfMemoryError:
            job.note("caught")
        end = time.monotonic() + 12
        while time.monotonic() < end:
            training.step()
        job.note("after", numbers=numbers())
    else:
        torch.empty(10**12, dtype=torch.uint8, device=job.device)
    del kept
    dist.destroy_process_group()


main()
