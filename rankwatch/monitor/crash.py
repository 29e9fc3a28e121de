"""The exception that ended a rank, from what it leaves on disk: torchelastic's error file, then the redirected log's tail."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from rankwatch.model import Crash
from rankwatch.monitor.workers import Worker

TAIL_BYTES = 64 << 10
FATAL = "Fatal Python error"  # as diagnose.ends calls it
MAX_TRACEBACK = 8000
MAX_LINE = 500
MAX_ERROR_FILE_BYTES = 16 << 20  # it holds the whole message
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$')
_NOT_USER = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>", "/rankwatch/agent/", "/torchinductor_")
MAX_LINES_AFTER = 40  # the rest of a message, and what an end writes
_AT_END = re.compile(r"\s|\[[WEI]\d{4,}|frame #\d+|Exception (raised|ignored)|C\+\+ CapturedTraceback|.*Warning:")  # lines of torch and of Python's own end
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.M)
_FATAL_FRAME = re.compile(r'^\s+File "(.+)", line (\d+) in (.+)$')  # faulthandler writes no comma before "in"
_TERMINATE = re.compile(r"terminate called after throwing an instance of '([^'\n]+)'\s*\n(?:.*what\(\):\s*(.*))?")
_CHAINED = re.compile(
    r"^(?:The above exception was the direct cause of the following exception|During handling of the above exception, another exception occurred):$", re.M
)
_BEGIN = "Traceback (most recent call last):"
MAX_LINKS = 4  # as many as a rank tells itself
MAX_BEFORE = 16 << 10  # characters ahead of the last traceback in which those stand that it came of
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
            chain=links_before(traceback[: max(0, traceback.rfind(_BEGIN))]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def from_log(path: str) -> Crash | None:
    """What ended the process, in the tail of a log: a C++ exception, Python's report of a fatal signal, else the last Python traceback; None without any.

    faulthandler reports of a process that an abort ends as well: the C++ exception, which says why, comes first then.
    """
    text = tail(path)
    fatal = list(_FATAL.finditer(text))
    stack = _fatal_stack(_PREFIX.sub("", text[fatal[-1].start() :])) if fatal else ""
    if ended := _TERMINATE.search(text):
        return Crash(type=ended[1], message=(ended[2] or "").strip()[:2000], where=user_frame(stack), traceback=_bounded(stack), source=f"log {path}")
    if fatal:
        return Crash(FATAL, fatal[-1][1].strip()[:2000], where=user_frame(stack), traceback=_bounded(stack), source=f"log {path}")
    start = text.rfind(_BEGIN)
    if start < 0:
        return None
    lines = _PREFIX.sub("", text[start:]).splitlines()
    body, last = _one(lines)
    if len([line for line in lines[len(body) :] if line.strip() and not _AT_END.match(line)]) > MAX_LINES_AFTER:
        return None  # the process went on: the exception was caught
    kind, _, message = last.partition(": ")
    traceback = "\n".join(body)
    chain = links_before(_PREFIX.sub("", text[max(0, start - MAX_BEFORE) : start]))
    return Crash(kind.strip(), message[:2000], user_frame(traceback), _bounded(traceback), source=f"log {path}", chain=chain)


def links_before(text: str) -> tuple[tuple[str, str], ...]:
    """(type, message) of the exceptions that the one came of whose traceback follows right after `text`; the nearest first, () without any."""
    *parts, rest = _CHAINED.split(text)
    found: list[tuple[str, str]] = []
    for part in reversed(parts) if not rest.strip() else ():
        start = part.rfind(_BEGIN)
        if start < 0 or len(found) == MAX_LINKS:
            break
        kind, _, message = _one(part[start:].splitlines())[1].partition(": ")
        found.append((kind.strip()[:MAX_LINE], message[:MAX_LINE]))
        if part[:start].strip():
            break  # older lines of the log: this is where it began
    return tuple(found)


def _one(lines: list[str]) -> tuple[list[str], str]:
    """The lines of the traceback that `lines` begin with, and its last one: `ValueError: bad batch`; "" where it is not whole."""
    body = [lines[0]]
    for line in lines[1:]:
        body.append(line)
        if line and not line.startswith((" ", "\t")):
            return body, line
    return body, ""


def _fatal_stack(text: str) -> str:
    """faulthandler's stack of the thread that died, in the form of a traceback, innermost frame last; "" without frames."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("Current thread")), None)
    frames = []
    for line in lines[start + 1 :] if start is not None else ():
        found = _FATAL_FRAME.match(line)
        if not found:
            break
        frames.append(f'  File "{found[1]}", line {found[2]}, in {found[3]}')
    return "\n".join(["Traceback (most recent call last):", *reversed(frames)]) if frames else ""


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
