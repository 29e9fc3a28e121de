"""Collectives by group, operation and size: time on the devices and bus bandwidth, from what the ranks' readings have added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rankwatch import shown
from rankwatch.model import CollectiveSum, Status

MAX_ROWS = 12
SAMPLED_RANKS = 256  # of a large job: bandwidth is the same for all ranks of a node
HEAD = ("operation", "size", "group", "count", "on the device", "bus bandwidth", "comes last")
NOTE = (
    "On the device: least to most of any rank, waits for the others included. Bus bandwidth: by nccl-tests' formulas, of the last rank of each operation."
    " Comes last: the rank whose device spends least in it."
)


def rows(status: Status) -> list[dict[str, Any]]:
    """At most MAX_ROWS, the ones that take longest first; [] where no durations are known.

    bus_bytes_per_s: the newest reading of the node that shows most, since every node's figure is a lower bound where a group spans several.
    least_rank: whose devices spent the least time in them: it comes last to most.
    """
    ranks = status.snapshot.ranks() if status.snapshot else {}
    sampled = sorted(ranks)[:: max(1, len(ranks) // SAMPLED_RANKS)]
    found: dict[tuple[object, ...], list[tuple[int, CollectiveSum]]] = {}
    labels: dict[tuple[object, ...], str] = {}
    for rank in sampled:
        groups = {group.name: group for group in ranks[rank].groups}
        for each in ranks[rank].collective_sums:
            group = groups.get(each.group)
            place = (each.group, len(group.ranks), group.ranks[:1]) if group is not None else (each.group,)
            key = (*place, each.op, each.size_bucket)
            found.setdefault(key, []).append((rank, each))
            labels[key] = shown.group_label(group) if group is not None else each.group
    shown_rows = [_row(labels[key], of_key) for key, of_key in found.items()]
    shown_rows.sort(key=lambda row: (-row["device_s_most"], row["operation"], row["size"], row["group"]))
    return shown_rows[:MAX_ROWS]


def _row(label: str, sums: list[tuple[int, CollectiveSum]]) -> dict[str, Any]:
    least_rank, least = min(sums, key=lambda one: (one[1].device_s / max(1, one[1].count), one[0]))
    rates = [each.bus_bytes_per_s for _, each in sums if each.bus_bytes_per_s is not None]
    means = [each.bus_bytes / each.bus_s for _, each in sums if each.bus_s > 0]
    return {
        "operation": shown.one_line(sums[0][1].op),
        "size": sums[0][1].size_bucket,
        "group": shown.one_line(label),
        "count": max(each.count for _, each in sums),
        "device_s_least": round(least.device_s, 6),
        "device_s_most": round(max(each.device_s for _, each in sums), 6),
        "least_rank": least_rank,
        "bus_bytes_per_s": max(rates) if rates else None,
        "bus_bytes_per_s_mean": max(means) if means else None,
        "whole": all(each.whole for _, each in sums),
    }


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row of `rows` as people read it, in the order of HEAD."""
    least, most, rate = row.get("device_s_least"), row.get("device_s_most"), row.get("bus_bytes_per_s")
    times = f"{_seconds(least)} to {_seconds(most)}" if least != most else _seconds(most)
    bound = "" if row.get("whole") else "at least "
    return (
        str(row.get("operation", "?")), str(row.get("size", "?")), str(row.get("group", "?")), str(row.get("count", "?")), times,
        f"{bound}{rate / 1e9:.1f} GB/s" if isinstance(rate, (int, float)) else "-",
        f"rank {row['least_rank']}" if isinstance(row.get("least_rank"), int) and least != most else "-",
    )  # fmt: skip


def table(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """The rows as aligned lines under their head, with what the figures mean; [] without rows."""
    lines = [HEAD, *(cells(row) for row in found)]
    if len(lines) < 2:
        return []
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return [*("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines), NOTE]


def _seconds(value: object) -> str:
    if not isinstance(value, (int, float)):
        return "?"
    return f"{1e3 * value:.1f} ms" if value < 1 else f"{value:.1f} s"
