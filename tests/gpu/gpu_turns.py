"""Jobs that live side by side and work in turns, so that what is compared runs within seconds of each other on the same GPUs.

One job has the GPUs; the others sleep with nothing on the device. The launcher of a watched job that is not at work is stopped (SIGSTOP): what it costs
then belongs to nobody's turn.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from gpu_output import JOBS, Deadline, backend, say
from gpu_watch import Running

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import Any

PAUSE_S = 0.5  # before each turn; a launcher that goes on has looked once by then
TURN_LIMIT_S = 120.0
START_LIMIT_S = 240.0  # four times as long in a dry run


class OutOfTime(Exception):
    """The script's time is up, or a job did not do its turn."""


@dataclass(slots=True)
class Contender:
    """One job. turns: what it told of each, `s_per_step` first of all."""

    mode: str
    number: int
    running: Running
    watched: bool
    turns: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0

    def ready(self) -> bool:
        if self.running.process.poll() is not None:
            raise OutOfTime(f"{self.mode} {self.number} ended: {self.running.log.read_text(errors='replace')[-1500:]}")
        return len(self.running.truths("ready")) > 0

    def rest(self) -> None:
        if self.watched:
            self.running.process.send_signal(signal.SIGSTOP)

    def turn(self, steps: int) -> float:
        """Seconds a step takes in this turn."""
        if self.watched:
            self.running.process.send_signal(signal.SIGCONT)
        time.sleep(PAUSE_S)
        polls = self._polls()
        self.asked += 1
        go = self.running.truth / f"go_{self.asked}"
        go.with_suffix(".new").write_text(str(steps))
        os.replace(go.with_suffix(".new"), go)
        end = time.monotonic() + TURN_LIMIT_S
        while not (told := [one for one in self.running.truths("turn") if one["number"] == self.asked]):
            if time.monotonic() > end or self.running.process.poll() is not None:
                raise OutOfTime(f"{self.mode} {self.number} does not do turn {self.asked}: {self.running.log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.02)
        told[0]["polls"] = self._polls() - polls
        self.rest()
        self.turns.append(told[0])
        return float(told[0]["s_per_step"])

    def _polls(self) -> int:
        """How often its launcher has looked at the ranks: asked outside of what is timed."""
        return int(self.running.state().get("health", {}).get("polls", 0)) if self.watched else 0


class Field:
    """All contenders that live at the moment. Use as a context manager."""

    def __init__(self, options: argparse.Namespace, work: Path, deadline: Deadline) -> None:
        self._options, self._work, self._deadline = options, work, deadline
        self._stack = ExitStack()
        self.contenders: list[Contender] = []

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *exc: object) -> None:
        for contender in self.contenders:
            (contender.running.truth / "stop").touch()
            if contender.running.process.poll() is None:
                contender.running.process.send_signal(signal.SIGCONT)
        end = time.monotonic() + 10
        while time.monotonic() < end and any(contender.running.process.poll() is None for contender in self.contenders):
            time.sleep(0.1)
        self._stack.close()

    def add(self, mode: str, number: int, kind: str, env: dict[str, str], *, watched: bool) -> Contender:
        folder = self._work / f"{kind}_{mode.replace(' ', '_')}_{number}"
        job = [str(JOBS / "timed_job.py"), kind, *backend(self._options), "--timeout-s", "1200"]
        options = ("--listen", "127.0.0.1:0") if watched else ()
        running = self._stack.enter_context(Running(folder, job, self._options.gpus, env, options, plain=not watched))
        self.contenders.append(Contender(mode, number, running, watched))
        return self.contenders[-1]

    def wait(self, contenders: Sequence[Contender]) -> None:
        """Until all are ready; OutOfTime when they do not get there."""
        end = time.monotonic() + START_LIMIT_S * (4 if self._options.dry_run_on_cpu else 1)
        began = time.monotonic()
        while not all(contender.ready() for contender in contenders):
            if time.monotonic() > end or self._deadline.left_s < 0:
                late = [f"{contender.mode} {contender.number}" for contender in contenders if not contender.ready()]
                raise OutOfTime(f"not ready: {', '.join(late)}: {contenders[0].running.log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.2)
        for contender in contenders:
            contender.rest()
        say(f"{len(contenders)} jobs ready after {time.monotonic() - began:.0f} s")

    def check(self, needs_s: float) -> None:
        if self._deadline.left_s < needs_s:
            raise OutOfTime("the time is up")
