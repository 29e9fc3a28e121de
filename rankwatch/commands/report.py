"""`rankwatch report`: the incidents of a run, rendered again from its files. Needs no running job.

Several incidents are shown under one line that names the run and counts them: those that are not over first, the gravest before the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rankwatch import shown
from rankwatch.cli import EXIT_USAGE, fail, say
from rankwatch.commands import node_runs
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST
from rankwatch.report import moved
from rankwatch.report.documents import INCIDENT, RUN, load

EXIT_NOTHING_FOUND = 3
NO_END = "no end recorded: it still runs, or its launcher was killed"


def main(argv: Sequence[str], options: Options) -> int:
    """0: shown; 2: wrong usage or an unreadable file; 3: the run holds no incident."""
    parser = argparse.ArgumentParser(
        prog="rankwatch report",
        description="Show the incidents of a run: one incident, or all of a run directory, the gravest first (as JSON: the oldest first).",
        epilog="Exit codes: 0 shown, 2 wrong usage or unreadable file, 3 no incident found.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "path", nargs="?", metavar="RUN_DIR|INCIDENT", help=f"a run directory, an incident's folder or its incident.json (default: {RUNS}/{LATEST})"
    )
    parser.add_argument("--format", choices=("text", "markdown", "html", "json"), default="text", help="html: one self-contained page, of the newest incident")
    parser.add_argument("--output", metavar="FILE", help="write there instead of stdout")
    parser.add_argument(
        "--redact", action="store_true", help="for strangers: no folders of paths, hosts as host1, host2, no values of arguments (look at the rest yourself)"
    )
    arguments = parser.parse_args(argv)
    path = arguments.path or options.run_dir or os.path.join(RUNS, LATEST)
    run = run_of(path)
    if run and (word := moved.words(run)):
        say(word)
    path = newest_of(path, run)
    if not os.path.exists(path):
        where = "" if arguments.path or options.run_dir else "; a run that was started with --run-dir is named by hand: rankwatch report DIR"
        return fail(f"{path} does not exist; name a run directory, an incident's folder or an incident.json{where}")
    try:
        given, path = path, node_runs.meant(path)
    except node_runs.Several as error:
        return fail(str(error))
    if path != given:
        say(node_runs.words(path))
    if word := moved.words(path):
        say(word)
    files = incident_files(path)
    if not files and (runs := _runs_in(path)):
        return fail(f"{path} holds runs; name one, such as {runs[-1]}; rankwatch ls {path} lists them")
    if not files:
        say(f"no incident in {_run_words(path)}")
        return EXIT_NOTHING_FOUND
    docs = []
    for file in files:
        try:
            docs.append(read(file))
        except (OSError, ValueError) as error:
            say(f"{file} cannot be read: {error}")
    if not docs:
        return EXIT_USAGE
    if arguments.redact:
        from rankwatch.report import hidden

        docs = [hidden.hide(doc) for doc in docs]
    docs.sort(key=lambda doc: (doc.get("opened_at") or 0.0, str(doc.get("id"))))
    text = _render(docs, arguments.format, one=os.path.isfile(path) or os.path.dirname(files[0]) == path.rstrip("/"))
    if not text:
        return EXIT_USAGE
    return _write(text, arguments.output)


def run_of(path: str) -> str:
    """The run directory of an incident's folder or of its incident.json; "" where `path` names neither."""
    folder = os.path.abspath(path)
    if os.path.basename(folder) == "incident.json":
        folder = os.path.dirname(folder)
    incidents = os.path.dirname(folder)
    return os.path.dirname(incidents) if os.path.basename(incidents) == "incidents" else ""


def newest_of(path: str, run: str) -> str:
    """Where the newest word on an incident of `run` is: in its incident.json where the run's later files are, if there is one, else where `path` says."""
    if not run:
        return path
    own = os.path.abspath(path)
    own = own if os.path.basename(own) == "incident.json" else os.path.join(own, "incident.json")
    newest = moved.newest(run, os.path.relpath(own, run))
    return newest if newest != own else path


