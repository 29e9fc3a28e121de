"""The exception that ends this process, read in atexit from what Python has printed. No excepthook is touched."""

from __future__ import annotations

import os
import sys

from rankwatch.agent.clock import clock
from rankwatch.agent.sources import is_users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType, TracebackType
    from typing import Any

MESSAGE_CHARACTERS = 500
TRACEBACK_BYTES = 2500
HEAD_BYTES = 600  # of a longer traceback: how the program got there
LINKS = 4  # exceptions behind the last one that are told
LINK_TYPE_CHARACTERS, LINK_MESSAGE_BYTES = 100, 200
FREE_BYTES = 500  # for links beside a traceback of full length; more are taken from it
_ARGUMENTS, _CAUSE, _CONTEXT = (BaseException.__dict__[name].__get__ for name in ("args", "__cause__", "__context__"))  # whatever a class makes of these


def ending_exception() -> dict[str, Any] | None:
    """`described` of the exception that went through the top of the main thread; None for any other end.

    Source: sys.last_exc (Python 3.12) and sys.last_value, which PyErr_Print sets before it calls sys.excepthook, whoever replaced that.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException):
        return None
    return described(error, error.__traceback__ or getattr(sys, "last_traceback", None))


def described(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """{type, message, where, traceback, wall_ns}, and `chain`, the links behind it, if there are any. However long the message and however deep the
    stack, the traceback has the first frames, the last ones and the exception's own line."""
    import traceback

    parts = [_cut(part) for part in traceback.format_exception(type(error), error, trace)]
    links = chain(error)
    found = {
        "type": named(error),
        "message": _text(error)[:MESSAGE_CHARACTERS],
        "where": where(trace),
        "traceback": _head_and_tail("".join(parts), TRACEBACK_BYTES - max(0, _size(links) - FREE_BYTES)),
        "wall_ns": clock.wall_ns(),
    }
    return {**found, "chain": links} if links else found


def chain(error: BaseException) -> list[dict[str, str]]:
    """[{type, message}] of what the exception was raised `from`, or while that was handled, the nearest first, at most LINKS.

    What torch raised may be behind an error of the job's own. No code of the exceptions' classes is run.
    """
    found: list[dict[str, str]] = []
    while len(found) < LINKS:
        behind = _CAUSE(error)
        if behind is None:
            behind = _CONTEXT(error)
        if behind is None:
            break
        message = plain_message(behind, LINK_MESSAGE_BYTES).encode("utf-8", "replace")[:LINK_MESSAGE_BYTES].decode("utf-8", "ignore")
        found.append({"type": named(behind)[-LINK_TYPE_CHARACTERS:], "message": message})
        error = behind
    return found


def named(error: BaseException) -> str:
    """`KeyError`, `library.errors.Refused`."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def plain_message(error: BaseException, characters: int) -> str:
    """Its plain arguments: str() of an exception may be code of the job."""
    arguments = _ARGUMENTS(error)
    try:
        return ", ".join(str(each) for each in arguments if type(each) in (str, int, float))[:characters]
    except ValueError:  # Python prints no number of more than 4300 digits
        return ""


def where(trace: TracebackType | None) -> str:
    """`train.py:31:load_batch`: the innermost frame of the user's own code; the innermost of all when there is none; "" without frames."""
    found = ""
    last = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        last = _line(code, trace.tb_lineno)
        if is_users(code.co_filename):
            found = last
        trace = trace.tb_next
    return found or last


def calling() -> str:
    """The same of the line that runs now: an exception's own frames begin where it is caught."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _line(frame.f_code, frame.f_lineno)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's __str__; traceback prints such an exception in the same words
        return "<exception str() failed>"


def _line(code: CodeType, number: int) -> str:
    return f"{os.path.basename(code.co_filename)}:{number}:{code.co_name}"


def _cut(part: str) -> str:
    """A frame, or an exception's own line with its message."""
    return part if len(part) <= MESSAGE_CHARACTERS else part[:MESSAGE_CHARACTERS].rstrip() + "...\n"


def _size(links: list[dict[str, str]]) -> int:
    return sum(len(link["type"].encode("utf-8", "replace")) + len(link["message"].encode("utf-8", "replace")) for link in links)


def _head_and_tail(text: str, most_bytes: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= most_bytes:
        return text
    tail_bytes = most_bytes - HEAD_BYTES - len("  ...\n")
    head = data[:HEAD_BYTES].rpartition(b"\n")[0]
    last = data[-tail_bytes:]
    tail = last.partition(b"\n")[2] or last
    return f"{head.decode('utf-8', 'ignore')}\n  ...\n{tail.decode('utf-8', 'ignore')}"
