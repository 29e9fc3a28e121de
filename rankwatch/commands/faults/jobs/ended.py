"""Faults of a process: it ends, is stopped, or cannot run. Run by torchrun: ended.py NAME PLANTED TIMEOUT_S."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
NAME, PLANTED, TIMEOUT_S = sys.argv[1], sys.argv[2], float(sys.argv[3])
FOR_EVER_S = 300


def train(steps: int) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.1)


def planted() -> None:
    """Tells the demo that the fault begins now."""
    with open(PLANTED, "w") as file:
        file.write(str(time.time()))


def exited() -> None:
    """Its part of the data was shorter."""
    sys.exit(0)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def oom_killed() -> None:
    """The demo has put the job into a memory cgroup with little room."""
    load_everything_into_memory()


def load_everything_into_memory() -> None:
    kept = []
    while True:
        kept.append(torch.ones(16 << 20))  # 64 MB, written to


def crashed() -> None:
    read_sample(17)


def read_sample(index: int) -> None:
    raise ValueError(f"sample {index} has no label")


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def gil_held() -> None:
    parse_in_native_code()


def parse_in_native_code() -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER_S)  # PyDLL: the call keeps the GIL


def uninterruptible() -> None:
    start_a_helper_on_a_dead_file_system()


def start_a_helper_on_a_dead_file_system() -> None:
    """posix_spawn waits in state D until its child has executed; the child opens a FIFO that nobody writes. The demo opens it in the end."""
    os.mkfifo(PLANTED + ".fifo")
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 0, PLANTED + ".fifo", os.O_RDONLY, 0)])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    train(10)
    if RANK == 1:
        planted()
        globals()[NAME]()
    train(50)
    dist.destroy_process_group()


main()