def incident_files(path: str) -> list[str]:
    """The incident.json files that `path` means: itself, the one in it, or those of the run directory and of the place where its later files are."""
    if os.path.isfile(path):
        return [path]
    own = os.path.join(path, "incident.json")
    if os.path.isfile(own):
        return [own]
    later = moved.of(path)
    found: dict[str, str] = {}
    for place in (path, *((later.path,) if later is not None and later.here else ())):
        folder = os.path.join(place, "incidents")
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        found.update({name: file for name in names if os.path.isfile(file := os.path.join(folder, name, "incident.json"))})
    return [found[name] for name in sorted(found)]


def _runs_in(path: str) -> list[str]:
    """The runs that a folder holds, in the order of their names; none where the folder is a run itself."""
    if not os.path.isdir(path) or os.path.isfile(os.path.join(path, "run.json")):
        return []
    return sorted(entry.path for entry in os.scandir(path) if entry.name != LATEST and os.path.isfile(os.path.join(entry.path, "run.json")))


def _run_words(path: str) -> str:
    """`rankwatch-runs/20260101T000000Z-job (torchrun --nproc-per-node 2 train.py, exit code 0)`: what a link points to, and how that run went."""
    name = os.path.join(os.path.dirname(path), os.readlink(path)) if os.path.islink(path) else path
    try:
        doc = load(moved.newest(path, "run.json"), RUN)
        code = doc.get("exit_code")
        ended_by = f"ended by {shown.one_line(doc['ended_by'])}" if doc.get("ended_by") else ""
        words = [shown.job_words(doc.get("command") or ()), NO_END if code is None else ended_by, shown.exit_words(code) if code is not None else ""]
    except (OSError, ValueError):
        return name
    return f"{name} ({', '.join(filter(None, words))})"


def read(file: str) -> dict[str, Any]:
    """One incident; ValueError when it is none."""
    doc = load(file, INCIDENT)
    if not isinstance(doc.get("verdict"), str):
        raise ValueError("no incident: it has no verdict")
    return doc


def _render(docs: list[dict[str, Any]], form: str, one: bool) -> str:
    if form == "json":
        return json.dumps(docs[0] if one else docs, indent=2) + "\n"
    if form == "html":
        from rankwatch.report import page

        if len(docs) > 1:
            say(f"{len(docs)} incidents, this is the newest ({docs[-1].get('id')}); name another one by its folder")
        return _rendered(lambda doc: page.render(doc, files=False, home=""), docs[-1])
    from rankwatch.report import markdown, text

    render = markdown.render if form == "markdown" else text.render
    shown_docs = sorted(docs, key=lambda doc: (text.healed(doc), -shown.VERDICT_ORDER.index(_worst(doc))))
    head = [] if len(docs) < 2 else [_head(docs, "# " if form == "markdown" else "")]
    rendered = [one_text.rstrip("\n") + "\n" for doc in shown_docs if (one_text := _rendered(render, doc))]
    return "\n".join((*head, *rendered)) if rendered else ""


def _rendered(render: Callable[[dict[str, Any]], str], doc: dict[str, Any]) -> str:
    """One document; "" for one that is damaged deep inside, which is said and hides no other."""
    try:
        return render(doc)
    except Exception as error:
        say(f"incident {doc.get('id')} cannot be shown: its incident.json is damaged ({type(error).__name__}: {error})"[:400])
        return ""


def _head(docs: list[dict[str, Any]], mark: str) -> str:
    """`run 20260101T000000Z-job: 3 incidents: 1 stuck, 2 slow`."""
    counts = Counter(map(_worst, docs))
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(shown.VERDICT_ORDER) if counts[verdict])
    run = next((str(path) for doc in docs if (path := (doc.get("run") or {}).get("run_dir"))), "")
    name = shown.one_line(os.path.basename(run.rstrip("/"))) or "one run"
    return f"{mark}run {name}: {len(docs)} incidents: {told}\n"


def _worst(doc: dict[str, Any]) -> str:
    verdict = shown.worst_in(doc)
    return verdict if verdict in shown.VERDICT_ORDER else shown.VERDICT_ORDER[0]


def _write(text: str, output: str | None) -> int:
    try:
        if output is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            # as readable as the run's own files: stacks and paths are in it
            with open(output, "w", encoding="utf-8", errors="backslashreplace", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(text)
    except BrokenPipeError:  # cli.main knows
        raise
    except OSError as error:
        return fail(f"cannot write {output or 'stdout'}: {error.strerror or error}")
    return 0
