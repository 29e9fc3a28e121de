"""The last moment of the launcher's process, where a thread of ours is still inside one of torch's calls.

A daemon thread that comes back from C++ while Python shuts down is ended there, and that aborts the process: seen as exit code -6 of a launcher whose
job had ended with 0 (Python 3.11, torch 2.13, a look into torchrun's store). Such a thread gets a moment to end; else the process leaves without
shutting Python down, with the exit code that it was about to return.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time

IN_TORCH = "rankwatch-discovery"
"""Name of threads that call torch's store."""
WAIT_S = 0.5

_code: int | None = None


def watch() -> None:
    """Call before torch is imported: of what is registered for the end, the first comes last."""
    atexit.register(_leave)


def returns(code: object) -> None:
    """The process is about to end with this, as SystemExit has it: a number, None for 0. Of anything else Python makes the exit code itself."""
    global _code
    _code = 0 if code is None else code if isinstance(code, int) else None


def _leave() -> None:
    until = time.monotonic() + WAIT_S
    inside = [thread for thread in threading.enumerate() if thread.name == IN_TORCH]
    for thread in inside:
        thread.join(max(0.0, until - time.monotonic()))
    if _code is None or not any(thread.is_alive() for thread in inside):
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(_code & 0xFF)
