"""The monitor's one thread: what others ask of it in their order, and a look whenever one is due. An error in any of it is counted and ends nothing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rankwatch.monitor import failure

POLL_EVIDENCE_S = 0.1
ERRORS_IN_A_ROW = 20


@dataclass(slots=True)
class _Command:
    do: Callable[[], None]
    done: threading.Event


class WatchThread:
    """look: the look. poll_s: after each look, seconds until the next. evidence_pending, take_evidence: what has been asked for is taken between two looks.

    on_error: gets each error in words, and whether it is the last of ERRORS_IN_A_ROW: then `off` is set.
    """

    def __init__(
        self,
        look: Callable[[], None],
        poll_s: Callable[[], float],
        evidence_pending: Callable[[], bool],
        take_evidence: Callable[[], None],
        on_error: Callable[[str, bool], None],
    ) -> None:
        self.off = False
        self._look = look
        self._poll_s = poll_s
        self._evidence_pending = evidence_pending
        self._take_evidence = take_evidence
        self._on_error = on_error
        self._queue: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._next_at = 0.0
        self._look_is_due = False
        self._errors_in_a_row = 0
        self._running = False

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._running

    def start(self) -> None:
        """Begin, once."""
        self._running = True
        threading.Thread(target=self._run, name="rankwatch-monitor", daemon=True).start()

    def stop(self) -> None:
        """No further work is begun (any thread)."""
        self._running = False

    def send(self, do: Callable[[], None], wait_s: float = 0.0) -> None:
        """Do this after all that was asked before (any thread); while it runs, wait at most wait_s until it is done."""
        command = _Command(do, threading.Event())
        self._queue.put(command)
        if wait_s > 0 and self._running:
            command.done.wait(wait_s)

    def look_now(self) -> None:
        """A look is due (any thread). Several calls before the look are one."""
        if not self._look_is_due:
            self._look_is_due = True
            self.send(self._look_early)

    def guarded(self, do: Callable[[], None]) -> None:
        """Run one piece of work; what it raises is counted, told, and never ends the thread."""
        try:
            do()
            self._errors_in_a_row = 0
        except Exception as error:
            self._errors_in_a_row += 1
            last = self._errors_in_a_row == ERRORS_IN_A_ROW
            self.off = self.off or last
            self._on_error(f"{type(error).__name__}: {error} ({failure.where(error)})", last)

    def _run(self) -> None:
        while self._running:
            if time.monotonic() >= self._next_at:
                self.guarded(self._look)
                self._next_at = time.monotonic() + self._poll_s()
            elif self._evidence_pending():
                self.guarded(self._take_evidence)
            wait_s = max(0.001, self._next_at - time.monotonic())
            try:
                command = self._queue.get(timeout=min(wait_s, POLL_EVIDENCE_S) if self._evidence_pending() else wait_s)
            except queue.Empty:
                continue
            self.guarded(command.do)
            command.done.set()

    def _look_early(self) -> None:
        self._look_is_due = False
        self._look()
        self._next_at = time.monotonic() + self._poll_s()
