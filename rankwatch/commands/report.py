"""`rankwatch report`: the incidents of a run, rendered again from its files. Needs no running job."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rankwatch.cli import EXIT_USAGE, fail, say
from rankwatch.config import Options
from rankwatch.launcher.rundir import LATEST, ROOT

EXIT_NOTHING_FOUND = 3


def main(argv: Sequence[str], options: Options) -> int:
    """0: shown; 2: wrong usage or an unreadable file; 3: the run holds no incident."""
    parser = argparse.ArgumentParser(
        prog="rankwatch report",
        description="Show the incidents of a run: one incident, or all of a run directory, the oldest first.",
        epilog="Exit codes: 0 shown, 2 wrong usage or unreadable file, 3 no incident found.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "path", nargs="?", metavar="RUN_DIR|INCIDENT", help=f"a run directory, an incident's folder or its incident.json (default: {ROOT}/{LATEST})"
    )
    parser.add_argument("--format", choices=("text", "markdown", "html", "json"), default="text", help="html: one self-contained page, of the newest incident")
    parser.add_argument("--output", metavar="FILE", help="write there instead of stdout")
    arguments = parser.parse_args(argv)
    path = arguments.path or options.run_dir or os.path.join(ROOT, LATEST)
    if not os.path.exists(path):
        where = "" if arguments.path or options.run_dir else "; a run that was started with --run-dir is named by hand: rankwatch report DIR"
        return fail(f"{path} does not exist; name a run directory, an incident's folder or an incident.json{where}")
    files = incident_files(path)
    if not files:
        say(f"no incident in {path}")
        return EXIT_NOTHING_FOUND
    docs = []
    for file in files:
        try:
            docs.append(read(file))
        except (OSError, ValueError) as error:
            say(f"{file} cannot be read: {error}")
    if not docs:
        return EXIT_USAGE
    docs.sort(key=lambda doc: (doc.get("opened_at") or 0.0, str(doc.get("id"))))
    text = _render(docs, arguments.format, one=os.path.isfile(path) or os.path.dirname(files[0]) == path.rstrip("/"))
    return _write(text, arguments.output)


def incident_files(path: str) -> list[str]:
    """The incident.json files that `path` means: itself, the one in it, or those of the run directory."""
    if os.path.isfile(path):
        return [path]
    own = os.path.join(path, "incident.json")
    if os.path.isfile(own):
        return [own]
    folder = os.path.join(path, "incidents")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [file for name in names if os.path.isfile(file := os.path.join(folder, name, "incident.json"))]


def read(file: str) -> dict[str, Any]:
    """One incident; ValueError when it is none."""
    with open(file, encoding="utf-8") as stream:
        doc = json.load(stream)
    if not isinstance(doc, dict) or not isinstance(doc.get("verdict"), str):
        raise ValueError("no incident: it has no verdict")
    return doc


def _render(docs: list[dict[str, Any]], form: str, one: bool) -> str:
    if form == "json":
        return json.dumps(docs[0] if one else docs, indent=2) + "\n"
    if form == "html":
        from rankwatch.report import page

        if len(docs) > 1:
            say(f"{len(docs)} incidents, this is the newest ({docs[-1].get('id')}); name another one by its folder")
        return page.render(docs[-1])
    from rankwatch.report import markdown, text

    render = markdown.render if form == "markdown" else text.render
    return "\n".join(render(doc).rstrip("\n") + "\n" for doc in docs)


def _write(text: str, output: str | None) -> int:
    try:
        if output is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            with open(output, "w", encoding="utf-8") as file:
                file.write(text)
    except BrokenPipeError:  # cli.main knows
        raise
    except OSError as error:
        return fail(f"cannot write {output or 'stdout'}: {error.strerror or error}")
    return 0
