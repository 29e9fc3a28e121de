"""The operating system's view of the ranks, from /proc alone: cheap enough for every poll.

A pid counts only with its start time. Walking all processes for descendants is done for suspects, otherwise twice a minute.
Exits are seen without reaping: torchrun collects its own children.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rankwatch.model import Process

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_OWN_THREADS = ("rankwatch", "pt_workerserver")  # what runs in a rank on our behalf is no sign of its progress
TREE_EVERY_S = 30.0
TREE_OF_SUSPECTS_EVERY_S = 1.0
WALK_COST_FACTOR = 30.0  # a walk over a node's thousands of processes is repeated the more rarely


@dataclass(frozen=True, slots=True)
class Stat:
    """/proc/PID/stat, as far as needed. start_ticks: clock ticks from boot to its start, the second half of its identity."""

    pid: int
    name: str
    state: str
    ppid: int
    cpu_s: float
    collected_cpu_s: float  # of children that it has waited for
    start_ticks: int
    rss_bytes: int


def read_stat(pid: int, proc: str = "/proc") -> Stat | None:
    """None when there is no such process (any more)."""
    try:
        with open(f"{proc}/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(4096)
    except OSError:
        return None
    return _parse_stat(pid, text)


def _parse_stat(pid: int, text: bytes) -> Stat | None:
    open_at, close_at = text.find(b"("), text.rfind(b")")
    fields = text[close_at + 2 :].split()
    if open_at < 0 or len(fields) < 22:
        return None
    return Stat(
        pid=pid,
        name=text[open_at + 1 : close_at].decode("utf-8", "replace"),
        state=fields[0].decode("ascii", "replace"),
        ppid=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
        collected_cpu_s=(int(fields[13]) + int(fields[14])) * _TICK_S,
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


@dataclass(slots=True)
class _Tree:
    """What the last walk found below one process."""

    read_at: float = -1e9
    pids: tuple[int, ...] = ()
    cpu_s: float = 0.0
    io_bytes: int = 0
    own_cpu_s: float = 0.0  # what our threads in the rank used while it was looked at as a suspect
    own_read: tuple[float, float] | None = None  # when they were last read, and their total then
    wchan: str = ""


class Processes:
    """Looks at processes by (pid, start time). One instance a monitor; called from one thread."""

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._trees: dict[tuple[int, int], _Tree] = {}
        self._last: dict[tuple[int, int], Process] = {}
        self._all: dict[int, Stat] = {}
        self._all_at = -1e9
        self._walk_s = 0.0
        self._boot_monotonic = _boot_offset_s()

    def look(self, pid: int, start_ticks: int | None = None, suspect: bool = False) -> Process:
        """How the process does now. Another process under a recycled pid counts as gone. Never raises."""
        stat = read_stat(pid, self._proc)
        if stat is None or (start_ticks is not None and stat.start_ticks != start_ticks):
            return self._gone(pid, start_ticks)
        key = (pid, stat.start_ticks)
        tree = self._tree(key, stat, suspect)
        alive = stat.state not in ("Z", "X", "x")
        last = self._last.get(key)
        cpu_s = max(0.0, stat.cpu_s - tree.own_cpu_s)
        process = Process(
            pid=pid,
            alive=alive,
            state=stat.state,
            cpu_s=max(cpu_s, last.cpu_s if last else 0.0),
            tree_cpu_s=max(cpu_s + stat.collected_cpu_s + tree.cpu_s, last.tree_cpu_s if last else 0.0),
            io_bytes=max(tree.io_bytes, last.io_bytes if last else 0),
            rss_bytes=stat.rss_bytes,
            started_at=stat.start_ticks * _TICK_S + self._boot_monotonic,
            exited_at=None if alive else (last.exited_at if last and last.exited_at is not None else self._clock()),
            wchan=tree.wchan if suspect else "",
            name=stat.name,
        )
        self._last[key] = process
        return process

    def children(self, pid: int) -> tuple[Stat, ...]:
        """Its descendants as of the last walk, oldest first."""
        self._walk(TREE_OF_SUSPECTS_EVERY_S)
        return tuple(sorted((self._all[child] for child in self._below(pid)), key=lambda stat: (stat.start_ticks, stat.pid)))

    def _gone(self, pid: int, start_ticks: int | None) -> Process:
        for key, last in self._last.items():
            if key[0] == pid and (start_ticks is None or key[1] == start_ticks):
                if last.exited_at is None or last.alive or last.state:
                    last = Process(
                        pid=pid,
                        alive=False,
                        cpu_s=last.cpu_s,
                        tree_cpu_s=last.tree_cpu_s,
                        io_bytes=last.io_bytes,
                        started_at=last.started_at,
                        exited_at=last.exited_at if last.exited_at is not None else self._clock(),
                        name=last.name,
                    )
                    self._last[key] = last
                return last
        gone = Process(pid=pid, alive=False, exited_at=self._clock())
        self._last[pid, start_ticks or 0] = gone
        return gone

    def _tree(self, key: tuple[int, int], stat: Stat, suspect: bool) -> _Tree:
        tree = self._trees.setdefault(key, _Tree())
        now = self._clock()
        period_s = TREE_OF_SUSPECTS_EVERY_S if suspect else TREE_EVERY_S
        if now - tree.read_at < period_s or not stat.start_ticks:
            return tree
        tree.read_at = now
        self._walk(period_s)
        tree.pids = self._below(key[0])
        below = [found for found in (read_stat(pid, self._proc) for pid in tree.pids) if found is not None]
        tree.cpu_s = sum(found.cpu_s + found.collected_cpu_s for found in below)
        tree.io_bytes = sum(self._io_bytes(pid) for pid in (key[0], *tree.pids))
        if suspect:
            total_s = self._own_cpu_s(key[0])
            # Only what they use between two near looks is taken off: taking off hours at once would make the rank look asleep for minutes.
            if tree.own_read is not None and now - tree.own_read[0] < 3 * TREE_OF_SUSPECTS_EVERY_S:
                tree.own_cpu_s += max(0.0, total_s - tree.own_read[1])
            tree.own_read = (now, total_s)
            tree.wchan = self._text(f"{key[0]}/wchan")
        return tree

    def _walk(self, max_age_s: float) -> None:
        now = self._clock()
        if now - self._all_at < max(max_age_s * 0.9, WALK_COST_FACTOR * self._walk_s):
            return
        began = time.perf_counter()
        self._all_at = now
        try:
            pids = [int(name) for name in os.listdir(self._proc) if name.isdigit()]
        except OSError:
            return
        self._all = {stat.pid: stat for stat in (read_stat(pid, self._proc) for pid in pids) if stat is not None}
        self._walk_s = time.perf_counter() - began

    def _below(self, root: int) -> tuple[int, ...]:
        children: dict[int, list[int]] = {}
        for stat in self._all.values():
            children.setdefault(stat.ppid, []).append(stat.pid)
        found: list[int] = []
        queue = [root]
        while queue:
            for child in children.get(queue.pop(), ()):
                found.append(child)
                queue.append(child)
        return tuple(found)

    def _io_bytes(self, pid: int) -> int:
        total = 0
        for line in self._text(f"{pid}/io").splitlines():
            name, _, value = line.partition(":")
            if name in ("rchar", "wchar") and value.strip().isdigit():
                total += int(value)
        return total

    def _own_cpu_s(self, pid: int) -> float:
        total = 0.0
        try:
            tids = os.listdir(f"{self._proc}/{pid}/task")
        except OSError:
            return 0.0
        for tid in tids:
            if self._text(f"{pid}/task/{tid}/comm").startswith(_OWN_THREADS):
                stat = read_stat(int(tid), f"{self._proc}/{pid}/task")
                total += stat.cpu_s if stat else 0.0
        return total

    def _text(self, name: str) -> str:
        try:
            with open(f"{self._proc}/{name}", encoding="utf-8", errors="replace") as file:
                return file.read(4096).strip()
        except OSError:
            return ""


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


def oom_kills(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """How often the kernel has killed in this process's memory cgroup for lack of memory; None where that cannot be read."""
    try:
        with open(f"{proc}/self/cgroup", encoding="ascii") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except (OSError, ValueError):
        return None
    for _number, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            name = f"{cgroups}{path}/memory.events"
        elif "memory" in controllers.split(","):
            name = f"{cgroups}/memory{path}/memory.oom_control"
        else:
            continue
        try:
            with open(name, encoding="ascii") as file:
                counts = dict(line.split() for line in file)
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def _boot_offset_s() -> float:
    """CLOCK_MONOTONIC minus CLOCK_BOOTTIME: start times in /proc count from boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(time.CLOCK_BOOTTIME)
