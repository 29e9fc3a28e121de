"""The check of one node: it listens, asks every other node until all have answered or the time is over, and collects what the others have found.

The first node (the lowest number that is there) collects: it asks the others for their rows too, and tells them when it has all. The others stay until
then, so that nobody finds a closed port where a node was only faster; without a word from the first they end soon after their time.
"""

from __future__ import annotations

import heapq
import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

from rankwatch import __version__
from rankwatch.commands.peers import reach
from rankwatch.commands.peers.ask import Asker, host_up
from rankwatch.commands.peers.listening import CannotListen, listen
from rankwatch.commands.peers.nodelist import Node, names
from rankwatch.commands.peers.reach import CERTAIN, HELLO, LACK_MOST, OVER, SCHEMA, Hello, Reach, Secret
from rankwatch.serve.http import Request, Response
from rankwatch.serve.server import Server

ASK_AGAIN_S = 0.25
ASK_AGAIN_MOST_S = 2.0
SURE_S = 6.0
"""What asking again does not mend is believed after it has stayed the same for so long."""
COLLECT_S = 2.5
"""So long after its time the first node still waits for the others' rows: they have not all begun at once."""
TELL_S = 1.0
LINGER_S = 4.0
"""So long after their time the others wait for the first node's word. With all that follows less than 5 s."""
WORKERS = 64
RELAYS = 2
"""So many others are kept informed by a node whose view nobody asks for."""
LETTERS_MOST = 3000
"""A longer row does not fit into a request."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a node knows at the end. rows: node -> its view of every node; a node without a row has told nothing.

    leads: it is this node's to tell all; told: its view was asked for by the one whose it is.
    """

    own: int
    rows: dict[int, tuple[Reach, ...]]
    leads: bool
    told: bool
    lasted_s: float
    interrupted: bool = False


@dataclass(slots=True)
class _Peer:
    """What is known of one other node. since: when `reach` became of this kind."""

    reach: Reach = field(default_factory=Reach)
    since: float = 0.0
    asked: int = 0
    row: tuple[Reach, ...] = ()
    final: bool = False
    told: bool = False


