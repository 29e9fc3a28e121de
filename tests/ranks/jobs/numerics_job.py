"""A small DDP training with BatchNorm, whose buffers differ between the ranks: `numerics_job.py KIND STEP`.

healthy; perturbed: rank 1 changes one weight after step STEP; nan_loss: rank 1's loss is NaN from step STEP on, the script logs losses;
nan_input: the same, losses are not logged.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import rankwatch

kind, at = sys.argv[1], int(sys.argv[2])
steps = 50
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 1))
ddp = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(1, steps + 1):
    loss = ddp(torch.randn(8, 16)).square().mean()
    if rank == 1 and kind in ("nan_loss", "nan_input") and step >= at:
        loss = loss * float("nan")
    if kind == "nan_loss":
        rankwatch.log_loss(loss)
    loss.backward()
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1 and kind == "perturbed" and step == at:
        with torch.no_grad():
            model[3].weight[0, 0] += 0.5
    time.sleep(0.05)
print(f"rank {rank} ends", flush=True)
dist.destroy_process_group()
