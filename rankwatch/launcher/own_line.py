"""Which lines of --peers may be this launcher's: group ranks are no places in the list, since c10d sorts its nodes by the text of their addresses."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

import psutil

LOOK_UP_S = 10.0
"""For all names together: a name server that does not answer holds up nothing but this node's place among the others."""


def candidates(nodes: Sequence[tuple[str, int]], group_rank: int, given: tuple[str, int | None], is_own: Callable[[str], bool]) -> tuple[int, ...]:
    """Places in the list, in the order in which to try to listen there; () where no line is known to be of this machine.

    given: --peer-address, ("", None) for none. is_own: whether a host is this machine. Several launchers of one machine have a line each: the one at
    the place of the group rank comes first, which is the right one with --node-rank.
    """
    host, port = given
    found = [line for line, node in enumerate(nodes) if host and node[0] == host and port in (None, node[1])]
    if not found:
        at_once, names = own_names()
        hosts = {host: None for host, _ in nodes}
        known = {host for host in hosts if host in at_once or _short(host) in names}
        known = known or {host for host in hosts if is_own(host)}
        found = [line for line, node in enumerate(nodes) if node[0] in known]
    return tuple(sorted(found, key=lambda line: line != group_rank))


def own_names() -> tuple[frozenset[str], frozenset[str]]:
    """This machine's addresses and names as texts, and the first parts of its names. Nobody is asked."""
    name = socket.gethostname()
    return frozenset((name, "localhost", *_addresses())), frozenset({_short(name)} - {"localhost", ""})


class Resolved:
    """Whether a host name, as it resolves here, is this machine. At most LOOK_UP_S in sum, then none is any more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + LOOK_UP_S
        self._own = _addresses()

    def __call__(self, host: str) -> bool:
        if self._clock() >= self._until:
            return False
        try:
            found = {str(place[0]) for *_, place in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        except (OSError, UnicodeError):
            return False
        return any(address in self._own or address.startswith("127.") for address in found)


def _addresses() -> frozenset[str]:
    try:
        of_all = psutil.net_if_addrs().values()
    except OSError:
        return frozenset(("127.0.0.1", "::1"))
    return frozenset(("127.0.0.1", "::1", *(each.address.partition("%")[0] for each_of in of_all for each in each_of)))


def _short(host: str) -> str:
    """The first part of a name; an address as it is."""
    return host if host.replace(".", "").isdigit() or ":" in host else host.partition(".")[0].lower()
