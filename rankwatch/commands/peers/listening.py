"""Ports of the check: on all addresses of this machine, over IPv6 and IPv4 where both are there, and never on another port than the one that is asked for."""

from __future__ import annotations

import errno
import os
import socket

from rankwatch.serve import address
from rankwatch.serve.http import Route
from rankwatch.serve.server import Server


class CannotListen(Exception):
    """The port cannot be had; the text says who holds it."""


def listen(servers: list[Server], port: int, routes: dict[str, Route], token: str) -> int:
    """Serve `routes`, with port 0 on a free one that the system chooses; the port. The server is added to `servers`, for the caller to stop."""
    host = "[::]" if _dual_stack() else "0.0.0.0"
    if port:
        _must_be_free(host, port)
    server = Server(f"{host}:{port}", routes, token)
    url = server.start()
    servers.append(server)
    if not url:
        raise CannotListen(server.notice)
    got = int(url.rpartition(":")[2])
    if port and got != port:
        raise CannotListen(_taken(port))
    return got


def _dual_stack() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::", 0))
            return True
    except OSError:
        return False


def _must_be_free(host: str, port: int) -> None:
    """Before the server, which would take the next port: that may be another node's of the list."""
    family = socket.AF_INET6 if host == "[::]" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise CannotListen(_taken(port) if error.errno == errno.EADDRINUSE else f"cannot listen on port {port}: {why}") from None


def _taken(port: int) -> str:
    return f"port {port} is taken by {address.holder(port)}"
