"""Who comes in, and in what order: the accepting thread waits for nobody, and a scrape waits for no crowd.

A connection has no thread before its first bytes are there, so a silent one costs none. Those bytes tell a scrape, which gets its thread at once; the
others get theirs one by one, as those before them are answered. Were all let in at one moment, each would wait for the interpreter lock behind all the
others, and so would the accepting thread, with a scrape behind it in the system's queue: 200 requests for a page held one up for a second.
"""

from __future__ import annotations

import errno
import selectors
import socket
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from socketserver import TCPServer
from typing import Any

from rankwatch.serve import handler
from rankwatch.serve.connections import Connections
from rankwatch.serve.handler import Handler, cut
from rankwatch.serve.http import Response, is_polled
from rankwatch.serve.tls import Tls

POLL_S = 1.0
"""How often the accepting thread looks for connections that are past their time."""
MAX_CONNECTIONS = 256
MAX_SENDING_BYTES = 64 << 20
"""Bodies on their way, of all connections together."""
PLACES = 1
"""So many of the crowd are read, answered and packed at once: with two, some scrapes wait for both, and for the interpreter's lock, beyond 50 ms."""
PLACE_S = 0.005
"""Who waits for a place longer comes in without one: those who have them wait for their clients."""
FIRST_BYTES = 4096
PAUSE_S = 0.05
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Nothing to accept with: the pending connection stays readable, so a pause is needed."""

_Arrived = tuple[socket.socket, Any]


class Acceptor(TCPServer):
    """Listens at `where`, and accepts from `start` to `stop`. Called in a connection's thread: answer(method, target, headers, version, nonce), and
    failed() after what no answer says.
    """

    request_queue_size = 512  # a full queue drops a connection attempt, and its client tries again after a second
    allow_reuse_address = True

    def __init__(
        self, family: socket.AddressFamily, where: tuple[str, int], answer: Callable[..., Response], failed: Callable[[], None], tls: Tls | None
    ) -> None:
        self.address_family = family
        self.answer = answer
        self._failed = failed
        self.connections: Connections[socket.socket] = Connections(MAX_CONNECTIONS, MAX_SENDING_BYTES)
        self._tls = tls
        self._crowd: OrderedDict[socket.socket, Any] = OrderedDict()  # who is still to come in, and where they are from
        self._knocks = threading.Semaphore(0)
        self._places = threading.Semaphore(PLACES)
        self._placed: set[socket.socket] = set()
        self._stopping = threading.Event()
        self._over = threading.Event()
        self._cut_at = 0.0
        super().__init__(where, Handler)

    def server_bind(self) -> None:
        """Without the standard library's look-up of our own name, which asks DNS and may hang."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def start(self) -> None:
        """Begin to accept, in threads of its own."""
        self.socket.setblocking(False)
        for name, run in (("rankwatch-http", self._accept), ("rankwatch-http-crowd", self._let_in)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def stop(self) -> None:
        """Stop accepting and cut every connection, at once."""
        self._stopping.set()
        cut(self.socket)  # wakes the accepting thread; where the system does not, it wakes within POLL_S
        self._over.wait(2 * POLL_S)
        self.server_close()
        for connection in self.connections.all():
            cut(connection)

    def answered(self, connection: socket.socket) -> None:
        """Its request is answered, or it is over: the next of the crowd may come in. A second call does nothing."""
        try:
            self._placed.remove(connection)
        except KeyError:
            return
        self._places.release()

    # -- the accepting thread ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with selectors.DefaultSelector() as silent:
            silent.register(self.socket, selectors.EVENT_READ)
            while not self._stopping.is_set():
                try:
                    self._turn(silent)
                except Exception:  # nobody else would accept
                    self._failed()
                    self._stopping.wait(PAUSE_S)
            for key in tuple(silent.get_map().values()):
                if key.fileobj is not self.socket:
                    self.shutdown_request(key.fileobj)
        self._over.set()
        self._knocks.release()

    def _turn(self, silent: selectors.BaseSelector) -> None:
        for key, _ in silent.select(POLL_S):
            if key.fileobj is self.socket:
                self._accept_all(silent)
            else:  # it speaks, or is gone, or was cut
                silent.unregister(key.fileobj)
                self._heard(key.data)
        now = time.monotonic()
        if now >= self._cut_at:
            self._cut_at = now + POLL_S
            for late in self.connections.late(now):
                cut(late)

    def _accept_all(self, silent: selectors.BaseSelector) -> None:
        for _ in range(MAX_CONNECTIONS):
            try:
                arrived = self.get_request()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._stopping.wait(PAUSE_S)
                return
            if not self._heard(arrived):
                silent.register(arrived[0], selectors.EVENT_READ, arrived)

    def get_request(self) -> _Arrived:
        """The next that has knocked, and where it is from; OSError if there is none."""
        connection, peer = super().get_request()
        if self._tls is not None:
            try:
                connection = self._tls.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            except (OSError, ValueError) as error:  # gone already
                connection.close()
                raise OSError(f"no TLS on this connection: {error}") from None
        victim = self.connections.admit(connection, time.monotonic(), handler.REQUEST_S)
        if victim is not None and self._crowd.pop(victim, None) is not None:
            self.shutdown_request(victim)
        elif victim is not None:
            cut(victim)
        return connection, peer

    def _heard(self, arrived: _Arrived) -> bool:
        """Whether it has said something, or is gone; then it is taken care of."""
        connection = arrived[0]
        try:
            first = socket.socket.recv(connection, FIRST_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            first = b""
        if not first:
            self.shutdown_request(connection)
        elif is_polled(first):
            self._begin(*arrived)
        else:
            self._crowd[connection] = arrived[1]
            self._knocks.release()
        return True

    # -- the crowd -----------------------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        newest = self._tls is not None  # a scrape by TLS cannot be told from the others: it does not wait for those of a burst that came before it
        while self._knocks.acquire() and not self._over.is_set():
            placed = self._places.acquire(timeout=PLACE_S)
            try:
                connection, peer = self._crowd.popitem(last=newest)
            except KeyError:  # it was pushed out by who came later
                if placed:
                    self._places.release()
                continue
            if placed:
                self._placed.add(connection)
            self._begin(connection, peer)
        while self._crowd:
            self._end(self._crowd.popitem()[0])

    def _begin(self, connection: socket.socket, peer: Any) -> None:
        try:
            threading.Thread(target=self._converse, args=(connection, peer), name="rankwatch-http-connection", daemon=True).start()
        except RuntimeError:  # no more threads for this process
            self._end(connection)

    def _converse(self, connection: socket.socket, peer: Any) -> None:
        try:
            self.finish_request(connection, peer)
        except OSError:  # a client that went away is no news
            pass
        except Exception:  # what else a request has brought up ends its connection
            self._failed()
        finally:
            self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self.shutdown_request(connection)
        self.answered(connection)

    def shutdown_request(self, request: Any) -> None:
        """Close it, as TLS wants it where that is spoken."""
        self.connections.gone(request)
        if isinstance(request, ssl.SSLSocket):
            try:
                request.settimeout(0)
                request.unwrap()  # says the end of the stream to the client; its own is not waited for
            except (OSError, ValueError):
                pass
        super().shutdown_request(request)
