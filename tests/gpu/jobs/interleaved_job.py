"""One training whose watching is off and on at many times its rate, block by block: `interleaved_job.py gpt --truth DIR --blocks N --steps N --times N`.

Run under rankwatch, and the one job here that knows of it. Off: the launcher is stopped (it stays so), the step hook is taken out, the beats of the rank's
thread do nothing. On: the hook runs TIMES times a step, the beats come TIMES as often, and another process asks what the launcher asks, TIMES as often.
Blocks go off, on, on, off, so that a drift of the clocks hits both alike, with the same pause before each; a block is timed as a whole.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from parts import RANK, Job
from timed_job import LOG_EVERY, training
from torch.optim import optimizer as optimizers

from rankwatch.agent import heartbeat
from rankwatch.agent.heartbeat import Heartbeat
from rankwatch.wire import env

WARM_STEPS = 5
PAUSE_S = 0.1


class Watching:
    """The switch of one rank. Rank 0's parent is the launcher: torchrun runs in it."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._hooks: list[Any] = list(optimizers._global_optimizer_post_hooks.values())
        if not self._hooks:
            raise SystemExit("rankwatch's step hook is not there: is this job run under rankwatch?")
        self._beat = Heartbeat._beat
        path = os.path.join(os.environ[env.SLOT_DIR], env.socket_name(RANK))
        words = [sys.executable, str(Path(__file__).with_name("poker.py")), str(os.getpid()), path, str(times)]
        self._poker = subprocess.Popen(words, env={name: text for name, text in os.environ.items() if not name.startswith("RANKWATCH")})
        optimizers._global_optimizer_post_hooks.clear()
        optimizers._global_optimizer_post_hooks[-1] = self._stepped
        self._on = False
        if RANK == 0:
            os.kill(os.getppid(), signal.SIGSTOP)

    def switch(self, on: bool) -> None:
        self._on = on
        Heartbeat._beat = self._beat if on else lambda beat, beats: None  # type: ignore[method-assign]
        heartbeat.BEAT_S = 0.5 / self._times if on else 0.5
        self._poker.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def over(self) -> None:
        self._poker.kill()
        if RANK == 0:
            os.kill(os.getppid(), signal.SIGCONT)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for _ in range(self._times if self._on else 0):
            for hook in self._hooks:
                hook(optimizer, args, kwargs)


def main() -> None:
    job = Job(blocks=int, steps=int, times=int)
    job.join()
    step = training(job)
    for _ in range(4 * LOG_EVERY):
        step()
    job.sync()
    job.note("ready")
    watching = Watching(job.options.times)
    try:
        for number in range(job.options.blocks):
            on = number % 4 in (1, 2)
            watching.switch(on)
            time.sleep(PAUSE_S + (0.5 if number == 0 else 0.0))
            dist.barrier()
            for _ in range(WARM_STEPS):
                step()
            job.sync()
            began, cpu = time.perf_counter(), time.process_time()
            for _ in range(job.options.steps):
                step()
            job.sync()
            took = time.perf_counter() - began
            job.note("block", number=number, on=on, s_per_step=took / job.options.steps, cpu_s_per_step=(time.process_time() - cpu) / job.options.steps)
    finally:
        watching.over()
    job.note("over")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
