"""A DeepSpeed engine on two gloo ranks: `deepspeed_job.py FAULT`."""

from __future__ import annotations

import datetime
import sys

import deepspeed
import planned
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # on CPU a C++ build of minutes, for a faster way within one node


def evaluate(engine, loader):
    for batch in loader:
        planned.evaluate_sample()
        engine.module(batch["x"])


def main():
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=planned.TIMEOUT_S))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
    }
    net = planned.model()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    loader = engine.deepspeed_io(planned.Numbers(), num_local_io_workers=planned.workers())
    for step, batch in enumerate(loader):
        planned.in_step(step)
        engine.backward(torch.nn.functional.mse_loss(engine(batch["x"]), batch["labels"]))
        engine.step()
        planned.save_on_rank_0(net, step)
        planned.download_on_rank_0(step)
        if step == planned.AFTER and planned.RANK == 0:
            evaluate(engine, torch.utils.data.DataLoader(planned.Numbers(), batch_size=2))


main()
