"""One small gloo job whose first attempt cannot go on: `unhealable.py KIND`. A restarted one trains to its end. Knows nothing of rankwatch."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
FIRST = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def train(steps: int) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(100))
        time.sleep(0.05)


def mismatch() -> None:
    if RANK == 1:
        dist.barrier()
    train(1)


def order_deadlock() -> None:
    first, second = dist.new_group(), dist.new_group()
    for group in (first, second) if RANK == 0 else (second, first):
        dist.all_reduce(torch.ones(10), group=group)


def exited() -> None:
    if RANK == 1:
        os._exit(0)
    train(1000)


def stopped() -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    train(1000)


def asleep() -> None:
    if RANK == 1:
        time.sleep(60)
    train(1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    train(6)
    if FIRST:
        globals()[sys.argv[1]]()
    train(6)
    dist.destroy_process_group()
    print(f"rank {RANK} is done", flush=True)


main()
