"""DDP over gloo, compiled with static shapes; one batch of rank 1 has another size, so that it recompiles while rank 0 waits for it.

Usage: compile_alone.py BACKEND CACHE; each rank has an Inductor cache of its own at CACHE_<rank>.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

backend, cache, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}_{rank}"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


dist.init_process_group("gloo")
model = DistributedDataParallel(Model())
step = torch.compile(model, backend=backend, dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(20):
    batch = torch.randn(5 if rank == 1 and number == 10 else 4, 64)
    optimizer.zero_grad()
    step(batch).sum().backward()
    optimizer.step()
    time.sleep(0.02)
dist.destroy_process_group()
