"""The training job of `rankwatch demo`: 4 ranks, DDP, torch.compile, gloo. Run by torchrun; it knows nothing of rankwatch.

Twenty ordinary steps; then rank 1 gets a batch that makes it recompile alone while the others wait; ten more steps; then rank 2
enters load_batch and never comes back. Nothing is faked: the recompile is a long trace through Dynamo and AOTAutograd.
"""

from __future__ import annotations

import datetime
import threading

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

GROUP_TIMEOUT = datetime.timedelta(minutes=5)
LONE_RECOMPILE_STEP, LONE_RECOMPILE_RANK, LONG_ROUNDS = 20, 1, 500
MISSING_STEP, MISSING_RANK = 30, 2


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(384, 384) for _ in range(4))

    def forward(self, x: torch.Tensor, rounds: int) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        for _ in range(rounds):
            x = torch.tanh(x * 1.01 + 0.01)
        return x


def load_batch(rank: int, step: int) -> torch.Tensor:
    if step == MISSING_STEP and rank == MISSING_RANK:
        threading.Event().wait()  # a file system, a queue, a lock that never answers
    return torch.full((8, 384), 0.01 * (step + 1))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    rank = dist.get_rank()
    model = torch.compile(DistributedDataParallel(Block(), bucket_cap_mb=1), backend="aot_eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(200):
        x = load_batch(rank, step)
        rounds = LONG_ROUNDS if (step, rank) == (LONE_RECOMPILE_STEP, LONE_RECOMPILE_RANK) else 2
        optimizer.zero_grad()
        model(x, rounds).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
