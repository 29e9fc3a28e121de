"""What the healthy jobs of this folder share. Run by torchrun; they know nothing of rankwatch and say nothing.

truth(event) appends a JSON line to $REENACT_TRUTH_DIR/truth_rank<R>.jsonl where that is set: the runner waits for such lines before it acts.
"""

from __future__ import annotations

import datetime
import json
import os
import time

import torch
import torch.distributed as dist

RANK = int(os.environ.get("RANK", "0"))


def truth(event: str) -> None:
    if folder := os.environ.get("REENACT_TRUTH_DIR"):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, f"truth_rank{RANK}.jsonl"), "a") as file:
            file.write(json.dumps({"t": time.time(), "rank": RANK, "pid": os.getpid(), "event": event}) + "\n")


def begin(timeout_s: float) -> int:
    """Join, take five steps; the rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    train(5)
    truth("trains")
    return dist.get_rank()


def train(steps: int, step_s: float = 0.1) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(1000))
        time.sleep(step_s)


def finish() -> None:
    train(10)
    truth("done")
    dist.destroy_process_group()
