"""Where to listen: parsing HOST:PORT, and who holds a port that is taken."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

LOOK_FOR_S = 0.3


def parse(listen: str) -> tuple[str, int]:
    """(host, port) of "127.0.0.1:27435", "[::1]:27435", "27435" (loopback) or ":27435" (every address). ValueError says what is wrong."""
    text = listen.strip()
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = "127.0.0.1", text
    elif host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"--listen {listen!r}: write an IPv6 address in brackets, such as [::1]:27435")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--listen {listen!r}: want HOST:PORT with a port from 0 to 65535, such as 127.0.0.1:27435, or off")
    return host or "0.0.0.0", int(port)


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """Family and address of a host name; OSError where it has none."""
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return family, str(address[0])


def url(host: str, port: int, scheme: str = "http") -> str:
    """What a person types into a browser on this machine, or on another one where the server listens for all."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}"


def holder(port: int) -> str:
    """ "pid 4242 (python3 train.py)" of the process that listens on a TCP port, or why it cannot be told. At most LOOK_FOR_S.

    Only processes of the same user can be looked into. Source: /proc/net/tcp and the socket links in /proc/PID/fd.
    """
    until = time.monotonic() + LOOK_FOR_S
    try:
        inodes = _listening(port)
        if not inodes:
            return "a process that /proc does not show"
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if _holds(f"/proc/{pid}", inodes):
                return f"pid {pid} ({_command(f'/proc/{pid}')})"
            if time.monotonic() > until:
                break
    except OSError:
        pass
    return "another user's process, or one that was not found in time"


def _listening(port: int) -> set[str]:
    """Socket inodes that listen on the port, over IPv4 and IPv6."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds(process: str, inodes: set[str]) -> bool:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        return any(os.readlink(f"{process}/fd/{descriptor}") in wanted for descriptor in os.listdir(f"{process}/fd"))
    except OSError:
        return False


def _command(process: str) -> str:
    """Program and script, no other argument: those may hold secrets."""
    try:
        arguments = Path(process, "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return "?"
    words = [os.path.basename(arguments[0])]
    script = next((argument for argument in arguments[1:] if argument and not argument.startswith("-")), "")
    if script and "python" in words[0]:
        words.append(os.path.basename(script))
    return " ".join(words)[:80] or "?"
