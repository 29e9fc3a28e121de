"""The Trainer of transformers on two gloo ranks: `trainer_job.py FAULT`."""

from __future__ import annotations

import tempfile

import planned
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = planned.model()
        self.calls = 0

    def forward(self, x, labels):
        if self.training:
            planned.in_step(self.calls)
            self.calls += 1
        else:
            planned.evaluate_sample()
        out = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


class Saves(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        planned.save_on_rank_0(kwargs["model"], state.global_step)
        planned.download_on_rank_0(state.global_step)


args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=True,
    ddp_backend="gloo",
    ddp_timeout=planned.TIMEOUT_S,
    per_device_train_batch_size=2,
    max_steps=24,
    eval_strategy="steps",
    eval_steps=planned.AFTER,
    save_strategy="no",
    report_to=[],
    dataloader_num_workers=planned.workers(),
    disable_tqdm=True,
    seed=0,
)
Trainer(Model(), args, train_dataset=planned.Numbers(), eval_dataset=planned.Numbers(), callbacks=[Saves()]).train()
