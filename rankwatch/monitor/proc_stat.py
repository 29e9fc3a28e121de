"""One line of /proc: a process or a thread as the scheduler sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


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
    killed_by: int = 0  # signal that ended it, of one that nobody has collected; 0 also where the kernel does not tell us


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
        cpu_s=(int(fields[11]) + int(fields[12])) * TICK_S,
        collected_cpu_s=(int(fields[13]) + int(fields[14])) * TICK_S,
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        killed_by=int(fields[49]) & 0x7F if len(fields) > 49 else 0,
    )
