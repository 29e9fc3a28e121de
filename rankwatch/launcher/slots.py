"""The launcher's short node-local directory: one slot file and one socket a rank, a fresh sub-directory for each attempt.

    <place>/rankwatch.<8 random>/owner.json       who made it: pid, start ticks, boot, pid namespace, and the workers it started
                                /a<attempt>/       rank_<N>.slot (blocks reserved), rank_<N>.sock (made by the rank)

Never in the run dir: a network file system blocks, and a socket's path is limited. Slots of an attempt never serve the next one, so a rank
that outlived its attempt cannot write into a new rank's slot. Directories whose launcher and ranks are gone are removed by the next start.

Other users share the places. All lies below one directory 0700 of a random name, in a place where nobody else may rename it, and a directory is used
again only while it is the very one that was made: one of that name may since be another user's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankwatch.wire import layout
from rankwatch.wire.env import slot_name, socket_name

PREFIX = "rankwatch."
OWNER = "owner.json"
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path, less its final NUL
LAST_RANK = 16383
_SLOT = re.compile(r"rank_\d+\.slot")


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where an attempt's slots lie. path None: nowhere, and `reason` says what failed in every place."""

    path: str | None
    reason: str = ""


class SlotDirectory:
    """This launcher's directory over its attempts. Not thread-safe: one caller at a time. OSError never leaves it."""

    def __init__(self, places: Sequence[str] | None = None) -> None:
        self._places = tuple(standard_places() if places is None else places)
        self._base: str | None = None
        self._bases: dict[str, tuple[int, int] | None] = {}  # all that were made, with device and inode
        self._attempts: list[str] = []
        self._workers: dict[int, int] = {}  # pid -> start ticks

    def make(self, attempt: int, ranks: Iterable[int]) -> SlotPlace:
        """Slots for `ranks` of a new attempt, in the first place that holds them all. The attempt before stays readable, older ones go."""
        while len(self._attempts) > 1:
            oldest = self._attempts.pop(0)
            if self._is_ours(os.path.dirname(oldest)):
                shutil.rmtree(oldest, ignore_errors=True)
        wanted = tuple(ranks)
        problems = []
        for place in dict.fromkeys((os.path.dirname(self._base), *self._places) if self._base else self._places):
            try:
                return SlotPlace(self._make_in(place, attempt, wanted))
            except OSError as error:
                problems.append(f"{place}: {error.strerror or error}")
        return SlotPlace(None, "; ".join(problems) or "no place to try")

    def record_workers(self, pids: Iterable[int]) -> None:
        """Note the started workers in owner.json, so that a later start sees whether they still run."""
        self._workers.update({pid: ticks for pid in pids if (ticks := start_ticks(pid)) is not None})
        if self._base and self._is_ours(self._base):
            try:
                _write_owner(self._base, self._workers)
            except OSError:
                pass  # the slots name their ranks too

    def remove(self) -> None:
        """Remove everything of ours; safe to call twice."""
        for path in self._bases:
            if self._is_ours(path):
                shutil.rmtree(path, ignore_errors=True)
        self._base, self._attempts, self._bases = None, [], {}

    def _is_ours(self, base: str) -> bool:
        """Whether what now has the name of a directory that was made is that directory."""
        made = self._bases.get(base)
        return made is not None and _identity(base) == made

    def _make_in(self, place: str, attempt: int, ranks: Sequence[int]) -> str:
        reused = self._base is not None and os.path.dirname(self._base) == place and self._is_ours(self._base)
        base = self._base if reused and self._base else _make_base(place)
        path = os.path.join(base, f"a{attempt}")
        try:
            os.mkdir(path, 0o700)
            for rank in ranks:
                _make_slot(os.path.join(path, slot_name(rank)), rank, attempt)
        except OSError:
            shutil.rmtree(path if reused else base, ignore_errors=True)
            raise
        self._base = base
        self._bases[base] = self._bases[base] if reused else _identity(base)
        self._attempts.append(path)
        return path


