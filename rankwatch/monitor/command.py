"""The user's `--on-incident` command: started with incident.json on its stdin, never waited for in the loop's thread.

It keeps its deadline when the launcher ends before it: coreutils' `timeout`, where there is one, ends it then. So a page of the last moment
still goes out, as does the last word on every incident that the job's end has closed, and nothing lives on for ever.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rankwatch.monitor.pool import Pool

DEADLINE_S = 30.0
TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Call:
    """One run of the command. change: opened, escalated, closed. reason: why it is closed: recovered, merge, restart, job_ended."""

    change: str
    incident_id: str
    document: Callable[[], bytes] = field(repr=False)
    reason: str = ""
    path: str = ""  # of incident.json; it may not be written yet


class IncidentCommand:
    """Runs `command` through the shell for each change; one that outlives DEADLINE_S is killed with its children. No command: does nothing."""

    def __init__(self, command: str, say: Callable[[str], None]) -> None:
        self._command = command
        self._say = say
        self._pool = Pool("on-incident", 2, backlog=20)
        self._calls: deque[Call] = deque()  # those that no thread of the pool has taken yet
        self._finished = threading.Event()
        self._finishing = False
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """("on_incident", ok | failed | dropped) -> calls; nothing without a command. Those of the job's end count as ok once they have begun."""
        return {("on_incident", result): self._counts[result] for result in ("ok", "failed", "dropped")} if self._command else {}

    def run(self, change: str, incident_id: str, document: Callable[[], bytes], reason: str = "", path: str = "") -> None:
        """Start it for this change (opened, escalated, closed); dropped when 20 wait already."""
        if not self._command:
            return
        call = Call(change, incident_id, document, reason, path)
        self._calls.append(call)
        if self._pool.submit(self._next) is None:
            self._calls.remove(call)
            self._counts["dropped"] += 1

    def finish(self, calls: Iterable[Call]) -> None:
        """The launcher is about to end: start all that still waits and these, in this order, from a thread that waits for none of them."""
        if self._command and not self._finishing:
            self._finishing = True
            last = tuple(calls)
            threading.Thread(target=self._start_all, args=(last,), name="rankwatch-on-incident-end", daemon=True).start()

    def finished(self, timeout_s: float) -> bool:
        """Whether all that was handed to `finish` has been started within timeout_s."""
        return not self._finishing or self._finished.wait(max(0.0, timeout_s))

    def close(self) -> None:
        self._pool.close()

    def _next(self) -> None:
        if (call := self._taken()) is not None:
            self._run(call)

    def _taken(self) -> Call | None:
        try:
            return self._calls.popleft()
        except IndexError:  # `finish` has it
            return None

    def _start_all(self, last: tuple[Call, ...]) -> None:
        """What they complain of goes nowhere: a pipe would break under them when the launcher ends."""
        try:
            while (call := self._taken()) is not None:
                self._count(self._started(call, subprocess.DEVNULL) is not None)
            for call in last:
                self._count(self._started(call, subprocess.DEVNULL) is not None)
        finally:
            self._finished.set()

    def _started(self, call: Call, stderr: int) -> subprocess.Popen[bytes] | None:
        """The command, begun; None where it does not start, which is said."""
        environment: Mapping[str, str] = {
            **os.environ, "RANKWATCH_CHANGE": call.change, "RANKWATCH_INCIDENT": call.incident_id, "RANKWATCH_REASON": call.reason,
            "RANKWATCH_INCIDENT_JSON": call.path,
        }  # fmt: skip
        try:
            with tempfile.TemporaryFile() as given:  # not a pipe: a command may end without reading
                given.write(call.document())
                given.seek(0)
                return subprocess.Popen(_bounded(self._command), stdin=given, stdout=subprocess.DEVNULL, stderr=stderr, env=environment, start_new_session=True)
        except OSError as error:
            self._say(f"on-incident command does not start: {error}")
            return None

    def _count(self, well: bool) -> None:
        self._counts["ok" if well else "failed"] += 1

    def _run(self, call: Call) -> None:
        process = self._started(call, subprocess.PIPE)
        if process is None:
            self._count(False)
            return
        with process:
            complaint = _tail_until_end(process, time.monotonic() + DEADLINE_S)
            if complaint is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except OSError:
                    pass
                self._count(False)
                self._say(f"on-incident command ran longer than {DEADLINE_S:g} s and was ended: {self._command}")
                return
        self._count(process.returncode == 0)
        if process.returncode:
            last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
            self._say(f"on-incident command ended with exit code {process.returncode}: {last[0][:200]}")


def _bounded(command: str) -> list[str]:
    timeout = shutil.which("timeout")
    late_s = math.ceil(DEADLINE_S) + 1  # the launcher's own deadline comes first, it says so
    return [*([timeout, "-s", "KILL", str(late_s)] if timeout else []), "/bin/sh", "-c", command]


def _tail_until_end(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """The last of what it wrote on stderr, once it has closed it and ended; None at the deadline. A flood is read and dropped."""
    assert process.stderr is not None
    tail = b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([process.stderr], [], [], left_s)[0]:
            return None
        chunk = os.read(process.stderr.fileno(), 1 << 16)
        if not chunk:
            break
        tail = (tail + chunk)[-TAIL_BYTES:]
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return tail
