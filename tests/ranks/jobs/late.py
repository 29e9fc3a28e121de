"""Ranks of unequal pace: `late.py KIND STEPS`. The later rank is 1, or another one each step. Knows nothing of rankwatch; says nothing."""

from __future__ import annotations

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
STEP_S = 0.25


def fixed(step: int) -> float:
    return 0.1 if RANK == 1 else 0.0


def rotating(step: int) -> float:
    return 0.1 if step % WORLD == RANK else 0.0


def saves(step: int) -> float:
    return 1.5 if RANK == 0 and step % 8 == 0 else 0.0


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    late = globals()[sys.argv[1]]
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(int(sys.argv[2])):
        time.sleep(STEP_S + late(step))
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


main()
