"""The launcher's private socket: one JSON line in, one JSON document out, for processes of the same user on this machine.

It lies in the launcher's node-local 0700 directory with mode 0600, and the kernel names the user of whoever connects (SO_PEERCRED): files can be
handed on, that cannot. A thread a connection, AT_ONCE of them; each is cut after its time. Nothing here raises into the launcher once it runs.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

NAME = "control.sock"
SCHEMA = 1
MAX_PATH_BYTES = 107  # sockaddr_un.sun_path, less its final NUL
MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 64 << 20
AT_ONCE = 8
REQUEST_S = 2.0
"""A whole request may take so long."""
SEND_S = 10.0
"""A whole answer may take so long to be read."""
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred

Request = Mapping[str, Any]
Answer = dict[str, Any]


class ControlError(Exception):
    """Why a launcher gave no answer, in words. gone: no launcher listens there any more."""

    def __init__(self, text: str, gone: bool = False) -> None:
        super().__init__(text)
        self.gone = gone


class Control:
    """Answers requests on `path` until `stop`. answer: called in a thread of the connection's own; what it raises is the client's answer."""

    def __init__(self, path: str, answer: Callable[[Request], Answer]) -> None:
        self.path = path
        self._answer = answer
        self._socket: socket.socket | None = None
        self._free = threading.BoundedSemaphore(AT_ONCE)

    def start(self) -> None:
        """Begin to listen. OSError where that cannot be: a path that is too long, no place, no SO_PEERCRED on this system."""
        if not hasattr(socket, "SO_PEERCRED"):
            raise OSError(0, "this system does not tell who connects")
        if len(os.fsencode(self.path)) > MAX_PATH_BYTES:
            raise OSError(0, f"{self.path} is too long for a socket ({MAX_PATH_BYTES} bytes)")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(self.path)
            os.chmod(self.path, 0o600)
            listening.listen(AT_ONCE)
        except OSError:
            listening.close()
            raise
        self._socket = listening
        threading.Thread(target=self._accept, args=(listening,), name="rankwatch-control", daemon=True).start()

    def stop(self) -> None:
        """Listen no more; waits for nobody."""
        listening, self._socket = self._socket, None
        if listening is None:
            return
        try:
            listening.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        except OSError:
            pass
        listening.close()
        try:
            os.unlink(self.path)
        except OSError:
            pass  # its directory is gone already

    def _accept(self, listening: socket.socket) -> None:
        while self._socket is listening:
            try:
                client, _address = listening.accept()
            except OSError:
                if self._socket is not listening:
                    return
                time.sleep(0.1)  # no descriptor is free
                continue
            if peer_uid(client) != os.geteuid() or not self._free.acquire(blocking=False):
                client.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(client,), name="rankwatch-control-client", daemon=True).start()
            except RuntimeError:  # no thread to be had
                self._free.release()
                client.close()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client:
                try:
                    answer = {"schema": SCHEMA, **self._answer(_request(_line(client, MAX_REQUEST_BYTES, time.monotonic() + REQUEST_S)))}
                except Exception as error:  # a request that cannot be answered must not end the launcher's thread with a traceback
                    answer = {"schema": SCHEMA, "error": str(error) if isinstance(error, ControlError) else f"{type(error).__name__}: {error}"}
                client.settimeout(SEND_S)
                client.sendall(json.dumps(answer, default=str).encode("utf-8", "backslashreplace") + b"\n")
        except OSError:
            pass  # who asked has gone, or does not read
        finally:
            self._free.release()


def ask(path: str, request: Request, deadline_s: float) -> Answer:
    """The launcher's answer. ControlError where nobody answers in time, another user does, or what it says is an error."""
    until = time.monotonic() + deadline_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.settimeout(deadline_s)
            server.connect(path)
            if peer_uid(server) != os.geteuid():
                raise ControlError(f"{path} is another user's")
            server.sendall(json.dumps(request).encode() + b"\n")
            data = _line(server, MAX_ANSWER_BYTES, until)
    except TimeoutError:
        raise ControlError(f"the launcher has not answered within {deadline_s:g} s") from None
    except OSError as error:
        gone = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
        raise ControlError(f"no launcher listens at {path}: {error.strerror or error}", gone) from None
    if not data:
        raise ControlError("the launcher has closed the connection: it is just ending, or too many ask it at once")
    answer = _request(data)
    if isinstance(answer.get("error"), str):
        raise ControlError(answer["error"])
    return dict(answer)


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel noted it when it connected or listened."""
    return int(_CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])


def _line(connection: socket.socket, most_bytes: int, until: float) -> bytes:
    """The bytes up to the first newline or the end. TimeoutError, or ControlError for more than most_bytes."""
    got = bytearray()
    while b"\n" not in got[-65536:]:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        more = connection.recv(65536)
        if not more:
            break
        got += more
        if len(got) > most_bytes:
            raise ControlError(f"more than {most_bytes} bytes")
    return bytes(got.partition(b"\n")[0])


def _request(line: bytes) -> Request:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ControlError("that is no JSON") from None
    if not isinstance(found, dict):
        raise ControlError("that is no JSON object")
    return found
