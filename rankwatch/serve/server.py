"""The launcher's HTTP server: standard library, hardened so that no client can hold up a scrape or the job.

A thread a connection; a connection that does not finish its request or does not read its answer is cut. Routes run behind a semaphore, the
open paths behind one of their own, so that slow pages never keep Prometheus out. Nothing here raises into the launcher once it runs.
"""

from __future__ import annotations

import errno
import gzip
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32

from rankwatch.serve import address
from rankwatch.serve.http import (
    OPEN_PATHS,
    Request,
    Response,
    Route,
    find,
    host_allowed,
    is_loopback,
    security_headers,
    split_target,
    token_given,
    wants_gzip,
)

RECEIVE_S = 5.0
"""A single read or write may take so long."""
REQUEST_S = 8.0
"""A whole request head may take so long, however its bytes trickle; also how long a kept connection may idle."""
POLL_S = 1.0
"""How often the accepting thread looks for connections that are past their time."""
ANSWER_S = 30.0
"""A whole answer may take so long."""
MAX_LINE = 4096
MAX_CONNECTIONS = 256
AT_ONCE = 32
PORTS_TRIED = 32
GZIP_FROM_BYTES = 1024

__all__ = ["Request", "Response", "Route", "Server"]


class Server:
    """Serves `routes` on `listen` ("HOST:PORT", "[V6]:PORT" or "off"; port 0 is any free one).

    routes: path -> Route; one that ends in "/" also takes what lies below it. token: asked for everything but /metrics and /healthz where given;
    without it a `listen` beyond loopback becomes 127.0.0.1. hosts: names beside localhost under which a loopback server may be reached.
    `notice`: after start, what a person should know ("" for nothing): no token, the port was taken and by whom, or why nothing is served.
    """

    def __init__(self, listen: str, routes: Mapping[str, Route], token: str | None = None, hosts: Iterable[str] = ()) -> None:
        self.notice = ""
        self.url = ""
        self.errors = 0
        self._off = listen.strip().lower() == "off"
        self._host, self._port = ("", 0) if self._off else address.parse(listen)
        self._routes = dict(routes)
        self._token = token or ""
        self._hosts = tuple(hosts)
        self._http: _Listener | None = None
        if not self._off and not self._token and not is_loopback(self._host):
            self.notice = (
                f"--listen {listen}: beyond this machine's own loopback address, pages with stacks and paths need a token; "
                "listening on 127.0.0.1 only; give a token with --token-file FILE"
            )
            self._host = "127.0.0.1"

    def start(self) -> str:
        """Begin to serve; the URL, or "" where that is off or impossible (then `notice` says why). Never raises for the network's sake."""
        if self._off or self._http is not None:
            return self.url
        try:
            family, host = address.resolve(self._host)
            self._http = self._bind(family, host)
        except OSError as error:
            self._note(f"nothing is served: cannot listen on {self._host}:{self._port}: {error.strerror or error}; files and lines are written all the same")
            return ""
        self.url = address.url(self._host, self._http.server_address[1])
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": POLL_S}, name="rankwatch-http", daemon=True).start()
        return self.url

    @property
    def port(self) -> int:
        """The one that it listens on, 0 while it does not."""
        http = self._http
        return http.server_port if http is not None else 0

    def stop(self) -> None:
        """Stop accepting and cut every connection, at once."""
        http, self._http = self._http, None
        if http is not None:
            _cut(http.socket)  # wakes the accepting thread; where the system does not, it wakes within POLL_S
            http.shutdown()
            http.server_close()
            http.cut_all()

    def _note(self, text: str) -> None:
        self.notice = f"{self.notice}; {text}" if self.notice else text

    def _bind(self, family: socket.AddressFamily, host: str) -> _Listener:
        """The listening server; on the next free port where the wanted one is taken. OSError where none can be had."""
        tried = [self._port] if not self._port else [*range(self._port, min(65536, self._port + PORTS_TRIED)), 0]
        for port in tried:
            try:
                http = _Listener(family, (host, port), self)
            except OSError as error:
                if error.errno not in _TAKEN or port == tried[-1]:
                    raise
                continue
            if port != self._port:
                self._note(f"port {self._port} is taken by {address.holder(self._port)}; listening on {http.server_address[1]} instead")
            return http
        raise OSError("no port could be had")

    # -- one request, in its connection's thread ---------------------------------------------------------------------------

    def answer(self, method: str, target: str, headers: Mapping[str, str], version: str, nonce: str, slots: Mapping[bool, threading.Semaphore]) -> Response:
        """The response to one request: the rules first, then the route."""
        if method not in ("GET", "HEAD"):
            return Response("only GET and HEAD\n", status=405, headers={"Allow": "GET, HEAD"})
        try:
            found = split_target(target)
            refused = self._refuse(found[0], headers, version) if found is not None else Response("no such page\n", status=404)
        except ValueError:  # too many fields, a Host or a token that nothing can read
            return Response("bad request\n", status=400)
        if found is None or refused is not None:
            return refused or Response("no such page\n", status=404)
        path, query = found
        route = find(self._routes, path)
        if route is None:
            return Response("no such page\n", status=404)
        slot = slots[path in OPEN_PATHS]
        if not slot.acquire(timeout=0.05):
            return Response("busy, try again\n", status=503, headers={"Retry-After": "1"})
        try:
            return route(Request(path, query, headers, method, nonce))
        except Exception as error:  # a page that fails must not end the server, let alone the launcher
            self.errors += 1
            return Response(f"this page failed: {type(error).__name__}\n", status=500)
        finally:
            slot.release()

    def _refuse(self, path: str, headers: Mapping[str, str], version: str) -> Response | None:
        host = headers.get("host", "")
        if version >= "HTTP/1.1" and not host:
            return Response("a Host header is needed\n", status=400)
        if host and is_loopback(self._host) and not host_allowed(host, self._hosts):
            return Response(f"this server answers as localhost only; open {self.url}, or give the name with --external-url\n", status=421)
        if self._token and path not in OPEN_PATHS and not token_given(headers, self._token):
            return Response(
                "the token is needed: as Bearer, or as the password of any user\n", status=401, headers={"WWW-Authenticate": 'Basic realm="rankwatch"'}
            )
        return None


