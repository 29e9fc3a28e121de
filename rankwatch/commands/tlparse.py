"""`rankwatch compile --tlparse`: tlparse over the traces of one attempt, and which of its pages to open."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from rankwatch.cli import fail, say
from rankwatch.launcher import torch_trace
from rankwatch.shown import clean

EXIT_NOTHING_FOUND = 3
EXIT_NO_TLPARSE = 4
RUN_S = 1800.0
PAGES = 3  # of one kind, for one rank
KINDS = {"recompile_reasons": "recompile", "dynamo_graph_break_reason": "graph break", "optimize_ddp_split_graph": "DDP split"}
"""What tlparse calls a page -> what people call it."""


def run(run_dir: str, attempt: int | None, out: str | None) -> int:
    """0: pages written; 2: wrong usage; 3: the run has no trace, or tlparse failed; 4: tlparse is not installed.

    attempt None: the newest. out None: `tlparse_attempt_<N>` in the run directory; a directory of ours there is replaced, another one never.
    """
    found = torch_trace.attempts(run_dir)
    if not os.path.isdir(run_dir):
        return fail(f"{run_dir} is no run directory")
    if attempt is not None and found and attempt not in found:
        return fail(f"{run_dir} has no trace of attempt {attempt}; it has {', '.join(map(str, found))}")
    number = attempt if attempt is not None else max(found, default=0)
    try:
        ranks = torch_trace.name_by_rank(found[number], since=_started_at(run_dir)) if number in found else {}
    except OSError as error:
        return fail(f"{found[number]} cannot be read: {error.strerror or error}")
    if not ranks:
        say(f"no trace in {os.path.join(run_dir, torch_trace.ROOT)}: start the job with rankwatch --torch-trace torchrun ...")
        return EXIT_NOTHING_FOUND
    program = executable()
    if program is None:
        say("tlparse is not installed: pip install 'rankwatch[trace]'")
        return EXIT_NO_TLPARSE
    place = os.path.abspath(out or os.path.join(run_dir, f"tlparse_attempt_{number}"))
    if os.path.lexists(place) and (out is not None or not os.path.isfile(os.path.join(place, "index.html"))):
        return fail(f"{place} exists; name another directory with --out")
    done = _tlparse(program, ranks, place)
    if done is not None:
        say(f"tlparse failed: {done}")
        return EXIT_NOTHING_FOUND
    sys.stdout.write("\n".join(pages(place, ranks)) + "\n")
    return 0


def executable() -> str | None:
    """tlparse of this Python's environment, else of the PATH."""
    own = os.path.join(os.path.dirname(sys.executable), "tlparse")
    return own if os.access(own, os.X_OK) else shutil.which("tlparse")


def pages(place: str, ranks: Mapping[int, Iterable[str]]) -> list[str]:
    """What to open, as lines: the landing page, then for each rank what failed, recompiled and broke."""
    landing = os.path.join(place, "index.html")
    lines = [f"open {landing}", *(f"  it says: {words}" for words in _divergence(landing))]
    for rank, files in ranks.items():
        own = os.path.join(place, f"rank_{rank}")
        more = len(list(files)) - 1
        if not os.path.isdir(own):
            lines.append(f"rank {rank}: tlparse found nothing in its trace")
            continue
        lines.append(f"rank {rank}: {os.path.join(own, 'index.html')}" + (f" (of its longest trace; {more} shorter left out)" if more else ""))
        failures = os.path.join(own, "failures_and_restarts.html")
        if os.path.isfile(failures):
            lines.append(f"  failures and restarts: {failures}")
        for kind, files_of_kind in _by_kind(own).items():
            shown = ", ".join(files_of_kind[:PAGES])
            lines.append(f"  {KINDS[kind]} ({len(files_of_kind)}): {shown}" + (", ..." if len(files_of_kind) > PAGES else ""))
    return [clean(line) for line in lines]


def _divergence(landing: str) -> list[str]:
    """What tlparse found to differ between the ranks: the first sentence of each notice."""
    try:
        with open(landing, encoding="utf-8", errors="replace") as file:
            return [words.partition(". ")[0].strip().rstrip(".:") for words in dict.fromkeys(re.findall(r"Diverging [^<\n]+", file.read()))]
    except OSError:
        return []


def _started_at(run_dir: str) -> float:
    """When the run began, 0 where its run.json does not tell."""
    try:
        with open(os.path.join(run_dir, "run.json"), encoding="utf-8") as file:
            return float(json.load(file)["started_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _by_kind(folder: str) -> dict[str, list[str]]:
    """Kind -> paths, from tlparse's compile_directory.json: {compile id: {artifacts: [{name, url}]}}."""
    try:
        with open(os.path.join(folder, "compile_directory.json"), encoding="utf-8") as file:
            directory: Any = json.load(file)
    except (OSError, ValueError):
        return {}
    found: dict[str, list[str]] = {}
    for entry in directory.values() if isinstance(directory, dict) else ():
        for artifact in entry.get("artifacts", ()) if isinstance(entry, dict) else ():
            name, url = str(artifact.get("name", "")), str(artifact.get("url", ""))
            kind = next((kind for kind in KINDS if name.startswith(kind)), None)
            if kind is not None and url:
                found.setdefault(kind, []).append(os.path.join(folder, url))
    return {kind: found[kind] for kind in KINDS if kind in found}


def _tlparse(program: str, ranks: Mapping[int, list[str]], place: str) -> str | None:
    """Why it failed, None when it did not. It sees one trace a rank, the longest: two of one rank would collide."""
    with tempfile.TemporaryDirectory(prefix="rankwatch-tlparse-") as folder:
        for files in ranks.values():
            os.symlink(os.path.abspath(files[0]), os.path.join(folder, os.path.basename(files[0])))
        command = [program, folder, "--all-ranks-html", "--no-browser", "--overwrite", "-o", place]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=RUN_S, check=False)
        except subprocess.TimeoutExpired:
            return f"it ran longer than {RUN_S:g} s"
        except OSError as error:
            return f"{program}: {error.strerror or error}"
    words = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return None if done.returncode == 0 else f"exit code {done.returncode}: {clean(words[-1]) if words else 'no message'}"
