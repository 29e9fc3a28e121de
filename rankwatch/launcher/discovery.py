"""Where the launchers of a job of many nodes find each other: in torchrun's own store, or from a list (--peers, listed.py). Imports no torch.

All calls on the store are one daemon thread's (store_link.py), nobody ever waits for it, and `problem` says how long it waits itself.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import rankwatch
from rankwatch.config.accepted import host_port
from rankwatch.launcher import addresses, pace
from rankwatch.launcher.announced import Announcement, AnnouncementError, decode
from rankwatch.launcher.leaving import IN_TORCH
from rankwatch.launcher.store_link import Operations, StoreLink, first_line
from rankwatch.monitor.nodes.peer import Peer

if TYPE_CHECKING:
    from rankwatch.config import Options
    from rankwatch.launcher.listed import Listed
    from rankwatch.launcher.supervision import Start

JUDGE = "rankwatch/judge"
NODE = "rankwatch/node/"
KEYS_AT_ONCE = 64
SECRET_BYTES = 32


def directory(start: Start, options: Options) -> Discovery | Listed:
    """For one attempt of a job of many nodes. Reads no file and asks nobody yet. ValueError where --peers cannot be read."""
    given, port = host_port(options.peer_address) if options.peer_address else ("", None)
    token = functools.partial(_token, options.token_file) if options.token_file else None
    if options.peers:
        from rankwatch.launcher.listed import Listed

        return Listed(options.peers, token, start.group_rank, start.nnodes, start.identity, (given, port))
    return Discovery(start.store, start.group_rank, start.nnodes, given, start.local_addr or "", port or 0, token)


def _token(path: str) -> str:
    from rankwatch.serve.token import read_token

    return read_token(path)


class Discovery:
    """One attempt of one launcher. Everything but `look` returns at once, or after the wait that it is given, and raises nothing.

    on_change: called in this object's thread when the secret, the judge or the others have changed. port: where to listen, 0 for any.
    `secret` and `run_name` come from the judge: group rank 0 is it and has them at once. The secret is 256 bits, drawn anew by each attempt's judge:
    what an attempt before has announced in the same store is of no use, and a member that meets it asks again once it is refused.
    """

    listed = False
    line: int | None = None

    def __init__(
        self,
        store: Any,
        group_rank: int,
        nnodes: int,
        given_address: str = "",
        local_addr: str = "",
        port: int = 0,
        token: Callable[[], str] | None = None,
        reach: Callable[[str, int], None] | None = None,
        own_addresses: Callable[[str, int], tuple[str, ...]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.on_change: Callable[[], None] | None = None
        self.port = port
        self._store = StoreLink(store, reach, clock)
        self._group_rank = group_rank
        self._others = range(1, nnodes) if group_rank == 0 else range(0)
        self._read_token = token
        self._own_addresses = own_addresses or functools.partial(_own_addresses, given_address, local_addr)
        self._clock = clock
        self._spread = random.random()
        self._wake, self._halt = threading.Event(), threading.Event()
        self._known = threading.Condition()  # guards what follows
        self._secret = secrets.token_hex(SECRET_BYTES) if group_rank == 0 and token is None else ""
        self._order_key = secrets.token_hex(SECRET_BYTES) if group_rank == 0 else ""
        self._token = ""
        self._judge: Announcement | None = None
        self._nodes: dict[int, Announcement] = {}
        self._wanted: tuple[int, str, tuple[int, ...], str] | None = None  # what publish was given
        self._problem = self._lacking = ""
        self._gone = False
        self._addresses: tuple[str, ...] = ()  # the thread's own, as what follows
        self._written: tuple[int, str, tuple[int, ...], str] | None = None
        self._raw: dict[int, bytes] = {}
        self._unreachable = ""
        self._looks = self._failures = 0
        self._news, self._in_vain, self._deaf_until = True, 0, 0.0  # whether the store has shown any since the refusal before
        self._failing_since = 0.0

    # -- any thread

    def start(self) -> None:
        """Begin to look. RuntimeError when no thread can be started."""
        threading.Thread(target=self._run, name=IN_TORCH, daemon=True).start()

    def stop(self) -> None:
        """No look begins after this. One that is under way may finish, and is not waited for."""
        self._halt.set()
        self._wake.set()
        with self._known:
            self._known.notify_all()

    def publish(self, port: int, nonce: str, ranks: tuple[int, ...], run_name: str = "") -> bool:
        """Have the others know: this launcher listens on `port`, whichever it is. ranks: global ranks of this node. run_name: the judge's, "" for none."""
        self._wanted = (port, nonce, ranks, run_name)
        self._looks = 0
        self._wake.set()
        return True

    def refused(self) -> None:
        """Look again now, and often for a while: another secret is asked for, or another launcher answers. Ever more rarely while looking is in vain."""
        now = self._clock()
        if now < self._deaf_until:
            return
        self._in_vain = 0 if self._news else self._in_vain + 1
        self._news, self._deaf_until = False, now + pace.refused_s(self._in_vain)
        if not self._in_vain:
            self._looks = 0
        self._wake.set()

    def judge_is_at(self, line: int) -> None:
        """It is found in the store."""

    def secret(self, wait_s: float = 0) -> str:
        """The newest secret of the job; "" while none is known, after wait_s."""
        with self._known:
            self._known.wait_for(lambda: bool(self._secret) or self._gone or self._halt.is_set(), wait_s)
            return self._secret

    def run_name(self, wait_s: float) -> str:
        """What the judge's launcher has called its run directory; "" while it is not known, after wait_s, and where it has no such name."""
        with self._known:
            self._known.wait_for(lambda: self._judge is not None or self._gone or self._halt.is_set(), wait_s)
            return self._judge.run_name if self._judge is not None else ""

    def order_key(self) -> str:
        """What the judge proves its orders with: all launchers know the secret, this only the judge; "" for a member."""
        return self._order_key

    def is_judges(self, order_key: str) -> bool:
        """Whether an order with this key is of the judge that this member has found."""
        with self._known:
            known = self._judge.orders if self._judge is not None else ""
        return bool(known) and hmac.compare_digest(known.encode(), _digest(order_key).encode())

    def judge(self) -> Peer | None:
        """The launcher that judges the job; None for that one itself, and while it has not been found."""
        with self._known:
            return self._judge.peer if self._judge is not None else None

    def peers(self) -> tuple[Peer, ...]:
        """The others that the judge has found, by group rank; () for a member."""
        with self._known:
            return tuple(self._nodes[rank].peer for rank in sorted(self._nodes))

    @property
    def ports(self) -> tuple[int, ...]:
        """Where to listen."""
        return (self.port,)

    @property
    def fixed(self) -> bool:
        """Whether the secret is the text of a token file: nothing in the store can change it."""
        if self._group_rank == 0:
            return self._read_token is not None
        with self._known:
            return bool(self._token) and self._judge is not None and self._judge.token

    @property
    def refusal(self) -> str:
        """Why another launcher of the job may refuse this one's secret."""
        return "its --token-file has another text" if self.fixed else "it waits for the newest one"

    @property
    def notice(self) -> str:
        """What a person has to mend on this very node; "" for nothing."""
        return self._lacking

    @property
    def problem(self) -> str:
        """Why launchers may not be found; "" while nothing is known to be wrong."""
        return self._store.blocked or self._problem or self._unreachable

    @property
    def operations(self) -> Operations:
        """What the store has been asked so far."""
        return self._store.operations

    # -- the thread

    def _run(self) -> None:
        while not self._halt.is_set():
            pause_s = self.look()
            if pause_s is None:
                break
            (self._halt if self._failures else self._wake).wait(pause_s)  # a store that fails is not asked more often because somebody is in a hurry
            self._wake.clear()
        self._store.drop()

    def look(self) -> float | None:
        """Read and write what is to be read and written; seconds until the next time, None for never."""
        try:
            if self._read_token is not None and not self._token and not self._take_token(self._read_token):
                return pace.CALM_S
            if lacking := self._store.connect():
                self._give_up(lacking)
                return None
            self._announce()
            if self._group_rank == 0:
                self._find_others()
            else:
                self._find_judge()
        except Exception as error:  # torch's errors are RuntimeErrors; a file's and a socket's are OSErrors
            return self._failed(error)
        self._failures, self._looks = 0, self._looks + 1
        return pace.pause_s(self._looks - 1, 0, self._spread)

    def _failed(self, error: Exception) -> float | None:
        now = self._clock()
        self._store.drop()
        self._failing_since = self._failing_since if self._failures else now
        self._failures += 1
        if pace.hopeless(self._failures, now - self._failing_since):
            self._give_up(f"torchrun's store is gone ({first_line(error)}): launchers that have not been found until now stay unknown")
            return None
        self._problem = f"torchrun's store cannot be asked ({first_line(error)})"
        return pace.pause_s(self._looks, self._failures, self._spread)

    def _find_others(self) -> None:
        """The judge's look."""
        found: dict[int, bytes] = {}
        for start in range(0, len(self._others), KEYS_AT_ONCE):
            keys = {f"{NODE}{rank}": rank for rank in self._others[start : start + KEYS_AT_ONCE]}
            found.update({keys[key]: raw for key, raw in self._store.read_some(keys).items()})
            if self._halt.is_set():
                return
        nodes, problems = dict(self._nodes), []
        for group_rank, raw in found.items():
            try:
                if raw != self._raw.get(group_rank):
                    nodes[group_rank] = decode(raw, group_rank)
                    self._raw[group_rank] = raw
            except AnnouncementError as error:
                problems.append(f"what node {group_rank} has announced cannot be used: {error}")
        changed = nodes != self._nodes
        with self._known:
            self._nodes, self._problem = nodes, "; ".join(problems[:3])
        if changed:
            self._tell()

    def _find_judge(self) -> None:
        """A member's look."""
        if not self._store.call("check", [JUDGE]):
            self._problem = ""
            return
        try:
            judge = decode(self._store.call("get", JUDGE), 0)
        except AnnouncementError as error:
            self._problem = f"what the judge's launcher has announced cannot be used: {error}"
            return
        lacking = judge.token and not self._token
        self._lacking = self._problem = f"{judge.peer.node} has a --token-file and this launcher has none: give the same here" if lacking else ""
        secret = self._token if judge.token else judge.secret
        changed = (judge, secret) != (self._judge, self._secret)
        with self._known:
            self._judge, self._secret = judge, secret
            self._known.notify_all()
        if changed:
            self._tell()

    def _announce(self) -> None:
        """Write what is not written yet."""
        wanted = self._wanted
        if wanted is None or wanted == self._written or self._store.place is None:
            return
        port, nonce, ranks, run_name = wanted
        self._addresses = self._addresses or self._own_addresses(*self._store.place)
        if not self._addresses:
            self._unreachable = "this machine has no address that other nodes reach: give --peer-address HOST"
            return
        self._unreachable = ""
        peer = Peer(self._group_rank, socket.gethostname(), self._addresses, port, nonce, rankwatch.__version__, ranks)
        token = self._read_token is not None
        judges = self._group_rank == 0
        secret, orders = "" if token else self._secret, _digest(self._order_key)
        mine = Announcement(peer, secret, token, run_name, orders) if judges else Announcement(peer)
        self._store.call("set", JUDGE if judges else f"{NODE}{self._group_rank}", mine.encode())
        self._written = wanted

    def _take_token(self, read: Callable[[], str]) -> bool:
        try:
            token = read()
        except ValueError as error:
            self._problem = f"--token-file {error}"
            return False
        with self._known:
            self._token = token
            if self._group_rank == 0:
                self._secret = token
                self._known.notify_all()
        if self._group_rank == 0:
            self._tell()
        return True

    def _give_up(self, problem: str) -> None:
        with self._known:
            self._problem, self._gone = problem, True
            self._known.notify_all()

    def _tell(self) -> None:
        self._news, self._deaf_until = True, 0.0
        if self.on_change is not None and not self._halt.is_set():
            self.on_change()


def _own_addresses(given: str, local_addr: str, host: str, port: int) -> tuple[str, ...]:
    """What to publish; host and port are the store's."""
    way = () if given or local_addr else addresses.routed(host, port)
    return addresses.choose(given, local_addr, way, addresses.of_this_machine, addresses.resolving_name)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