_TAKEN = (98, 13, 48)  # EADDRINUSE on Linux, EACCES of a privileged port, EADDRINUSE on macOS


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(self, family: socket.AddressFamily, where: tuple[str, int], owner: Server) -> None:
        self.address_family = family
        self.owner = owner
        self.slots = {False: threading.Semaphore(AT_ONCE), True: threading.Semaphore(8)}
        self._lock = threading.Lock()
        self._due: dict[socket.socket, float] = {}  # connection -> when it is cut; in order of arrival
        self._reading: set[socket.socket] = set()
        super().__init__(where, _Handler)

    def server_bind(self) -> None:
        """Without the standard library's look-up of our own name, which asks DNS and may hang."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[Any, Any]:
        try:
            connection, peer = super().get_request()
        except OSError as error:
            if error.errno != errno.EINVAL:  # not stopped, but out of descriptors: the pending connection stays readable, do not spin on it
                time.sleep(0.05)
            raise
        with self._lock:
            crowded = len(self._due) >= MAX_CONNECTIONS
            victim = next((old for old in self._due if old in self._reading), None) if crowded else None
            if victim is not None:
                self._reading.discard(victim)
        if victim is not None:
            _cut(victim)
        self.until(connection, REQUEST_S, reading=True)
        return connection, peer

    def until(self, connection: socket.socket, seconds: float, reading: bool) -> None:
        """Give a connection so long for what it does now."""
        with self._lock:
            self._due[connection] = time.monotonic() + seconds
            (self._reading.add if reading else self._reading.discard)(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._due.pop(request, None)
            self._reading.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Every POLL_S, in the accepting thread: cut what is past its time. Its own thread then closes it."""
        now = time.monotonic()
        with self._lock:
            late = [connection for connection, due in self._due.items() if due < now]
            for connection in late:
                self._due[connection] = now + ANSWER_S
        for connection in late:
            _cut(connection)

    def cut_all(self) -> None:
        with self._lock:
            connections = list(self._due)
        for connection in connections:
            _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    protocol_version = "HTTP/1.1"
    server_version = "rankwatch"
    sys_version = ""
    timeout = RECEIVE_S
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        """As the standard library's, with a short request line, one dispatch for every method, and a deadline for each part."""
        try:
            self.server.until(self.connection, REQUEST_S, reading=True)
            self.raw_requestline = self.rfile.readline(MAX_LINE + 1)
            if len(self.raw_requestline) > MAX_LINE:
                self.requestline, self.request_version, self.command = "", "", ""
                self._send(Response("the request line is too long\n", status=414), secrets.token_urlsafe(12), close=True)
                return
            if not self.raw_requestline:
                self.close_connection = True
                return
            if not self.parse_request():
                return
            self.server.until(self.connection, ANSWER_S, reading=False)
            headers = _plain(self.headers)
            nonce = secrets.token_urlsafe(12)
            response = self.server.owner.answer(self.command, self.path, headers, self.request_version, nonce, self.server.slots)
            # a body is never read; what follows it on the connection must not be taken for the next request
            body_comes = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
            self._send(response, nonce, close=body_comes or self.command not in ("GET", "HEAD"), headers=headers)
        except OSError:  # too slow, or gone
            self.close_connection = True

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
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002 - the signature is the base class's
        """The standard library's own refusals, in our form: nothing of the request comes back."""
        self.command = getattr(self, "command", None) or ""
        self._send(Response("bad request\n", status=code), secrets.token_urlsafe(12), close=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the launcher's stderr belongs to the job."""


def _plain(headers: Message) -> dict[str, str]:
    return {name.lower(): str(value) for name, value in headers.items()}
