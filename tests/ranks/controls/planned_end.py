"""Trains until the runner ends it. argv[1] says what the job makes of the signal:

plain    nothing: default dispositions
saves    a handler sets a flag; the step loop sees it, rank 0 saves for 4 s, everybody leaves with code 0
slowly   a handler saves for rank x 2 s on its own and ends the process with 128 + signal, so that ranks end one after the other
ignores  SIGTERM is ignored: the scheduler's SIGKILL ends it
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from control import RANK, begin, train, truth

WAY = sys.argv[1]
asked: list[int] = []


def on_signal(number: int, frame: object) -> None:
    asked.append(number)
    if WAY == "slowly":
        time.sleep(2.0 * RANK)
        os._exit(128 + number)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if WAY in ("saves", "slowly"):
            signal.signal(number, on_signal)
        elif WAY == "ignores":
            signal.signal(number, signal.SIG_IGN)
    begin(timeout_s=60)
    for _ in range(2000):
        train(1)
        flag = torch.tensor([float(bool(asked))])
        dist.all_reduce(flag)  # a signal does not reach all ranks within the same step
        if flag.item():
            if RANK == 0:
                time.sleep(4)
            dist.barrier()
            truth("saved")
            break
    dist.destroy_process_group()


main()
