"""What NCCL's watchdog has printed in a rank's logs: that it has fired, that it takes the process down, that it aborts the communicator.

Only where torchrun redirects or tees the ranks' output is there a log. It is read from where the read before has ended, while ranks wait.
Source of the words: torch 2.9-2.14 ProcessGroupNCCL and NCCL 2.28, seen in recorded logs of 2.11; the order of the lines is all that counts,
their times have no year.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace

from rankwatch.model import Watchdog

FIRST_BYTES = 64 << 10
MOST_BYTES = 256 << 10  # of one read
MAX_LINES = 8
MAX_LINE = 240
_FIRED = re.compile(r"Watchdog caught collective operation timeout|Timeout at NCCL work: \d+|failure detected by watchdog at work sequence id: \d+")
_WORK = re.compile(r"SeqNum=(\d+), OpType=(\w+)")
_ENDS = re.compile(r"taking the entire process down|[Tt]erminating the process after attempting to dump")
_ABORTS = re.compile(r"Aborting ncclComm_|- Abort START")
_ABORTED = re.compile(r"- Abort COMPLETE")
_BEATS_NOT = re.compile(r"watchdog got stuck for \d+ seconds")
_PREFIX = re.compile(r"^(?:\[[^\]\n]{1,40}\]:\s?)*(?:\[[EIWF]\d{4} [\d:.]+ [^\]]*\]\s*)?(?:\[rank\d+\]:\s*)?")


def fold(before: Watchdog, text: str, now: float) -> Watchdog:
    """What is known after more of a log. now: when it was read."""
    found = before
    for line in text.splitlines():
        if "what():" in line or "terminated with exception" in line:
            continue  # the same words once more, in the exception that they became
        if _FIRED.search(line) or _BEATS_NOT.search(line):
            found = found if found.fired_at is not None else replace(found, fired_at=now)
            if (work := _WORK.search(line)) and not found.op:
                found = replace(found, seq=int(work[1]), op=work[2].lower())
        elif _ABORTED.search(line):
            found = replace(found, aborted_at=now)
        elif _ABORTS.search(line):
            found = found if found.aborts_at is not None else replace(found, aborts_at=now)
        elif _ENDS.search(line):
            found = found if found.ends_at is not None else replace(found, ends_at=now)
        else:
            continue
        said = _PREFIX.sub("", line, count=1).strip()[:MAX_LINE]
        if said not in found.lines and len(found.lines) < MAX_LINES:
            found = replace(found, lines=(*found.lines, said))
    return found


class RankLog:
    """The logs of one rank. `read` reads files: call it from a helper thread, one call at a time."""

    def __init__(self, paths: tuple[str, ...]) -> None:
        self._paths = tuple(dict.fromkeys(path for path in paths if path))
        self._offsets: dict[str, int] = {}
        self._rest: dict[str, str] = {}

    @property
    def known(self) -> bool:
        return bool(self._paths)

    def read(self) -> str:
        """What whole lines have been added since the call before, at first the end of each file."""
        return "".join(self._more(path) for path in self._paths)

    def _more(self, path: str) -> str:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = self._offsets.get(path, max(0, size - FIRST_BYTES))
                if start > size:
                    start = 0  # it was cut
                start = max(start, size - MOST_BYTES)
                file.seek(start)
                data = file.read(MOST_BYTES)
        except OSError:
            return ""
        self._offsets[path] = start + len(data)
        text = self._rest.get(path, "") + data.decode("utf-8", "replace")
        whole, newline, rest = text.rpartition("\n")
        self._rest[path] = rest[-MOST_BYTES:]
        return whole + newline
