"""`rankwatch stacks`: the Python stacks of a running job's ranks, taken now, grouped by what is equal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rankwatch import shown, traces
from rankwatch.cli import fail, say
from rankwatch.commands.live import source
from rankwatch.commands.live.styled import text_of
from rankwatch.commands.live.tables import mapping, rows, whole
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST
from rankwatch.monitor.on_demand import DEADLINE_S, MAX_RANKS, MOST_DEADLINE_S
from rankwatch.serve.control import ControlError, ask
from rankwatch.wire.ranks import expand

EXIT_NOTHING_FOUND = 3
ANSWER_S = 15.0
"""Beyond the dump's own deadline: making and sending of the answer."""


def main(argv: Sequence[str], options: Options) -> int:
    """0: every rank's stack is shown; 2: wrong usage; 3: no such job, or some stacks could not be had."""
    parser = argparse.ArgumentParser(
        prog="rankwatch stacks",
        description="Python stacks of the ranks of a job that runs on this machine, taken now and grouped by equal stack. Ranks are not paused; the "
        "launcher is asked through its private socket, which answers its own user only. A job of many nodes is asked on node 0 for ranks of any node.",
        epilog="Exit codes: 0 all stacks shown, 2 wrong usage, 3 no such job here, or some stacks could not be had (it says why).",
        allow_abbrev=False,
    )
    parser.add_argument("source", nargs="?", metavar="RUN_DIR", help=f"the job's run directory (default: the job that runs here; of several {RUNS}/{LATEST})")
    parser.add_argument("--ranks", metavar="0-3,7", help=f"at most {MAX_RANKS} (default: all; above 64 those that verdicts name, else this node's)")
    parser.add_argument("--native", action="store_true", help="with C and C++ frames: pauses each rank for about half a second; this node's ranks only")
    parser.add_argument("--out", metavar="DIR", help="also write each rank's whole stack to DIR/rank_<N>.txt")
    parser.add_argument("--timeout", type=float, default=DEADLINE_S, metavar="SECONDS", help=f"for all of them (default: {DEADLINE_S:g})")
    parser.add_argument("--json", action="store_true", help="the answer as JSON, whole stacks included")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.timeout <= MOST_DEADLINE_S:
        return fail(f"--timeout {arguments.timeout:g}: from 0 to {MOST_DEADLINE_S:g} seconds")
    try:
        ranks = expand(arguments.ranks, MAX_RANKS) if arguments.ranks else ()
    except ValueError as error:
        return fail(f"--ranks {error}")
    try:
        launcher = source.launcher_of(arguments.source, options)
        request = {"do": "stacks", "ranks": arguments.ranks or "", "native": arguments.native, "deadline_s": arguments.timeout}
        answer = ask(launcher.socket, request, arguments.timeout + ANSWER_S)
    except source.Misused as error:
        return fail(str(error))
    except (source.Nothing, ControlError) as error:
        say(str(error))
        return EXIT_NOTHING_FOUND
    if arguments.out and (problem := write(answer, arguments.out)):
        return fail(problem)
    sys.stdout.write(json.dumps(answer, indent=2) + "\n" if arguments.json else render(answer))
    if arguments.out:
        say(f"whole stacks are in {arguments.out}")
    told = [row for row in rows(answer.get("ranks")) if row.get("text") and not row.get("error")]
    return 0 if told and len(told) == len(ranks or rows(answer.get("ranks"))) else EXIT_NOTHING_FOUND


def render(answer: Mapping[str, Any]) -> str:
    """Groups of equal stacks, innermost frame first, library frames folded; then why others are missing."""
    lines: list[str] = []
    for group in rows(answer.get("groups")):
        role = f" ({group['role']})" if group.get("role") in ("culprit", "waiting") else ""
        ranks = text_of(group.get("ranks"), 400)
        told = group.get("frames")
        frames = [shown.one_line(frame) for frame in told] if isinstance(told, list) and told else ["no Python frame"]
        lines += [f"{'rank' if ranks.isdigit() else 'ranks'} {ranks}{role}", *(f"    {frame}" for frame in traces.folded(frames)), ""]
    missing: dict[str, list[int]] = {}
    for row in rows(answer.get("ranks")):
        if row.get("error"):
            missing.setdefault(text_of(row["error"], 400), []).append(whole(row.get("rank")) or 0)
    lines += [f"{shown.rank_words(ranks)}: no stack: {why}" for why, ranks in missing.items()]
    if answer.get("left_out"):
        world = whole(mapping(answer.get("run")).get("world_size")) or 0
        lines.append(f"{len(rows(answer.get('ranks')))} of {shown.plural(world, 'rank')} asked; others with --ranks")
    return "\n".join(lines).rstrip("\n") + "\n"


def write(answer: Mapping[str, Any], folder: str) -> str:
    """Each rank's whole stack as a file that only its user reads; why that cannot be, or ""."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for row in rows(answer.get("ranks")):
            rank, told = whole(row.get("rank")), row.get("text") or f"no stack: {row.get('error')}\n"
            path = os.path.join(folder, f"rank_{rank}.txt")
            with open(path, "w", encoding="utf-8", errors="backslashreplace", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600)) as file:
                file.write(shown.clean(told))
    except OSError as error:
        return f"cannot write to {folder}: {error.strerror or error}"
    return ""