class Check:
    """One node's check; a context manager that listens inside. CannotListen at its beginning. `clock` is monotonic."""

    def __init__(
        self,
        nodes: Sequence[Node],
        own: int,
        secret: Secret,
        wait_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes = tuple(nodes)
        self._own = own
        self._secret = secret
        self._wait_s = wait_s
        self._say = say
        self._clock = clock
        self._nonce = secrets.token_hex(8)
        self._asker = Asker(own, names(nodes), self._nonce, secret)
        lock = threading.RLock()
        self._change = threading.Condition(lock)
        self._more = threading.Condition(lock)  # there is something to ask
        self._peers = {at: _Peer() for at in range(len(nodes)) if at != own}
        self._heard: dict[int, str] = {}
        self._heard_of: dict[int, str] = {}
        self._first = own
        self._due: list[tuple[float, int]] = []
        self._over_by: set[int] = set()
        self._wanted_by: set[int] = set()
        self._collecting = own == 0
        self._ended = False
        self._began = clock()
        self._servers: list[Server] = []
        self._free_port = 0

    def __enter__(self) -> Check:
        routes = {HELLO: self._hello, OVER: self._over, "/healthz": self._healthz}
        port = self._nodes[self._own].port
        try:
            listen(self._servers, port, routes, self._secret.token)
            self._free_port = listen(self._servers, 0, {HELLO: self._hello}, self._secret.token)
        except CannotListen:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and asking; waits for no connection."""
        with self._change:
            self._ended = True
            self._change.notify_all()
            self._more.notify_all()
        closing = [threading.Thread(target=server.stop, daemon=True) for server in self._servers]
        for thread in closing:
            thread.start()
        until = time.monotonic() + 1.0
        for thread in closing:
            thread.join(max(0.0, until - time.monotonic()))

    def run(self) -> Found:
        """Ask and collect; at most wait_s, and less than 5 s more. An interrupt ends it with what is known."""
        try:
            self._ask_all()
            return self._found(self._finish())
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left takes no time, and a step's tasks may get the signal twice
            return replace(self._found(self._own == 0), interrupted=True)

    # -- the main thread -------------------------------------------------------------------------------------------------------

    def _ask_all(self) -> None:
        """Until all rows are there (the first node), somebody calls it over (the others), or the time is over."""
        self._due = [(0.0, (self._own + 1 + at) % len(self._nodes)) for at in range(len(self._nodes) - 1)]  # not all begin with the same one
        for _ in range(min(WORKERS, len(self._peers))):
            threading.Thread(target=self._work, name="rankwatch-peers", daemon=True).start()
        end = self._began + self._wait_s
        noted = False
        with self._change:
            while (left_s := end - self._clock()) > 0 and not (self._all_collected() if self._own == 0 else self._called_over()):
                note_in_s = 5.0 - (self._clock() - self._began)
                self._change.wait(min(left_s, note_in_s) if note_in_s > 0 else left_s)
                if self._own == 0 and not noted and self._clock() - self._began > 5.0:
                    noted = True
                    self._note()

    def _finish(self) -> bool:
        """Who tells all is settled, the rows are collected, the others are let go. Whether it is this node."""
        end = self._began + self._wait_s
        with self._change:
            if self._called_over():
                return False
            if self._lowest() == self._own:
                self._collecting = True
                self._again_now()
                while (left_s := end + COLLECT_S - self._clock()) > 0 and not self._all_collected():
                    self._change.wait(left_s)
                self._tell_over()
                return self._own == 0 or (self._lowest() == self._own and any(peer.reach.answers for peer in self._peers.values()))
            linger_s = LINGER_S if self._in_touch(self._lowest()) else COLLECT_S
            while (left_s := end + linger_s - self._clock()) > 0 and not self._called_over():
                self._change.wait(left_s)
            return False

    def _tell_over(self) -> None:
        """With the lock held: every node that answers learns that it may go; waits TELL_S at most."""
        left = [at for at, peer in self._peers.items() if peer.reach.answers]

        def tell() -> None:
            while True:
                with self._change:
                    if not left or self._ended:
                        return
                    at = left.pop()
                self._asker.over(self._nodes[at])
                with self._change:
                    self._peers[at].told = True
                    self._change.notify_all()

        awaited = tuple(left)
        for _ in range(min(WORKERS, len(left))):
            threading.Thread(target=tell, name="rankwatch-peers-over", daemon=True).start()
        until = self._clock() + TELL_S
        while (left_s := until - self._clock()) > 0 and not all(self._peers[at].told for at in awaited):
            self._change.wait(left_s)

    def _found(self, leads: bool) -> Found:
        with self._change:
            return Found(self._own, self._rows(), leads, bool(self._wanted_by), self._clock() - self._began)

    def _rows(self) -> dict[int, tuple[Reach, ...]]:
        """With the lock held: what is known of each node's view, its full row before its letters."""
        rows = {at: row for at, text in {**self._heard_of, **self._heard}.items() if (row := reach.from_letters(text, len(self._nodes)))}
        rows.update({at: peer.row for at, peer in self._peers.items() if peer.row})
        rows[self._own] = self._row()
        return rows

    def _row(self) -> tuple[Reach, ...]:
        return tuple(self._peers[at].reach if at != self._own else Reach("ok", version=__version__, offset_s=0.0) for at in range(len(self._nodes)))

    def _settled(self) -> bool:
        """With the lock held: nothing of the own row will change any more."""
        now = self._clock()
        return now >= self._began + self._wait_s or all(self._sure(peer, now) for peer in self._peers.values())

    def _sure(self, peer: _Peer, now: float) -> bool:
        return peer.reach.ok or (peer.reach.kind in CERTAIN and now - peer.since >= SURE_S)

    def _all_collected(self) -> bool:
        return self._settled() and all(peer.final for peer in self._peers.values() if peer.reach.answers)

    def _called_over(self) -> bool:
        """Whether the lowest node that is there has said so: another one may only not see it."""
        return any(at <= self._lowest() for at in self._over_by)

    def _in_touch(self, at: int) -> bool:
        """Whether this node reaches the other one, or was asked by it."""
        return at in self._heard or (at in self._peers and self._peers[at].reach.answers)

    def _lowest(self) -> int:
        """The lowest node that is there, as far as this one sees or is told by those that it reaches."""
        return min(self._first, next((at for at in range(self._own) if self._in_touch(at)), self._own))

    def _note(self) -> None:
        kinds = {self._nodes[at]: peer.reach.kind for at, peer in self._peers.items() if not peer.reach.ok}
        missing = [f"{node} ({'no answer yet' if kind == 'unasked' else kind.replace('_', ' ')})" for node, kind in kinds.items()]
        if missing:
            more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
            self._say(f"waiting for {', '.join(missing[:4])}{more}; {max(0.0, self._began + self._wait_s - self._clock()):.0f} s left")

    # -- the asking threads ----------------------------------------------------------------------------------------------------

    def _again_now(self) -> None:
        """With the lock held: every node whose row is still to come is asked at once."""
        waiting = {at for _, at in self._due}
        for at, peer in self._peers.items():
            if peer.reach.answers and not peer.final and at not in waiting:
                self._due.append((0.0, at))
        self._due = [(0.0 if self._peers[at].reach.answers else due, at) for due, at in self._due]
        heapq.heapify(self._due)
        self._more.notify_all()

    def _work(self) -> None:
        while True:
            with self._more:
                while not self._ended and not (self._due and self._due[0][0] <= self._clock()):
                    self._more.wait(max(0.01, self._due[0][0] - self._clock()) if self._due else None)
                if self._ended:
                    return
                at = heapq.heappop(self._due)[1]
                asked, row = self._peers[at].asked, reach.letters(self._row())
                lack = self._lack() if self._collecting else None
            came, hello = self._ask(at, row if len(row) <= LETTERS_MOST else "", lack, asked)
            with self._change:
                self._take(at, came, hello)
                self._change.notify_all()

    def _ask(self, at: int, row: str, lack: list[int] | None, asked: int) -> tuple[Reach, Hello | None]:
        node = self._nodes[at]
        try:
            came, hello = self._asker.hello(node, at, row, lack)
            if hello is not None and not self._peers[at].reach.ok:
                came = self._asker.free_port(node, came, hello.free_port)
            if came.kind == "timed_out" and came.address and asked % 3 == 0:
                came = replace(came, host_up=host_up(came.address))
            return came, hello
        except Exception as error:  # a thread that dies would leave a node unasked
            return Reach("cut", f"{type(error).__name__}: {error}"), None

    def _take(self, at: int, came: Reach, hello: Hello | None) -> None:
        """With the lock held: one answer is taken, and the next look is put where it is due."""
        peer, now = self._peers[at], self._clock()
        peer.asked += 1
        if hello is not None:
            self._first = min(self._first, hello.first)
            if hello.row:
                peer.row, peer.final = hello.row, hello.final
            for other, text in hello.heard.items():
                if other != self._own:
                    self._heard_of[other] = text
        before = peer.reach.kind
        peer.reach = _better(peer.reach, came)
        if peer.reach.kind != before:
            peer.since = now
        # whoever tells all does not reach this node: what it should know travels in our requests, to some others too, and in their answers to it
        unheard = not self._collecting and not self._wanted_by and at in self._relays()
        relays = self._collecting and self._lack() and at in self._relays()
        if peer.reach.ok and not unheard and not relays and (peer.final or not self._collecting):
            return
        slower_s = min(ASK_AGAIN_MOST_S, ASK_AGAIN_S * 1.3 ** min(peer.asked, 20))
        wait_s = max(ASK_AGAIN_S, len(self._nodes) / 200) if peer.reach.ok else slower_s
        heapq.heappush(self._due, (now + wait_s, at))
        self._more.notify()

    def _lack(self) -> list[int]:
        """With the lock held: nodes whose rows have not come from themselves."""
        return [at for at, peer in self._peers.items() if not peer.row][:LACK_MOST]

    def _relays(self) -> list[int]:
        return [at for at, peer in self._peers.items() if peer.reach.answers][:RELAYS]

    # -- what the others ask ---------------------------------------------------------------------------------------------------

    def _hello(self, request: Request) -> Response:
        with self._change:
            who = self._hear(request)
            final = self._settled()
            row = self._row() if request.query.get("want") == "row" else ()
            if row and who is not None:
                self._wanted_by.add(who)
            lack = set(request.query.get("lack", "").split(",")[:LACK_MOST]) if row else set()
            heard = {at: text for at, text in self._heard.items() if text and str(at) in lack}
            first = self._lowest()
        hello = Hello(__version__, self._own, socket.gethostname(), self._nonce, time.time(), self._free_port, final, first, row, heard)
        return Response(reach.encode(hello, len(self._nodes)), "application/json")

    def _over(self, request: Request) -> Response:
        with self._change:
            who = self._hear(request)
            if who is not None:
                self._over_by.add(who)
                self._change.notify_all()
        return Response("bye\n")

    def _hear(self, request: Request) -> int | None:
        """With the lock held: who asks, and its row as far as the request tells it."""
        text = request.query.get("from", "")
        who = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else -1
        if who not in self._peers:
            return None
        row = request.query.get("row", "")
        if who not in self._heard or reach.from_letters(row, len(self._nodes)):
            self._heard[who] = row if reach.from_letters(row, len(self._nodes)) else ""
        return who

    def _healthz(self, _request: Request) -> Response:
        """Open to everybody: it tells a node with another token why."""
        document = {"ok": True, "check": "peers", "schema": SCHEMA, "version": __version__, "token": self._secret.source, "list": self._secret.public}
        return Response(json.dumps(document), "application/json")


def _better(old: Reach, new: Reach) -> Reach:
    """What is kept of two looks at a node: a success stays one, with the shortest round trip and the clock that was read with it.

    A node that has answered, and whose port is closed later, has ended its check: its answer says more.
    """
    if old.ok and new.ok:
        return new if (new.round_trip_s or 0.0) < (old.round_trip_s or 0.0) else old
    answered = old.kind in CERTAIN and new.kind in ("refused", "timed_out", "silent", "cut")
    if old.ok or answered or (new.kind == "busy" and old.kind != "unasked"):
        return old
    return replace(new, host_up=old.host_up) if new.host_up is None and old.host_up is not None else new
