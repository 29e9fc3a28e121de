"""Compiled DDP on gloo that compiles anew at each of its first steps; then rank 1 never comes to the next one. It does not end by itself."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPILES = 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.round = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()) * (self.round + 1)  # each value of round is a guard that fails


def load_batch_that_never_comes() -> None:
    time.sleep(100_000)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 2 * COMPILES
    dist.init_process_group("gloo")
    model = DistributedDataParallel(Model())
    step = torch.compile(model, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(COMPILES + 1):
        if number == COMPILES and dist.get_rank() == 1:
            load_batch_that_never_comes()
        model.module.round = number % COMPILES
        optimizer.zero_grad()
        step(torch.randn(4, 32)).sum().backward()
        optimizer.step()


main()
