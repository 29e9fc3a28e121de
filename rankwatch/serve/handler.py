"""One connection, in its own thread: the handshake, then each request's head within its bounds, the answer, and its bytes."""

from __future__ import annotations

import gzip
import secrets
import socket
import ssl
import time
from collections.abc import Mapping
from email.message import Message
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase
from typing import TYPE_CHECKING, Any
from zlib import crc32

from rankwatch.serve.http import Response, security_headers, wants_gzip

if TYPE_CHECKING:
    from rankwatch.serve.acceptor import Acceptor

RECEIVE_S = 5.0
"""A single read or write may take so long."""
REQUEST_S = 8.0
"""A whole request head may take so long, however its bytes trickle; also how long a kept connection may idle."""
ANSWER_S = 30.0
"""A whole answer may take so long."""
MAX_LINE = 4096
MAX_HEAD_BYTES = 32 << 10
"""All header lines of a request together: cookies of localhost are shared by all its ports."""
GZIP_FROM_BYTES = 1024


def cut(connection: socket.socket) -> None:
    """End a connection from another thread; its own, or the accepting one, then closes it."""
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # SSLSocket's own would let the thread that uses it go on in plain text
    except OSError:
        pass


class Handler(BaseHTTPRequestHandler):
    """The standard library's, with every part bounded, and nothing of a request echoed or logged."""

    server: Acceptor
    protocol_version = "HTTP/1.1"
    server_version = "rankwatch"
    sys_version = ""
    timeout = RECEIVE_S
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """The handshake, where there is one, then the requests of a connection."""
        if isinstance(self.connection, ssl.SSLSocket):
            try:
                self._shake_hands(self.connection)
            except ssl.SSLError as error:
                if error.reason == "HTTP_REQUEST":
                    socket.socket.sendall(self.connection, _PLAIN_HTTP)
                raise
        super().handle()

    def _shake_hands(self, connection: ssl.SSLSocket) -> None:
        connection.settimeout(0)
        try:
            connection.do_handshake()
            return
        except ssl.SSLWantReadError:  # our part is done, the client's is to come
            self.server.answered(connection)
        finally:
            connection.settimeout(self.timeout)
        connection.do_handshake()

    def handle_one_request(self) -> None:
        """As the standard library's, with a bounded head, one dispatch for every method, and a deadline for each part."""
        connections = self.server.connections
        try:
            connections.reading(self.connection, time.monotonic(), REQUEST_S)
            self.raw_requestline = self.rfile.readline(MAX_LINE + 1)
            if len(self.raw_requestline) > MAX_LINE:
                self.requestline, self.request_version, self.command = "", "", ""
                self._send(Response("the request line is too long\n", status=414), secrets.token_urlsafe(12), close=True)
                return
            if not self.raw_requestline:
                self.close_connection = True
                return
            if not self._parse_bounded():
                return
            connections.working(self.connection, time.monotonic(), ANSWER_S)
            if any(len(self.headers.get_all(name, ())) > 1 for name in _SINGLE):
                self.send_error(400)  # which of two counts is where attacks begin
                return
            headers = _plain(self.headers)
            nonce = secrets.token_urlsafe(12)
            response = self.server.answer(self.command, self.path, headers, self.request_version, nonce)
            # a body is never read; what follows it on the connection must not be taken for the next request
            body_comes = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
            self._send(response, nonce, close=body_comes or self.command not in ("GET", "HEAD"), headers=headers)
        except OSError:  # too slow, or gone
            self.close_connection = True

    def _parse_bounded(self) -> bool:
        whole = self.rfile
        self.rfile = _Head(whole, MAX_HEAD_BYTES)  # type: ignore[assignment]
        try:
            return self.parse_request()
        finally:
            self.rfile = whole

    def _send(self, response: Response, nonce: str, close: bool, headers: Mapping[str, str] | None = None) -> None:
        asked = headers or {}
        body, status = response.payload, response.status
        extra = {**security_headers(nonce), **response.headers}
        if status == 200:
            extra["ETag"] = f'W/"{crc32(body):08x}-{len(body)}"'
            if asked.get("if-none-match") == extra["ETag"]:
                status, body = 304, b""
        if len(body) >= GZIP_FROM_BYTES and wants_gzip(asked):
            body = gzip.compress(body, compresslevel=4, mtime=0)
            extra["Content-Encoding"] = "gzip"
        extra["Vary"] = "Accept, Accept-Encoding"
        self.close_connection = self.close_connection or close or status == 400
        if self.request_version == "HTTP/0.9":  # also what the standard library assumes of anything unreadable
            self.request_version = "HTTP/1.0"
        self.send_response(status)
        for name, value in extra.items():
            self.send_header(name, value.replace("\r", " ").replace("\n", " "))
        if status != 304:
            self.send_header("Content-Type", response.content_type)
            self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD" and body:
            for slow in self.server.connections.sending(self.connection, time.monotonic(), len(body)):
                cut(slow)
            self.wfile.write(body)
        self.server.answered(self.connection)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - the signature is the base class's
        """The standard library's own refusals, in our form: nothing of the request comes back."""
        self.command = getattr(self, "command", None) or ""
        self._send(Response("bad request\n", status=code), secrets.token_urlsafe(12), close=True)

    def handle_expect_100(self) -> bool:
        """No `100 Continue`: a body is never wanted, the answer itself says so."""
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the launcher's stderr belongs to the job."""


_SINGLE = ("Host", "Authorization", "Content-Length", "Transfer-Encoding")
_PLAIN_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nX-Content-Type-Options: nosniff\r\nContent-Length: 39\r\nConnection: close\r\n\r\n"
    b"this port speaks TLS: open it by https\n"
)


class _Head:
    """The lines of one request's head, up to so many bytes in all."""

    def __init__(self, whole: BufferedIOBase, limit_bytes: int) -> None:
        self._whole = whole
        self._left = limit_bytes

    def readline(self, limit: int = -1) -> bytes:
        line = self._whole.readline(min(limit, self._left + 1) if limit >= 0 else self._left + 1)
        self._left -= len(line)
        if self._left < 0:
            raise LineTooLong("head")
        return line


def _plain(headers: Message) -> dict[str, str]:
    return {name.lower(): str(value) for name, value in headers.items()}
