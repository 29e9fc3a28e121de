"""The user's `--on-incident` command: started with incident.json on its stdin, never waited for in the loop's thread.

It keeps its deadline when the launcher ends before it: coreutils' `timeout`, where there is one, ends it then. So a page of the last moment
still goes out, and nothing lives on for ever.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable

from rankwatch.monitor.pool import Pool

DEADLINE_S = 30.0
TAIL_BYTES = 4096


class IncidentCommand:
    """Runs `command` through the shell for each change; one that outlives DEADLINE_S is killed with its children. No command: does nothing."""

    def __init__(self, command: str, say: Callable[[str], None]) -> None:
        self._command = command
        self._say = say
        self._pool = Pool("on-incident", 2, backlog=20)

    def run(self, change: str, incident_id: str, document: Callable[[], bytes]) -> None:
        """Start it for this change (opened, escalated, closed); dropped when 20 wait already."""
        if self._command:
            self._pool.submit(lambda: self._run(change, incident_id, document()))

    def close(self) -> None:
        self._pool.close()

    def _run(self, change: str, incident_id: str, document: bytes) -> None:
        environment = {**os.environ, "RANKWATCH_CHANGE": change, "RANKWATCH_INCIDENT": incident_id}
        try:
            with tempfile.TemporaryFile() as given:  # not a pipe: a command may end without reading
                given.write(document)
                given.seek(0)
                process = subprocess.Popen(
                    _bounded(self._command),
                    stdin=given,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._say(f"on-incident command does not start: {error}")
            return
        with process:
            complaint = _tail_until_end(process, time.monotonic() + DEADLINE_S)
            if complaint is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except OSError:
                    pass
                self._say(f"on-incident command ran longer than {DEADLINE_S:g} s and was ended: {self._command}")
                return
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
