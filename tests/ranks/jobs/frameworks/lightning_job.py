"""A Lightning trainer on two gloo ranks: `lightning_job.py FAULT`."""

from __future__ import annotations

import datetime
import tempfile

import lightning
import planned
import torch
from lightning.pytorch.strategies import DDPStrategy


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = planned.model()

    def training_step(self, batch, index):
        planned.in_step(self.global_step)
        return torch.nn.functional.mse_loss(self.net(batch["x"]), batch["labels"])

    def validation_step(self, batch, index):
        planned.evaluate_sample()
        self.log("val_loss", torch.nn.functional.mse_loss(self.net(batch["x"]), batch["labels"]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Saves(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        planned.save_on_rank_0(module, trainer.global_step)
        planned.download_on_rank_0(trainer.global_step)


def loader():
    return torch.utils.data.DataLoader(planned.Numbers(), batch_size=2, num_workers=planned.workers())


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend="gloo", timeout=datetime.timedelta(seconds=planned.TIMEOUT_S)),
    max_epochs=1,
    val_check_interval=planned.AFTER,
    num_sanity_val_steps=0,
    callbacks=[Saves()],
    logger=False,
    enable_progress_bar=False,
    default_root_dir=tempfile.mkdtemp(),
)
trainer.fit(Model(), loader(), loader())
