"""Exit codes of children the moment they end, without reaping them: whoever started them still gets them."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


class ExitWatch:
    """Learns the exit code of children in the moment they end, without reaping them: whoever started them still gets it.

    `on_exit(pid, code)` is called from this object's thread; a negative code is a signal, None means that it was reaped before we looked.
    """

    def __init__(self, on_exit: Callable[[int, int | None], None]) -> None:
        self._on_exit = on_exit
        self._poll = select.poll()
        self._pid_of: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll.register(self._wake_read, select.POLLIN)
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, pid: int) -> None:
        """Watch a child of this process; a pid that is no child or a kernel without pidfd is left to the poll of the reader."""
        try:
            fd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            return
        with self._lock:
            self._pid_of[fd] = pid
            self._poll.register(fd, select.POLLIN)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="rankwatch-exits", daemon=True)
            self._thread.start()
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except OSError:
            pass

    def _watch(self) -> None:
        while not self._closed:
            for fd, _event in self._poll.poll():
                if fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                    continue
                with self._lock:
                    self._poll.unregister(fd)
                    pid = self._pid_of.pop(fd)
                _, code = child_exit(pid)
                os.close(fd)
                try:
                    self._on_exit(pid, code)
                except Exception:  # an observer's fault must not end the watch
                    pass


def child_exit(pid: int) -> tuple[bool, int | None]:
    """(whether pid is a child of this process that is not reaped yet, its exit code if it has ended). A negative code is a signal."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:
        return False, None
    if found is None:
        return True, None
    return True, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
