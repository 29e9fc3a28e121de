"""torch's C++ worker server on a private unix socket: the launcher reads the flight recorder through it, also while this process holds the GIL.

Two traps (torch 2.9-2.14): a `_WorkerServer` that is destroyed in a fork child takes the parent's listening socket with it and the parent
aborts, so one reference is never given back; and its construction sets SIGPIPE to SIG_IGN for the whole process.
"""

from __future__ import annotations

import ctypes
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SOCKET_PATH_LIMIT = 107
_SIGACTION_BYTES = 512  # larger than struct sigaction of any Linux libc


class WorkerServer:
    """One running server. `stop()` works once, and only in the process that started it."""

    def __init__(self, server: Any, path: str) -> None:
        self._server = server
        self._pid = os.getpid()
        self.path = path

    def stop(self) -> None:
        """Shut the server down if this is its process. The object itself stays for ever."""
        if self._server is not None and os.getpid() == self._pid:
            server, self._server = self._server, None
            server.shutdown()


def start(server_class: Callable[[str, int], Any], path: str) -> tuple[WorkerServer | None, str]:
    """(running server, "") or (None, reason). A stale socket of that name is removed. SIGPIPE's disposition is afterwards as it was."""
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        return None, f"the socket path has {len(os.fsencode(path))} bytes, a unix socket takes {SOCKET_PATH_LIMIT}: {path}"
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    disposition = _sigpipe_disposition()
    # The server's threads inherit this mask: where SIGPIPE is set to kill, a client that hangs up must not end the job.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        server = server_class(path, -1)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    finally:
        _set_sigpipe_disposition(disposition)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return WorkerServer(server, path), ""


def _sigpipe_disposition() -> Any:
    """The kernel's view: a handler that C code installed is not in Python's table, and signal.signal works in the main thread only."""
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    return action if ctypes.CDLL(None).sigaction(int(signal.SIGPIPE), None, action) == 0 else None


def _set_sigpipe_disposition(action: Any) -> None:
    if action is not None:
        ctypes.CDLL(None).sigaction(int(signal.SIGPIPE), action, None)
