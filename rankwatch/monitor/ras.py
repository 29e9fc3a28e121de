"""NCCL's RAS service as a second opinion: asked over its socket, in its own text, while something is suspected in a group on NCCL.

RAS counts launches on the host by communicator: it sees a rank that has not come and a process that answers no more, and is blind to a kernel
that does not run. A healthy job looks uneven in one poll of seven, so only what two polls say alike counts. All jobs of a user on a host
share one port unless NCCL_RAS_ADDR says otherwise (the listeners bind with SO_REUSEPORT): an answer counts only where its processes are ours.
The variable is never set for the ranks: an address that cannot be bound would cost them their RAS.
Source: NCCL 2.24-2.28, src/ras/client.cc and client_support.cc; recordings of 2.28.9.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from rankwatch.model import Ras, RasProblem, RasRank
from rankwatch.monitor.pool import Job, Pool

DEFAULT_ADDRESS = "localhost:28028"
EVERY_S = 2.0
KEEP_S = 10.0
CONNECT_S = 1.0
GATHER_S = 1  # how long RAS itself waits for its peers; it adds some for each hop
ANSWER_S = 5.0
MAX_BYTES = 1 << 18
MAX_PROBLEMS = 16
_BLOCK = re.compile(r"(?:#\S+ \((?P<communicator>\w+)\) )?(?P<kind>[A-Z]{3,})$")
_RANK = re.compile(r"  Rank (?P<rank>\d+) (?P<what>.*)-- GPU (?P<gpu>\S+) managed by process (?P<pid>\d+) on node (?P<node>\S+)")
_PROCESS = re.compile(r"  Process (?P<pid>\d+) on node (?P<node>\S+) managing GPUs? (?P<gpu>.+)")
_LAUNCHED = re.compile(r"launched up to operation (\d+)")
_TOGETHER = re.compile(r"  \d+ ranks have ")


class RasWatch:
    """Called from the loop's thread only; the question itself runs in a helper."""

    def __init__(self, environ: Mapping[str, str], ask: Callable[[str], str] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._address = environ.get("NCCL_RAS_ADDR", "").strip() or DEFAULT_ADDRESS
        self._off = "NCCL_RAS_ENABLE=0 is set in the job's environment" if environ.get("NCCL_RAS_ENABLE", "").strip() == "0" else ""
        self._ask, self._clock = ask or question, clock
        self._pool = Pool("ras", 1)
        self._job: Job[str] | None = None
        self._asked_at = -1e9
        self._last: Ras | None = None  # the newest answer, unconfirmed
        self._told: Ras | None = None

    def look(self, pids: Mapping[int, int]) -> Ras | None:
        """What RAS says, as far as two polls agree; starts a poll where one is due. pids: process of each local rank. None until there is an answer."""
        now = self._clock()
        if self._off:
            return Ras("off", now, note=self._off)
        if self._job is not None and self._job.done:
            job, self._job = self._job, None
            newest = self._read(job, pids, now)
            self._told, self._last = agreed(self._last, newest), newest
        if self._job is None and now - self._asked_at >= EVERY_S:
            self._asked_at = now
            self._job = self._pool.submit(lambda: self._ask(self._address))
        return self._told if self._told is not None and now - self._told.at <= KEEP_S else None

    def close(self) -> None:
        """Let the helper end."""
        self._pool.close()

    def _read(self, job: Job[str], pids: Mapping[int, int], now: float) -> Ras:
        if job.value is not None:
            return ours(parse(job.value, now), pids)
        if isinstance(job.error, ConnectionRefusedError):
            return Ras("refused", now, note=f"nobody listens at {self._address}")
        return Ras("silent", now, note=f"no answer at {self._address}: {job.error}")


def question(address: str) -> str:
    """RAS's status text. OSError where nobody answers within some seconds, or something else does."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + ANSWER_S
    with socket.create_connection((host.strip("[]") or "localhost", int(port)), CONNECT_S) as peer:
        peer.sendall(b"CLIENT PROTOCOL 2\n")
        if not _line(peer, until).startswith(b"SERVER PROTOCOL "):
            raise OSError("not NCCL's RAS")
        peer.sendall(b"TIMEOUT %d\n" % GATHER_S)
        if _line(peer, until).strip() != b"OK":
            raise OSError("RAS refuses a timeout")
        peer.sendall(b"STATUS\n")
        text = b""
        while part := _receive(peer, until):
            text += part
            if len(text) > MAX_BYTES:
                raise OSError(f"the answer is longer than {MAX_BYTES} bytes")
    return text.decode("utf-8", "replace")


def _line(peer: socket.socket, until: float) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < 1024:
        part = _receive(peer, until)
        if not part:
            raise OSError("RAS has closed the connection")
        line += part
    return line


def _receive(peer: socket.socket, until: float) -> bytes:
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError(f"not within {ANSWER_S:g} s")
    peer.settimeout(left_s)
    return peer.recv(1 << 16)


def parse(text: str, at: float) -> Ras:
    """RAS's status text as it stands. Ranks are those of the communicator; state `unread` for what is no such text."""
    lines = text.splitlines()
    if not any(line.startswith("NCCL version ") for line in lines) or "Job summary" not in lines:
        return Ras("unread", at, note="its answer is of a format that is not known")
    problems: list[RasProblem] = []
    block: re.Match[str] | None = None
    launched: int | None = None
    for line in lines[_from(lines, "Errors") :]:
        if found := _BLOCK.match(line):
            block = found
        elif not line.startswith("  "):
            block = None
        elif block is not None and (entry := _entry(line, launched)):
            if problems:
                problems[-1] = replace(problems[-1], ranks=(*problems[-1].ranks, entry))
        elif block is not None and _TOGETHER.match(line):
            launched = _operation(line)
        elif block is not None and line.strip():
            launched = None
            problems.append(RasProblem(block["kind"], line.strip(), block["communicator"] or ""))
    return Ras("problems" if problems else "ok", at, tuple(problems[:MAX_PROBLEMS]), _processes(lines))


def _from(lines: list[str], title: str) -> int:
    return next((number for number, line in enumerate(lines) if line == title), len(lines))


def _entry(line: str, launched: int | None) -> RasRank | None:
    if found := _RANK.match(line):
        own = 0 if "not launched any" in found["what"] else _operation(found["what"])
        return RasRank(int(found["rank"]), int(found["pid"]), found["gpu"], found["node"], launched=own if own is not None else launched)
    if found := _PROCESS.match(line):
        return RasRank(-1, int(found["pid"]), found["gpu"].strip(), found["node"])
    return None


def _operation(text: str) -> int | None:
    found = _LAUNCHED.search(text)
    return int(found[1]) if found else None


def _processes(lines: list[str]) -> int | None:
    """`Processes (total)` of the summary: the last number but one of its only row."""
    for line in lines[: _from(lines, "Errors")]:
        words = line.split()
        if len(words) == 5 and all(word.isdigit() for word in words):
            return int(words[3])
    return None


def ours(ras: Ras, pids: Mapping[int, int]) -> Ras:
    """With the global ranks of our processes; `foreign` where it names processes and none of them is ours."""
    rank_of = {pid: rank for rank, pid in pids.items()}
    named = {entry.pid for problem in ras.problems for entry in problem.ranks}
    if named and not named & rank_of.keys():
        return Ras("foreign", ras.at, processes=ras.processes, note="it speaks of processes of another job: two jobs share one RAS port")
    problems = tuple(replace(problem, ranks=tuple(replace(entry, rank=rank_of.get(entry.pid)) for entry in problem.ranks)) for problem in ras.problems)
    return replace(ras, problems=problems)


def agreed(before: Ras | None, newest: Ras) -> Ras | None:
    """What two polls in a row say alike, numbers included; None while that is not known."""
    if newest.state != "problems":
        return newest
    if before is None:
        return None
    if before.state != "problems":
        return replace(newest, state="ok", problems=(), note="") if before.state == "ok" else None
    same = tuple(problem for problem in newest.problems if problem in before.problems)
    return replace(newest, problems=same, state="problems" if same else "ok")
