"""Where a thread sleeps in the kernel: the call, the file behind its descriptor, and the mount that it lies on.

Nothing is ever opened or stat()ed on the file system in question: links of /proc are read as text and matched against mountinfo. Even so
such a look may block (a process that hangs in mmap holds a lock that some files of /proc take), so it runs in a thread of its own.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rankwatch.model import KernelWait
from rankwatch.monitor.pool import Job, Pool

AGAIN_S = 2.0
MAX_PATH_BYTES = 512
_MEMORY_PATH_BYTES = 256
_BY_FD = (
    "read", "write", "close", "fstat", "ioctl", "pread64", "pwrite64", "readv", "writev", "sendto", "recvfrom", "sendmsg", "recvmsg", "connect", "accept",
    "fcntl", "flock", "fsync", "fdatasync", "ftruncate", "getdents64", "sync_file_range", "fallocate", "preadv", "pwritev", "syncfs", "epoll_wait",
)  # fmt: skip
_BY_PATH = {"open": 0, "stat": 0, "lstat": 0, "access": 0, "rename": 0, "mkdir": 0, "unlink": 0, "execve": 0, "openat": 1, "newfstatat": 1, "mkdirat": 1,
            "unlinkat": 1, "faccessat": 1, "renameat": 1, "renameat2": 1, "statx": 1}  # fmt: skip
# Linux: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 16: "ioctl", 17: "pread64", 18: "pwrite64", 19: "readv",
        20: "writev", 21: "access", 23: "select", 35: "nanosleep", 40: "sendfile", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg",
        47: "recvmsg", 56: "clone", 57: "fork", 58: "vfork", 59: "execve", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync",
        77: "ftruncate", 82: "rename", 83: "mkdir", 87: "unlink", 162: "sync", 202: "futex", 217: "getdents64", 230: "clock_nanosleep", 232: "epoll_wait",
        247: "waitid", 257: "openat", 258: "mkdirat", 262: "newfstatat", 263: "unlinkat", 264: "renameat", 269: "faccessat", 270: "pselect6", 271: "ppoll",
        277: "sync_file_range", 285: "fallocate", 288: "accept", 295: "preadv", 296: "pwritev", 306: "syncfs", 316: "renameat2", 332: "statx", 435: "clone3",
    },
    "aarch64": {
        22: "epoll_wait", 25: "fcntl", 29: "ioctl", 32: "flock", 34: "mkdirat", 35: "unlinkat", 38: "renameat", 46: "ftruncate", 47: "fallocate",
        48: "faccessat", 56: "openat", 57: "close", 61: "getdents64", 63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64", 68: "pwrite64",
        69: "preadv", 70: "pwritev", 71: "sendfile", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 80: "fstat", 81: "sync", 82: "fsync", 83: "fdatasync",
        84: "sync_file_range", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 202: "accept", 203: "connect", 206: "sendto",
        207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 220: "clone", 221: "execve", 260: "wait4", 267: "syncfs", 276: "renameat2", 291: "statx",
        435: "clone3",
    },
}  # fmt: skip


@dataclass(slots=True)
class _Seen:
    """What is known of one process, and the look that is under way."""

    at: float = -1e9  # when the newest look began
    waits: tuple[KernelWait, ...] = ()
    waits_at: float = -1e9  # when the look began that they are from
    job: Job[tuple[KernelWait, ...]] | None = None


class KernelWaits:
    """The newest finished look into each suspect. `of` never waits; called from one thread."""

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._pool = Pool("kernel", 1, backlog=16)

    def of(self, key: tuple[int, int], tids: Iterable[int]) -> tuple[float, dict[int, KernelWait]]:
        """When the newest finished look began, and what it saw by thread; another one begins AGAIN_S after that. key: pid and start ticks."""
        seen, now = self._seen.setdefault(key, _Seen()), self._clock()
        if seen.job is not None and seen.job.done:
            seen.waits, seen.waits_at, seen.job = seen.job.value or (), seen.at, None
        if seen.job is None and now - seen.at >= AGAIN_S:
            wanted = tuple(tids)
            seen.at = now
            seen.job = self._pool.submit(lambda: tuple(look(key[0], tid, self._proc) for tid in wanted))
        return seen.waits_at, {wait.tid: wait for wait in seen.waits}


def look(pid: int, tid: int, proc: str = "/proc", machine: str = "") -> KernelWait:
    """One thread now. May block; never raises."""
    at = f"{proc}/{pid}/task/{tid}"
    wait = KernelWait(tid, _state(_text(f"{at}/stat")), wchan=_text(f"{at}/wchan").strip())
    words = _text(f"{at}/syscall").split()
    if len(words) < 7 or not words[0].isdigit():  # "running", or asleep outside of a call: a page fault
        return replace(wait, call="a page fault") if words[:1] == ["-1"] and wait.state == "D" else wait
    call = _CALLS.get(machine or platform.machine(), {}).get(int(words[0]), f"system call {words[0]}")
    wait = replace(wait, call=call)
    target = ""
    if call in _BY_FD:
        fd = int(words[1], 16)
        wait = replace(wait, fd=fd if fd < 1 << 31 else -1)
        target = _link(f"{proc}/{pid}/fd/{fd}")
    elif call in _BY_PATH:
        target = _path_argument(f"{proc}/{pid}", int(words[1 + _BY_PATH[call]], 16))
    return replace(wait, target=target, mount=mount_of(target, _text(f"{proc}/{pid}/mountinfo", 1 << 20)) if target.startswith("/") else "")


def mount_of(path: str, mountinfo: str) -> str:
    """`nfs4 filer:/export at /ckpt` of the innermost mount that holds the path, by text alone; "" when there is none."""
    best, found = "", ""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, source = left.split(), right.split()
        if len(fields) < 5 or len(source) < 2:
            continue
        point = _unescaped(fields[4])
        inside = path == point or path.startswith(point if point.endswith("/") else point + "/")
        if inside and len(point) >= len(best):  # a later mount at the same point hides the earlier
            best, found = point, f"{source[0]} {_unescaped(source[1])} at {point}"
    return found


def _path_argument(process: str, address: int) -> str:
    """The path that the call was given, absolute; "" where it cannot be read."""
    try:
        with open(f"{process}/mem", "rb", buffering=0) as memory:
            text = os.pread(memory.fileno(), _MEMORY_PATH_BYTES, address).split(b"\0", 1)[0].decode("utf-8", "replace")
    except (OSError, OverflowError, ValueError):
        return ""
    if not text.isprintable() or not text:
        return ""
    return text if text.startswith("/") else os.path.join(_link(f"{process}/cwd") or ".", text)


def _state(stat: str) -> str:
    return stat[stat.rfind(")") + 2 : stat.rfind(")") + 3]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _link(name: str) -> str:
    try:
        return os.readlink(name)[:MAX_PATH_BYTES]
    except OSError:
        return ""


def _text(name: str, most: int = 4096) -> str:
    try:
        with open(name, encoding="utf-8", errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""
