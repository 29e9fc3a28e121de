"""`rankwatch compile`: what every rank compiled, where they differ and what to change; of a running job or of a run's files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rankwatch.cli import fail, say
from rankwatch.commands import node_runs
from rankwatch.commands.fetch import FETCH_S, Absent, document, is_url, why
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST
from rankwatch.report import moved
from rankwatch.report.documents import load
from rankwatch.serve.token import read_token

EXIT_NOTHING_FOUND = 3
FILE = "compile.json"
ROUTE = "/api/v1/compile"


def main(argv: Sequence[str], options: Options) -> int:
    """0: shown; 2: wrong usage, or a file or an address that cannot be read; 3: nothing is known of compiles there."""
    parser = argparse.ArgumentParser(
        prog="rankwatch compile",
        description="torch.compile across ranks: the regime of the job, advice, frames by time lost, where ranks differ, a timeline.",
        epilog="Exit codes: 0 shown, 2 wrong usage or unreadable, 3 the run knows of no compile.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", nargs="?", metavar="RUN_DIR|URL", help=f"a run directory, its {FILE}, or a running job's status address (default: {RUNS}/{LATEST})"
    )
    parser.add_argument("--json", action="store_true", help="the whole document as JSON")
    parser.add_argument("--tlparse", action="store_true", help="run tlparse over the traces of a run with --torch-trace, and say which pages to open")
    parser.add_argument("--attempt", type=int, metavar="N", help="with --tlparse: the attempt, the newest by default")
    parser.add_argument("--out", metavar="DIR", help="with --tlparse: where the pages go")
    arguments = parser.parse_args(argv)
    source = arguments.source or options.run_dir or os.path.join(RUNS, LATEST)
    try:
        given, source = source, source if is_url(source) else node_runs.meant(source)
    except node_runs.Several as error:
        return fail(str(error))
    if source != given:
        say(node_runs.words(source))
    if arguments.tlparse:
        from rankwatch.commands import tlparse

        return tlparse.run(source, arguments.attempt, arguments.out)
    if arguments.attempt is not None or arguments.out:
        return fail("--attempt and --out belong to --tlparse")
    try:
        token = read_token(options.token_file) if options.token_file else ""
    except ValueError as error:
        return fail(f"--token-file: {error}")
    try:
        if not is_url(source) and (word := moved.words(source)):
            say(word)
        doc = fetch(source, token) if is_url(source) else read(source)
    except Absent as error:
        say(f"{source}: {error}")
        return EXIT_NOTHING_FOUND
    except FileNotFoundError as error:
        if os.path.isdir(source):
            say(f"no {FILE} in {source}: no rank of that run compiled anything, or it ran without the compile probe")
            return EXIT_NOTHING_FOUND
        return fail(f"{error.filename or source} does not exist; name a run directory, or a running job's status address such as http://127.0.0.1:27435")
    except OSError as error:
        return fail(f"{source} cannot be read: {why(error) if is_url(source) else error}")
    except ValueError as error:
        return fail(f"{source} cannot be read: {error}")
    from rankwatch.report import compile_text

    try:
        text = json.dumps(doc, indent=2) + "\n" if arguments.json else compile_text.render(doc)
    except Exception as error:  # another program's document, or one of a later release
        return fail(f"{source} cannot be shown: {type(error).__name__}: {error}{'' if arguments.json else '; rankwatch compile --json shows it as it is'}")
    sys.stdout.write(text)
    return 0


def read(path: str) -> dict[str, Any]:
    """The document of a run directory or of a file; OSError, or ValueError when it is none."""
    return _checked(load(moved.newest(path, FILE) if os.path.isdir(path) else path, {}))


def fetch(url: str, token: str = "", limit_s: float = FETCH_S) -> dict[str, Any]:
    """The document of a running job, from its status address. OSError when nobody answers in time, Absent when nothing was compiled,
    ValueError when it is no rankwatch."""
    return _checked(document(url, ROUTE, token, limit_s))


def _checked(doc: object) -> dict[str, Any]:
    if not isinstance(doc, dict) or not isinstance(doc.get("run"), dict):
        raise ValueError("no compile document: it has no run")
    return doc
