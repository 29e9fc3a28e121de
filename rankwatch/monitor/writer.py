"""One background thread that writes files, so that a slow, full, read-only or hung run directory never holds the monitor up.

Whole files appear at once (written beside, renamed). When the run directory takes nothing more, everything that follows goes to a
directory in the temp dir, and one line says so; once the run directory takes writes again, `moved_to` in it names that place.
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rankwatch.report import moved
from rankwatch.whole_files import append_whole, replace_file

QUEUE_ENTRIES = 2000
QUEUE_BYTES = 256 << 20
HUNG_AFTER_S = 15.0  # file servers pause for more than 5 s; in 15 s some hundred tasks queue up
CHECKED_S = 3.0  # more time between two checks is a pause of this process, in which no write could get on
WORD_EVERY_S = 30.0
ROTATE_BYTES = 16 << 20
ROTATED_FILES = 3


@dataclass(frozen=True, slots=True)
class _Task:
    kind: str  # write | append | remove | flush
    name: str
    data: bytes | Callable[[], bytes] = b""
    done: threading.Event | None = None

    @property
    def size(self) -> int:
        return 0 if callable(self.data) else len(self.data)

    @property
    def bytes(self) -> bytes:
        return self.data() if callable(self.data) else self.data


class Writer:
    """Writes below `root`; names are relative to it. Every method returns at once except flush(), which has a deadline.

    on_trouble: called with one line for people, once for each kind of trouble, from the writer's thread.
    """

    def __init__(self, root: str, on_trouble: Callable[[str], None], fallback_parent: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.dropped = 0
        self._on_trouble = on_trouble
        self._fallback_parent = fallback_parent
        self._clock = clock
        self._queue: queue.Queue[_Task] = queue.Queue(QUEUE_ENTRIES)
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._current: tuple[_Task, float] | None = None
        self._checked_at: float | None = None
        self._generation = 0
        self._fell_back = False
        self._made_again = False
        self._mode = 0o700
        self._said: set[str] = set()
        self._flushed = threading.Event()
        self._dead = False
        self._start()

    def write(self, name: str, data: bytes | Callable[[], bytes]) -> bool:
        """Replace a whole file. A callable is rendered in the writer's thread. False: the queue is full, it was dropped."""
        return self._put(_Task("write", name, data))

    def append(self, name: str, data: bytes) -> bool:
        """Add to a file; it is rotated (name.1 ... name.3) past ROTATE_BYTES. False: dropped."""
        return self._put(_Task("append", name, data))

    def remove(self, name: str) -> bool:
        """Remove a directory tree. False: dropped."""
        return self._put(_Task("remove", name))

    def flush(self, deadline_s: float) -> bool:
        """Whether everything handed in before is on disk within deadline_s."""
        done = threading.Event()
        deadline = self._clock() + deadline_s
        self._flushed.set()
        if not self._put(_Task("flush", "", done=done)):
            return False
        while not done.wait(min(0.05, max(0.0, deadline - self._clock()))):
            if self._clock() >= deadline:
                return False
        return True

    def mark(self) -> threading.Event:
        """Set once everything handed in before is on disk, or was given up; never where the writer hangs or its queue is full."""
        done = threading.Event()
        self._put(_Task("flush", "", done=done))
        return done

    def hangs(self, after_s: float) -> bool:
        """Whether the write that is under way has taken longer than after_s, or everything was given up."""
        with self._lock:
            return self._dead or (self._current is not None and self._clock() - self._current[1] > after_s)

    def check(self, hung_after_s: float = HUNG_AFTER_S) -> None:
        """Give up on a root that has held one write for so long: a new thread goes on elsewhere, the old one is left to the kernel."""
        with self._lock:
            now = self._clock()
            paused_s = now - self._checked_at - CHECKED_S if self._checked_at is not None else 0.0
            self._checked_at = now
            if self._current is not None and paused_s > 0:
                self._current = (self._current[0], min(now, self._current[1] + paused_s))
            current = self._current
            hung = current is not None and now - current[1] > hung_after_s and not self._dead
            if not hung:
                return
            assert current is not None
            self._generation += 1
            self._current = None
            second = self._fell_back
            self._dead = second
        if second:
            self._say("hung twice", "the fallback directory hangs as well; nothing more is written")
            return
        self._start(f"a write to {self.root} has hung for {hung_after_s:g} s", current[0])

    def path_of(self, name: str) -> str:
        """Where a file of this name is or will be."""
        return os.path.join(self.root, name)

    def _start(self, trouble: str = "", first: _Task | None = None) -> None:
        threading.Thread(target=self._work, args=(self._generation, trouble, first), name="rankwatch-writer", daemon=True).start()

    def _put(self, task: _Task) -> bool:
        with self._lock:
            room = not self._dead and self._queued_bytes + task.size <= QUEUE_BYTES
            if room:
                try:
                    self._queue.put_nowait(task)
                    self._queued_bytes += task.size
                    return True
                except queue.Full:
                    pass
            self.dropped += 1
            return False

    def _work(self, generation: int, trouble: str, first: _Task | None) -> None:
        if trouble:
            self._fall_back(trouble, first.name if first is not None else "")
        while True:
            task = first or self._queue.get()
            with self._lock:
                if first is None:
                    self._queued_bytes -= task.size
                self._current = (task, self._clock())
            first = None
            self._perform(task)
            with self._lock:
                if generation != self._generation:
                    return
                self._current = None

    def _perform(self, task: _Task) -> None:
        try:
            self._do(task)
        except OSError as error:
            again = error.errno == errno.ENOENT and self._make_again()
            if not again and (self._fell_back or not self._fall_back(f"cannot write {self.path_of(task.name)}: {error.strerror or error}", task.name)):
                self.dropped += 1
                return
            try:
                self._do(task)
            except OSError:
                self.dropped += 1
        except Exception as error:  # the thread outlives any surprise; what it lost is counted and said once
            self.dropped += 1
            self._say("bug", f"could not write {task.name}: {error!r}")

    def _do(self, task: _Task) -> None:
        if task.kind == "flush":
            if task.done is not None:
                task.done.set()
            return
        path = self.path_of(task.name)
        if task.kind == "remove":
            shutil.rmtree(path, ignore_errors=True)
            return
        data = task.bytes
        mode = self._mode = os.stat(self.root).st_mode & 0o777  # who may look into the run directory may read its files
        _make_directories(os.path.dirname(path), mode)
        if task.kind == "append":
            _rotate(path, len(data))
            append_whole(path, data, _file_mode(mode))
        else:
            replace_file(path, data, _file_mode(mode))

    def _make_again(self) -> bool:
        """A run directory that somebody removed is made once more, in its place."""
        if self._made_again or os.path.lexists(self.root):
            return False
        self._made_again = True
        try:
            os.makedirs(self.root, self._mode)
        except OSError:
            return False
        self._say("removed", f"{self.root} was removed while the job runs; it was made again, what it held is lost")
        return True

    def _fall_back(self, reason: str, name: str) -> bool:
        """name: of the file that could not be written."""
        try:
            place = tempfile.mkdtemp(prefix="rankwatch-", dir=self._fallback_parent)
        except OSError as error:
            self._fell_back = True
            self._say("no fallback", f"{reason}; the temp dir takes nothing either ({error.strerror}): incidents are shown here and on the status page only")
            return False
        node = "/".join(name.split("/")[:2]) if name.startswith("nodes/") else ""  # of a launcher that shares the run directory with the first node's
        old, new = (os.path.join(root, node) if node else root for root in (self.root, place))
        self.root, self._fell_back = place, True
        threading.Thread(target=self._leave_word, args=(old, new), name="rankwatch-moved", daemon=True).start()
        self._say("fallback", f"{reason}; files go to {place} from now on, the job is not affected")
        return True

    def _leave_word(self, old: str, new: str) -> None:
        """Note in the old place where the files are, as soon as it takes that; a thread of its own, which the old place may hold."""
        if not os.path.isdir(old):
            return
        while True:
            try:
                replace_file(os.path.join(old, moved.NAME), moved.document(new), _file_mode(self._mode))
                return
            except OSError:
                self._flushed.wait(WORD_EVERY_S)  # at the end of the run once more
                self._flushed.clear()

    def _say(self, kind: str, text: str) -> None:
        if kind in self._said:
            return
        self._said.add(kind)
        try:
            self._on_trouble(text)
        except Exception:  # a closed stderr is not the writer's trouble
            pass


def _file_mode(directory_mode: int) -> int:
    return 0o600 | (directory_mode & 0o044)


def _make_directories(path: str, mode: int) -> None:
    if os.path.isdir(path):
        return
    _make_directories(os.path.dirname(path), mode)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def _rotate(path: str, more: int) -> None:
    try:
        size = os.stat(path).st_size
    except OSError:
        return
    if size + more <= ROTATE_BYTES:
        return
    for number in range(ROTATED_FILES, 0, -1):
        older = f"{path}.{number - 1}" if number > 1 else path
        if os.path.exists(older):
            os.replace(older, f"{path}.{number}")
