"""One training whose watching is switched off and on: `interleaved_job.py gpt --backend nccl --truth DIR --blocks N --steps N`, under rankwatch.

The one job here that knows of rankwatch. Off: the launcher is stopped (no poll), the step hook is taken out, the beats of the rank's thread do nothing.
Blocks go off, on, on, off, so that a drift of the clocks hits both alike; a block is timed as a whole, so that a step made slow by a poll counts.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch.distributed as dist
from parts import Job
from timed_job import LOG_EVERY, training
from torch.optim import optimizer as optimizers

from rankwatch.agent.heartbeat import Heartbeat

WARM_STEPS = 10
LAUNCHER_WAKES_S = 0.3


class Watching:
    """The switch. The launcher is rank 0's parent: torchrun runs in it."""

    def __init__(self) -> None:
        self._hooks: dict[int, Any] = dict(optimizers._global_optimizer_post_hooks)
        self._beat = Heartbeat._beat
        if not self._hooks:
            raise SystemExit("rankwatch's step hook is not there: is this job run under rankwatch?")

    def off(self) -> None:
        optimizers._global_optimizer_post_hooks.clear()
        Heartbeat._beat = lambda beat, beats: None  # type: ignore[method-assign]
        self._launcher(signal.SIGSTOP)

    def on(self) -> None:
        optimizers._global_optimizer_post_hooks.update(self._hooks)
        Heartbeat._beat = self._beat  # type: ignore[method-assign]
        self._launcher(signal.SIGCONT)
        time.sleep(LAUNCHER_WAKES_S)

    def _launcher(self, number: signal.Signals) -> None:
        if dist.get_rank() == 0:
            os.kill(os.getppid(), number)


def main() -> None:
    job = Job(blocks=int, steps=int)
    job.join()
    step = training(job)
    for _ in range(4 * LOG_EVERY):
        step()
    job.sync()
    job.note("ready", hooks=len(optimizers._global_optimizer_post_hooks), recorder=os.environ.get("TORCH_FR_BUFFER_SIZE", ""))
    watching = Watching()
    try:
        for number in range(job.options.blocks):
            on = number % 4 in (1, 2)
            (watching.on if on else watching.off)()
            dist.barrier()
            for _ in range(WARM_STEPS):
                step()
            job.sync()
            began = time.perf_counter()
            for _ in range(job.options.steps):
                step()
            job.sync()
            took = time.perf_counter() - began
            job.note("block", number=number, on=on, s_per_step=took / job.options.steps, cpu_s=time.process_time())
    finally:
        watching.on()
    job.note("over")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
