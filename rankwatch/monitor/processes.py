"""The operating system's view of the ranks, from /proc alone: cheap enough for every poll.

A pid counts only with its start time. Walking all processes for descendants is done for suspects, otherwise twice a minute.
Exits are seen without reaping: torchrun collects its own children.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rankwatch.model import Process
from rankwatch.monitor.kernel_waits import KernelWaits
from rankwatch.monitor.proc_stat import TICK_S, Stat, read_stat
from rankwatch.monitor.sockets import Sockets
from rankwatch.monitor.threads import Threads, thread_ids

TREE_EVERY_S = 30.0
TREE_OF_SUSPECTS_EVERY_S = 1.0
MAX_CHILDREN = 16
# children that go on talking to the network while a rank stands still
_TELEMETRY = ("wandb", "gpu_stats", "tensorboard", "nvidia-smi", "dcgm", "py-spy", "node_exporter", "mlflow")
WALK_COST_FACTOR = 30.0  # a walk over a node's thousands of processes is repeated the more rarely


@dataclass(slots=True)
class _Tree:
    """What the last walk found below one process."""

    read_at: float = -1e9
    pids: tuple[int, ...] = ()
    cpu_s: float = 0.0
    io_bytes: int = 0
    disk_bytes: int = 0
    net_bytes: int = 0
    own_cpu_s: float = 0.0  # what our threads in the rank used while it was looked at as a suspect
    own_read: tuple[float, float] | None = None  # when they were last read, and their total then
    wchan: str = ""
    tracer: str = ""
    children: tuple[str, ...] = ()
    dead_children: tuple[tuple[int, int], ...] = ()
    stopped_children: tuple[int, ...] = ()
    threads: Threads = field(default_factory=Threads)


class Processes:
    """Looks at processes by (pid, start time). One instance a monitor; called from one thread."""

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic, sockets: Sockets | None = None) -> None:
        self._proc = proc
        self._clock = clock
        self._trees: dict[tuple[int, int], _Tree] = {}
        self._last: dict[tuple[int, int], Process] = {}
        self._all: dict[int, Stat] = {}
        self._all_at = -1e9
        self._walk_s = 0.0
        self._boot_monotonic = _boot_offset_s()
        self._kernel = KernelWaits(proc, clock)
        self._sockets = sockets or Sockets(proc, clock)

    def look(self, pid: int, start_ticks: int | None = None, suspect: bool = False) -> Process:
        """How the process does now. Another process under a recycled pid counts as gone. Never raises."""
        stat = read_stat(pid, self._proc)
        if stat is None or (start_ticks is not None and stat.start_ticks != start_ticks):
            return self._gone(pid, start_ticks)
        key = (pid, stat.start_ticks)
        tree = self._tree(key, stat, suspect)
        state = stat.state
        if state == "Z":  # a main thread that has ended before the others: the process lives
            state = self._letter_of_others(pid) or state
        alive = state not in ("Z", "X", "x")
        last = self._last.get(key)
        cpu_s = max(0.0, stat.cpu_s - tree.own_cpu_s)
        process = Process(
            pid=pid,
            alive=alive,
            state=state,
            cpu_s=max(cpu_s, last.cpu_s if last else 0.0),
            tree_cpu_s=max(cpu_s + stat.collected_cpu_s + tree.cpu_s, last.tree_cpu_s if last else 0.0),
            io_bytes=max(tree.io_bytes, last.io_bytes if last else 0),
            disk_bytes=max(tree.disk_bytes, last.disk_bytes if last else 0),
            net_bytes=tree.net_bytes,
            rss_bytes=stat.rss_bytes,
            started_at=stat.start_ticks * TICK_S + self._boot_monotonic,
            exited_at=None if alive else (last.exited_at if last and last.exited_at is not None else self._clock()),
            wchan=tree.wchan if suspect else "",
            name=stat.name,
        )
        if suspect and alive:
            process = replace(
                process,
                main_wait=tree.threads.main,
                blocked_threads=tree.threads.blocked,
                tracer=tree.tracer,
                children=tree.children,
                dead_children=tree.dead_children,
                stopped_children=tree.stopped_children,
                main_cpu_s=tree.threads.main_cpu_s,
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
                        rss_bytes=last.rss_bytes,
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
        moved = [self._io_bytes(pid) for pid in (key[0], *tree.pids)]
        tree.io_bytes, tree.disk_bytes = sum(each[0] for each in moved), sum(each[1] for each in moved)
        if suspect:
            quiet = {found.pid for found in below if found.name.startswith(_TELEMETRY)}
            tree.net_bytes = self._sockets.moved(key, (key[0], *(pid for pid in tree.pids if pid not in quiet)))
            by_age = sorted(below, key=lambda found: (found.start_ticks, found.pid))
            tree.children = tuple(found.name for found in by_age if found.state not in ("Z", "X"))[:MAX_CHILDREN]
            tree.dead_children = tuple((found.pid, found.killed_by) for found in by_age if found.state == "Z")[:MAX_CHILDREN]
            tree.stopped_children = tuple(found.pid for found in by_age if found.state == "T")[:MAX_CHILDREN]
            total_s = tree.threads.look(key, self._proc, now, self._kernel)
            # Only what they use between two near looks is taken off: taking off hours at once would make the rank look asleep for minutes.
            if tree.own_read is not None and now - tree.own_read[0] < 3 * TREE_OF_SUSPECTS_EVERY_S:
                tree.own_cpu_s += max(0.0, total_s - tree.own_read[1])
            tree.own_read = (now, total_s)
            tree.wchan = self._text(f"{key[0]}/wchan")
            tree.tracer = self._tracer(key[0]) if stat.state == "t" else ""
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

    def _io_bytes(self, pid: int) -> tuple[int, int]:
        """(by read() and write(), to and from storage): the second holds what goes through mapped memory."""
        counts: dict[str, int] = {}
        for line in self._text(f"{pid}/io").splitlines():
            name, _, value = line.partition(":")
            if value.strip().isdigit():
                counts[name] = int(value)
        return counts.get("rchar", 0) + counts.get("wchar", 0), counts.get("read_bytes", 0) + counts.get("write_bytes", 0)

    def _letter_of_others(self, pid: int) -> str:
        letters = [stat.state for tid in thread_ids(pid, self._proc) if tid != pid and (stat := read_stat(tid, f"{self._proc}/{pid}/task")) is not None]
        return next((letter for letter in letters if letter not in ("Z", "X", "x")), "")

    def _tracer(self, pid: int) -> str:
        found = next((line.split()[1] for line in self._text(f"{pid}/status").splitlines() if line.startswith("TracerPid:")), "0")
        stat = read_stat(int(found), self._proc) if found not in ("", "0") else None
        return f"{stat.name} (pid {found})" if stat is not None else ""

    def _text(self, name: str) -> str:
        try:
            with open(f"{self._proc}/{name}", encoding="utf-8", errors="replace") as file:
                return file.read(4096).strip()
        except OSError:
            return ""


def _boot_offset_s() -> float:
    """CLOCK_MONOTONIC minus CLOCK_BOOTTIME: start times in /proc count from boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_MONOTONIC) - time.clock_gettime(time.CLOCK_BOOTTIME)
