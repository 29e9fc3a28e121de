"""The time before any rank runs, and after the last one of a node: torchrun waits for other nodes, or for an endpoint that does not answer.

There is nothing to judge then, and a scheduler may take its time: what is waited for is said now and then, and never paged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

SAID_AT_S = (60.0, 300.0, 900.0)
SAID_EVERY_S = 1800.0


class Meeting:
    """Says a line at SAID_AT_S after `begin`, then every SAID_EVERY_S, until `end`. A thread of its own does the waiting; nothing is raised."""

    def __init__(self, say: Callable[[str], None], said_at_s: tuple[float, ...] = SAID_AT_S) -> None:
        self._say = say
        self._said_at_s = said_at_s
        self._over = threading.Event()

    def begin(self, what: Callable[[], str], ranks: str = "no rank runs yet") -> None:
        """The wait for `what()` begins; it is asked whenever a line is due. ranks: where they are. RuntimeError when no thread can be started."""
        self.end()
        self._over = threading.Event()
        threading.Thread(target=self._wait, args=(self._over, what, ranks), name="rankwatch-meeting", daemon=True).start()

    def end(self) -> None:
        """The ranks start, or torchrun ends."""
        self._over.set()

    def _wait(self, over: threading.Event, what: Callable[[], str], ranks: str) -> None:
        began = time.monotonic()
        due_s, number = self._said_at_s[0], 0
        while not over.wait(max(0.0, began + due_s - time.monotonic())):
            try:
                text = what()
            except Exception as error:
                text = f"its rendezvous ({type(error).__name__} when it was looked at)"
            self._say(f"{ranks}: torchrun has waited for {due_s:.0f} s for {text}")
            number += 1
            due_s = self._said_at_s[number] if number < len(self._said_at_s) else due_s + SAID_EVERY_S


def describe(handler: Any, nodes: str = "") -> str:
    """What a rendezvous handler of torch 2.9-2.14 waits for, from its attributes; nothing is asked over the network.

    nodes: what is known without the handler, for one of another kind.
    """
    backend = str(handler.get_backend())
    place = f"{backend} rendezvous, id {handler.get_run_id()}"
    settings = getattr(handler, "_settings", None)
    if settings is not None:  # dynamic: c10d, etcd-v2
        state = getattr(getattr(handler, "_state_holder", None), "state", None)
        here = len(getattr(state, "participants", ())) or 1
        least, most = int(settings.min_nodes), int(settings.max_nodes)
        wanted = str(least) if least == most else f"{least} to {most}"
        gives_up = f"; it gives up after {settings.timeout.join.total_seconds():.0f} s"
        if here >= least:
            return f"more nodes, {here} of {wanted} are here ({place})"
        return f"other nodes: {here} of {wanted} {'is' if here == 1 else 'are'} here ({place}){gives_up}"
    address, size = getattr(handler, "master_addr", ""), getattr(handler, "world_size", 0)
    if address and size:  # static
        port, rank = getattr(handler, "master_port", ""), getattr(handler, "rank", "")
        limit = getattr(getattr(handler, "timeout", None), "total_seconds", None)
        gives_up = f"; it gives up after {limit():.0f} s" if limit is not None else ""
        who = "the other nodes" if rank == 0 else f"node 0 at {address}:{port}"
        return f"{who}: this is node {rank} of {size} ({place}){gives_up}"
    return f"{nodes or 'other nodes'} ({place})"
