"""Questions to a rank's C++ worker server over its private unix socket. It answers without the GIL, in about a millisecond.

Every question has one deadline over connecting, sending and receiving together. That a socket accepts says nothing about its rank: a
surviving child keeps it listening, and a stopped process still has a backlog.
Source: handlers of torch 2.9-2.14, run; which of them exist differs by version and build, so the list is asked for once.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from typing import Any

CALL_DEADLINE_S = 1.0
MAX_ANSWER_BYTES = 64 << 20
_MAX_HEAD_BYTES = 64 << 10
_UCRED = struct.Struct("iII")  # pid, uid, gid
_COMPILE_COUNTERS = ("dynamo_compile", "compile_", "_compile", "entire_forward", "entire_backward", "autotuner")
GENERIC, NCCL = "fr_trace_json", "dump_nccl_trace_json"


class ServerError(Exception):
    """The question was not answered; the text says why. silent: there is a server and it let the deadline pass."""

    def __init__(self, text: str, silent: bool = False) -> None:
        super().__init__(text)
        self.silent = silent


class WorkerServer:
    """One rank's server at `path`. Not thread-safe: at most one question at a time (the reader keeps to that)."""

    def __init__(self, path: str, deadline_s: float = CALL_DEADLINE_S) -> None:
        self.path = path
        self.deadline_s = deadline_s
        self._handlers: frozenset[str] | None = None

    def handlers(self) -> frozenset[str]:
        """Names of what this server answers; asked once."""
        if self._handlers is None:
            names = _loads(self._call("GET", "/handler/"))
            self._handlers = frozenset(str(name) for name in names) if isinstance(names, list) else frozenset()
        return self._handlers

    def forget(self) -> None:
        """Ask for the handlers again: another process owns the socket now."""
        self._handlers = None

    def ping(self) -> None:
        """Return when the server answers, ServerError otherwise."""
        self._post("ping")

    def status(self) -> dict[str, Any] | None:
        """NCCL's recorder without its entries (0.4 ms); None where this torch has no NCCL recorder."""
        if NCCL not in self.handlers():
            return None
        return _loads_object(self._post(f"{NCCL}?includecollectives=false"))

    def recorders(self) -> dict[str, bytes]:
        """Every flight recorder of the process with its entries, as JSON text by handler name. Costs about 25 us an entry in the rank, no GIL."""
        return {name: self._post(name) for name in (GENERIC, NCCL) if name in self.handlers()}

    def wait_counters(self) -> dict[str, dict[str, Any]]:
        """torch's wait counters: {name: {active_count, total_calls, ...}}; {} where there are none."""
        if "wait_counter_values" not in self.handlers():
            return {}
        return {str(k): v for k, v in _loads_object(self._post("wait_counter_values")).items() if isinstance(v, dict)}

    def traceback(self) -> str:
        """faulthandler's text of all Python threads. Needs the GIL: while it is held this ends in ServerError, and the request lingers in the rank."""
        return self._post("dump_traceback").decode("utf-8", "replace")

    def _post(self, target: str) -> bytes:
        return self._call("POST", f"/handler/{target}")

    def _call(self, method: str, target: str) -> bytes:
        deadline = time.monotonic() + self.deadline_s
        request = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self.deadline_s)
                connection.connect(self.path)
                _check_user(connection)
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                connection.sendall(request)
                head, body = _receive(connection, deadline)
        except (OSError, ValueError) as error:
            # A full backlog refuses with EAGAIN at once: nobody accepts, as with a stopped process.
            silent = isinstance(error, (TimeoutError, BlockingIOError))
            raise ServerError(f"worker server did not answer {target}: {error or type(error).__name__}", silent) from error
        words = head.split(None, 2)
        if len(words) < 2 or words[1] != b"200":
            raise ServerError(f"worker server answered {target} with {head[:80].decode('latin-1')!r}")
        return body


def compiles(counters: dict[str, dict[str, Any]]) -> bool:
    """Whether torch's own counters say that a compile (or run-time tuning of kernels) is going on."""
    return any(value.get("active_count", 0) and any(word in name for word in _COMPILE_COUNTERS) for name, value in counters.items())


def _check_user(connection: socket.socket) -> None:
    """PermissionError unless this user or root listens: a socket of the rank's name that another user has made is not asked."""
    uid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
    if uid not in (os.geteuid(), 0):
        raise PermissionError(0, f"the socket is another user's (uid {uid})")


def _receive(connection: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    """Head and body up to the promised length or the end of the stream; TimeoutError at the deadline.

    The body of megabytes is put together once: every more copy of it would stay in the launcher's size for good.
    """
    head, told = b"", False  # told: the head is complete
    parts: list[bytes] = []
    length = 0
    wanted: int | None = None
    while wanted is None or length < wanted:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        connection.settimeout(left)
        part = connection.recv(1 << 18)
        if not part:
            if wanted is not None:
                raise OSError(f"answer ended after {length} of {wanted} bytes")
            break
        if not told:
            head, separator, part = (head + part).partition(b"\r\n\r\n")
            told = bool(separator)
            if not told:
                if len(head) > _MAX_HEAD_BYTES:
                    raise OSError(f"head of the answer is longer than {_MAX_HEAD_BYTES} bytes")
                continue
            wanted = _promised(head)
        parts.append(part)
        length += len(part)
        if length > MAX_ANSWER_BYTES:
            raise OSError(f"answer is longer than {MAX_ANSWER_BYTES} bytes")
    return head if told else b"", b"".join(parts)[:wanted]


def _promised(head: bytes) -> int | None:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    return None


def _loads(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"worker server's answer is no JSON: {error}") from error


def _loads_object(text: bytes) -> dict[str, Any]:
    value = _loads(text)
    if not isinstance(value, dict):
        raise ServerError("worker server's answer is no JSON object")
    return value
