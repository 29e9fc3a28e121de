"""One look at one node: its name, both of its ports, its hello. Every step has a deadline but the name server's, which the caller does not wait for."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from rankwatch.commands.peers.nodelist import Node
from rankwatch.commands.peers.reach import HELLO, MAX_BYTES, OVER, Hello, Reach, SchemaError, Secret, decode, of_error, token_cause

CONNECT_S = 2.0
"""TCP repeats a lost first packet after 1 s: one loss is no timeout."""
ANSWER_S = 2.0
SSH_PORT = 22
"""Most machines listen there or refuse: either says that the machine is up."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks: the own place in the list of nodes, who are called `names`."""

    own: int
    names: tuple[str, ...]
    nonce: str
    secret: Secret
    wall: Callable[[], float] = time.time

    def hello(self, node: Node, index: int, letters: str, lack: Sequence[int] | None = None) -> tuple[Reach, Hello | None]:
        """What became of asking `node`, which should be number `index`; its answer where it came. letters: the own row; lack: ask for its, and of whom else."""
        query = {"from": str(self.own), "row": letters, **({} if lack is None else {"want": "row", "lack": ",".join(map(str, lack))})}
        reply = self._get(node.host, node.port, f"{HELLO}?{urlencode(query)}")
        if isinstance(reply, Reach):
            return reply, None
        reached = Reach("ok", address=reply.address, round_trip_s=reply.round_trip_s)
        if reply.status == 503:
            return replace(reached, kind="busy"), None
        if reply.status == 401 and reply.ours:
            return replace(reached, kind="token", detail=self._why_refused(node, index)), None
        if reply.status != 200 or not reply.ours:
            whose = " of a rankwatch's status page" if reply.ours else ""
            return replace(reached, kind="foreign", detail=f"an answer with status {reply.status}{whose}"), None
        try:
            hello = decode(reply.body, len(self.names))
        except SchemaError as error:
            return replace(reached, kind="schema", detail=str(error)), None
        except (ValueError, RecursionError) as error:
            return replace(reached, kind="foreign", detail=f"a document that is no hello ({type(error).__name__})"), None
        offset_s = hello.wall - (reply.sent_wall + reply.received_wall) / 2
        reached = replace(reached, offset_s=offset_s, version=hello.version, node=hello.node)
        if hello.nonce == self.nonce:
            return replace(reached, kind="wrong_node", detail=f"{reply.address} is this very process"), None
        if hello.index != index:
            return replace(reached, kind="wrong_node", detail=f"{hello.node} answers there and says that it is node {hello.index}"), None
        return reached, hello

    def free_port(self, node: Node, reached: Reach, port: int) -> Reach:
        """`reached`, or what is wrong with the second port of the node, at the address that answered."""
        reply = self._get(reached.address or node.host, port, f"{HELLO}?{urlencode({'from': str(self.own)})}")
        if not isinstance(reply, Reach) and reply.status in (200, 503):
            return reached
        why = {"timed_out": "timed out", "refused": "refused"}.get(reply.kind, reply.kind) if isinstance(reply, Reach) else f"status {reply.status}"
        return replace(reached, kind="one_port", detail=f"free port {port}: {why}")

    def over(self, node: Node) -> bool:
        """Tell a node that the check is over; whether it took it."""
        reply = self._get(node.host, node.port, f"{OVER}?{urlencode({'from': str(self.own)})}")
        return not isinstance(reply, Reach) and reply.status == 200

    def _why_refused(self, node: Node, index: int) -> str:
        reply = self._get(node.host, node.port, "/healthz")
        try:
            other = {} if isinstance(reply, Reach) else json.loads(reply.body)
        except (ValueError, RecursionError):
            other = {}
        return token_cause(self.secret, other if isinstance(other, dict) else {}, self.names[self.own], self.names[index])

    def _get(self, host: str, port: int, target: str) -> _Reply | Reach:
        """One request on a connection of its own; the outcome where there was no answer."""
        made = connect(host, port, CONNECT_S)
        if isinstance(made, Reach):
            return made
        client = http.client.HTTPConnection(host.partition("%")[0], port)  # no brackets: with a port given, Python 3.11 would send them twice
        client.sock = made.socket
        made.socket.settimeout(ANSWER_S)
        try:
            sent_wall = self.wall()
            client.request("GET", target, headers={"Authorization": f"Bearer {self.secret.token}", "Accept-Encoding": "identity", "Connection": "close"})
            response = client.getresponse()
            received_wall = self.wall()
            body = response.read(MAX_BYTES + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return replace(of_error(error, connected=True), address=made.address, round_trip_s=made.round_trip_s)
        finally:
            client.close()
        ours = response.headers.get("Server", "").strip() == "rankwatch"
        return _Reply(response.status, ours, body[:MAX_BYTES], made.address, made.round_trip_s, sent_wall, received_wall)


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    ours: bool
    body: bytes
    address: str
    round_trip_s: float
    sent_wall: float
    received_wall: float


@dataclass(frozen=True, slots=True)
class _Made:
    socket: socket.socket
    address: str
    round_trip_s: float


def connect(host: str, port: int, limit_s: float) -> _Made | Reach:
    """A TCP connection to the first address that takes one, each with `limit_s`; else the outcome of the last."""
    try:
        found: list[Any] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return of_error(error, connected=False) if isinstance(error, OSError) else Reach("unresolved", "no host name")
    failed = Reach("unresolved", "it has no address")
    for family, kind, protocol, _, where in found:
        try:
            made = socket.socket(family, kind, protocol)
        except OSError as error:
            failed = of_error(error, connected=False)
            continue
        try:
            made.settimeout(limit_s)
            began = time.perf_counter()
            made.connect(where)
            return _Made(made, str(where[0]), time.perf_counter() - began)
        except OSError as error:
            made.close()
            failed = replace(of_error(error, connected=False), address=str(where[0]))
    return failed


def host_up(address: str) -> bool:
    """Whether a machine reacts on another port, be it by refusing. False says little: a firewall may swallow that as well."""
    made = connect(address, SSH_PORT, 1.0)
    if isinstance(made, Reach):
        return made.kind == "refused"
    with contextlib.suppress(OSError):
        made.socket.close()
    return True
