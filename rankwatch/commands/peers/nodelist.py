"""Who takes part: lists such as "node01,node[02-04],[fd00::1]:27480", files of such lines, and what SLURM says. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from rankwatch.config.accepted import host_port

DEFAULT_PORT = 27480
"""The check's own: past the ports that status pages take one after the other, from 27435 on."""
MOST_NODES = 8192
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class ListError(ValueError):
    """A list that cannot be read. The text names the word and what is accepted."""


@dataclass(frozen=True, slots=True)
class Node:
    """Where one node's check listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Slurm:
    """What a job step's environment says. index: this node's place in `hosts`, None where it does not tell; local: this task's number on its node."""

    hosts: tuple[str, ...]
    index: int | None
    job: str
    local: int = 0
    in_step: bool = True


def parse(text: str, default_port: int = DEFAULT_PORT) -> tuple[Node, ...]:
    """The nodes of a list: words between commas, blanks or line ends; "#" begins a comment, words such as slots=8 are left out.

    The words of rankwatch's own option --peers (config/accepted.py), where the port may be missing and a host may have SLURM's ranges.
    ListError for another word, and for a node that comes twice.
    """
    lines = (line.partition("#")[0] for line in text.splitlines())
    words = [word for line in lines for word in _words(line) if "=" not in word]
    nodes = tuple(node for word in words for node in _nodes(word, default_port))
    if not nodes:
        raise ListError("the list names no node; it takes HOST[:PORT],HOST[:PORT]... or a file with one on each line")
    if len(nodes) > MOST_NODES:
        raise ListError(f"the list names {len(nodes)} nodes; at most {MOST_NODES} are checked")
    twice = next((node for at, node in enumerate(nodes) if node in nodes[:at]), None) if len(set(nodes)) < len(nodes) else None
    if twice is not None:
        raise ListError(f"{twice} stands in the list twice; two checks on one machine need two ports")
    return nodes


def expand(text: str) -> tuple[str, ...]:
    """ "node[01-03,07],gpu1" -> ("node01", "node02", "node03", "node07", "gpu1"); the last of several brackets runs fastest. ListError names the word."""
    return tuple(host for word in _words(text) for host in _expand_word(word))


def slurm(environ: Mapping[str, str]) -> Slurm | None:
    """The step's nodes, else the job's; None outside of SLURM. ListError where its list cannot be read.

    Source: srun(1), OUTPUT ENVIRONMENT VARIABLES. SLURMD_NODENAME is this node's name as the list has it; SLURM_NODEID counts within the step.
    """
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    if not listed:
        return None
    try:
        hosts = expand(listed)
    except ListError as error:
        raise ListError(f"SLURM's list of nodes {listed[:200]!r}: {error}; give the nodes yourself: --peers HOST,HOST,...") from None
    name, place = environ.get("SLURMD_NODENAME", ""), environ.get("SLURM_NODEID") or environ.get("SLURM_PROCID") or ""
    index = hosts.index(name) if name in hosts else int(place) if place.isdecimal() and int(place) < len(hosts) else None
    local = environ.get("SLURM_LOCALID", "")
    return Slurm(hosts, index, environ.get("SLURM_JOB_ID", ""), int(local) if local.isdecimal() else 0, bool(environ.get("SLURM_STEP_NODELIST")))


def names(nodes: Sequence[Node]) -> tuple[str, ...]:
    """How nodes are called in front of people: by host where that tells them apart, else with the port."""
    hosts = {node.host for node in nodes}
    return tuple(node.host if len(hosts) == len(nodes) else str(node) for node in nodes)


def _words(line: str) -> list[str]:
    """`line` cut at commas and blanks outside of brackets."""
    words, depth, start = [], 0, 0
    for at, letter in enumerate(line):
        depth += (letter == "[") - (letter == "]")
        if (letter == "," or letter.isspace()) and depth <= 0:
            words.append(line[start:at])
            start = at + 1
    return [word for word in (*words, line[start:]) if word]


def _nodes(word: str, default_port: int) -> list[Node]:
    """HOST, HOST:PORT, an IPv6 address with or without brackets, and SLURM's ranges in HOST."""
    ranges = "[" in word and ":" not in word.partition("[")[2].partition("]")[0]
    host, colon, port = word.partition(":")
    words = [f"{name}{colon}{port}" for name in _expand_word(host)] if ranges else [word]
    nodes = []
    for each in words:
        try:
            name, given = host_port(each)
        except ValueError as error:
            raise ListError(f"{each[:80]!r} is not accepted; it takes {error}") from None
        name = str(ipaddress.IPv6Address(name)) if ":" in name and "%" not in name else name
        nodes.append(Node(name, default_port if given is None else given))
    return nodes


def _expand_word(word: str) -> list[str]:
    pieces: list[list[str]] = []
    rest, count = word, 1
    while rest:
        plain, opened, rest = rest.partition("[")
        pieces.append([plain])
        if not opened:
            break
        inside, closed, rest = rest.partition("]")
        if not closed or "[" in inside:
            raise ListError(f"{word[:80]!r}: a bracket is not closed")
        pieces.append(_numbers(inside, word))
        count *= len(pieces[-1])
        if count > MOST_NODES:
            raise ListError(f"{word[:80]!r} names more than {MOST_NODES} nodes")
    hosts = ["".join(parts) for parts in product(*pieces)]
    bad = next((host for host in hosts if not _HOST.fullmatch(host)), None)
    if bad is not None or not hosts:
        raise ListError(f"{(bad if bad is not None else word)[:80]!r} is no host name and no address")
    return hosts


def _numbers(inside: str, word: str) -> list[str]:
    """ "01-03,07" -> ["01", "02", "03", "07"]: the width of a range's first number is kept."""
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ListError(f"{word[:80]!r}: {part[:20]!r} in brackets is no number and no range such as 01-16")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high - low >= MOST_NODES:
            raise ListError(f"{word[:80]!r}: {part[:20]!r} is no range of 1 to {MOST_NODES} nodes")
        numbers += [f"{number:0{len(match[1])}}" for number in range(low, high + 1)]
    return numbers
