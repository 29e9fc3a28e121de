"""The rules that a dashboard keeps, beside Grafana's schema. Standard library only; a rule says what is wrong and where.

A dashboard    has a fixed uid, no id of a Grafana, a data source variable named `datasource`, three kinds of annotation, a link to its siblings, no two panels
               in one place, panel ids that differ, titles that differ.
A panel        has a title, a unit that Grafana knows, a description with what it shows and "Next:", a text for no data, a runbook or a link, the variable as
               data source; is of a React type; where it shows ranks, jobs or incidents, leads to them.
A query        names its series or is a table's, uses only metrics that wire.signals has, rates counters and nothing else, over $__rate_interval, $__range or
               ten minutes, keeps to the job (or to the clusters, on Fleet).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rankwatch.wire.signals import BY_NAME

from .queries import asked, panels

UIDS = ("rankwatch-job", "rankwatch-rank", "rankwatch-fleet", "rankwatch-compile")
TYPES = ("stat", "table", "timeseries", "heatmap", "state-timeline", "status-history", "bargauge")
UNITS = ("none", "s", "bytes", "percentunit", "ops", "Bps", "suffix: rank-h")
ANNOTATIONS = ["Restarts", "Incidents", "Alerts"]
_METRIC = re.compile(r"\brankwatch_\w+")
_OVER_TIME = re.compile(r"(\w+)\((rankwatch_\w+)\{[^}]*\}\[([^\]]+)\]\)")
_ON_COUNTERS = ("rate", "increase", "changes")


def faults(board: Mapping[str, Any]) -> list[str]:
    """What is wrong with a dashboard; empty where nothing is."""
    return [*_of_board(board), *_of_places(board), *(text for panel in panels(board) for text in _of_panel(panel)), *_of_queries(board)]


def metrics(board: Mapping[str, Any]) -> set[str]:
    """Names of metrics that its panels, variables and annotations ask for."""
    return {name for query in asked(board) for name in _METRIC.findall(query.expression)}


def runbooks(board: Mapping[str, Any]) -> set[str]:
    """Alerts whose runbooks its panels name."""
    return {alert for panel in panels(board) for line in panel["description"].splitlines() for alert in _alerts_in(line)}


def _alerts_in(line: str) -> list[str]:
    return line.removeprefix("Runbook: ").split(", ") if line.startswith("Runbook: ") else []


def _of_board(board: Mapping[str, Any]) -> Iterator[str]:
    if board.get("uid") not in UIDS:
        yield f"uid {board.get('uid')!r} is none of {', '.join(UIDS)}"
    if board.get("id") is not None:
        yield "has the id of one Grafana"
    if "__inputs" in board:
        yield "asks for inputs when imported"
    sources = [variable["name"] for variable in board["templating"]["list"] if variable["type"] == "datasource"]
    if sources != ["datasource"]:
        yield f"data source variables are {sources}, not one named datasource"
    if [mark["name"] for mark in board["annotations"]["list"]] != ANNOTATIONS:
        yield f"annotations are not {', '.join(ANNOTATIONS)}"
    if not any(link["type"] == "dashboards" and "rankwatch" in link["tags"] for link in board["links"]):
        yield "does not link to its siblings"
    text = json.dumps(board)
    for uid in sorted(set(re.findall(r'"uid": "([^"]*)"', text)) - {"${datasource}", board.get("uid")}):
        yield f"data source {uid!r} is not the variable"
    for path in sorted(set(re.findall(r"/d/([\w-]+)/", text)) - set(UIDS)):
        yield f"links to the dashboard {path}, which does not exist"


def _of_places(board: Mapping[str, Any]) -> Iterator[str]:
    every = [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", ()))]
    for number, count in Counter(panel["id"] for panel in every).items():
        if count > 1:
            yield f"panel id {number} is given {count} times"
    for title, count in Counter(panel["title"] for panel in every).items():
        if count > 1:
            yield f"{title!r} is the title of {count} panels"
    for together in (board["panels"], *(panel["panels"] for panel in board["panels"] if panel.get("panels"))):
        for at, one in enumerate(together):
            if one["gridPos"]["x"] + one["gridPos"]["w"] > 24:
                yield f"{one['title']!r} is wider than the page"
            yield from (f"{one['title']!r} and {other['title']!r} overlap" for other in together[at + 1 :] if _overlap(one["gridPos"], other["gridPos"]))


def _overlap(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in (("x", "w"), ("y", "h")))


def _of_panel(panel: Mapping[str, Any]) -> Iterator[str]:
    title, defaults, description = panel.get("title"), panel["fieldConfig"]["defaults"], panel.get("description", "")
    if not (title or "").strip():
        yield f"panel {panel['id']} has no title"
    if panel["type"] not in TYPES:
        yield f"{title!r} is of type {panel['type']}"
    if defaults.get("unit") not in UNITS:
        yield f"{title!r} has the unit {defaults.get('unit')!r}"
    if not re.match(r"[A-Z`].*\n\nNext: .{20}", description, re.DOTALL):
        yield f"{title!r} does not say what it shows and what to do next"
    if not defaults.get("noValue"):
        yield f"{title!r} does not say what no data means"
    if not panel.get("links") and not any(_alerts_in(line) for line in description.splitlines()):
        yield f"{title!r} leads nowhere: no runbook, no link"
    if not panel.get("targets"):
        yield f"{title!r} asks nothing"
    if panel.get("datasource", {}).get("uid") != "${datasource}":
        yield f"{title!r} has a data source of its own"
    if panel["type"] in ("timeseries", "state-timeline", "status-history", "bargauge", "heatmap") and "legend" not in panel["options"]:
        yield f"{title!r} has no legend"
    yield from _of_leads(panel, json.dumps(panel["fieldConfig"]))


def _of_leads(panel: Mapping[str, Any], fields: str) -> Iterator[str]:
    legends = {target.get("legendFormat", "") for target in panel["targets"]}
    columns = {item["matcher"]["options"] for item in panel["fieldConfig"]["overrides"]}
    by_rank = "rank {{rank}}" in legends or ("Rank" in columns and len(columns) > 1)
    if by_rank and "/d/rankwatch-rank/" not in fields and 'rank="$rank"' not in panel["targets"][0]["expr"]:
        yield f"{panel['title']!r} shows ranks and does not lead to them"
    if ("{{job_id}}" in legends or "Job" in columns) and "/d/rankwatch-job/" not in fields:
        yield f"{panel['title']!r} shows jobs and does not lead to them"
    if "Incident" in columns and "/incidents/" not in fields:
        yield f"{panel['title']!r} shows incidents and does not lead to their pages"


def _of_queries(board: Mapping[str, Any]) -> Iterator[str]:
    tables = {panel["title"] for panel in panels(board) if panel["type"] == "table"}
    for query in asked(board):
        place = query.where.split(" / ")
        if len(place) == 3 and place[1] not in tables and not query.legend:
            yield f"{query.where} has no legend"
        for name in sorted(set(_METRIC.findall(query.expression)) - set(BY_NAME)):
            yield f"{query.where} asks for {name}, which wire.signals does not have"
        for function, name, window in _OVER_TIME.findall(query.expression):
            counter = name in BY_NAME and BY_NAME[name].type == "counter"
            if (function in _ON_COUNTERS) != counter:
                yield f"{query.where}: {function} of {name}"
            if function == "rate" and window != "$__rate_interval":
                yield f"{query.where}: a rate over {window}"
        for braces in re.findall(r"rankwatch_\w+(\{[^}]*\})?", query.expression):
            if board["uid"] != "rankwatch-fleet" and 'job_id="$' not in braces and not place[1].startswith("variable"):
                yield f"{query.where} reads all jobs"
