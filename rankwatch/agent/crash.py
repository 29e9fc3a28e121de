"""The exception that ends this process, read in atexit from what Python has printed. No excepthook is touched."""

from __future__ import annotations

import os
import sys
import time

from rankwatch.agent.sources import is_users

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

TRACEBACK_BYTES = 2500


def ending_exception() -> dict[str, Any] | None:
    """{type, message, where, traceback, wall_ns} of the exception that went through the top of the main thread; None for any other end.

    Source: sys.last_exc (Python 3.12) and sys.last_value, which PyErr_Print sets before it calls sys.excepthook, whoever replaced that.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if not isinstance(error, BaseException):
        return None
    import traceback

    trace = error.__traceback__ or getattr(sys, "last_traceback", None)
    text = "".join(traceback.format_exception(type(error), error, trace))
    return {
        "type": type(error).__qualname__ if type(error).__module__ == "builtins" else f"{type(error).__module__}.{type(error).__qualname__}",
        "message": str(error)[:500],
        "where": where(trace),
        "traceback": text.encode("utf-8", "replace")[-TRACEBACK_BYTES:].decode("utf-8", "replace"),
        "wall_ns": time.time_ns(),
    }


def where(trace: TracebackType | None) -> str:
    """`train.py:31:load_batch`: the innermost frame of the user's own code; the innermost of all when there is none; "" without frames."""
    found = ""
    last = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        last = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno}:{code.co_name}"
        if is_users(code.co_filename):
            found = last
        trace = trace.tb_next
    return found or last
