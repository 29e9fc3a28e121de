"""What came of one node's connections to another, and the document in which nodes tell each other. Pure.

Bytes from the network are never trusted: whatever is wrong in a document is a ValueError, and becomes an outcome.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankwatch.commands.peers.nodelist import Node
from rankwatch.shown import one_line

SCHEMA = 1
HELLO, OVER = "/peers/v1/hello", "/peers/v1/over"
MAX_BYTES = 4 << 20
LACK_MOST = 32
"""Of so many nodes rows are asked for at second hand."""
_TEXT = 200

# kind -> (letter in a request, word in the table's cell)
KINDS = {
    "ok": ("o", "ok"),
    "unasked": ("-", "?"),
    "busy": ("b", "busy"),
    "looking_up": ("l", "dns"),
    "unresolved": ("n", "no name"),
    "refused": ("r", "refused"),
    "timed_out": ("t", "timeout"),
    "unreachable": ("u", "no route"),
    "silent": ("s", "silent"),
    "cut": ("c", "cut"),
    "token": ("k", "token"),
    "foreign": ("f", "foreign"),
    "wrong_node": ("w", "wrong"),
    "schema": ("v", "version"),
    "one_port": ("p", "one port"),
}
CERTAIN = ("token", "foreign", "wrong_node", "schema", "one_port")
"""Does not become better by asking again, once it has stayed so for some seconds."""
_KIND_OF = {letter: kind for kind, (letter, _) in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Reach:
    """What one node knows of another. round_trip_s: of TCP's handshake; offset_s: the other's wall clock less one's own.

    host_up: whether the machine reacted on another port, where that was looked at.
    """

    kind: str = "unasked"
    detail: str = ""
    address: str = ""
    round_trip_s: float | None = None
    offset_s: float | None = None
    version: str = ""
    node: str = ""
    host_up: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether both ports answered as they should."""
        return self.kind == "ok"

    @property
    def answers(self) -> bool:
        """Whether its hello came, be the rest as it may."""
        return self.kind in ("ok", "one_port")


@dataclass(frozen=True, slots=True)
class Hello:
    """One node's answer. free_port: the second one, which the system chose; first: the lowest node that it is in touch with.

    row: its view of every node in the list's order, and heard: those of others in letters, as they were last told to it; both only where asked for.
    """

    version: str
    index: int
    node: str
    nonce: str
    wall: float
    free_port: int
    final: bool
    first: int
    row: tuple[Reach, ...] = ()
    heard: Mapping[int, str] = field(default_factory=dict)


def encode(hello: Hello, count: int) -> str:
    """JSON of a hello; `count`: how many nodes its list has."""
    fields = {name: getattr(hello, name) for name in ("version", "index", "node", "nonce", "wall", "free_port", "final", "first", "heard")}
    row = [{name: value for name in Reach.__slots__ if (value := getattr(reach, name)) not in (None, "")} for reach in hello.row]
    return json.dumps({"schema": SCHEMA, "count": count, **fields, "row": row})


def decode(body: bytes, count: int) -> Hello:
    """The hello in an answer. SchemaError where a newer or older rankwatch speaks, ValueError where nothing of ours does."""
    document = json.loads(body)
    if not isinstance(document, dict):
        raise ValueError("no object")
    if document.get("schema") != SCHEMA:
        raise SchemaError(
            f"it speaks version {one_line(document.get('schema'))[:20]} of this check (rankwatch {_word(document, 'version')}), this one {SCHEMA}"
        )
    row = document.get("row") or []
    if not isinstance(row, list) or len(row) not in (0, count):
        raise ValueError("a row of another size")
    return Hello(
        version=_word(document, "version"),
        index=_whole(document, "index", 1 << 20),
        node=_word(document, "node"),
        nonce=_word(document, "nonce"),
        wall=_number(document, "wall") or 0.0,
        free_port=_whole(document, "free_port", 65535),
        final=document.get("final") is True,
        first=_whole(document, "first", 1 << 20),
        row=tuple(map(_reach, row)),
        heard=_heard(document.get("heard"), count),
    )


