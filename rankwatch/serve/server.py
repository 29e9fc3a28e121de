"""The launcher's HTTP server: standard library, hardened so that no client can hold up a scrape or the job.

A thread a connection, a bounded number of them; a connection that does not finish its request or does not read its answer is cut, and a TLS handshake is
made in the connection's own thread. Routes run behind a semaphore, the open paths behind one of their own, so that slow pages never keep Prometheus
out. Nothing here raises into the launcher once it runs.
"""

from __future__ import annotations

import errno
import gzip
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from email.message import Message
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any
from zlib import crc32

from rankwatch.serve import address
from rankwatch.serve.connections import Connections
from rankwatch.serve.http import (
    OPEN_PATHS,
    Request,
    Response,
    Route,
    find,
    host_allowed,
    is_bearer,
    is_loopback,
    security_headers,
    split_target,
    token_given,
    wants_gzip,
)
from rankwatch.serve.names import own_names
from rankwatch.serve.tls import Tls

RECEIVE_S = 5.0
"""A single read or write may take so long."""
REQUEST_S = 8.0
"""A whole request head may take so long, however its bytes trickle; also how long a kept connection may idle."""
POLL_S = 1.0
"""How often the accepting thread looks for connections that are past their time."""
ANSWER_S = 30.0
"""A whole answer may take so long."""
MAX_LINE = 4096
MAX_HEAD_BYTES = 32 << 10
"""All header lines of a request together: cookies of localhost are shared by all its ports."""
MAX_CONNECTIONS = 256
MAX_SENDING_BYTES = 64 << 20
"""Bodies on their way, of all connections together."""
AT_ONCE = 4
"""Pages that are made at once. They take turns at the interpreter lock: more of them are not ready sooner, and a scrape waits for each."""
FILES_AT_ONCE = 16
"""Answers at once of routes that end in "/": those may read files, and a file server that hangs must not take the other pages along."""
OPEN_AT_ONCE = 8
PATIENCE_S = 1.0
"""A page waits so long for its turn, then it is refused."""
PORTS_TRIED = 32
GZIP_FROM_BYTES = 1024

__all__ = ["Request", "Response", "Route", "Server"]


class Slots:
    """How many routes of a kind run at once, so that no kind keeps another out."""

    def __init__(self) -> None:
        self._open = threading.Semaphore(OPEN_AT_ONCE)
        self._pages = threading.Semaphore(AT_ONCE)
        self._files = threading.Semaphore(FILES_AT_ONCE)

    def of(self, path: str, exact: bool) -> threading.Semaphore:
        """The slots of a path. exact: a route has that very name."""
        return self._open if path in OPEN_PATHS else self._pages if exact else self._files


