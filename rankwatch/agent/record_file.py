"""A file of JSON lines that a rank appends to, whole lines at once, so that a crash keeps what was written."""

from __future__ import annotations

import json
import os

from rankwatch.agent.guard import getpid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class RecordFile:
    """Opened at the first line, by the process that writes it first. An OSError switches it off: the job never pays for it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._pid = 0

    def write(self, kind: str, **fields: Any) -> None:
        """Append {"kind": kind, ...}. Numbers that are not finite stand as NaN and Infinity."""
        if self._pid == -1 or self._pid not in (0, getpid()):
            return
        try:
            if not self._pid:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                self._pid = getpid()
            os.write(self._fd, json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n")
        except (OSError, TypeError, ValueError):
            self._pid = -1
