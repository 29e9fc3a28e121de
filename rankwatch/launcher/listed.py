"""The launchers of a job as --peers lists them: no store is asked. Every launcher listens on the port of its own line, see own_line.py.

Jobs that follow or stand beside each other may have the same list and token file. So the secret is made of the token and of what only this job's
launchers share (Start.identity): another job's launcher refuses it. Which group rank a line has, its launcher says when it is asked.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
from collections.abc import Callable

from rankwatch.launcher import own_line
from rankwatch.launcher.addresses import listed
from rankwatch.launcher.store_link import Operations
from rankwatch.monitor.nodes.peer import Peer

MAX_LIST_BYTES = 1 << 20
_PURPOSE = b"rankwatch --peers 1\0"


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


def derived(token: str, identity: str) -> str:
    """The secret of one job: whoever has the token file and is not of this job cannot be taken for one of its launchers. 64 hex digits."""
    return hmac.new(token.encode("utf-8", "surrogateescape"), _PURPOSE + identity.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()


class Listed:
    """One attempt of one launcher, as discovery.Discovery: nothing waits for longer than it is told, or raises.

    Ports and the others are known when the secret is. A peer's nonce, version and ranks are not known here: "" and (); its group rank is a number
    that no other one has, until it says its own. given_address: host and port of --peer-address, "" for none.
    """

    listed = True
    fixed = True
    refusal = "it is another job's launcher, or its --token-file, its --rdzv-id or its --master-addr has another text"

    def __init__(
        self,
        given: str,
        token: Callable[[], str] | None,
        group_rank: int,
        nnodes: int,
        identity: str = "",
        given_address: tuple[str, int | None] = ("", None),
        is_own: Callable[[str], bool] | None = None,
        holder: Callable[[int], str] | None = None,
    ) -> None:
        self.on_change: Callable[[], None] | None = None
        self.ports: tuple[int, ...] = ()
        self.line: int | None = None  # this launcher's own, once it listens there
        self._given = given
        self._token = token
        self._group_rank = group_rank
        self._nnodes = nnodes
        self._identity = identity
        self._given_address = given_address
        self._is_own = is_own
        self._holder = holder or _holder
        self._nodes: tuple[tuple[str, int], ...] = ()
        self._own: tuple[int, ...] = ()  # lines where this launcher may listen
        self._sure = False  # they are of this machine
        self._judge_line: int | None = None
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
            own = own_line.candidates(nodes, self._group_rank, self._given_address, self._is_own or own_line.Resolved())
            if not own and len(nodes) <= self._group_rank:
                raise ValueError(f"--peers lists {len(nodes)} nodes, none is this machine, and this is node {self._group_rank}, counted from 0: add it")
            self._nodes, self._own, self._sure = nodes, own or (self._group_rank,), bool(own)
            self.ports = tuple(nodes[line][1] for line in self._own)
            self._secret = derived(self._token(), self._identity)
        except ValueError as error:
            self._problem = str(error)
        self._read.set()
        if self.on_change is not None:
            self.on_change()

    def stop(self) -> None:
        """Nothing runs on."""
        self._read.set()

    def publish(self, port: int, nonce: str, ranks: tuple[int, ...], run_name: str = "") -> bool:  # noqa: ARG002 - as Discovery's
        """Nobody reads it. Whether the others look for this launcher at this port; if not, the listed one is taken, which is a problem."""
        self.line = next((line for line in self._own if self._nodes[line][1] == port), None)
        if self.line is not None:
            self._problem = ""
            return True
        if not self.ports:
            return False
        wanted = " and ".join(map(str, self.ports))
        several, who = len(self.ports) > 1, "; ".join(dict.fromkeys(map(self._holder, self.ports)))
        self._problem = (
            f"--peers lists port{'s' if several else ''} {wanted} for this node, and {'they are' if several else 'it is'} taken by {who} "
            "(by another job's launcher?): the others do not find this launcher; give each job ports of its own"
        )
        return False

    def refused(self) -> None:
        """There is nowhere to look."""

    def judge_is_at(self, line: int) -> None:
        """The judge has asked, and said which line is its own."""
        if 0 <= line < len(self._nodes) and line != self.line:
            self._judge_line = line

    def secret(self, wait_s: float = 0) -> str:
        """Of the token file's text and the job; "" while it is not read, after wait_s."""
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
        """For a member: where the judge has said that it is, before that the first line."""
        line = self._judge_line if self._judge_line is not None else 0
        if not self._group_rank or not self._nodes or line == self.line:
            return None
        return self._peer(line, 0)

    def peers(self) -> tuple[Peer, ...]:
        """For the judge: all lines but its own. Where it does not know that for sure it is asked too, and says so."""
        if self._group_rank:
            return ()
        own = {self.line} if self.line is not None else set(self._own)
        return tuple(self._peer(line, line or len(self._nodes)) for line in range(len(self._nodes)) if not (self._sure and line in own))

    def _peer(self, line: int, group_rank: int) -> Peer:
        host, port = self._nodes[line]
        return Peer(group_rank, host, (host,), port, "", "")

    @property
    def operations(self) -> Operations:
        """No store is asked."""
        return Operations()

    @property
    def notice(self) -> str:
        """What a person has to mend on this very node; "" for nothing."""
        return self._problem

    @property
    def problem(self) -> str:
        """Why a launcher will not be found; "" for nothing."""
        if not self._problem and self._nodes and len(self._nodes) < self._nnodes:
            return f"--peers lists {len(self._nodes)} of {self._nnodes} nodes: add the others"
        return self._problem


def _holder(port: int) -> str:
    from rankwatch.serve.address import holder

    return holder(port)
