"""`--archive-dir`: pages of the run and its incidents on a shared place, so that links outlive the launcher. Its own thread: a mount that hangs delays nothing.

Of each name only the newest version waits, so that the queue is as long as the number of names. What cannot be written is said once and counted.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

from rankwatch.monitor.writer import write_atomically

MAX_WAITING = 256
_NO_RENAME = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV)


class Archive:
    """Copies into `root`/`name`. Every method returns at once except flush(), which has a deadline. on_trouble: one line for people, once."""

    def __init__(self, root: str, name: str, on_trouble: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.root, self.name = root, name
        self.dropped = 0
        self._on_trouble = on_trouble
        self._clock = clock
        self._waiting: dict[str, Callable[[], bytes]] = {}
        self._writing = False
        self._change = threading.Condition()
        self._started = False
        self._said = False

    def put(self, name: str, render: Callable[[], bytes]) -> bool:
        """Write `name` below the run's folder, rendered in the archive's thread; a version that still waits is replaced. False: too many wait, dropped."""
        with self._change:
            if name not in self._waiting and len(self._waiting) >= MAX_WAITING:
                self.dropped += 1
                return False
            self._waiting[name] = render
            if not self._started:
                self._started = True
                threading.Thread(target=self._work, name="rankwatch-archive", daemon=True).start()
            self._change.notify_all()
            return True

    def flush(self, deadline_s: float) -> bool:
        """Whether everything handed in has been written, or given up, within deadline_s."""
        until = self._clock() + deadline_s
        with self._change:
            while self._waiting or self._writing:
                left_s = until - self._clock()
                if left_s <= 0:
                    return False
                self._change.wait(left_s)
            return True

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._waiting:
                    self._change.wait()
                name = next(iter(self._waiting))
                render = self._waiting.pop(name)
                self._writing = True
            try:
                self._write(name, render())
            except Exception as error:  # a full, read-only or vanished place, or a page that cannot be made: the job and the run directory are not affected
                self.dropped += 1
                self._say(f"--archive-dir {self.root}: cannot write {name}: {getattr(error, 'strerror', None) or error}; the run directory has everything")
            with self._change:
                self._writing = False
                self._change.notify_all()

    def _write(self, name: str, data: bytes) -> None:
        # Who may look into the archive may read what is put there. The root is never made: a mount that is not there is trouble.
        mode = os.stat(self.root).st_mode & 0o777
        path = self.root
        for part in (self.name, *name.split("/")[:-1]):
            path = os.path.join(path, part)
            if not os.path.isdir(path):
                os.mkdir(path, mode | 0o700)
            elif os.path.islink(path):
                raise OSError(errno.ELOOP, f"{path} is a symbolic link, which is not followed")
        path = os.path.join(path, name.rpartition("/")[2])
        try:
            write_atomically(path, data, 0o600 | (mode & 0o044))
        except OSError as error:
            if error.errno not in _NO_RENAME:
                raise
            with open(path, "wb") as file:  # mounts of object stores do not rename
                file.write(data)

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            try:
                self._on_trouble(text)
            except Exception:  # a closed stderr is not the archive's trouble
                pass
