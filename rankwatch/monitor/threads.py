"""The threads of a suspect: which of them are ours, and how long the others have slept in the kernel without a break."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from rankwatch.model import KernelWait
from rankwatch.monitor.kernel_waits import KernelWaits
from rankwatch.monitor.proc_stat import read_stat

EVERY_S = 4.0  # all threads; the few of interest at every look
MAX_BLOCKED = 4
MAX_THREADS = 4096
_OURS = ("rankwatch", "pt_workerserver")  # what runs in a rank on our behalf is no sign of its progress


@dataclass(slots=True)
class Threads:
    """What the last looks found in one process. asleep: thread -> letter, times it has run, since when both are so."""

    main: KernelWait | None = None
    main_cpu_s: float = 0.0
    blocked: tuple[KernelWait, ...] = ()  # other threads in state D, longest first
    asleep: dict[int, tuple[str, int, float]] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    read_at: float = -1e9

    def look(self, key: tuple[int, int], proc: str, now: float, kernel: KernelWaits) -> float:
        """Notes how long each thread of interest has slept without a break; CPU seconds of our own threads in there."""
        pid, own_s = key[0], 0.0
        asleep: dict[int, tuple[str, int, float]] = {}
        if now - self.read_at >= EVERY_S:
            self.read_at = now
            tids = set(thread_ids(pid, proc))
            self.own &= tids
        else:
            tids = {pid, *self.own, *self.asleep}
        for tid in tids:
            stat = read_stat(tid, f"{proc}/{pid}/task")
            if stat is None:
                continue
            if tid == pid:
                self.main_cpu_s = stat.cpu_s
            if stat.name.startswith(_OURS):
                own_s += stat.cpu_s
                self.own.add(tid)
            elif stat.state == "D" or (tid == pid and stat.state == "S"):
                ran = _times_run(pid, tid, proc)
                old = self.asleep.get(tid)
                asleep[tid] = old if old is not None and old[:2] == (stat.state, ran) else (stat.state, ran, now)
        self.asleep = asleep
        longest = sorted((tid for tid in asleep if tid != pid), key=lambda tid: asleep[tid][2])[:MAX_BLOCKED]
        looked_at, known = kernel.of(key, (pid, *longest)) if asleep else (now, {})
        waits = {tid: _wait(tid, asleep[tid], known.get(tid), looked_at, now) for tid in (pid, *longest) if tid in asleep}
        self.main = waits.get(pid)
        self.blocked = tuple(waits[tid] for tid in longest)
        return own_s


def _wait(tid: int, asleep: tuple[str, int, float], known: KernelWait | None, looked_at: float, now: float) -> KernelWait:
    """What was read of the thread counts only if it was in the sleep then that it is in now."""
    letter, _, since = asleep
    if known is None or known.state != letter or looked_at < since:
        return KernelWait(tid, letter, now - since)
    return replace(known, asleep_s=now - since)


def _times_run(pid: int, tid: int, proc: str) -> int:
    """How often the scheduler has given it a core: equal twice means one and the same sleep. -1 where the kernel does not count."""
    try:
        with open(f"{proc}/{pid}/task/{tid}/schedstat", encoding="ascii") as file:
            return int(file.read(200).split()[2])
    except (OSError, ValueError, IndexError):
        return -1


def thread_ids(pid: int, proc: str) -> list[int]:
    """[] for a process that is gone."""
    try:
        return [int(name) for name in os.listdir(f"{proc}/{pid}/task")[:MAX_THREADS]]
    except (OSError, ValueError):
        return []
