"""`--archive-dir`: pages of the run and its incidents on a shared place, so that links outlive the launcher. Its own thread: a mount that hangs delays nothing.

Of each name only the newest version waits, so that the queue is as long as the number of names. What cannot be written is said once and counted.

Others may write the place too. So a folder is entered by its descriptor, never through a link, and only where it is ours; a file is never followed.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence

from rankwatch.monitor.pool import Job
from rankwatch.whole_files import replace_file, write_in_place

MAX_WAITING = 256
CLAIM_WAIT_S = 1.0
_NO_RENAME = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EXDEV)  # not EPERM: so a sticky folder of another user answers
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Archive:
    """Copies into `root`/`name`. Every method returns at once except flush() and claim(), which have a bound. on_trouble: one line for people, once."""

    def __init__(self, root: str, name: str, on_trouble: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.root, self.name = root, name
        self.dropped = 0
        self.failed = False  # the newest copy could not be written: a link to it would be dead
        self._on_trouble = on_trouble
        self._clock = clock
        self._waiting: dict[str, Callable[[], bytes]] = {}
        self._writing = False
        self._change = threading.Condition()
        self._started = False
        self._said = False
        self._claimed = False

    def claim(self, names: Sequence[str], wait_s: float = CLAIM_WAIT_S) -> str:
        """Take the first of `names` that is not there yet, so that no other run's pages are written over; a second call changes nothing.

        The last one should be nobody else's: it is taken, untried, where the place does not answer within wait_s or takes no folder.
        """
        if self._claimed:
            return self.name
        self._claimed = True
        late = threading.Event()
        making = Job(lambda: self._make_first(names, late))
        threading.Thread(target=making.run, name="rankwatch-archive-name", daemon=True).start()
        if not making.wait(wait_s):
            late.set()
        self.name = making.value or names[-1]
        return self.name

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
                self.failed = False
            except Exception as error:  # a full, read-only or vanished place, or a page that cannot be made: the job and the run directory are not affected
                self.dropped += 1
                self.failed = self.failed or isinstance(error, OSError)
                self._say(f"--archive-dir {self.root}: cannot write {name}: {getattr(error, 'strerror', None) or error}; the run directory has everything")
            with self._change:
                self._writing = False
                self._change.notify_all()

    def _write(self, name: str, data: bytes) -> None:
        # Who may look into the archive may read what is put there. The root is never made: a mount that is not there is trouble.
        *folders, file = (self.name, *name.split("/"))
        fd = os.open(self.root, _FOLDER)
        try:
            mode = os.fstat(fd).st_mode
            path = self.root
            for part in folders:
                path = os.path.join(path, part)
                inner = _enter(fd, part, path, 0o700 | (mode & 0o775))
                os.close(fd)
                fd = inner
            try:
                replace_file(file, data, 0o600 | (mode & 0o044), dir_fd=fd)
            except OSError as error:
                if error.errno not in _NO_RENAME:
                    raise
                write_in_place(file, data, 0o600 | (mode & 0o044), dir_fd=fd)  # mounts of object stores do not rename
        finally:
            os.close(fd)

    def _make_first(self, names: Sequence[str], late: threading.Event) -> str:
        """The folder that could be made; "" for none. OSError as the place gives it."""
        mode = os.stat(self.root).st_mode
        owners: dict[str, int] = {}
        for name in names:
            path = os.path.join(self.root, name)
            try:
                os.mkdir(path, 0o700 | (mode & 0o775))
            except FileExistsError:
                owners[path] = os.lstat(path).st_uid
                continue
            if late.is_set():
                os.rmdir(path)  # another name was taken meanwhile
                return ""
            foreign = {taken: uid for taken, uid in owners.items() if uid != os.lstat(path).st_uid}
            for taken, uid in foreign.items():
                self._on_trouble(f"--archive-dir {self.root}: {taken} belongs to another user (uid {uid}) and is left alone; the pages go to {path}")
            return name
        return ""

    def _say(self, text: str) -> None:
        if not self._said:
            self._said = True
            try:
                self._on_trouble(text)
            except Exception:  # a closed stderr is not the archive's trouble
                pass


def _enter(around: int, part: str, path: str, mode: int) -> int:
    """A descriptor of folder `part` of the folder `around`, made where it is not there. OSError for a link and for another user's folder."""
    try:
        os.mkdir(part, mode, dir_fd=around)
    except FileExistsError:
        pass
    try:
        fd = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=around)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise OSError(error.errno, f"{path} is a symbolic link or no folder, which is not followed") from None
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid() and owner != _uid_here(fd):
        os.close(fd)
        raise OSError(errno.EPERM, f"{path} belongs to another user (uid {owner}), who could lead our files elsewhere")
    return fd


def _uid_here(folder: int) -> int:
    """What this mount says we are: some say one user for everybody. -1 where nothing can be made in the folder."""
    name = f".rankwatch-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    except OSError:
        return -1
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        os.unlink(name, dir_fd=folder)
