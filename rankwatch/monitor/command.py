"""The user's `--on-incident` command: started with incident.json on its stdin, never waited for in the loop's thread."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from rankwatch.monitor.pool import Pool

DEADLINE_S = 30.0


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
            process = subprocess.Popen(
                self._command,
                shell=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._say(f"on-incident command does not start: {error}")
            return
        try:
            _, complaint = process.communicate(document, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            try:
                os.killpg(process.pid, 9)
            except OSError:
                pass
            process.wait()
            self._say(f"on-incident command ran longer than {DEADLINE_S:g} s and was ended: {self._command}")
            return
        if process.returncode:
            last = complaint.decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
            self._say(f"on-incident command ended with exit code {process.returncode}: {last[0][:200]}")
