"""fully_shard on two gloo ranks: `fsdp2_job.py FAULT`."""

from __future__ import annotations

import datetime

import planned
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard


def evaluate(loader):
    for _ in loader:
        planned.evaluate_sample()


def main():
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=planned.TIMEOUT_S))
    mesh = dist.init_device_mesh("cpu", (2,))
    plain = planned.model()
    net = planned.model()
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step, batch in enumerate(torch.utils.data.DataLoader(planned.Numbers(), batch_size=2, num_workers=planned.workers())):
        planned.in_step(step)
        torch.nn.functional.mse_loss(net(batch["x"]), batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        planned.save_on_rank_0(plain, step)
        planned.download_on_rank_0(step)
        if step == planned.AFTER and planned.RANK == 0:
            evaluate(torch.utils.data.DataLoader(planned.Numbers(), batch_size=2))


main()
