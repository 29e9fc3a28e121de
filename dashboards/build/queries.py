"""The queries of a dashboard's JSON, with Grafana's variables filled in. Standard library only: tests, the benchmark and the pictures share it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """One query. where: dashboard / panel / ref; now: instant, at the end of the range; points: at most so many of a range; legend: template of names."""

    where: str
    expression: str
    now: bool
    points: int
    legend: str = ""


POINTS = 300
"""Of a panel that says nothing: what Grafana asks for is its width in pixels, some 300 to 1,800."""
_RESULT = re.compile(r"query_result\((.*)\)\Z", re.DOTALL)
_LABELS = re.compile(r"label_values\((.*),\s*\w+\)\Z", re.DOTALL)


def panels(board: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every panel but rows, those in folded rows too."""
    for panel in board["panels"]:
        yield from panels(panel) if panel["type"] == "row" else (panel,)


def asked(board: Mapping[str, Any]) -> Iterator[Asked]:
    """Queries of panels, annotations and variables, as the JSON has them."""
    name = board["uid"].removeprefix("rankwatch-")
    for panel in panels(board):
        for target in panel["targets"]:
            where = f"{name} / {panel['title']} / {target['refId']}"
            yield Asked(where, target["expr"], bool(target.get("instant")), int(panel.get("maxDataPoints", POINTS)), target.get("legendFormat", ""))
    for mark in board["annotations"]["list"]:
        yield Asked(f"{name} / annotation {mark['name']}", mark["expr"], False, POINTS)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query" and (found := _RESULT.match(variable["query"]["query"]) or _LABELS.match(variable["query"]["query"])):
            yield Asked(f"{name} / variable {variable['name']}", found[1], True, 1)


def filled(expression: str, variables: Mapping[str, str], range_s: float, step_s: float, scrape_s: float) -> str:
    """The expression with variables and Grafana's own intervals in their places; `$__rate_interval` as Grafana reckons it: at least four scrapes."""
    rate_s = max(step_s + scrape_s, 4 * scrape_s)
    own = {"__rate_interval": f"{rate_s:.0f}s", "__range": f"{range_s:.0f}s", "__interval": f"{max(step_s, scrape_s):.0f}s"}
    for name, value in sorted({**own, **variables}.items(), key=lambda pair: -len(pair[0])):
        expression = expression.replace(f"${{{name}}}", value).replace(f"${name}", value)
    return expression
