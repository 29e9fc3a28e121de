"""Launchers on loopback for tests of pulling: real ones (a Server with an Offer) and ones that answer whatever a test wants."""

import socket
import threading
import time

from rankwatch.model import NodeReport, Process, RankState
from rankwatch.monitor.nodes.offer import Offer
from rankwatch.monitor.nodes.pull import Peer
from rankwatch.serve.server import Server

SECRET = "b7f0-shared"
LONG_S = 10.0  # to wait for what comes at once, where it does come


def state(number, node="node1", at=None, **fields):
    at = time.monotonic() if at is None else at
    return RankState(rank=number, local_rank=number % 8, node=node, process=Process(1000 + number, True, "R"), heartbeat_at=at, **fields)


class Launcher:
    """One launcher: its Offer behind the server that every launcher has. ahead_s: how far its clocks are before the test's."""

    def __init__(self, group_rank=1, ranks=(8, 9), secret=SECRET, listen="127.0.0.1:0", nonce=None, ahead_s=0.0, mono_ahead_s=0.0):
        self.group_rank, self.ranks, self.node = group_rank, ranks, f"node{group_rank}"
        self.nonce = nonce or f"nonce-{group_rank}"
        self.stands_still_s = 0.0
        self.clock, self.wall = lambda: time.monotonic() + mono_ahead_s - self.stands_still_s, lambda: time.time() + ahead_s
        self.offer = Offer(self.nonce, "0.1.0", clock=self.clock, wall=self.wall)
        self.listen, self.secret = listen, secret
        self.server = None
        self.start()

    def start(self, secret=None, routes=None):
        if self.server is not None:
            self.server.stop()
        self.secret = secret or self.secret
        self.server = Server(self.listen, routes or self.offer.routes(), self.secret)
        assert self.server.start(), self.server.notice

    def put(self, events=(), ending="", final=False, **fields):
        ranks = tuple(state(number, self.node, self.clock(), **fields) for number in self.ranks)
        self.offer.put(NodeReport(self.node, ranks, self.group_rank), events, ending, final)

    def peer(self, **fields):
        known = {"addresses": ("127.0.0.1",), "port": self.server.port, "nonce": self.nonce, "version": "0.1.0", "ranks": self.ranks}
        return Peer(self.group_rank, self.node, **{**known, **fields})

    def stop(self):
        self.server.stop()


class Stranger:
    """Accepts on loopback and hands every connection, with the head of its request, to `answer` in a thread of its own."""

    def __init__(self, answer, host="127.0.0.1", port=0):
        self.answer = answer
        self.over = threading.Event()
        self.asked = 0
        self.listener = socket.create_server((host, port))
        self.port = self.listener.getsockname()[1]
        self.connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        try:
            while self._head(connection):
                self.asked += 1
                if not self.answer(connection, self):
                    break
        except OSError:
            pass
        finally:
            connection.close()

    @staticmethod
    def _head(connection):
        got = b""
        while b"\r\n\r\n" not in got:
            part = connection.recv(65536)
            if not part:
                return b""
            got += part
        return got

    def peer(self, **fields):
        known = {"addresses": ("127.0.0.1",), "port": self.port, "nonce": "nonce-2", "version": "0.3.0", "ranks": (16, 17)}
        return Peer(2, "node2", **{**known, **fields})

    def stop(self):
        self.over.set()
        for closing in (self.listener, *self.connections):
            try:
                closing.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            closing.close()


def says(body, *headers, status="200 OK", keep=True):
    """An `answer` of a Stranger: one complete response."""
    body = body.encode() if isinstance(body, str) else body
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers)).encode()

    def answer(connection, _stranger):
        connection.sendall(head + b"\r\n" + body)
        return keep

    return answer


def raw(data, keep=False):
    """An `answer` of a Stranger: these bytes; then the connection ends, or stays open without a word."""

    def answer(connection, stranger):
        connection.sendall(data)
        if keep:
            stranger.over.wait(LONG_S)
        return False

    return answer


def silence(_connection, stranger):
    """An `answer` of a Stranger: none."""
    stranger.over.wait(LONG_S)
    return False


def trickle(connection, stranger):
    """An `answer` of a Stranger: a head of which another byte comes again and again."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Filler: ")
    while not stranger.over.wait(0.01):
        connection.sendall(b"x")
    return False
