"""A training loop with Accelerate on two gloo ranks: `accelerate_job.py FAULT`."""

from __future__ import annotations

import datetime

import planned
import torch
from accelerate import Accelerator, InitProcessGroupKwargs


def evaluate(model, loader):
    with torch.no_grad():
        for batch in loader:
            planned.evaluate_sample()
            model(batch["x"])


def main():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=datetime.timedelta(seconds=planned.TIMEOUT_S))])
    net = planned.model()
    loader = torch.utils.data.DataLoader(planned.Numbers(), batch_size=2, num_workers=planned.workers())
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), loader)
    for step, batch in enumerate(loader):
        planned.in_step(step)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["labels"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        planned.save_on_rank_0(accelerator.unwrap_model(model), step)
        with accelerator.main_process_first():
            planned.download_on_rank_0(step)
        if step == planned.AFTER and accelerator.is_main_process:
            evaluate(net, torch.utils.data.DataLoader(planned.Numbers(), batch_size=2))
        accelerator.wait_for_everyone()


main()
