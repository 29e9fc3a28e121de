"""A few daemon threads for calls that may be slow; the caller never waits longer than it wants to.

concurrent.futures is not used: the interpreter joins its threads at exit, and a launcher must not hang behind a hung py-spy.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """A call that was handed to a pool. `result()` is None until it is done or when it failed; then `error` holds the exception."""

    __slots__ = ("_done", "_function", "error", "value")

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._done = threading.Event()
        self.value: T | None = None
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done within timeout_s."""
        return self._done.wait(max(0.0, timeout_s))

    def run(self) -> None:
        try:
            self.value = self._function()
        except Exception as error:
            self.error = error
        finally:
            self._done.set()


class Pool:
    """At most `size` threads, started when work arrives; at most `backlog` calls wait, more are refused."""

    def __init__(self, name: str, size: int, backlog: int = 256) -> None:
        self._name = name
        self._size = size
        self._queue: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._backlog = backlog
        self._threads = 0
        self._idle = 0
        self._lock = threading.Lock()

    def submit(self, function: Callable[[], T]) -> Job[T] | None:
        """Start the call when a thread is free; None when too many wait already."""
        if self._queue.qsize() >= self._backlog:
            return None
        job: Job[T] = Job(function)
        self._queue.put(job)  # type: ignore[arg-type]
        with self._lock:
            start = self._idle < self._queue.qsize() and self._threads < self._size
            if start:
                self._threads += 1
        if start:
            threading.Thread(target=self._work, name=f"rankwatch-{self._name}", daemon=True).start()
        return job

    def close(self) -> None:
        """Let the threads end once their present call is over."""
        for _ in range(self._size):
            self._queue.put(None)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._queue.get()
            with self._lock:
                self._idle -= 1
            if job is None:
                return
            job.run()


def wait_all(jobs: list[Job[T]], timeout_s: float) -> bool:
    """Whether every job is done within timeout_s, all together."""
    deadline = time.monotonic() + timeout_s
    return all(job.wait(deadline - time.monotonic()) for job in jobs)
