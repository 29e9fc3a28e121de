"""`rankwatch open`: where a running job is looked at: the link, what it asks for, and the ssh line that brings it to another machine."""

from __future__ import annotations

import argparse
import getpass
import json
import re
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
_JUDGE_THERE = re.compile(r"(?P<node>[A-Za-z0-9][A-Za-z0-9._-]*) \((?P<url>https?://\S+) there\)")


def main(argv: Sequence[str], options: Options) -> int:
    """0: printed; 2: wrong usage; 3: no such job runs here, or it serves no page."""
    parser = argparse.ArgumentParser(
        prog="rankwatch open",
        description="Print the link to a running job's status page, the token file that it asks for, and the ssh line that forwards it to your machine.",
        epilog="Exit codes: 0 printed, 2 wrong usage, 3 no such job runs here, or it serves no page (--listen off).",
        allow_abbrev=False,
    )
    parser.add_argument("source", nargs="?", metavar="RUN_DIR", help=f"the job's run directory (default: the job that runs here; of several {RUNS}/{LATEST})")
    parser.add_argument("--json", action="store_true", help="link, served_at, token_file, ssh, host, user, port, judge as JSON")
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
    """What `open` prints, from what a launcher says of itself. link: as people are told it. served_at: where the launcher itself serves the page, which
    port and ssh mean. ssh: "" where that listens beyond its own machine; judge_ssh: the same for the page of the whole job."""
    run = info.get("run") if isinstance(info.get("run"), dict) else {}
    assert isinstance(run, dict)
    link, node = text_of(run.get("status_url"), 500), text_of(run.get("node"), 200)
    judge = text_of(info.get("judge"), 500)
    there = _JUDGE_THERE.fullmatch(judge)
    served_at = text_of(info.get("served_at"), 500) or link
    ssh, port = _forward(served_at, node, user)
    return {
        "link": link,
        "served_at": served_at,
        "token_file": text_of(info.get("token_file"), 500),
        "host": node,
        "user": user,
        "port": port,
        "ssh": ssh,
        "judge": judge,
        "judge_ssh": _forward(there["url"], there["node"], user)[0] if there else "",
    }


def _forward(link: str, node: str, user: str) -> tuple[str, int | None]:
    """The ssh line that brings a page to another machine, "" where it listens beyond its own; and its port."""
    try:
        parts = urlsplit(link)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "", None
    near = host in ("localhost", "::1", *_EVERYWHERE) or host.startswith("127.")
    there = f"[{host}]" if ":" in host else host
    return f"ssh -N -L {port}:{there}:{port} {user}@{node}" if near and port else "", port


def render(found: Mapping[str, Any]) -> str:
    """The lines."""
    lines = [f"page   {found['link']}"]
    if found["served_at"] != found["link"]:
        lines.append(f"live   {found['served_at']} on {found['host']}")
    if found["token_file"]:
        lines.append(f"token  in {found['token_file']}: as the password of any user")
    if found["ssh"]:
        lines.append(f"from your machine: {found['ssh']}")
        lines.append(f"                   then open {found['served_at']}")
    if found["judge"]:
        lines.append(f"this node's ranks only; the whole job: {found['judge']}")
    if found["judge_ssh"]:
        lines.append(f"                   from your machine: {found['judge_ssh']}")
    return "".join(f"{shown.clean(text)}\n" for text in lines)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        return "USER"
