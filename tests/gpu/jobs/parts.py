"""What the jobs here share: arguments, the group, what they note for the script that judges them. They know nothing of rankwatch."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANK, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
WIDTHS = (1024, 1280, 1536, 1792, 2048, 1280, 1024)  # each product needs kernels of its own
PAUSE_S = 0.02


class Job:
    """The arguments of a job, its device and its notes: `truth/rankN.jsonl`, an object a line with `event` and `t` (unix seconds)."""

    def __init__(self, **more: type) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("kind")
        parser.add_argument("--backend", default="nccl")
        parser.add_argument("--timeout-s", type=float, default=120.0)
        parser.add_argument("--truth", type=Path, required=True)
        for name, kind in more.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
        self.options = parser.parse_args()
        self.kind: str = self.options.kind
        self.cuda = self.options.backend == "nccl"
        self.device = torch.device("cuda", LOCAL_RANK % max(1, torch.cuda.device_count())) if self.cuda else torch.device("cpu")
        self.scale = 1 if self.cuda else 8  # a CPU gets layers of an eighth
        self.timeout = datetime.timedelta(seconds=self.options.timeout_s)
        self._notes = (self.options.truth / f"rank{RANK}.jsonl").open("a", buffering=1)
        if self.cuda:
            torch.cuda.set_device(self.device)
            if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
                # NCCL refuses two ranks of one host on one GPU; as ranks of different hosts they meet over sockets
                os.environ.update(NCCL_HOSTID=f"host{RANK}", NCCL_IB_DISABLE="1")
        else:
            torch.set_num_threads(1)

    def note(self, event: str, **more: object) -> None:
        self._notes.write(json.dumps({"event": event, "t": time.time(), "rank": RANK, **more}) + "\n")

    def join(self, **more: object) -> None:
        dist.init_process_group(self.options.backend, timeout=self.timeout, **({"device_id": self.device} if self.cuda else {}), **more)
        self.note("joined")

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


class Net(nn.Module):
    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Training:
    """DDP over a few linear layers."""

    def __init__(self, job: Job, widths: tuple[int, ...] = WIDTHS, *, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self.job = job
        self.inputs = widths[0] // job.scale
        self.model = DistributedDataParallel(Net(tuple(width // job.scale for width in widths)).to(job.device), bucket_cap_mb=25)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.run = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.longest_s = 0.0

    def step(self, rows: int = 64) -> None:
        began = time.monotonic()
        self.optimizer.zero_grad()
        loss = self.run(torch.ones(rows, self.inputs, device=self.job.device)).square().mean()
        loss.backward()
        self.optimizer.step()
        loss.item()
        time.sleep(PAUSE_S)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
