"""The launcher's HTTP server: who may read what, and how much is answered at once. No client can hold up a scrape or the job.

acceptor.py lets connections in, handler.py reads their requests within bounds and sends what `Server.answer` says. Routes run behind semaphores, one for
each kind, so that slow pages never keep Prometheus out. Nothing here raises into the launcher once it runs.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping

from rankwatch.serve import address
from rankwatch.serve.acceptor import Acceptor
from rankwatch.serve.http import (
    OPEN_PATHS,
    POLLED_PATHS,
    Request,
    Response,
    Route,
    find,
    host_allowed,
    is_bearer,
    is_loopback,
    split_target,
    token_given,
)
from rankwatch.serve.names import own_names
from rankwatch.serve.tls import Tls

AT_ONCE = 4
"""Pages that are made at once. They take turns at the interpreter lock: more of them are not ready sooner, and a scrape waits for each."""
FILES_AT_ONCE = 16
"""Answers at once of routes that end in "/": those may read files, and a file server that hangs must not take the other pages along."""
OPEN_AT_ONCE = 8
PATIENCE_S = 1.0
"""A page waits so long for its turn, then it is refused."""
PORTS_TRIED = 32
_TAKEN = (98, 13, 48)  # EADDRINUSE on Linux, EACCES of a privileged port, EADDRINUSE on macOS

__all__ = ["Request", "Response", "Route", "Server"]


class Slots:
    """How many routes of a kind run at once, so that no kind keeps another out."""

    def __init__(self) -> None:
        self._open = threading.Semaphore(OPEN_AT_ONCE)
        self._polled = threading.Semaphore(AT_ONCE)
        self._pages = threading.Semaphore(AT_ONCE)
        self._files = threading.Semaphore(FILES_AT_ONCE)

    def of(self, path: str, exact: bool) -> threading.Semaphore:
        """The slots of a path. exact: a route has that very name."""
        if path in POLLED_PATHS:
            return self._open if path in OPEN_PATHS else self._polled
        return self._pages if exact else self._files


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
        self._slots = Slots()
        self._off = listen.strip().lower() == "off"
        self._host, self._port = ("", 0) if self._off else address.parse(listen)
        self._routes = dict(routes)
        self._token = token or ""
        self._token_at = token_at
        self.tls = tls
        self._http: Acceptor | None = None
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
        self._http.start()
        return self.url

    @property
    def port(self) -> int:
        """The one that it listens on, 0 while it does not."""
        http = self._http
        return int(http.server_address[1]) if http is not None else 0

    def stop(self) -> None:
        """Stop accepting and cut every connection, at once."""
        http, self._http = self._http, None
        if http is not None:
            http.stop()

    def _note(self, text: str) -> None:
        self.notice = f"{self.notice}; {text}" if self.notice else text

    def _bind(self, family: socket.AddressFamily, host: str) -> Acceptor:
        """The listening server; on the next free port where the wanted one is taken. OSError where none can be had."""
        tried = [self._port] if not self._port else [*range(self._port, min(65536, self._port + PORTS_TRIED)), 0]
        for port in tried:
            try:
                http = Acceptor(family, (host, port), self.answer, self._failed, self.tls)
            except OSError as error:
                if error.errno not in _TAKEN or port == tried[-1]:
                    raise
                continue
            if port != self._port:
                self._note(f"port {self._port} is taken by {address.holder(self._port)}; listening on {http.server_address[1]} instead")
            return http
        raise OSError("no port could be had")

    # -- one request, in its connection's thread ---------------------------------------------------------------------------

    def answer(self, method: str, target: str, headers: Mapping[str, str], version: str, nonce: str) -> Response:
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
        slot = self._slots.of(path, exact=path in self._routes)
        if not slot.acquire(timeout=PATIENCE_S):
            return Response("busy, try again\n", status=503, headers={"Retry-After": "1"})
        try:
            return route(Request(path, query, headers, method, nonce))
        except Exception as error:  # a page that fails must not end the server, let alone the launcher
            self._failed()
            return Response(f"this page failed: {type(error).__name__}\n", status=500)
        finally:
            slot.release()

    def _failed(self) -> None:
        self.errors += 1

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
