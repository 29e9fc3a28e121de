"""The launchers of a job as --peers lists them: nothing is looked for, and no store is asked. Every launcher listens on the port of its own line."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from rankwatch.launcher.addresses import listed
from rankwatch.launcher.discovery import Operations
from rankwatch.monitor.nodes.peer import Peer

MAX_LIST_BYTES = 1 << 20


def names_nodes(given: str) -> bool:
    """Whether --peers holds the nodes themselves, HOST:PORT,HOST:PORT, and not the name of a file."""
    return ":" in given and not os.path.exists(given)


def read(given: str) -> tuple[tuple[str, int], ...]:
    """(host, port) of each node. given: as for --peers. ValueError names the file, the line, the cause and the next step."""
    if names_nodes(given):
        return listed(given)
    path = os.path.expanduser(given)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            text = file.read(MAX_LIST_BYTES).decode()
    except OSError as error:
        hint = "write HOST:PORT of each node into it, in the order of --node-rank, or give HOST:PORT,HOST:PORT,... itself"
        raise ValueError(f"{given} cannot be read ({error.strerror or error}); {hint}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{given} is no text; write HOST:PORT of each node into it, one a line, in the order of --node-rank") from None
    try:
        return listed(text)
    except ValueError as error:
        raise ValueError(f"{given}: {error}; correct it") from None


class Listed:
    """One attempt of one launcher, as discovery.Discovery: nothing waits for longer than it is told, or raises.

    The port and the others are known when the secret is. A peer's nonce, version and ranks are not known here: "" and ().
    """

    def __init__(self, given: str, token: Callable[[], str] | None, group_rank: int, nnodes: int) -> None:
        self.on_change: Callable[[], None] | None = None
        self.port = 0
        self._given = given
        self._token = token
        self._group_rank = group_rank
        self._nnodes = nnodes
        self._all: tuple[Peer, ...] = ()
        self._secret = ""
        self._problem = ""
        self._read = threading.Event()

    def start(self) -> None:
        """Read the list and the token. RuntimeError when no thread can be started."""
        threading.Thread(target=self.look, name="rankwatch-listed", daemon=True).start()

    def look(self) -> None:
        """Read both, now."""
        try:
            if self._token is None:
                raise ValueError("--peers needs --token-file, with the same text on every node: without it the launchers have no secret")
            try:
                nodes = read(self._given)
            except ValueError as error:
                raise ValueError(f"--peers: {error}") from None
            if len(nodes) <= self._group_rank:
                raise ValueError(f"--peers lists {len(nodes)} nodes, and this is node {self._group_rank}, counted from 0: add it")
            self._all = tuple(Peer(rank, host, (host,), port, "", "") for rank, (host, port) in enumerate(nodes[: self._nnodes]))
            self.port = nodes[self._group_rank][1]
            self._secret = self._token()
        except ValueError as error:
            self._problem = str(error)
        self._read.set()
        if self.on_change is not None:
            self.on_change()

    def stop(self) -> None:
        """Nothing runs on."""
        self._read.set()

    def publish(self, port: int, nonce: str, ranks: tuple[int, ...], run_name: str = "") -> None:  # noqa: ARG002 - as Discovery's
        """Nobody reads it; a port that is not the listed one is a problem."""
        if self.port and port != self.port:
            self._problem = f"--peers lists port {self.port} for node {self._group_rank}, which is taken: this launcher listens on {port} and is not found"

    def refused(self) -> None:
        """There is nowhere to look."""

    def secret(self, wait_s: float = 0) -> str:
        """The token file's text; "" while it is not read, after wait_s."""
        self._read.wait(wait_s)
        return self._secret

    def run_name(self, wait_s: float) -> str:  # noqa: ARG002 - as Discovery's
        """Nobody tells it."""
        return ""

    def order_key(self) -> str:
        """Nothing is published that could prove an order: none is given."""
        return ""

    def is_judges(self, order_key: str) -> bool:  # noqa: ARG002 - as Discovery's
        """None is taken either: whoever has the token file could have sent it."""
        return False

    def judge(self) -> Peer | None:
        """Node 0, for the others."""
        return self._all[0] if self._group_rank and self._all else None

    def peers(self) -> tuple[Peer, ...]:
        """The others, for node 0."""
        return () if self._group_rank else self._all[1:]

    @property
    def operations(self) -> Operations:
        """No store is asked."""
        return Operations()

    @property
    def problem(self) -> str:
        """Why a launcher will not be found; "" for nothing."""
        if not self._problem and self._all and len(self._all) < self._nnodes:
            return f"--peers lists {len(self._all)} of {self._nnodes} nodes: add the others"
        return self._problem
