"""Under which addresses the other nodes reach this launcher, and the lists of --peers."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

import psutil

from rankwatch.config.accepted import host_port

MOST_PEERS = 16_384
_ANYWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses of documents (RFC 5737, RFC 3849): the way to nowhere in particular is the default route."""


def listed(text: str) -> tuple[tuple[str, int], ...]:
    """(host, port) of each node in the order of group ranks: words HOST:PORT between commas, blanks or line ends, "#" begins a comment.

    ValueError names the line and what it takes.
    """
    found: list[tuple[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        for word in line.partition("#")[0].replace(",", " ").split():
            try:
                host, port = host_port(word)
                if port is None:
                    raise ValueError("HOST:PORT: a port of its own, since nothing tells the others which one a launcher has taken")
            except ValueError as error:
                raise ValueError(f"line {number}: {word[:80]!r} is not accepted; it takes {error}") from None
            if (host, port) in found:
                raise ValueError(f"line {number}: {word[:80]!r} stands there twice")
            found.append((host, port))
    if not found:
        raise ValueError("it names no node; it takes HOST:PORT of each, in the order of their --node-rank")
    if len(found) > MOST_PEERS:
        raise ValueError(f"it names {len(found)} nodes; at most {MOST_PEERS} are watched together")
    return tuple(found)


def choose(given: str, local_addr: str, routed: Iterable[str], default: Callable[[], Iterable[str]], own_name: Callable[[], str]) -> tuple[str, ...]:
    """The addresses to publish, likeliest first; every callable may be slow and is asked only where what stands before it is not enough.

    given: --peer-address, which then stands alone. local_addr: torchrun's --local-addr. routed: towards the store, that is to node 0, as a rule.
    default: other addresses of this machine, for where the way to the store is loopback (`--rdzv-endpoint localhost:29400` on node 0).
    own_name: a name of this machine that resolves, "" for none.
    """
    if given:
        return (given,)
    found = [address for address in dict.fromkeys((local_addr, *routed)) if address]
    if all(map(_is_loopback, found)):
        found = [*(address for address in default() if not _is_loopback(address)), *found]
    if all(map(_is_loopback, found)):
        found = [*filter(None, (own_name(),)), *found]
    return tuple(dict.fromkeys(found))


def routed(host: str, port: int) -> tuple[str, ...]:
    """The source addresses of the routes to a host, of each family that it has. Nothing is sent. A name is looked up, for as long as that takes."""
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return ()
    sources = (_source(family, place) for family, _, _, _, place in places if family in _ANYWHERE)
    return tuple(dict.fromkeys(filter(None, sources)))


def of_this_machine() -> tuple[str, ...]:
    """The sources of the default routes, then what other interfaces have."""
    sources = [_source(family, (address, 9)) for family, address in _ANYWHERE.items()]
    try:
        others = [each.address for addresses in psutil.net_if_addrs().values() for each in addresses if each.family in _ANYWHERE]
    except OSError:
        others = []
    return tuple(dict.fromkeys(address for address in (*sources, *others) if address and _goes_far(address)))


def resolving_name() -> str:
    """This machine's full name where it has an address; "" else. Asks DNS."""
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return ""
    return name


def _source(family: int, place: tuple[object, ...]) -> str:
    """The address that this machine would send from; "" where there is no way there, or only one within a link."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            address = str(probe.getsockname()[0])
    except OSError:
        return ""
    return address if _goes_far(address) else ""


def _goes_far(address: str) -> bool:
    """Not link-local: such an address means nothing on another machine without an interface."""
    try:
        return not ipaddress.ip_address(address).is_link_local
    except ValueError:
        return False


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
