"""The exception that ended a rank, from what it leaves on disk: torchelastic's error file, then the redirected log's tail."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from rankwatch.model import Crash
from rankwatch.monitor.workers import Worker

TAIL_BYTES = 64 << 10
MAX_TRACEBACK = 8000
MAX_LINE = 500
MAX_ERROR_FILE_BYTES = 16 << 20  # it holds the whole message
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$')
_NOT_USER = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>", "/rankwatch/agent/", "/torchinductor_")
_TERMINATE = re.compile(r"terminate called after throwing an instance of '([^'\n]+)'\s*\n(?:.*what\(\):\s*(.*))?")
_PREFIX = re.compile(r"^(\[[^\]\n]{1,40}\]:\s?)+", re.M)  # "[rank1]: ", added by torchrun and by torch's own excepthook


def crash_on_disk(worker: Worker) -> Crash | None:
    """What the worker's files say; None when they say nothing. Reads files: call it from a helper thread, a file system may hang."""
    return from_error_file(worker.error_file) or from_log(worker.stderr) or (from_log(worker.stdout) if worker.stdout != worker.stderr else None)


def from_error_file(path: str) -> Crash | None:
    """torchelastic's error file, written by `record` in the rank; None when it is absent or not of that form."""
    try:
        with open(path, "rb") as file:
            document: Any = json.loads(file.read(MAX_ERROR_FILE_BYTES))
        message = document["message"]
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        text = str(message["message"] if isinstance(message, dict) else message)
        traceback = str(extra.get("py_callstack", ""))
        timestamp = extra.get("timestamp")
        kind, separator, rest = text.partition(": ")
        kind, rest = (kind, rest) if separator and kind.isidentifier() else ("", text)
        return Crash(
            type=kind,
            message=rest[:2000],
            where=user_frame(traceback),
            traceback=_bounded(traceback),
            source=f"error file {path}",
            at_wall=float(str(timestamp)) if str(timestamp or "").isdigit() else None,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def from_log(path: str) -> Crash | None:
    """The C++ exception that ended the process, else the last Python traceback, in the tail of a log; None when there is none."""
    text = tail(path)
    if ended := _TERMINATE.search(text):
        return Crash(type=ended[1], message=ended[2].strip()[:2000], source=f"log {path}")
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return None
    lines = _PREFIX.sub("", text[start:]).splitlines()
    body = [lines[0]]
    last = ""
    for line in lines[1:]:
        body.append(line)
        if line and not line.startswith((" ", "\t")):
            last = line
            break
    kind, _, message = last.partition(": ")
    traceback = "\n".join(body)
    return Crash(type=kind.strip(), message=message[:2000], where=user_frame(traceback), traceback=_bounded(traceback), source=f"log {path}")


def _bounded(traceback: str) -> str:
    """First and last frames of a long traceback; no message, however long, takes their place."""
    lines = [line if len(line) <= MAX_LINE else line[:MAX_LINE] + "..." for line in traceback.splitlines()]
    text = "\n".join(lines)
    if len(text) <= MAX_TRACEBACK:
        return text
    half = MAX_TRACEBACK // 2
    return text[:half].rpartition("\n")[0] + "\n  ...\n" + text[-half:].partition("\n")[2]


def tail(path: str, max_bytes: int = TAIL_BYTES) -> str:
    """The end of a text file; "" when it cannot be read."""
    if not path:
        return ""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - max_bytes))
            return file.read(max_bytes).decode("utf-8", "replace")
    except OSError:
        return ""


def user_frame(traceback: str) -> str:
    """`train.py:31:load_batch`: the innermost frame outside of installed packages, else the innermost one; "" without frames."""
    chosen = innermost = ""
    for line in traceback.splitlines():
        found = _FRAME.match(line)
        if not found:
            continue
        innermost = f"{found[1].rsplit('/', 1)[-1]}:{found[2]}:{found[3].strip()}"
        if not any(part in found[1] for part in _NOT_USER):
            chosen = innermost
    return chosen or innermost
