"""`rankwatch compile`: what every rank compiled, where they differ and what to change; of a running job or of a run's files."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from rankwatch.cli import fail, say
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST
from rankwatch.report.documents import MAX_BYTES, load
from rankwatch.serve.token import read_token

EXIT_NOTHING_FOUND = 3
FILE = "compile.json"
ROUTE = "/api/v1/compile"
FETCH_S = 10.0  # for the whole answer
_READ_BYTES = 1 << 16


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
        doc = fetch(source, token) if source.lower().startswith(("http://", "https://")) else read(source)
    except FileNotFoundError as error:
        if os.path.isdir(source):
            say(f"no {FILE} in {source}: no rank of that run compiled anything, or it ran without the compile probe")
            return EXIT_NOTHING_FOUND
        return fail(f"{error.filename or source} does not exist; name a run directory, or a running job's status address such as http://127.0.0.1:27435")
    except (OSError, ValueError) as error:
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
    return _checked(load(os.path.join(path, FILE) if os.path.isdir(path) else path, {}))


def fetch(url: str, token: str = "", limit_s: float = FETCH_S) -> dict[str, Any]:
    """The document of a running job, from its status address. OSError when nobody answers in time, ValueError when it is no rankwatch."""
    request = urllib.request.Request(url.rstrip("/").removesuffix(ROUTE) + ROUTE, headers={"Authorization": f"Bearer {token}"} if token else {})
    got: list[bytes | Exception] = []
    over = threading.Event()

    def ask() -> None:
        try:
            got.append(_answer(request, limit_s, over))
        except Exception as error:
            got.append(error)

    # A timeout of a socket bounds each read alone: only a thread that is left behind bounds names, redirects, headers and body together.
    asking = threading.Thread(target=ask, name="rankwatch-fetch", daemon=True)
    asking.start()
    asking.join(limit_s)
    over.set()
    if not got:
        raise TimeoutError(f"no whole answer within {limit_s:g} s")
    if isinstance(got[0], http.client.HTTPException):
        raise ValueError(f"the address or the answer is not HTTP: {type(got[0]).__name__}: {got[0]}") from got[0]
    if isinstance(got[0], Exception):
        raise got[0]
    try:
        doc = json.loads(got[0])
    except RecursionError:
        raise ValueError("the answer is nested too deep") from None
    return _checked(doc)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A status address does not redirect, and urllib would take the token along to another host."""

    def redirect_request(self, *_args: object) -> None:
        return None


def _answer(request: urllib.request.Request, limit_s: float, over: threading.Event) -> bytes:
    """The body. over: nobody waits for it any more."""
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=limit_s) as answer:
            data = bytearray()
            while not over.is_set() and (more := answer.read1(_READ_BYTES)):
                data += more
                if len(data) > MAX_BYTES:
                    raise ValueError(f"the answer is larger than {MAX_BYTES >> 20} MiB")
            return bytes(data)
    except urllib.error.HTTPError as error:
        with error:
            asks = "; it asks for a token: give --token-file" if error.code == 401 else ""
            raise ValueError(f"the server answers {error.code}{asks}") from error


def _checked(doc: object) -> dict[str, Any]:
    if not isinstance(doc, dict) or not isinstance(doc.get("run"), dict):
        raise ValueError("no compile document: it has no run")
    return doc
