"""Where the launchers of a job of many nodes find each other: in torchrun's own store, or from a list (--peers, listed.py). Imports no torch.

What torchrun hands over as `worker_group.store` (read in torch 2.13.0 and 2.14.1, run on 2.13.0):
* static rendezvous: PrefixStore(run id, TCPStore(master_addr, master_port)), the server in node 0's launcher, the same object in every attempt, so
  the keys of one attempt are still there in the next, until they are overwritten.
* c10d: PrefixStore("torch.rendezvous.<id>.<round>", TCPStore(endpoint)); each round has a prefix of its own. The server is in the launcher that is
  the endpoint, which need not be the one with group rank 0. TORCH_DISABLE_SHARE_RDZV_TCP_STORE only decides which store the ranks get, not this one.
* etcd, etcd-v2: EtcdStore, a Python class without clone(); c10d with store_type=file: FileStore, whose clone() is the store itself, so that a
  timeout set on it would be torchrun's. Launchers do not find each other through these; `problem` says so.

PrefixStore.clone() is a PrefixStore of the same prefix around TCPStore.clone(): a connection of its own. It waits for one as long as the original's
timeout says (a minute, ten for static), with lines on stderr; so do calls on a store that has died. Hence a plain connect, of CONNECT_S at most,
comes before clone() and before every look. set_timeout() bounds get and wait; check and set on a server that is stopped block
until it goes on (found by running it; the GIL is free). So all calls are one daemon thread's, nobody ever waits for it, and `problem` says how long.
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import rankwatch
from rankwatch import shown
from rankwatch.config.accepted import host_port
from rankwatch.launcher import addresses, pace
from rankwatch.launcher.announced import Announcement, AnnouncementError, decode
from rankwatch.launcher.leaving import IN_TORCH
from rankwatch.monitor.nodes.peer import Peer

if TYPE_CHECKING:
    from rankwatch.config import Options
    from rankwatch.launcher.listed import Listed
    from rankwatch.launcher.supervision import Start

JUDGE = "rankwatch/judge"
NODE = "rankwatch/node/"
CONNECT_S = 2.0
CALL_S = 2.0
BLOCKED_S = 5.0
KEYS_AT_ONCE = 64
SECRET_BYTES = 32
LISTED_INSTEAD = "give --peers and --token-file on every node"


@dataclass(frozen=True, slots=True)
class Operations:
    """What this launcher has asked of the store. bytes: of keys and values, both ways."""

    calls: int = 0
    bytes: int = 0


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
        self._store = store
        self._group_rank = group_rank
        self._others = range(1, nnodes) if group_rank == 0 else range(0)
        self._read_token = token
        self._reach = reach or _reach
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
        self._operations = Operations()
        self._problem = self._lacking = ""
        self._gone = False
        self._calling_since: float | None = None
        self._link: Any = None  # the thread's own, as what follows
        self._place: tuple[str, int] | None = None
        self._addresses: tuple[str, ...] = ()
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
        since = self._calling_since
        if since is not None and (blocked_s := self._clock() - since) > BLOCKED_S:
            return f"torchrun's store has not answered for {shown.duration(blocked_s)}"
        return self._problem or self._unreachable

    @property
    def operations(self) -> Operations:
        """What the store has been asked so far."""
        return self._operations

    # -- the thread

    def _run(self) -> None:
        while not self._halt.is_set():
            pause_s = self.look()
            if pause_s is None:
                break
            (self._halt if self._failures else self._wake).wait(pause_s)  # a store that fails is not asked more often because somebody is in a hurry
            self._wake.clear()
        self._link = None  # the connection is closed here

    def look(self) -> float | None:
        """Read and write what is to be read and written; seconds until the next time, None for never."""
        try:
            if self._read_token is not None and not self._token and not self._take_token(self._read_token):
                return pace.CALM_S
            if not self._connected():
                return None
            self._announce()
            if self._group_rank == 0:
                self._find_others()
            else:
                self._find_judge()
        except Exception as error:  # torch's errors are RuntimeErrors; a file's and a socket's are OSErrors
            return self._failed(error)
        finally:
            self._calling_since = None
        self._failures, self._looks = 0, self._looks + 1
        return pace.pause_s(self._looks - 1, 0, self._spread)

    def _failed(self, error: Exception) -> float | None:
        now, self._link = self._clock(), None
        self._failing_since = self._failing_since if self._failures else now
        self._failures += 1
        if pace.hopeless(self._failures, now - self._failing_since):
            self._give_up(f"torchrun's store is gone ({_first_line(error)}): launchers that have not been found until now stay unknown")
            return None
        self._problem = f"torchrun's store cannot be asked ({_first_line(error)})"
        return pace.pause_s(self._looks, self._failures, self._spread)

    def _connected(self) -> bool:
        """A connection of our own to a store that answers. False: there can be none. Raises where there is none now."""
        if self._place is None:
            self._place, why = _place(self._store)
            if self._place is None:
                self._give_up(why)
                return False
        self._reach(*self._place)
        if self._link is None:
            self._calling_since = self._clock()
            link = self._store.clone()
            link.set_timeout(timedelta(seconds=CALL_S))
            self._calling_since = None
            self._link = link
        return True

    def _find_others(self) -> None:
        """The judge's look."""
        found: dict[int, bytes] = {}
        for start in range(0, len(self._others), KEYS_AT_ONCE):
            found.update(self._read_some(self._others[start : start + KEYS_AT_ONCE]))
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

    def _read_some(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """group rank -> what stands there, of those that are there: get would wait for a key that is not."""
        wanted = list(ranks)
        if not self._call("check", [f"{NODE}{rank}" for rank in wanted]):
            wanted = [rank for rank in wanted if self._call("check", [f"{NODE}{rank}"])]
        if not wanted:
            return {}
        return dict(zip(wanted, self._call("multi_get", [f"{NODE}{rank}" for rank in wanted]), strict=True))

    def _find_judge(self) -> None:
        """A member's look."""
        if not self._call("check", [JUDGE]):
            self._problem = ""
            return
        try:
            judge = decode(self._call("get", JUDGE), 0)
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
        if wanted is None or wanted == self._written or self._place is None:
            return
        port, nonce, ranks, run_name = wanted
        self._addresses = self._addresses or self._own_addresses(*self._place)
        if not self._addresses:
            self._unreachable = "this machine has no address that other nodes reach: give --peer-address HOST"
            return
        self._unreachable = ""
        peer = Peer(self._group_rank, socket.gethostname(), self._addresses, port, nonce, rankwatch.__version__, ranks)
        token = self._read_token is not None
        judges = self._group_rank == 0
        secret, orders = "" if token else self._secret, _digest(self._order_key)
        mine = Announcement(peer, secret, token, run_name, orders) if judges else Announcement(peer)
        self._call("set", JUDGE if judges else f"{NODE}{self._group_rank}", mine.encode())
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

    def _call(self, name: str, *arguments: Any) -> Any:
        """One call of the store. What it takes is seen in `problem` while it lasts."""
        self._calling_since = self._clock()
        result = getattr(self._link, name)(*arguments)
        self._calling_since = None
        before = self._operations
        self._operations = Operations(before.calls + 1, before.bytes + _size(arguments) + _size(result))
        return result

    def _give_up(self, problem: str) -> None:
        with self._known:
            self._problem, self._gone = problem, True
            self._known.notify_all()

    def _tell(self) -> None:
        self._news, self._deaf_until = True, 0.0
        if self.on_change is not None and not self._halt.is_set():
            self.on_change()


def _place(store: Any) -> tuple[tuple[str, int] | None, str]:
    """Host and port of the TCPStore below the prefixes, or why there is none."""
    base = store
    for _ in range(8):
        below = getattr(base, "underlying_store", None)
        if below is None:
            break
        base = below
    kind = type(base).__name__
    if kind != "TCPStore" or not callable(getattr(store, "clone", None)):
        return None, f"launchers cannot find each other through torchrun's {kind}: {LISTED_INSTEAD}"
    return (str(base.host), int(base.port)), ""


def _reach(host: str, port: int) -> None:
    """OSError where nobody listens there any more."""
    socket.create_connection((host, port), CONNECT_S).close()


def _own_addresses(given: str, local_addr: str, host: str, port: int) -> tuple[str, ...]:
    """What to publish; host and port are the store's."""
    way = () if given or local_addr else addresses.routed(host, port)
    return addresses.choose(given, local_addr, way, addresses.of_this_machine, addresses.resolving_name)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def _size(value: Any) -> int:
    """Bytes of the keys and values in a call's arguments or result."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 1


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
