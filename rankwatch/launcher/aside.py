"""Runs calls beside the launcher's main thread, in order, so that nothing of ours can hold torchrun up or swallow its signals.

torchrun's signal handlers raise SignalException, an Exception, between any two lines of the main thread: code there that guards itself
with `except Exception` would eat a SIGTERM. So the main thread only waits, for a bounded time, and lets whatever is raised there pass.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from rankwatch.monitor.pool import Job

T = TypeVar("T")


class Aside:
    """One daemon thread that runs submitted calls in their order. After a call that is overdue the later ones queue up behind it."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Job[object]] = queue.SimpleQueue()
        self._name = name
        self._started = False

    def submit(self, function: Callable[[], T]) -> Job[T]:
        """Queue a call and return at once. RuntimeError when no thread can be started (the process has too many)."""
        call = Job(function)
        self._calls.put(call)  # type: ignore[arg-type]
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return call

    def call(self, function: Callable[[], T], timeout_s: float) -> Job[T]:
        """Queue a call and wait for it, at most timeout_s. Look at `done`, `value` and `error` of what comes back."""
        call = self.submit(function)
        call.wait(timeout_s)
        return call

    def _work(self) -> None:
        while True:
            self._calls.get().run()
