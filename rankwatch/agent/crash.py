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


def ending_exception() -> dict[str, Any] | None:
    """`described` of the exception that went through the top of the main thread; None for any other end.

    Source: sys.last_exc (Python 3.12) and sys.last_value, which PyErr_Print sets before it calls sys.excepthook, whoever replaced that.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException):
        return None
    return described(error, error.__traceback__ or getattr(sys, "last_traceback", None))


def described(error: BaseException, trace: TracebackType | None) -> dict[str, Any]:
    """{type, message, where, traceback, wall_ns}. However long the message and however deep the stack, the traceback has the first frames, the
    last ones and the exception's own line."""
    import traceback

    parts = [_cut(part) for part in traceback.format_exception(type(error), error, trace)]
    return {
        "type": type(error).__qualname__ if type(error).__module__ == "builtins" else f"{type(error).__module__}.{type(error).__qualname__}",
        "message": _text(error)[:MESSAGE_CHARACTERS],
        "where": where(trace),
        "traceback": _head_and_tail("".join(parts)),
        "wall_ns": clock.wall_ns(),
    }


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


def _head_and_tail(text: str) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= TRACEBACK_BYTES:
        return text
    tail_bytes = TRACEBACK_BYTES - HEAD_BYTES - len("  ...\n")
    head = data[:HEAD_BYTES].rpartition(b"\n")[0]
    tail = data[-tail_bytes:].partition(b"\n")[2]
    return f"{head.decode('utf-8', 'ignore')}\n  ...\n{tail.decode('utf-8', 'ignore')}"
