"""When each rank compiled, as a chart for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankwatch import shown
from rankwatch.report.compile_parts import finite, number, rows

CHART_COLUMNS = 72
MAX_CHART_RANKS = 16
_MARKS = {" ": "", "-": "left to Python", "#": "compiles", "r": "recompiles", "!": "fails"}
"""Of the chart, the gravest last."""


def chart(doc: Mapping[str, Any]) -> Iterator[str]:
    """A row a rank, a column a slice of the time from the first compile to the last; of several marks in a slice the gravest is shown."""
    as_of = number(doc, "as_of")
    spans = [
        (int(rank), start, number(row, "end_wall") or max(as_of, start), row)
        for row in rows(doc, "timeline")
        if (start := finite(row.get("start_wall"))) is not None and (rank := finite(row.get("rank"))) is not None
    ]
    if not spans:
        return
    begin = min(start for _rank, start, _end, _row in spans)
    end = max(end for _rank, _start, end, _row in spans)
    per_column = max(end - begin, 0.001) / CHART_COLUMNS
    ranks = sorted({rank for rank, _start, _end, _row in spans})
    lanes = {rank: [" "] * CHART_COLUMNS for rank in ranks[:MAX_CHART_RANKS]}
    for rank, start, ended, row in spans:
        lane = lanes.get(rank)
        if lane is None:
            continue
        first = int((start - begin) / per_column)
        last = int((ended - begin) / per_column)
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
