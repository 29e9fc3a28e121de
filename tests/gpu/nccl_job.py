"""One NCCL job on two GPUs with one planned trouble: `nccl_job.py KIND` (`never_joins` needs one). Knows nothing of rankwatch."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import time
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
WIDTHS = (1024, 1280, 1536, 1792, 2048, 1280, 1024)  # each product needs kernels of its own
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def main(kind: str) -> None:
    torch.cuda.set_device(DEVICE)
    if kind == "never_joins":  # without device_id the communicator is made by the first collective, after init_process_group has returned
        if RANK == 1:
            load_batch()
        dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120))
        dist.all_reduce(torch.ones(8, device=DEVICE))
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=120), device_id=DEVICE)
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in pairwise(WIDTHS)]).to(DEVICE), bucket_cap_mb=8)
    if kind == "compile_alone":
        model = torch.compile(model, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(400 if kind == "healthy" else 60):
        rows = 64
        if step == 30 and RANK == 1:
            if kind == "asleep":
                load_batch()
            if kind == "gil_held":
                parse_native()
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "compile_alone":
                rows = 96  # a new shape on this rank alone, and a long search for its kernels
                torch._inductor.config.max_autotune = torch._inductor.config.max_autotune_gemm = True
                torch._inductor.config.max_autotune_gemm_backends = "TRITON"
                torch._inductor.config.coordinate_descent_tuning = True
        if step == 30 and RANK == 1 and kind == "mismatch":
            dist.all_reduce(torch.ones(7, device=DEVICE))
        optimizer.zero_grad()
        model(torch.ones(rows, 1024, device=DEVICE)).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        time.sleep(0.02)
    dist.destroy_process_group()


def load_batch() -> None:
    time.sleep(1000)


def parse_native() -> None:
    ctypes.PyDLL(None).sleep(1000)


main(sys.argv[1])
