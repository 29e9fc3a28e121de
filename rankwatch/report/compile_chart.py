"""When each rank compiled, as a chart for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankwatch import shown

CHART_COLUMNS = 72
MAX_CHART_RANKS = 16
_MARKS = {" ": "", "-": "left to Python", "#": "compiles", "r": "recompiles", "!": "fails"}
"""Of the chart, the gravest last."""


def chart(doc: Mapping[str, Any]) -> Iterator[str]:
    """A row a rank, a column a slice of the time from the first compile to the last; of several marks in a slice the gravest is shown."""
    rows = [row for row in doc.get("timeline") or () if isinstance(row, Mapping)]
    spans = [row for row in rows if isinstance(row.get("start_wall"), (int, float)) and isinstance(row.get("rank"), int)]
    if not spans:
        return
    as_of = float(known) if isinstance(known := doc.get("as_of"), (int, float)) else 0.0
    begin = min(row["start_wall"] for row in spans)
    end = max(row.get("end_wall") or as_of for row in spans)
    per_column = max(end - begin, 0.001) / CHART_COLUMNS
    ranks = sorted({row["rank"] for row in spans})
    lanes = {rank: [" "] * CHART_COLUMNS for rank in ranks[:MAX_CHART_RANKS]}
    for row in spans:
        lane = lanes.get(row["rank"])
        if lane is None:
            continue
        first = int((row["start_wall"] - begin) / per_column)
        last = int(((row.get("end_wall") or as_of) - begin) / per_column)
        mark = _mark(row)
        for column in range(min(first, CHART_COLUMNS - 1), min(last, CHART_COLUMNS - 1) + 1):
            lane[column] = max(lane[column], mark, key=list(_MARKS).index)
    yield from (f"rank {rank:<5} |{''.join(lane)}|" for rank, lane in lanes.items())
    told = "  ".join(f"{mark} {words}" for mark, words in _MARKS.items() if words and any(mark in lane for lane in lanes.values()))
    yield f"{shown.utc(begin, date=False):>11} {'':{CHART_COLUMNS - 12}}{shown.utc(end, date=False):>13}   {told}"
    if len(ranks) > MAX_CHART_RANKS:
        yield f"... and {len(ranks) - MAX_CHART_RANKS} more ranks: rankwatch compile --json"


def _mark(row: Mapping[str, Any]) -> str:
    if row.get("skipped"):
        return "-"
    if row.get("ok") is False:
        return "!"
    again = str(row.get("compile_id") or "").rpartition("/")[2]
    return "r" if row.get("reason_class") or again not in ("", "0") else "#"
