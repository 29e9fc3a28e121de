"""What launchers of a job publish of themselves, as JSON: written here, read here with distrust. Pure.

{"schema": 1, "version", "nonce", "node", "addresses": [...], "port", "ranks": "8-15"}; the judge's also "secret", or "token": true where every launcher
has it from a token file, "run_name", and "orders": the SHA-256 of the key that proves an order to be the judge's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankwatch.monitor.nodes.peer import Peer
from rankwatch.wire.ranks import compress, expand

SCHEMA = 1
MAX_BYTES = 64 << 10
MAX_RANKS = 1024
MAX_ADDRESSES = 8
_WORD = re.compile(r"[\x21-\x7e]{1,4096}\Z")  # a token file's text may be long
_ADDRESS = re.compile(r"[0-9A-Za-z_.:%-]{1,255}\Z")


class AnnouncementError(ValueError):
    """What stands there is no announcement that this version can read. The text says why."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One launcher's. Members leave all but `peer` empty."""

    peer: Peer
    secret: str = ""
    token: bool = False
    run_name: str = ""
    orders: str = ""

    def encode(self) -> str:
        """As it goes into the store."""
        peer = self.peer
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "version": peer.version,
            "nonce": peer.nonce,
            "node": peer.node,
            "addresses": list(peer.addresses),
            "port": peer.port,
            "ranks": compress(peer.ranks),
        }
        extra = {"secret": self.secret, "token": self.token, "run_name": self.run_name, "orders": self.orders}
        return json.dumps({**document, **{name: value for name, value in extra.items() if value}})


def decode(raw: bytes, group_rank: int) -> Announcement:
    """The announcement of the launcher of this group rank. AnnouncementError for all that is none; fields that a newer version adds are left out."""
    if len(raw) > MAX_BYTES:
        raise AnnouncementError(f"it is {len(raw)} bytes long")
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        raise AnnouncementError("it is no JSON") from None
    if not isinstance(document, dict):
        raise AnnouncementError("it is no JSON object")
    if document.get("schema") != SCHEMA:
        raise AnnouncementError(f"it is of rankwatch {_shown(document.get('version'))} in schema {_shown(document.get('schema'))}, this one reads {SCHEMA}")
    port, ranks, token = document.get("port"), document.get("ranks"), document.get("token", False)
    if type(port) is not int or not 0 < port < 65536:
        raise AnnouncementError(f"its port is {_shown(port)}")
    try:
        known = expand(ranks, MAX_RANKS) if isinstance(ranks, str) else ()
    except ValueError:
        raise AnnouncementError(f"its ranks are {_shown(ranks)}") from None
    addresses = document.get("addresses")
    good = [each for each in addresses if isinstance(each, str) and _ADDRESS.match(each)] if isinstance(addresses, list) else []
    if not good:
        raise AnnouncementError("it names no address")
    peer = Peer(
        group_rank=group_rank,
        node=_text(document, "node", f"node {group_rank}"),
        addresses=tuple(good[:MAX_ADDRESSES]),
        port=port,
        nonce=_word(document, "nonce"),
        version=_text(document, "version", "?"),
        ranks=known,
    )
    secret = _word(document, "secret") if document.get("secret") else ""
    orders = _word(document, "orders") if document.get("orders") else ""
    return Announcement(peer, secret, token is True, _text(document, "run_name", ""), orders)


def _word(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not _WORD.match(value):
        raise AnnouncementError(f"its {name} cannot be read")
    return value


def _text(document: Mapping[str, Any], name: str, otherwise: str) -> str:
    """Words for people: what does not print is left out."""
    value = document.get(name)
    return "".join(filter(str.isprintable, value))[:200] or otherwise if isinstance(value, str) else otherwise


def _shown(value: object) -> str:
    return "".join(filter(str.isprintable, repr(value)[:40]))