class Server:
    """Serves `routes` on `listen` ("HOST:PORT", "[V6]:PORT" or "off"; port 0 is any free one).

    routes: path -> Route; one that ends in "/" also takes what lies below it. token: asked for everything but /metrics and /healthz where given;
    without it, and without client certificates, a `listen` beyond loopback becomes 127.0.0.1. hosts: names under which it may be reached, beside
    localhost and, beyond loopback, this machine's own. tls: from tls.load. token_at: where the token lies, told to who comes without it.
    `notice`: after start, what a person should know ("" for nothing): no token, the port was taken and by whom, or why nothing is served.
    """

    def __init__(
        self, listen: str, routes: Mapping[str, Route], token: str | None = None, hosts: Iterable[str] = (), tls: Tls | None = None, token_at: str = ""
    ) -> None:
        self.notice = ""
        self.url = ""
        self.errors = 0
        self._off = listen.strip().lower() == "off"
        self._host, self._port = ("", 0) if self._off else address.parse(listen)
        self._routes = dict(routes)
        self._token = token or ""
        self._token_at = token_at
        self.tls = tls
        self._http: _Listener | None = None
        guarded = bool(self._token) or (tls is not None and tls.clients_certified)
        if not self._off and not guarded and not is_loopback(self._host):
            self.notice = (
                f"--listen {listen}: beyond this machine's own loopback address, pages with stacks and paths need a token; "
                "listening on 127.0.0.1 only; give a token with --token-file FILE"
            )
            self._host = "127.0.0.1"
        self._loopback = is_loopback(self._host)
        own = () if self._off or self._loopback else (self._host, *own_names())
        self._hosts = frozenset((*hosts, *(tls.names if tls is not None else ()), *own))

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
        self.url = address.url(self._host, self._http.server_address[1], "http" if self.tls is None else "https")
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

    def answer(self, method: str, target: str, headers: Mapping[str, str], version: str, nonce: str, slots: Slots) -> Response:
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
        slot = slots.of(path, exact=path in self._routes)
        if not slot.acquire(timeout=PATIENCE_S):
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
        wants_token = bool(self._token) and path not in OPEN_PATHS
        has_token = bool(self._token) and token_given(headers, self._token)
        named = not host or host_allowed(host, self._hosts, any_address=not self._loopback)
        # Beyond loopback scrapers and health checks come under names that this machine cannot know, and find there what --listen publishes anyway.
        # A Bearer stands for itself: no browser that was led here adds it, so it is right, or refused below as what it is.
        anyones = (path in OPEN_PATHS and not self._loopback) or (is_bearer(headers) and (wants_token or has_token))
        if not named and not anyones:
            known = "localhost only" if self._loopback else "this machine's own names and addresses only"
            return Response(f"this server answers as {known}; open {self.url}, or give the name with --external-url\n", status=421)
        if wants_token and not has_token:
            where = f"; it lies in {self._token_at} on {socket.gethostname()}" if self._token_at else ""
            challenge = "Basic" if named else "Bearer"  # no prompt for a password under a foreign name
            return Response(
                f"the token is needed: as Bearer, or as the password of any user{where}\n",
                status=401,
                headers={"WWW-Authenticate": f'{challenge} realm="rankwatch"'},
            )
        return None


_TAKEN = (98, 13, 48)  # EADDRINUSE on Linux, EACCES of a privileged port, EADDRINUSE on macOS


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # a full queue drops a connection attempt, and its client tries again after a second
    allow_reuse_address = True

    def __init__(self, family: socket.AddressFamily, where: tuple[str, int], owner: Server) -> None:
        self.address_family = family
        self.owner = owner
        self.slots = Slots()
        self.connections: Connections[socket.socket] = Connections(MAX_CONNECTIONS, MAX_SENDING_BYTES)
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
        tls = self.owner.tls
        if tls is not None:
            try:
                connection = tls.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            except (OSError, ValueError) as error:  # gone already
                connection.close()
                raise OSError(f"no TLS on this connection: {error}") from None
        victim = self.connections.admit(connection, time.monotonic(), REQUEST_S)
        if victim is not None:
            _cut(victim)
        return connection, peer

    def shutdown_request(self, request: Any) -> None:
        self.connections.gone(request)
        if isinstance(request, ssl.SSLSocket):
            try:
                request.settimeout(0)
                request.unwrap()  # says the end of the stream to the client; its own is not waited for
            except (OSError, ValueError):
                pass
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Every POLL_S, in the accepting thread: cut what is past its time. Its own thread then closes it."""
        for connection in self.connections.late(time.monotonic()):
            _cut(connection)

    def cut_all(self) -> None:
        for connection in self.connections.all():
            _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the signature is the base class's
        """A client that went away is no news; what else a request has brought up ends its connection, and is counted."""
        if not isinstance(sys.exc_info()[1], OSError):
            self.owner.errors += 1


def _cut(connection: socket.socket) -> None:
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # SSLSocket's own would let the thread that uses it go on in plain text
    except OSError:
        pass


class _Handler(BaseHTTPRequestHandler):
    server: _Listener
    protocol_version = "HTTP/1.1"
    server_version = "rankwatch"
    sys_version = ""
    timeout = RECEIVE_S
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """The handshake, where there is one, then the requests of a connection."""
        if isinstance(self.connection, ssl.SSLSocket):
            try:
                self.connection.do_handshake()  # within RECEIVE_S
            except ssl.SSLError as error:
                if error.reason == "HTTP_REQUEST":
                    socket.socket.sendall(self.connection, _PLAIN_HTTP)
                raise
        super().handle()

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
            response = self.server.owner.answer(self.command, self.path, headers, self.request_version, nonce, self.server.slots)
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
                _cut(slow)
            self.wfile.write(body)

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
