"""`rankwatch open`: where a running job is looked at: the link, what it asks for, and the ssh line that brings it to another machine."""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rankwatch import shown
from rankwatch.cli import fail, say
from rankwatch.commands.live import source
from rankwatch.commands.live.styled import text_of
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST

EXIT_NOTHING_FOUND = 3
_EVERYWHERE = ("0.0.0.0", "::")


def main(argv: Sequence[str], options: Options) -> int:
    """0: printed; 2: wrong usage; 3: no such job runs here, or it serves no page."""
    parser = argparse.ArgumentParser(
        prog="rankwatch open",
        description="Print the link to a running job's status page, the token file that it asks for, and the ssh line that forwards it to your machine.",
        epilog="Exit codes: 0 printed, 2 wrong usage, 3 no such job runs here, or it serves no page (--listen off).",
        allow_abbrev=False,
    )
    parser.add_argument("source", nargs="?", metavar="RUN_DIR", help=f"the job's run directory (default: the job that runs here; of several {RUNS}/{LATEST})")
    parser.add_argument("--json", action="store_true", help="link, token_file, ssh, host, user, port, judge as JSON")
    arguments = parser.parse_args(argv)
    try:
        launcher = source.launcher_of(arguments.source, options)
    except source.Misused as error:
        return fail(str(error))
    except source.Nothing as error:
        say(str(error))
        return EXIT_NOTHING_FOUND
    found = links(launcher.info, _user())
    if not found["link"]:
        say("this job serves no page: --listen off, or no port could be had (its first lines say which); rankwatch top and status work all the same")
        return EXIT_NOTHING_FOUND
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if arguments.json else render(found))
    return 0


def links(info: Mapping[str, Any], user: str) -> dict[str, Any]:
    """What `open` prints, from what a launcher says of itself. ssh: "" where the page listens beyond its own machine, or elsewhere than said."""
    run = info.get("run") if isinstance(info.get("run"), dict) else {}
    assert isinstance(run, dict)
    link, node = text_of(run.get("status_url"), 500), text_of(run.get("node"), 200)
    try:
        parts = urlsplit(link)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    near = host in ("localhost", "::1", *_EVERYWHERE) or host.startswith("127.")
    there = f"[{host}]" if ":" in host else host
    return {
        "link": link,
        "token_file": text_of(info.get("token_file"), 500),
        "host": node,
        "user": user,
        "port": port,
        "ssh": f"ssh -N -L {port}:{there}:{port} {user}@{node}" if near and port else "",
        "judge": text_of(info.get("judge"), 500),
    }


def render(found: Mapping[str, Any]) -> str:
    """The lines."""
    lines = [f"page   {found['link']}"]
    if found["token_file"]:
        lines.append(f"token  in {found['token_file']}: as the password of any user")
    if found["ssh"]:
        lines.append(f"from your machine: {found['ssh']}")
        lines.append(f"                   then open {found['link']}")
    if found["judge"]:
        lines.append(f"this node's ranks only; the whole job: {found['judge']}")
    return "".join(f"{shown.clean(text)}\n" for text in lines)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        return "USER"
