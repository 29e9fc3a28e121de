"""`rankwatch doctor --peers`: who takes part, the check, and what is printed where."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address

from rankwatch.cli import fail, say
from rankwatch.commands.peers import own, table
from rankwatch.commands.peers.check import Check, Found
from rankwatch.commands.peers.faults import NONE, Picture, exit_code, own_code
from rankwatch.commands.peers.listening import CannotListen
from rankwatch.commands.peers.nodelist import DEFAULT_PORT, ListError, Node, parse, slurm
from rankwatch.commands.peers.reach import Reach, secret
from rankwatch.config import Options
from rankwatch.config.accepted import duration
from rankwatch.serve.token import read_token

INTERRUPTED = 130
MOST_WAIT_S = 3600.0
LEAST_S = 0.5
_FILE_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--peers and what belongs to it."""
    group = parser.add_argument_group(
        "nodes",
        "Started on every node at about the same time, it says which nodes reach which, and for each connection that fails the cause and the next step."
        " The first node prints the table; another one prints a line if it has a problem, and nothing otherwise."
        " Without a secret (rankwatch --token-file FILE doctor --peers) nodes know each other by the job's id and the list: that keeps two checks apart and"
        " keeps nobody out; while the check runs, who can connect may then read host names, addresses, versions, clocks and who reaches whom.",
    )
    group.add_argument(
        "--peers",
        nargs="?",
        const="",
        metavar="FILE|LIST",
        help="check that all nodes reach each other, instead of this machine: HOST[:PORT],HOST[:PORT]... or a file with one on each line;"
        " none: the nodes of the SLURM step, as in srun -N8 --ntasks-per-node=1 rankwatch doctor --peers",
    )
    group.add_argument("--wait", type=_wait, default=30.0, metavar="TIME", help="how long nodes that do not answer are asked again (default: 30s)")
    group.add_argument("--peer-index", type=int, metavar="N", help="this node's place in the list, from 0 on, where its address does not tell")
    group.add_argument("--peer-port", type=_port, default=DEFAULT_PORT, metavar="PORT", help=f"where a node listens whose PORT is not given ({DEFAULT_PORT})")


def run(arguments: argparse.Namespace, options: Options) -> int:
    """0: all reach each other, 3: not all (of a node that is not the first: of what it sees itself), 4: it reaches nobody or cannot listen, 2: wrong usage."""
    began = time.monotonic()
    try:
        nodes, at, job, hint = _taking_part(arguments, options, os.environ)
        if nodes is None:
            return 0
        text = read_token(options.token_file) if options.token_file else ""
    except ListError as error:
        return fail(f"--peers: {error}")
    except ValueError as error:
        return fail(f"--token-file {error}")
    wait_s = max(LEAST_S, arguments.wait - (time.monotonic() - began))  # a name server may have taken its part of it
    try:
        with Check(nodes, at, secret(text, job, nodes), wait_s, say=_quiet if arguments.quiet else say) as check:
            found = check.run()
    except CannotListen as error:
        spare = min(65535, nodes[at].port + 101)
        say(f"error: {error}; end it, or give all nodes another port: --peer-port {spare}, or HOST:PORT in the list")
        return NONE
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    if found.interrupted:
        say(f"interrupted after {found.lasted_s:.0f} s: what is known by then")
    rows = _ended(found, nodes) if found.lasted_s >= wait_s else found.rows
    code = _print(Picture(nodes, at, rows, found.lasted_s), found, arguments)
    if code and hint:
        say(hint)
    return INTERRUPTED if found.interrupted else code


def _print(picture: Picture, found: Found, arguments: argparse.Namespace) -> int:
    """The table, or the line of a node that does not lead; the exit code."""
    if found.leads:
        print(json.dumps(table.as_json(picture), indent=1) if arguments.json else table.as_text(picture, arguments.quiet), end="\n" if arguments.json else "")
        return exit_code(picture)
    line = table.own_line(picture, found.told)
    if line and not arguments.json:
        print(line)
    return own_code(picture.rows[picture.own], picture.own)


def _taking_part(arguments: argparse.Namespace, options: Options, environ: Mapping[str, str]) -> tuple[tuple[Node, ...] | None, int, str, str]:
    """(nodes, own place, job, what to say if it goes wrong); nodes is None for a second task on a node, which has nothing to do."""
    step = slurm(environ)
    job = step.job if step is not None else ""
    given = arguments.peers or options.peers
    if given:
        nodes = parse(_listed(given), arguments.peer_port)
    elif step is None:
        raise ListError("no list is given, and this is no SLURM step; give HOST[:PORT],HOST[:PORT]... or a file with one on each line")
    else:
        nodes = tuple(Node(host, arguments.peer_port) for host in step.hosts)
    if len(set(nodes)) < len(nodes):
        raise ListError("a node stands in the list twice")
    hint = ""
    if step is not None and not given:
        if step.local > 0:
            return None, 0, job, ""
        if not step.in_step:
            hint = "this is no job step, so nothing has started it on the other nodes: srun --ntasks-per-node=1 rankwatch doctor --peers"
    if arguments.peer_index is not None:
        if not 0 <= arguments.peer_index < len(nodes):
            raise ListError(f"--peer-index {arguments.peer_index}: the list has the places 0 to {len(nodes) - 1}")
        return nodes, arguments.peer_index, job, hint
    if step is not None and not given and step.index is not None:
        return nodes, step.index, job, hint
    return nodes, own.index_of(nodes, socket.gethostname(), own.local, own.addresses, options.peer_address), job, hint


def _listed(given: str) -> str:
    """The text of a list: the value itself, or the file that it names."""
    path = os.path.expanduser(given)
    if "/" not in given and not os.path.isfile(path):
        return given
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ListError(f"{given} cannot be read ({why}); it should have one HOST or HOST:PORT on each line") from None


def _ended(found: Found, nodes: tuple[Node, ...]) -> dict[int, tuple[Reach, ...]]:
    """The rows, with what never came to an end in the own one named: a name server that is silent, else the node."""
    rows = dict(found.rows)
    rows[found.own] = tuple(
        _unended(reach, nodes[at].host) if reach.kind == "unasked" and at != found.own else reach for at, reach in enumerate(found.rows[found.own])
    )
    return rows


def _unended(reach: Reach, host: str) -> Reach:
    try:
        ip_address(host)
    except ValueError:
        return replace(reach, kind="looking_up")
    return replace(reach, kind="timed_out", address=host)


def _wait(text: str) -> float:
    try:
        wait_s = duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; it takes {error}") from None
    if wait_s > MOST_WAIT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; at most {MOST_WAIT_S:.0f} s")
    return wait_s


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 1 to 65535")
    return int(text)


def _quiet(_text: str) -> None:
    """Nothing is said meanwhile."""
