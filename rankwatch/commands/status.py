"""`rankwatch status`: one picture of a job as a plain table or as JSON; its exit code says whether somebody should look."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rankwatch.cli import fail, say
from rankwatch.commands.live import picture, source
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST
from rankwatch.model import PAGING, VerdictName
from rankwatch.report import outcome

EXIT_NOTHING_FOUND = 3
_FINE = ("starting", "running", "restarting", "finishing", "done", outcome.ENDED)
_FINE_VERDICTS = tuple(word for word in get_args(VerdictName) if word not in PAGING)


def main(argv: Sequence[str], options: Options) -> int:
    """0: shown and fine; 2: wrong usage; 3: an open incident that pages, a failed job, or no such job."""
    parser = argparse.ArgumentParser(
        prog="rankwatch status",
        description="One picture of a job: the verdict, what every rank does, compiles, late ranks, incidents. `rankwatch top` is the same, live.",
        epilog="Exit codes: 0 the job is fine (slow is fine), 2 wrong usage, 3 it is stuck or has failed, does not answer, or there is none.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", nargs="?", metavar="RUN_DIR|URL", help=f"run directory or status address (default: the job that runs here, else {RUNS}/{LATEST})"
    )
    parser.add_argument("--json", action="store_true", help="the state document, as /api/v1/state gives it")
    arguments = parser.parse_args(argv)
    try:
        found = source.find(arguments.source, options)
    except source.Misused as error:
        return fail(str(error))
    except source.Nothing as error:
        say(str(error))
        return EXIT_NOTHING_FOUND
    try:
        taken = found.take(compiles=not arguments.json)
    except source.Lost as error:
        say(f"{found.name}: {error}")
        return EXIT_NOTHING_FOUND
    if arguments.json:
        sys.stdout.write(json.dumps(taken.state, indent=2) + "\n")
        return verdict_code(taken.state)
    try:
        lines = picture.draw(taken.state, taken.compiles, shutil.get_terminal_size((picture.PLAIN_WIDTH, 24)).columns)
    except Exception as error:  # another program's document, or one of a later release
        return fail(f"{found.name} cannot be shown: {type(error).__name__}: {error}; rankwatch status --json shows it as it is")
    sys.stdout.write(picture.plain(lines))
    return verdict_code(taken.state)


def verdict_code(state: Mapping[str, Any]) -> int:
    """0 where the job is fine, or was ended by a signal; 3 where somebody should look: it has failed, an open incident pages, or nobody knows.

    A word that is none of ours tells nothing good.
    """
    incidents = state.get("incidents", {})
    opened = incidents.get("open", []) if isinstance(incidents, dict) else None
    fine = isinstance(opened, list) and all(isinstance(row, dict) and row.get("verdict") in _FINE_VERDICTS for row in opened)
    return 0 if fine and outcome.word(state) in _FINE else EXIT_NOTHING_FOUND
