"""`rankwatch dashboards export DIR`: the Grafana dashboards, as files that import without an edit."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from rankwatch.cli import fail
from rankwatch.config import Options, accepted

RUNBOOK = "Runbook: "
EPILOG = """\
Import them in Grafana 10 to 13 (Dashboards, New, Import), or let Grafana read the folder, in /etc/grafana/provisioning/dashboards/rankwatch.yaml:

  apiVersion: 1
  providers:
    - name: rankwatch
      options: {path: DIR}

They choose a Prometheus by themselves where there is one, and ask where there are several.
Exit codes: 0 written, 2 wrong usage.
"""


def main(argv: Sequence[str], _options: Options) -> int:
    """0: written; 2: wrong usage, or a folder that cannot be written."""
    parser = argparse.ArgumentParser(
        prog="rankwatch dashboards",
        usage="rankwatch dashboards export [--runbook-base URL] DIR",
        description="Write the Grafana dashboards Job, Rank, Fleet and Compile.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("verb", choices=("export",), metavar="export", help="write one JSON file a dashboard")
    parser.add_argument("folder", metavar="DIR", help="where to; made if it is not there")
    parser.add_argument("--runbook-base", metavar="URL", default="", help="where dashboards/runbooks/ is published: panels then link to their runbooks")
    arguments = parser.parse_args(argv)
    try:
        base = accepted.url(arguments.runbook_base).rstrip("/") if arguments.runbook_base else ""
    except ValueError as error:
        return fail(f"--runbook-base {arguments.runbook_base!r} is not {error}")
    try:
        os.makedirs(arguments.folder, exist_ok=True)
        for name, text in shipped().items():
            path = os.path.join(arguments.folder, name)
            with open(path, "w", encoding="utf-8") as file:
                file.write(with_runbooks(text, base) if base else text)
            print(path)
    except OSError as error:
        return fail(f"cannot write {arguments.folder}: {error.strerror}; give a folder that you may write")
    return 0


def shipped() -> dict[str, str]:
    """File name -> text, of the dashboards that came with this rankwatch."""
    folder = resources.files("rankwatch").joinpath("dashboards")
    return {item.name: item.read_text(encoding="utf-8") for item in sorted(folder.iterdir(), key=lambda item: item.name) if item.name.endswith(".json")}


def with_runbooks(text: str, base: str) -> str:
    """The dashboard with a link to `base`/<alert>.md for each alert that a panel's description names."""
    board = json.loads(text)
    for panel in board["panels"]:
        for one in (panel, *panel.get("panels", ())):
            _link(one, base)
    return json.dumps(board, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _link(panel: dict[str, Any], base: str) -> None:
    lines: list[str] = []
    for line in panel.get("description", "").splitlines():
        if line.startswith(RUNBOOK):
            alerts = line.removeprefix(RUNBOOK).split(", ")
            panel["links"] = [*panel.get("links", ()), *(_runbook(alert, base) for alert in alerts)]
            line = RUNBOOK + ", ".join(f"[{alert}]({base}/{alert}.md)" for alert in alerts)
        lines.append(line)
    if lines:
        panel["description"] = "\n".join(lines)


def _runbook(alert: str, base: str) -> Mapping[str, object]:
    return {"title": f"Runbook {alert}", "type": "link", "url": f"{base}/{alert}.md", "targetBlank": True}
