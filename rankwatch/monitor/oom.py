"""Whether a SIGKILL was the kernel's for lack of memory: the count of the rank's own memory cgroup, and the kernel's log where that is readable."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_S = 2.0
FIND_EVERY_S = 30.0  # a process may be moved to another cgroup
WINDOW_S = 10.0  # a kill in the cgroup this long before the rank's end may have been another process's
_INIT_PID_NAMESPACE = 0xEFFFFFFC  # linux/proc_ns.h
_MAX_RECORDS = 4000
_KILLED = re.compile(r"Killed process (\d+) \(")
_MEMCG = re.compile(r"task_memcg=(?P<path>[^,]+),task=(?P<name>[^,]*),pid=(?P<pid>\d+)")


@dataclass(slots=True)
class _Counter:
    """One cgroup's count of kills, as it was read over the last seconds."""

    file: str
    path: str
    reads: list[tuple[float, int]]


class OomWatch:
    """Remembers the count of each rank's cgroup while it lives. Called from one thread; never raises."""

    def __init__(self, proc: str = "/proc", kmsg: str = "/dev/kmsg", clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._counters: dict[str, _Counter] = {}
        self._of: dict[int, tuple[str, str]] = {}  # pid -> file, path of its cgroup
        self._found_at: dict[int, float] = {}
        self._kmsg = _open_at_end(kmsg)
        self._records: list[str] = []

    def note(self, pid: int) -> None:
        """Call while the rank lives, as often as you like."""
        now = self._clock()
        if now - self._found_at.get(pid, -1e9) >= FIND_EVERY_S:
            self._found_at[pid] = now
            self._of[pid] = memory_events(pid, self._proc) or self._of.get(pid, ("", ""))
        file, path = self._of[pid]
        if not file:
            return
        counter = self._counters.setdefault(file, _Counter(file, path, []))
        if counter.reads and now - counter.reads[-1][0] < EVERY_S:
            return
        self._read(counter, now)

    def killed(self, pid: int) -> tuple[bool, str]:
        """(whether the kernel killed it for lack of memory, what says so or what was read in vain; "" when nothing could be read)."""
        said = self._log_says(pid)
        if said.startswith("the kernel's log"):
            return True, said
        file, path = self._of.get(pid, ("", ""))
        counter = self._counters.get(file)
        if counter is None or not counter.reads:
            return False, said
        now = self._clock()
        before = next((count for at, count in reversed(counter.reads) if now - at >= WINDOW_S), counter.reads[0][1])
        if not self._read(counter, now):
            return False, said
        count = counter.reads[-1][1]
        if count > before:
            return True, f"{os.path.basename(file)} of the memory cgroup {path}: oom_kill rose from {before} to {count}"
        return False, said or f"{os.path.basename(file)} of the memory cgroup {path}: oom_kill did not rise"

    def close(self) -> None:
        if self._kmsg is not None:
            os.close(self._kmsg)
            self._kmsg = None

    def _read(self, counter: _Counter, now: float) -> bool:
        count = _oom_kills(counter.file)
        if count is None:
            return False
        counter.reads.append((now, count))
        while len(counter.reads) > 2 and now - counter.reads[1][0] > WINDOW_S:
            counter.reads.pop(0)
        return True

    def _log_says(self, pid: int) -> str:
        """A record that names the rank begins with "the kernel's log"; one that may mean it with "an out-of-memory kill"."""
        self._take_records()
        own_namespace = _own_pid_namespace(self._proc)
        _, path = self._of.get(pid, ("", ""))
        maybe = ""
        for record in self._records:
            found, in_cgroup = _KILLED.search(record), _MEMCG.search(record)
            number = found[1] if found else in_cgroup["pid"] if in_cgroup else ""
            if number == str(pid) and own_namespace:
                return f"the kernel's log: {record[:200]}"
            if in_cgroup and not own_namespace and path not in ("", "/") and in_cgroup["path"].endswith(path):
                maybe = f"an out-of-memory kill of {in_cgroup['name']} in this cgroup is in the kernel's log, by its number outside of this container"
        return maybe

    def _take_records(self) -> None:
        if self._kmsg is None:
            return
        for _ in range(_MAX_RECORDS):
            try:
                record = os.read(self._kmsg, 8192)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the ring has overrun our place
                    continue
                return
            if not record:
                return
            text = record.decode("utf-8", "replace").partition(";")[2].splitlines()
            if text and ("Killed process" in text[0] or "oom-kill:" in text[0]):
                self._records = [*self._records[-50:], text[0]]


def memory_events(pid: int, proc: str = "/proc") -> tuple[str, str] | None:
    """(file that counts kills, path of the cgroup) of a process's memory cgroup, the nearest one that accounts; None where there is none to read."""
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
        with open(f"{proc}/self/mountinfo", encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in file]
    except (OSError, ValueError):
        return None
    for _number, controllers, path in (line for line in lines if len(line) == 3):
        v2 = controllers == ""
        if not v2 and "memory" not in controllers.split(","):
            continue
        name = "memory.events" if v2 else "memory.oom_control"
        for root, point in _mounted(mounts, v2):
            relative = path[len(root.rstrip("/")) :] if path.startswith(root) else ""
            while True:
                file_name = f"{point}{relative}/{name}"
                if _oom_kills(file_name) is not None:
                    return file_name, path
                if not relative.strip("/"):
                    break
                relative = relative.rpartition("/")[0]
    return None


def _mounted(mounts: list[list[str]], v2: bool) -> list[tuple[str, str]]:
    """(root within the hierarchy, mount point) of the cgroup file systems that account memory."""
    found = []
    for fields in mounts:
        if "-" not in fields[6:]:
            continue
        kind, options = fields[fields.index("-", 6) + 1], fields[-1].split(",")
        if kind == "cgroup2" if v2 else (kind == "cgroup" and "memory" in options):
            found.append((fields[3], fields[4]))
    return found


def _oom_kills(name: str) -> int | None:
    try:
        with open(name, encoding="ascii") as file:
            return int(dict(line.split() for line in file)["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def _own_pid_namespace(proc: str) -> bool:
    """Whether the numbers in the kernel's log are those that we see."""
    try:
        return os.stat(f"{proc}/self/ns/pid").st_ino == _INIT_PID_NAMESPACE
    except OSError:
        return False


def _open_at_end(kmsg: str) -> int | None:
    try:
        descriptor = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.lseek(descriptor, 0, os.SEEK_END)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
