"""`rankwatch ls`: the runs of a directory, the newest first, with what became of each."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence

from rankwatch import shown
from rankwatch.cli import fail, say
from rankwatch.commands.report import EXIT_NOTHING_FOUND, incident_files, read
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST
from rankwatch.report.documents import RUN, load

HEADER = ("RUN", "LASTED", "EXIT", "INCIDENTS", "COMMAND")


def main(argv: Sequence[str], options: Options) -> int:
    """0: listed; 2: wrong usage; 3: no run there."""
    parser = argparse.ArgumentParser(
        prog="rankwatch ls",
        description="List runs, the newest first: name, duration, exit code, incidents by the worst verdict that each reached, command.",
        epilog="Exit codes: 0 listed, 2 wrong usage, 3 no run found.",
        allow_abbrev=False,
    )
    parser.add_argument("path", nargs="?", metavar="DIR", help=f"folder that holds run directories (default: {RUNS}, or the folder of --run-dir)")
    path = parser.parse_args(argv).path or (os.path.dirname(os.path.abspath(options.run_dir)) if options.run_dir else RUNS)
    if not os.path.isdir(path):
        return fail(f"{path} is no directory; runs are listed from the folder that holds them, by default ./{RUNS}")
    runs = [entry.path for entry in os.scandir(path) if entry.name != LATEST and os.path.isfile(os.path.join(entry.path, "run.json"))]
    if not runs:
        say(f"no run in {path}")
        return EXIT_NOTHING_FOUND
    rows = [HEADER, *(_row(run) for run in sorted(runs, key=_started, reverse=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _started(run: str) -> tuple[float, str]:
    """Its start, by the age of its run.json where that does not tell, and its name."""
    path = os.path.join(run, "run.json")
    try:
        return float(load(path, RUN)["started_at"]), run
    except (OSError, ValueError, KeyError, TypeError):
        return (os.path.getmtime(path) if os.path.exists(path) else 0.0), run


def _row(run: str) -> tuple[str, ...]:
    name, incidents = shown.one_line(os.path.basename(run)), _incidents(run)
    try:
        doc = load(os.path.join(run, "run.json"), RUN)
        started, ended, code = doc.get("started_at"), doc.get("ended_at"), doc.get("exit_code")
        lasted = shown.duration(ended - started) if isinstance(started, (int, float)) and isinstance(ended, (int, float)) else "-"
        return name, lasted, "no end recorded" if code is None else str(code), incidents, shown.job_words(doc.get("command") or ())
    except (OSError, ValueError):
        return name, "-", "unreadable", incidents, ""


def _incidents(run: str) -> str:
    counted: Counter[str] = Counter()
    for file in incident_files(run):
        try:
            counted[shown.worst_in(read(file))] += 1
        except (OSError, ValueError):
            counted["unreadable"] += 1
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(counted.items())) or "none"
