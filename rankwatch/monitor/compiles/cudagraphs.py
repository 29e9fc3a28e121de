"""CUDA graphs in the compile document: what was recorded for which frame on which ranks, and whether a frame is recorded anew for every new size. Pure.

The records are those of agent/probes/cudagraph.py. Counts are those of the rank with most; a frame grows while new sizes still come at about the pace
at which they came so far. Names of settings: torch/_inductor/config.py of 2.9-2.14.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rankwatch import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwatch.model import RankState

MAX_FRAMES = 20
MAX_ROWS = 12
GROWS_SIZES = 9  # torch warns above 8 (cudagraph_dynamic_shape_warn_limit; 50 before 2.10)
_PACE = 3.0  # times the mean time between two new sizes without another: it has ended
_PACE_LEAST_S = 60.0
_FAR = 1e15
_COUNTS = ("warmups", "recordings", "rerecords", "eager", "skips", "captures")


def number(table: object, key: str) -> float:
    """A number of a record that anybody may have written; 0 where there is none."""
    value = table.get(key) if isinstance(table, Mapping) else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and -_FAR < value < _FAR else 0.0


def document(ranks: Mapping[int, RankState], wall_at: float, over: bool, written: Callable[[int], str]) -> dict[str, Any]:
    """{} while no rank has anything to do with CUDA graphs."""
    records = {rank: state.cudagraph for rank, state in ranks.items() if state.cudagraph}
    if not records:
        return {}
    pools = {rank: number(record, "pool_bytes") for rank, record in records.items()}
    worst = max(pools, key=lambda rank: (pools[rank], -rank))
    frames = sorted(_frames(records, wall_at, over, written), key=lambda row: (-row["growing"], -row["recordings"], row["frame"]))
    frames = [{**row, "words": growth(row, pools[worst])} for row in frames[:MAX_FRAMES]]
    return {
        "ranks": written(_mask(records)),
        **{name: int(max(number(record, name) for record in records.values())) for name in _COUNTS},
        "seconds_max": round(max(number(record, "seconds") for record in records.values()), 3),
        "pool_bytes_max": int(pools[worst]) if pools[worst] else None,
        "pool_max_rank": worst if pools[worst] else None,
        "pool_first_bytes": int(number(records[worst], "pool_first_bytes")) or None,
        "pools_unknown": next((shown.public_line(reason)[:200] for record in records.values() if (reason := record.get("pools_reason"))), ""),
        "frames": frames,
        "skip_reasons": _grouped(records, "skip_reasons", ("reason", "at", "frame"), written),
        "capture_sites": _grouped(records, "capture_sites", ("at", "via"), written),
        "steps_seen": any(state.steps > 0 for rank, state in ranks.items() if rank in records),
    }


def _mask(ranks: Mapping[int, object]) -> int:
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


def _frames(records: Mapping[int, Mapping[str, Any]], wall_at: float, over: bool, written: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for rank, record in records.items():
        table = record.get("frames")
        for name, row in table.items() if isinstance(table, Mapping) else ():
            if isinstance(row, Mapping) and (name in found or len(found) < 200):
                found.setdefault(str(name), {})[rank] = row
    for name, rows in found.items():
        worst = max(rows, key=lambda rank: (number(rows[rank], "sizes"), number(rows[rank], "recordings"), -rank))
        row = rows[worst]
        growing = _mask({rank: each for rank, each in rows.items() if not over and _grows(each, wall_at)})
        yield {
            "frame": shown.public_line(name)[:200] or "?",
            "ranks": written(_mask(rows)),
            **{key: int(number(row, key)) for key in ("recordings", "rerecords", "sizes", "pool_bytes", "new_step")},
            "seconds": round(number(row, "seconds"), 3),
            "shape": shown.public_line(row.get("shape") or "")[:120],
            "growing": bool(growing),
            "growing_ranks": written(growing) if growing else "",
        }


def _grows(row: Mapping[str, Any], wall_at: float) -> bool:
    """Whether sizes are many and another one is still to be expected."""
    sizes, first, newest = number(row, "sizes"), number(row, "first_wall"), number(row, "new_wall")
    if sizes < GROWS_SIZES or not first or newest < first:
        return False
    return wall_at - newest <= max(_PACE * (newest - first) / (sizes - 1), _PACE_LEAST_S)


def _grouped(records: Mapping[int, Mapping[str, Any]], key: str, names: tuple[str, ...], written: Callable[[int], str]) -> list[dict[str, Any]]:
    """Rows that several ranks tell alike, with the highest count."""
    found: dict[tuple[str, ...], tuple[int, float]] = {}
    for rank, record in records.items():
        rows = record.get(key)
        for row in rows if isinstance(rows, list) else ():
            if isinstance(row, Mapping):
                place = tuple(shown.public_line(row.get(name) or "")[:200] for name in names)
                mask, count = found.get(place, (0, 0.0))
                if place in found or len(found) < 64:
                    found[place] = (mask | 1 << rank, max(count, number(row, "count")))
    ordered = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))[:MAX_ROWS]
    return [{**dict(zip(names, place, strict=True)), "count": int(count), "ranks": written(mask)} for place, (mask, count) in ordered]


def growth(row: Mapping[str, Any], total: float) -> str:
    """ "recorded 40 times for 38 sizes, the newest [64, 2048] at step 900; pools grew by 1.2 GB with it, 31.6 MB a recording"."""
    recordings, grown = int(number(row, "recordings")), number(row, "pool_bytes")
    text = f"recorded {shown.plural(recordings, 'time')} for {shown.plural(int(number(row, 'sizes')), 'size')}"
    if row.get("shape"):
        text += f", the newest {row['shape']}" + (f" at step {int(number(row, 'new_step'))}" if number(row, "new_step") else "")
    if again := int(number(row, "rerecords")):
        text += f"; {again} of them again for memory that had moved"
    text += f"; {number(row, 'seconds'):.1f} s"
    if grown and recordings:
        return f"{text}; the pools grew by {shown.megabytes([grown])} with it, {shown.megabytes([grown / recordings])} a recording"
    return f"{text}; the pools did not grow with it" + (f" ({shown.megabytes([total])})" if total else "")
