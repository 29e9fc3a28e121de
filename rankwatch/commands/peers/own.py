"""Which of the listed nodes this process is: by host name, else by the address that is this machine's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence

import psutil

from rankwatch.commands.peers.nodelist import ListError, Node
from rankwatch.config.accepted import host_port

LOOK_UP_S = 3.0
"""A name server may take so long for all names together."""
_LOOK_UPS_AT_ONCE = 32
_SHOWN = 8


def index_of(
    nodes: Sequence[Node], host_name: str, local: Callable[[Sequence[Node]], Sequence[int]], addresses: Callable[[], Sequence[str]], given: str = ""
) -> int:
    """This machine's place in the list. local: places whose address is this machine's; given: rankwatch's --peer-address, which goes first.

    ListError where none or several are: then --peer-index says it.
    """
    if given:
        host, port = host_port(given)
        meant = [at for at, node in enumerate(nodes) if node.host == host and port in (None, node.port)]
        if len(meant) == 1:
            return meant[0]
    short = host_name.partition(".")[0]
    named = [at for at, node in enumerate(nodes) if host_name and node.host in (host_name, short)]
    found = named if len(named) == 1 else sorted({*named, *local(nodes)})
    if len(found) == 1:
        return found[0]
    if found:
        which = ", ".join(f"{at} is {nodes[at]}" for at in found[:_SHOWN])
        raise ListError(f"{len(found)} nodes of the list are this machine: say which one this process is with --peer-index N ({which})")
    here = ", ".join((host_name, *addresses()[:_SHOWN]))
    raise ListError(
        f"none of the {len(nodes)} nodes of the list is this machine ({here}): correct the list, or say which one it is with --peer-index N, from 0 on"
    )


def local(nodes: Sequence[Node]) -> list[int]:
    """Places whose host has an address that this machine can listen on. A name that nobody answers for within LOOK_UP_S is not ours."""
    found: list[int] = []
    left = list(enumerate(nodes))
    lock = threading.Lock()

    def look() -> None:
        while True:
            with lock:
                if not left:
                    return
                at, node = left.pop()
            if _is_local(node.host):
                with lock:
                    found.append(at)

    threads = [threading.Thread(target=look, daemon=True) for _ in range(min(_LOOK_UPS_AT_ONCE, len(nodes)))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + LOOK_UP_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    with lock:
        return list(found)


def addresses() -> list[str]:
    """This machine's addresses, loopback and link-local ones left out."""
    every = (address for interface in psutil.net_if_addrs().values() for address in interface if address.family in (socket.AF_INET, socket.AF_INET6))
    return [text for address in every if not (text := address.address.partition("%")[0]).startswith(("127.", "fe80:")) and text != "::1"]


def _is_local(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return True
        except OSError:
            continue
    return False
