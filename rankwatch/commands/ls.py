"""`rankwatch ls`: the runs of a directory and those that run on this machine, the newest first, with what became of each."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rankwatch import shown
from rankwatch.cli import fail, say
from rankwatch.commands import node_runs
from rankwatch.commands.live.running import Launcher, launchers
from rankwatch.commands.report import EXIT_NOTHING_FOUND, incident_files, read
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST
from rankwatch.report import moved
from rankwatch.report.documents import RUN, load

MOVED_SAID = 8
HEADER = ("RUN", "STATE", "AGE", "LASTED", "INCIDENTS", "COMMAND")


@dataclass(frozen=True, slots=True)
class Row:
    """One run. state: of a job that runs what its launcher says (starting, running, stuck, ...); else "ended", "no end recorded", "unreadable".

    incidents: how many by the worst verdict that each reached. ended_by: the signal to the launcher that has ended it, "" for none.
    """

    name: str
    path: str
    state: str
    started_at: float | None
    ended_at: float | None
    exit_code: float | None
    incidents: Mapping[str, int]
    command: str
    running: bool
    ended_by: str = ""


def main(argv: Sequence[str], options: Options) -> int:
    """0: listed; 2: wrong usage; 3: no run there."""
    parser = argparse.ArgumentParser(
        prog="rankwatch ls",
        description="List runs, the newest first: name, state or exit code, age, duration, incidents by the worst verdict that each reached, command. "
        "Without DIR also yours that run on this machine, wherever their files are.",
        epilog="Exit codes: 0 listed, 2 wrong usage, 3 no run found.",
        allow_abbrev=False,
    )
    parser.add_argument("path", nargs="?", metavar="DIR", help=f"folder that holds run directories (default: {RUNS}, or the folder of --run-dir)")
    parser.add_argument("--json", action="store_true", help="a list of objects")
    arguments = parser.parse_args(argv)
    path = arguments.path or (os.path.dirname(os.path.abspath(options.run_dir)) if options.run_dir else RUNS)
    if arguments.path and not os.path.isdir(path):
        return fail(f"{path} is no directory; runs are listed from the folder that holds them, by default ./{RUNS}")
    found = listed(path, launchers(), elsewhere=not arguments.path)
    for word in list(filter(None, (moved.words(row.path) for row in found)))[:MOVED_SAID]:
        say(word)
    if not found:
        say(f"no run in {path}" + ("" if arguments.path else ", and no job of yours runs on this machine under rankwatch"))
        return EXIT_NOTHING_FOUND
    sys.stdout.write(json.dumps([asdict(row) for row in found], indent=2) + "\n" if arguments.json else render(found, time.time()))
    return 0


def listed(folder: str, running: Sequence[Launcher], elsewhere: bool) -> list[Row]:
    """The runs in a folder, and with `elsewhere` those that run here and lie in another one."""
    live = {os.path.realpath(launcher.run_dir): launcher for launcher in running if launcher.run_dir}
    rows = []
    for path in _places(folder) if os.path.isdir(folder) else ():
        later = moved.of(path)
        place = os.path.realpath(later.path) if later is not None and later.here else ""
        rows.append(_row(path, os.path.relpath(path, folder), live.pop(os.path.realpath(path), None) or live.pop(place, None)))
    if elsewhere:
        rows += [_row(path, path, launcher) for path, launcher in live.items()]
    return sorted(rows, key=lambda row: (row.started_at or _changed(row.path), row.name), reverse=True)


def _places(folder: str) -> list[str]:
    """Where the runs of a folder are: its folders, and what other nodes than the first keep of a run in there."""
    places = node_runs.within(folder)
    for entry in os.scandir(folder):
        if entry.name != LATEST:
            places += [entry.path] if os.path.isfile(moved.newest(entry.path, "run.json")) else node_runs.within(entry.path)
    return places


def render(rows: Sequence[Row], now: float) -> str:
    """The table."""
    table = [HEADER, *(_cells(row, now) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    return "".join("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in table)


def _cells(row: Row, now: float) -> tuple[str, ...]:
    until = now if row.running else row.ended_at
    lasted = shown.duration(until - row.started_at) if until is not None and row.started_at is not None else "-"
    age = shown.duration(now - row.started_at) if row.started_at is not None else "-"
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(row.incidents.items())) or "none"
    ended = f"ended by {row.ended_by}" if row.ended_by else f"exit {row.exit_code:g}" if row.exit_code is not None else row.state
    state = ended if row.state == "ended" else row.state
    return row.name, state, age, lasted, told, row.command


def _row(path: str, name: str, launcher: Launcher | None) -> Row:
    name, incidents = shown.one_line(name), _incidents(path)
    doc: Mapping[str, Any]
    if launcher is not None:
        doc, state = launcher.run, shown.one_line(launcher.info.get("state") or "running")
        state = state if state != "failed" and state != "done" else "ending"
    else:
        try:
            doc = load(moved.newest(path, "run.json"), RUN)
            state = "no end recorded" if doc.get("exit_code") is None else "ended"
        except (OSError, ValueError):
            doc, state = {}, "unreadable"
    command = doc.get("command")
    return Row(
        name=name,
        path=shown.clean(path),
        state=state,
        started_at=_number(doc.get("started_at")),
        ended_at=_number(doc.get("ended_at")),
        exit_code=_number(doc.get("exit_code")) if launcher is None else None,
        incidents=incidents,
        command=shown.job_words(command) if isinstance(command, (list, tuple)) else "",
        running=launcher is not None,
        ended_by=shown.one_line(doc.get("ended_by") or "")[:16] if launcher is None else "",
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value else None


def _changed(run: str) -> float:
    """When its run.json was written: for one that does not tell its start."""
    try:
        return os.path.getmtime(os.path.join(run, "run.json"))
    except OSError:
        return 0.0


def _incidents(run: str) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for file in incident_files(run):
        try:
            counted[shown.worst_in(read(file))] += 1
        except (OSError, ValueError):
            counted["unreadable"] += 1
    return dict(counted)
