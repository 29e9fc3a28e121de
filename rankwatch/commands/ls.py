"""`rankwatch ls`: the runs of a directory, the newest first, with what became of each."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rankwatch.cli import fail, say
from rankwatch.commands.report import EXIT_NOTHING_FOUND, incident_files, read
from rankwatch.config import Options
from rankwatch.launcher.rundir import LATEST, ROOT


def main(argv: Sequence[str], options: Options) -> int:
    """0: listed; 2: wrong usage; 3: no run there."""
    parser = argparse.ArgumentParser(
        prog="rankwatch ls",
        description="List runs, the newest first: name, exit code, incidents by their last verdict.",
        epilog="Exit codes: 0 listed, 2 wrong usage, 3 no run found.",
        allow_abbrev=False,
    )
    parser.add_argument("path", nargs="?", metavar="DIR", help=f"folder that holds run directories (default: {ROOT}, or the folder of --run-dir)")
    path = parser.parse_args(argv).path or (os.path.dirname(os.path.abspath(options.run_dir)) if options.run_dir else ROOT)
    if not os.path.isdir(path):
        return fail(f"{path} is no directory; runs are listed from the folder that holds them, by default ./{ROOT}")
    runs = [entry.path for entry in os.scandir(path) if entry.name != LATEST and os.path.isfile(os.path.join(entry.path, "run.json"))]
    if not runs:
        say(f"no run in {path}")
        return EXIT_NOTHING_FOUND
    rows = [(os.path.basename(run), _outcome(run), _incidents(run)) for run in sorted(runs, reverse=True)]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, outcome, incidents in rows:
        print(f"{name:{widths[0]}}  {outcome:{widths[1]}}  {incidents}")
    return 0


def _outcome(run: str) -> str:
    try:
        with open(os.path.join(run, "run.json"), encoding="utf-8") as file:
            doc: dict[str, Any] = json.load(file)
    except (OSError, ValueError):
        return "unreadable"
    exit_code = doc.get("exit_code")
    return f"exit {exit_code}" if exit_code is not None else "no end recorded"


def _incidents(run: str) -> str:
    counted: Counter[str] = Counter()
    for file in incident_files(run):
        try:
            counted[read(file)["verdict"]] += 1
        except (OSError, ValueError):
            counted["unreadable"] += 1
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(counted.items())) or "no incident"
