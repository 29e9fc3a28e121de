"""The other launchers of a job as their judge knows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """What a launcher has published of itself. addresses: IP addresses or names, likeliest first. nonce: drawn anew by each of its attempts.

    One that --peers lists has published nothing: nonce and version are "", ranks (), and group_rank is a number for it until it says its own.
    """

    group_rank: int
    node: str
    addresses: tuple[str, ...]
    port: int
    nonce: str
    version: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeState:
    """How pulling one node goes. report_age_s: of its newest report, None while there is none. bytes: on the wire, both ways.

    problem: why the newest pull brought nothing, "" when it did. clock_error_s: the offsets are right within so much.
    """

    group_rank: int
    node: str
    address: str  # "10.0.0.5:41234"
    report_age_s: float | None
    clock_offset_s: float
    clock_error_s: float
    version: str
    problem: str
    pulls: int
    failures: int
    bytes: int
    ending: str = ""
    final: bool = False
    events_lost: int = 0
