"""Names of this machine, as its own files tell them: no name server is asked, since one that does not answer would hold the start up.

They decide which Host header may reach a page beyond loopback: a site that points its own name at our address (DNS rebinding) makes a browser
send that name.
"""

from __future__ import annotations

import socket

from rankwatch.serve import regular_file

MAX_BYTES = 64 << 10


def own_names() -> frozenset[str]:
    """Names under which others reach this machine: its host name, that name in the domains it searches, and its aliases in /etc/hosts."""
    return names_of(socket.gethostname(), _read("/etc/resolv.conf"), _read("/etc/hosts"))


def names_of(hostname: str, resolv_conf: str, hosts: str) -> frozenset[str]:
    """`own_names` from the texts of the two files, in lower case."""
    name = hostname.lower().rstrip(".")
    short = name.partition(".")[0]
    if not short or short == "localhost":
        return frozenset()
    names = {name, short}
    for line in resolv_conf.lower().splitlines():
        words = line.split()
        if words[:1] in (["search"], ["domain"]):
            names |= {f"{short}.{domain.strip('.')}" for domain in words[1:] if domain.strip(".")}
    for line in hosts.lower().splitlines():
        words = line.partition("#")[0].split()[1:]
        if names & set(words):
            names |= set(words)
    return frozenset(names)


def _read(path: str) -> str:
    try:
        return regular_file.read(path, MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
