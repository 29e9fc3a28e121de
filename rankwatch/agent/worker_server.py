"""torch's C++ worker server on a private unix socket: the launcher reads the flight recorder through it, also while this process holds the GIL.

Traps (torch 2.9-2.14): a `_WorkerServer` that is destroyed in a fork child takes the parent's listening socket with it and the parent aborts,
so one reference is never given back. Its construction sets SIGPIPE to SIG_IGN for the whole process, and writes a line to stderr. Its
`shutdown()` holds the GIL and joins every handler, for as long as a client pleases, and for ever where a handler waits for the GIL.

So `shutdown()` is never called. The end of the process is the server's end: the socket's name goes, connections are hung up on, a handler
gets a bounded time to finish, and the thread that listens lives on until exit. Measured with torch 2.13: of 108 ends of a process (end of the
script, destroy_process_group, exception, sys.exit, os._exit, SIGTERM; no client, silent, half a request, unread answer, a stream of requests,
of ones that need the GIL) none hung and none aborted; with shutdown() 7 of 24 hung.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

from rankwatch.agent.clock import clock
from rankwatch.agent.guard import getpid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SOCKET_PATH_LIMIT = 107
ANSWER_S = 0.1  # an answer that is under way at the end may take this long
STOP_S = 0.3  # and after that no reader is waited for
_SIGACTION_BYTES = 512  # larger than struct sigaction of any Linux libc
_ADDRESS_BYTES = 128  # larger than struct sockaddr_un
_AF_UNIX, _SHUT_RD, _SHUT_RDWR = 1, 0, 2
_SOL_SOCKET, _SO_ACCEPTCONN = 1, 30


class WorkerServer:
    """One running server. `stop()` works once, and only in the process that started it."""

    def __init__(self, server: Any, path: str) -> None:
        self._server = server
        self._pid = getpid()
        self._stopped = False
        self.path = path

    def stop(self) -> None:
        """Take the name away and hang up on all clients; at most STOP_S, with the GIL released. Only where the process is about to end."""
        if self._stopped or getpid() != self._pid:
            return
        self._stopped = True
        try:
            os.unlink(self.path)
        except OSError:
            pass
        started_ns = clock.now_ns()
        while (passed_s := (clock.now_ns() - started_ns) / 1e9) < STOP_S and _hang_up(self.path, _SHUT_RD if passed_s < ANSWER_S else _SHUT_RDWR):
            time.sleep(0.005)


def start(server_class: Callable[[str, int], Any], path: str) -> tuple[WorkerServer | None, str]:
    """(running server, "") or (None, reason). A stale socket of that name is removed. SIGPIPE's disposition is afterwards as it was."""
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        return None, f"the socket path has {len(os.fsencode(path))} bytes, a unix socket takes {SOCKET_PATH_LIMIT}: {path}"
    if not takes_output(2):
        return None, "it writes a line to stderr when it starts, and nobody reads this stderr: it would block there"
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    disposition = _sigpipe_disposition()
    # The server's threads inherit this mask: where SIGPIPE is set to kill, a client that hangs up must not end the job.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    pending = signal.SIGPIPE in signal.sigpending()
    try:
        server = server_class(path, -1)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    finally:
        if not pending:
            signal.sigtimedwait({signal.SIGPIPE}, 0)  # of its line to a stderr that is closed
        _set_sigpipe_disposition(disposition)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return WorkerServer(server, path), ""


def takes_output(fd: int) -> bool:
    """Whether a short line written to `fd` comes back at once, if only with an error: not so for a pipe that is full."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def _hang_up(path: str, how: int) -> int:
    """Shut down this process's ends of all connections to socket `path`, and tell how many there are."""
    libc = ctypes.CDLL(None)
    wanted = os.fsencode(path)
    found = 0
    for name in os.listdir("/proc/self/fd"):
        if _bound_to(libc, int(name)) != wanted:
            continue
        try:
            fd = os.dup(int(name))  # the number may be another file's the next moment, the copy stays this one
        except OSError:
            continue
        try:
            if _bound_to(libc, fd) == wanted and not _listens(libc, fd):
                found += 1
                libc.shutdown(fd, how)
        finally:
            os.close(fd)
    return found


def _bound_to(libc: ctypes.CDLL, fd: int) -> bytes:
    """Path of a unix socket's own end, which an accepted connection has from the socket that listens; b"" for anything else."""
    address, size = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint32(_ADDRESS_BYTES)
    if libc.getsockname(fd, address, ctypes.byref(size)) or int.from_bytes(address.raw[:2], sys.byteorder) != _AF_UNIX:
        return b""
    return address.raw[2:].partition(b"\0")[0]


def _listens(libc: ctypes.CDLL, fd: int) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_uint32(4)
    return libc.getsockopt(fd, _SOL_SOCKET, _SO_ACCEPTCONN, ctypes.byref(value), ctypes.byref(size)) != 0 or value.value != 0


def _sigpipe_disposition() -> Any:
    """The kernel's view: a handler that C code installed is not in Python's table, and signal.signal works in the main thread only."""
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    return action if ctypes.CDLL(None).sigaction(int(signal.SIGPIPE), None, action) == 0 else None


def _set_sigpipe_disposition(action: Any) -> None:
    if action is not None:
        ctypes.CDLL(None).sigaction(int(signal.SIGPIPE), action, None)
