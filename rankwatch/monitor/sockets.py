"""Bytes that processes move over TCP, from the kernel's own count of each connection.

/proc/PID/io counts read() and write() only; recv() and send(), which every network library uses, are in no counter of a process
(measured on Linux 6.18). sock_diag tells them for each connection of this network namespace without any privilege.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

EVERY_S = 1.0
COST_FACTOR = 30.0  # a node with very many connections is asked the more rarely
MAX_FDS = 4096
_DEADLINE_S = 0.2
# linux/inet_diag.h, linux/tcp.h
_SOCK_DIAG_BY_FAMILY, _DUMP, _DONE, _ERROR = 20, 0x301, 3, 2
_INFO, _LISTEN = 2, 10
_MESSAGE_BYTES, _ACKED_AT = 72, 120


@dataclass(frozen=True, slots=True)
class Connection:
    """One TCP socket. bytes: acknowledged by the other side plus received."""

    inode: int
    local_port: int
    listens: bool
    bytes: int


@dataclass(slots=True)
class _Total:
    moved: int = 0
    last: dict[int, int] = field(default_factory=dict)  # inode -> bytes


class Sockets:
    """Bytes moved on the connections that a process tree has opened. Called from one thread; never raises."""

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic, dump: Callable[[], list[Connection]] | None = None) -> None:
        self._proc = proc
        self._clock = clock
        self._dump = dump or connections
        self._at = -1e9
        self._cost_s = 0.0
        self._opened: dict[int, int] = {}
        self._totals: dict[tuple[int, int], _Total] = {}

    def moved(self, key: tuple[int, int], pids: Iterable[int]) -> int:
        """Since the first call for this key (pid and start ticks of the rank). It only grows; what was moved before a socket's first sight counts once.

        Connections that the process accepted are left out: a scraper that reads a rank's metrics is no progress of the rank.
        """
        self._refresh()
        first = key not in self._totals
        total = self._totals.setdefault(key, _Total())
        found = {inode: self._opened[inode] for pid in pids for inode in self._inodes(pid) if inode in self._opened}
        if not first:
            total.moved += sum(max(0, count - total.last.get(inode, 0)) for inode, count in found.items())
        total.last = found
        return total.moved

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._at < max(EVERY_S * 0.9, COST_FACTOR * self._cost_s):
            return
        began = time.perf_counter()
        self._at = now
        seen = self._dump()
        served = {each.local_port for each in seen if each.listens}
        self._opened = {each.inode: each.bytes for each in seen if not each.listens and each.inode and each.local_port not in served}
        self._cost_s = time.perf_counter() - began

    def _inodes(self, pid: int) -> list[int]:
        found = []
        try:
            for number in os.listdir(f"{self._proc}/{pid}/fd")[:MAX_FDS]:
                try:
                    target = os.readlink(f"{self._proc}/{pid}/fd/{number}")
                except OSError:
                    continue
                if target.startswith("socket:["):
                    found.append(int(target[8:-1]))
        except OSError:
            return []
        return found


def connections() -> list[Connection]:
    """Every TCP socket of this network namespace; [] where the kernel refuses."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            found += _ask(family)
        except (OSError, struct.error):
            continue
    return found


def _ask(family: int) -> list[Connection]:
    found: list[Connection] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 4) as link:  # NETLINK_SOCK_DIAG
        link.settimeout(_DEADLINE_S)
        body = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, 0xFFFFFFFF) + bytes(48)
        link.send(struct.pack("=IHHII", 16 + len(body), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + body)
        until = time.monotonic() + _DEADLINE_S
        while time.monotonic() < until:
            data, at = link.recv(1 << 18), 0
            while at + 16 <= len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind in (_DONE, _ERROR) or length < 16:
                    return found
                if each := parse(data[at + 16 : at + length]):
                    found.append(each)
                at += (length + 3) & ~3
    return found


def parse(message: bytes) -> Connection | None:
    """One inet_diag_msg with its attributes; None when it is too short to be one."""
    if len(message) < _MESSAGE_BYTES:
        return None
    state = message[1]
    (port,) = struct.unpack_from(">H", message, 4)
    (inode,) = struct.unpack_from("=I", message, 68)
    at, count = _MESSAGE_BYTES, 0
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if length < 4:
            break
        if kind == _INFO and length >= 4 + _ACKED_AT + 16:  # tcpi_bytes_acked, tcpi_bytes_received: Linux 4.1
            acked, received = struct.unpack_from("=QQ", message, at + 4 + _ACKED_AT)
            count = int(acked + received)
        at += (length + 3) & ~3
    return Connection(int(inode), int(port), state == _LISTEN, count)