def standard_places(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Folders to try, best first; memory before disk."""
    places = (environ.get("XDG_RUNTIME_DIR", ""), "/dev/shm", "/tmp", tempfile.gettempdir())
    return tuple(dict.fromkeys(place.rstrip("/") for place in places if os.path.isabs(place)))


def sweep(places: Sequence[str] | None = None) -> list[str]:
    """Remove directories of dead launchers whose ranks are gone; returns what was removed.

    Touches only directories of this user that hold a readable owner.json of this pid namespace (or of an earlier boot); follows no link.
    """
    removed = []
    for place in standard_places() if places is None else places:
        try:
            names = [name for name in os.listdir(place) if name.startswith(PREFIX)]
        except OSError:
            continue
        for name in names:
            path = os.path.join(place, name)
            try:
                if _is_abandoned(path):
                    shutil.rmtree(path)
                    removed.append(path)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, struct.error):
                continue  # somebody else's, half made, or going away this moment
    return removed


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, which with the pid names a process for good; None when it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def place_problem(place: str) -> str:
    """Why slots may not lie in a folder: another user could rename what is made there. "" where they may. OSError where it cannot be looked at."""
    status = os.stat(place)
    if status.st_uid not in (os.geteuid(), 0, _unmapped_uid()):
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        return f"others may rename what lies there (mode {stat.S_IMODE(status.st_mode):04o} without the sticky bit)"
    return ""


def _unmapped_uid() -> int:
    """In a user namespace the owner as which the host's root is shown, of a bound /tmp say; -1 outside of one, where that uid is a user like others."""
    try:
        if _read("/proc/self/uid_map", 4096).split() == [b"0", b"0", b"4294967295"]:
            return -1
        return int(_read("/proc/sys/kernel/overflowuid", 64))
    except (OSError, ValueError):
        return -1


def _identity(path: str) -> tuple[int, int] | None:
    """Device and inode of a directory that is ours alone; None for everything else, a link included."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return (status.st_dev, status.st_ino) if ours else None


def _make_base(place: str) -> str:
    if problem := place_problem(place):
        raise OSError(0, problem)
    longest = os.path.join(place, PREFIX + 8 * "x", "a9999", socket_name(LAST_RANK))
    if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
        raise OSError(0, f"its path is too long for a socket ({MAX_SOCKET_PATH_BYTES} bytes)")
    base = tempfile.mkdtemp(prefix=PREFIX, dir=place)  # 0700
    try:
        if _identity(base) is None:
            raise OSError(0, "permissions do not hold there: a directory made 0700 is not")
        _write_owner(base, {})
    except OSError:
        shutil.rmtree(base, ignore_errors=True)
        raise
    return base


def _make_slot(path: str, rank: int, attempt: int) -> None:
    """The blocks are reserved: writing to a hole on a full tmpfs would be SIGBUS in the training process."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, layout.SLOT_BYTES)
        os.pwrite(fd, layout.pack_header(rank, attempt), 0)
    finally:
        os.close(fd)


def _write_owner(base: str, workers: Mapping[int, int]) -> None:
    pid = os.getpid()
    owner = {"pid": pid, "start_ticks": start_ticks(pid), "boot": _boot(), "pid_namespace": _pid_namespace(), "workers": sorted(workers.items())}
    temporary = os.path.join(base, OWNER + ".new")
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(owner, file)
    os.replace(temporary, os.path.join(base, OWNER))


def _is_abandoned(path: str) -> bool:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    owner = json.loads(_read(os.path.join(path, OWNER), 1 << 20))
    if owner["boot"] != _boot():
        return True
    if owner["pid_namespace"] != _pid_namespace():
        return False  # its processes cannot be seen from here
    processes = [(owner["pid"], owner["start_ticks"]), *map(tuple, owner["workers"]), *_claims(path)]
    return not any(start_ticks(int(pid)) == ticks for pid, ticks in processes)


def _claims(base: str) -> list[tuple[int, int]]:
    """(pid, start ticks) that the slots themselves name: below `--no-python` the rank is a descendant of the worker."""
    found = []
    for folder in os.listdir(base):
        path = os.path.join(base, folder)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            continue
        for name in filter(_SLOT.fullmatch, os.listdir(path)):
            record = layout.read_record(_read(os.path.join(path, name), layout.SLOT_BYTES), layout.RECORDS["owner"])
            if record and record[2]:
                claim: dict[str, Any] = json.loads(record[2])
                found.append((int(claim["pid"]), int(claim["start_ticks"])))
    return found


def _read(path: str, limit_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        return file.read(limit_bytes)


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id", 64).decode().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
