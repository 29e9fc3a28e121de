"""Documents of a run as its files hold them: read back with bounds, since a file may be cut, edited or another program's."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any

MAX_BYTES = 64 << 20
_FAR = 1e12  # seconds and ranks beyond that are no times and no ranks

INCIDENT: Mapping[str, str] = {
    **dict.fromkeys(("id", "verdict", "cause", "domain", "summary", "confidence", "closed_by", "at", "into"), "text"),
    **dict.fromkeys(("since", "opened_at", "updated_at", "closed_at", "as_of", "seen_at", "timeout_s", "timeout_left_s", "timeout_at"), "number"),
    "lost_rank_s": "number",
    **dict.fromkeys(("culprit_ranks", "waiting_ranks", "unknown_ranks", "was_ranks"), "ranks"),
    **dict.fromkeys(("advice", "evidence", "missing_evidence", "recorder_files"), "list of texts"),
    **dict.fromkeys(("history", "stack_groups", "groups"), "list of objects"),
    **dict.fromkeys(("group", "compile", "stacks", "crash", "action", "job", "run", "hosts", "pids", "places", "straggling"), "object"),
}
RUN: Mapping[str, str] = {"started_at": "number", "ended_at": "number", "exit_code": "number", "command": "list of texts", "state": "text", "ended_by": "text"}
"""key -> what its value is, where it is there and not null."""


def load(path: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object in a file. OSError, or ValueError that says why it is none, or which of `keys` has a value of another kind."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
        data = file.read(MAX_BYTES)
    try:
        doc = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(doc, dict):
        raise ValueError("it is no JSON object")
    for key, kind in keys.items():
        value = doc.get(key)
        if value is not None and not _KINDS[kind](value):
            raise ValueError(f"its {key!r} is no {kind}")
    return doc


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -_FAR < value < _FAR


def _is_ranks(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(rank, int) and 0 <= rank < _FAR for rank in value)


_KINDS: Mapping[str, Callable[[object], bool]] = {
    "text": lambda value: isinstance(value, str),
    "number": _is_number,
    "ranks": _is_ranks,
    "object": lambda value: isinstance(value, dict),
    "list of texts": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "list of objects": lambda value: isinstance(value, list) and all(isinstance(item, dict) for item in value),
}
