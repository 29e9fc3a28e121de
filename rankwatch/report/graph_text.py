"""The compile document's part about CUDA graphs, for a terminal. Reads documents of any age."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankwatch import shown
from rankwatch.report.compile_parts import number, rows


def lines(graphs: Mapping[str, Any]) -> Iterator[str]:
    """The section of the compile text."""
    if not graphs:
        return
    counts = [
        shown.plural(int(number(graphs, name)), word)
        for name, word in (("recordings", "recording"), ("rerecords", "re-recording"), ("warmups", "warm-up"), ("captures", "capture"), ("skips", "skip"))
        if number(graphs, name)
    ]
    pool = number(graphs, "pool_bytes_max")
    memory = f"; private pools {shown.megabytes([pool])} on rank {graphs.get('pool_max_rank')}" if pool else ""
    if pool and (first := number(graphs, "pool_first_bytes")) and first < pool:
        memory += f", {shown.megabytes([first])} after the first"
    unknown = f"; size of the pools not known: {graphs['pools_unknown']}" if graphs.get("pools_unknown") and not pool else ""
    yield f"{', '.join(counts) or 'nothing recorded'} on the rank with most{memory}{unknown}"
    for row in rows(graphs, "frames"):
        yield f"{row.get('frame')}{' GROWS' if row.get('growing') else ''}: {row.get('words')}"
    for row in rows(graphs, "skip_reasons"):
        place = f" at {row['at']}" if row.get("at") else ""
        yield f"{row.get('frame') or 'not recorded'}{place}: {row.get('reason')} ({shown.plural(int(number(row, 'count')), 'time')})"
    for row in rows(graphs, "capture_sites"):
        yield f"captured by hand at {row.get('at') or '?'} ({row.get('via')}): {shown.plural(int(number(row, 'count')), 'time')}"
