"""A connection of our own to torchrun's store: bounded, counted, and never torchrun's own. Imports no torch.

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
until it goes on (found by running it; the GIL is free). So all calls are one daemon thread's, and `blocked` says how long.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rankwatch import shown

CONNECT_S = 2.0
CALL_S = 2.0
BLOCKED_S = 5.0
LISTED_INSTEAD = "give --peers and --token-file on every node"


@dataclass(frozen=True, slots=True)
class Operations:
    """What this launcher has asked of the store. bytes: of keys and values, both ways."""

    calls: int = 0
    bytes: int = 0


class StoreLink:
    """One thread connects and calls; `blocked` and `operations` may be read by any.

    store: what torchrun hands over. reach: raises OSError where nobody listens at a host and port. place: where the store is, once that is known.
    """

    def __init__(self, store: Any, reach: Callable[[str, int], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.place: tuple[str, int] | None = None
        self.operations = Operations()
        self._store = store
        self._reach = reach or _reach
        self._clock = clock
        self._link: Any = None
        self._calling_since: float | None = None

    def connect(self) -> str:
        """Have a connection to a store that answers; why there can be none, "" where there is one. OSError or RuntimeError where there is none now."""
        if self.place is None:
            self.place, why = _place(self._store)
            if self.place is None:
                return why
        self._reach(*self.place)
        if self._link is None:
            self._calling_since = self._clock()
            try:
                link = self._store.clone()
                link.set_timeout(timedelta(seconds=CALL_S))
            finally:
                self._calling_since = None
            self._link = link
        return ""

    def drop(self) -> None:
        """Close the connection; the next `connect` makes another."""
        self._link = None

    def call(self, name: str, *arguments: Any) -> Any:
        """One call of the store, with its errors. What it takes is seen in `blocked` while it lasts."""
        self._calling_since = self._clock()
        try:
            result = getattr(self._link, name)(*arguments)
        finally:
            self._calling_since = None
        before = self.operations
        self.operations = Operations(before.calls + 1, before.bytes + _size(arguments) + _size(result))
        return result

    def read_some(self, keys: Iterable[str]) -> dict[str, bytes]:
        """What stands under those of these keys that are there: get would wait for a key that is not."""
        wanted = list(keys)
        if not self.call("check", wanted):
            wanted = [key for key in wanted if self.call("check", [key])]
        return dict(zip(wanted, self.call("multi_get", wanted), strict=True)) if wanted else {}

    @property
    def blocked(self) -> str:
        """How long the store has not answered; "" where that is not long."""
        since = self._calling_since
        if since is not None and (blocked_s := self._clock() - since) > BLOCKED_S:
            return f"torchrun's store has not answered for {shown.duration(blocked_s)}"
        return ""


def first_line(error: Exception) -> str:
    """Of an error of the store: what follows is a stack of C++."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


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


def _size(value: Any) -> int:
    """Bytes of the keys and values in a call's arguments or result."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 1
