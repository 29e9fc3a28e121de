"""A gloo job whose collectives torch checks (TORCH_DISTRIBUTED_DEBUG=DETAIL): `checked.py asleep | other_call | healthy`. Knows nothing of rankwatch.

The level is set in the script, as people do it: no launcher sees it in the environment.
"""

from __future__ import annotations

import datetime
import os
import sys
import time

os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
LAST = int(os.environ["WORLD_SIZE"]) - 1


def train(steps: int) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(100))
        time.sleep(0.05)


def load_batch_that_never_comes() -> None:
    while True:
        time.sleep(3600)


def main(kind: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=14))
    old = dist.new_group()
    dist.all_reduce(torch.ones(3), group=old)
    dist.destroy_process_group(old)
    side = dist.new_group()
    train(10)
    dist.all_reduce(torch.ones(3), group=side)
    print(f"rank {RANK} trains", flush=True)
    if kind == "asleep" and RANK == 1:
        load_batch_that_never_comes()
    if kind == "other_call" and RANK == LAST:
        dist.barrier()
    train(20)
    dist.destroy_process_group()


main(sys.argv[1])