def _heard(value: Any, count: int) -> dict[int, str]:
    if not isinstance(value, dict) or len(value) > LACK_MOST:
        raise ValueError("heard is no object of rows")
    return {
        int(at): row for at, row in value.items() if len(at) < 6 and at.isdecimal() and int(at) < count and isinstance(row, str) and from_letters(row, count)
    }


class SchemaError(ValueError):
    """Another version of the check."""


def letters(row: Iterable[Reach]) -> str:
    """A row in one letter a node, short enough for a request."""
    return "".join(KINDS[reach.kind][0] for reach in row)


def from_letters(text: str, count: int) -> tuple[Reach, ...] | None:
    """The kinds of a row, without details; None for what is no row of `count` nodes."""
    if len(text) != count or any(letter not in _KIND_OF for letter in text):
        return None
    return tuple(Reach(_KIND_OF[letter]) for letter in text)


def of_error(error: BaseException, connected: bool) -> Reach:
    """The outcome that an exception of a connection means. connected: it came after TCP's handshake."""
    if isinstance(error, socket.gaierror):
        again = error.errno == socket.EAI_AGAIN
        return Reach("looking_up" if again else "unresolved", "" if again else one_line(error.strerror)[:_TEXT])
    if isinstance(error, TimeoutError):
        return Reach("silent" if connected else "timed_out")
    if isinstance(error, ConnectionRefusedError):
        return Reach("refused")
    if isinstance(error, OSError):
        detail = one_line(error.strerror or error)[:_TEXT]
        cut = connected or error.errno in (errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE)
        return Reach("cut" if cut else "unreachable", detail)  # routes of their own kinds give EHOSTUNREACH, EACCES, EINVAL...
    return Reach("foreign" if connected else "cut", one_line(f"{type(error).__name__} {error}")[:_TEXT])


# -- the token ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Secret:
    """What requests bring. source: file | job | list; public: a digest of the nodes and the job, which anybody may see."""

    token: str
    source: str
    public: str


def secret(text: str, job: str, nodes: Sequence[Node]) -> Secret:
    """From a token file's text, else from the job's id and the list of nodes, which is no secret: that keeps two checks apart, and nobody out.

    A file's text itself never travels: what does is good for this check only.
    """
    public = hashlib.sha256("\n".join((job, *map(str, nodes))).encode()).hexdigest()
    source = "file" if text else "job" if job else "list"
    key = text or public
    return Secret(hmac.new(key.encode(), b"rankwatch doctor --peers", "sha256").hexdigest(), source, public[:16])


def token_cause(own: Secret, other: Mapping[str, Any], us: str, them: str) -> str:
    """Why the other one does not know our token, from what it tells everybody at /healthz. us and them: what the nodes are called."""
    source, public = other.get("token"), other.get("list")
    if source not in ("file", "job", "list"):
        return f"what answers at {them} wants another token and is no check of this kind"
    if (source == "file") != (own.source == "file"):
        given, missing = (them, us) if source == "file" else (us, them)
        return f"{given} was started with --token-file, {missing} was not"
    if public != own.public:
        jobs = "belongs to another job, or " if own.source == source == "job" else ""
        return f"{them} {jobs}was started with another list of nodes than {us}"
    if source == "file":
        return f"the text in the token file of {them} is not that of {us}"
    return f"the token of {them} comes from its {source}, that of {us} from its {own.source}"


def _reach(fields: Any) -> Reach:
    if not isinstance(fields, dict) or fields.get("kind") not in KINDS:
        raise ValueError("no outcome")
    up = fields.get("host_up")
    return Reach(
        kind=fields["kind"],
        detail=_word(fields, "detail"),
        address=_word(fields, "address"),
        round_trip_s=_number(fields, "round_trip_s"),
        offset_s=_number(fields, "offset_s"),
        version=_word(fields, "version"),
        node=_word(fields, "node"),
        host_up=up if isinstance(up, bool) else None,
    )


def _word(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    return one_line(value)[:_TEXT]


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e12:
        raise ValueError(f"{name} is no number")
    return float(value)


def _whole(fields: Mapping[str, Any], name: str, most: int) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} is no number from 0 to {most}")
    return value
