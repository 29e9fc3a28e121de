"""The answer of `rankwatch doctor --peers` as people and programs read it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rankwatch.commands.peers.faults import FULL, NONE, Fault, Picture, exit_code, faults
from rankwatch.commands.peers.reach import KINDS, Reach
from rankwatch.shown import clean

MATRIX_MOST = 16
"""More nodes do not fit beside each other: then only what is wrong is listed."""


def as_text(picture: Picture, quiet: bool) -> str:
    """Who reaches whom, then each trouble with cause and next step, the judgement last. Quiet: only troubles, nothing when all is well."""
    found, code = faults(picture), exit_code(picture)
    if quiet and code == FULL:
        return ""
    lines: list[str] = []
    if not quiet:
        lines += _matrix(picture) if len(picture.nodes) <= MATRIX_MOST else []
    for fault in found:
        lines += [fault.what, f"    cause: {fault.cause}", f"    do: {fault.do}"]
    lines += _untold(picture)
    lines.append(_judgement(picture, code))
    return "".join(f"{clean(line)}\n" for line in lines)


def own_line(picture: Picture, told: bool) -> str:
    """One line of a node that is not the one to tell all: what it does not reach itself; "" where it reaches all. told: the table has it, with the cause."""
    mine = [fault for fault in faults(Picture(picture.nodes, picture.own, {picture.own: picture.rows[picture.own]})) if fault.targets]
    if not mine:
        return ""
    more = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
    if told:
        return clean(f"{mine[0].what}{more}")
    return clean(f"{mine[0].what}{more}; cause: {mine[0].cause}; do: {mine[0].do}")


def as_json(picture: Picture) -> dict[str, Any]:
    """The same for programs: nodes, rows (node -> node -> outcome), faults, supervision."""
    own = picture.rows.get(picture.own, ())
    return {
        "supervision": {FULL: "full", NONE: "none"}.get(exit_code(picture), "degraded"),
        "told_by": picture.own,
        "nodes": [
            {"index": at, "name": name, "host": node.host, "port": node.port, **(_known(own[at]) if at < len(own) else {})}
            for at, (name, node) in enumerate(zip(picture.names, picture.nodes, strict=True))
        ],
        "rows": {
            str(a): {str(b): _outcome(reach) for b, reach in enumerate(row) if b != a and reach.kind != "unasked"} for a, row in sorted(picture.rows.items())
        },
        "faults": [_document(fault) for fault in faults(picture)],
    }


def _matrix(picture: Picture) -> list[str]:
    """A row a node that asks, a column a node that is asked; a cell is the round trip in ms, or what went wrong."""
    count = len(picture.nodes)
    cells = [[".".rjust(1) if a == b else _cell(picture.rows.get(a, ()), b) for b in range(count)] for a in range(count)]
    names, numbers = [clean(name) for name in picture.names], [str(at) for at in range(count)]
    widths = [max(len(numbers[b]), *(len(cells[a][b]) for a in range(count))) for b in range(count)]
    left, wide = len(str(count - 1)), max(map(len, names))
    lines = [f"{'':{left + 1 + wide}}  " + "  ".join(f"{numbers[b]:>{widths[b]}}" for b in range(count)) + "   (the row's node connects to the column's; ms)"]
    lines += [f"{a:>{left}} {names[a]:{wide}}  " + "  ".join(f"{cells[a][b]:>{widths[b]}}" for b in range(count)) for a in range(count)]
    return [line.rstrip() for line in lines]


def _cell(row: Sequence[Reach], b: int) -> str:
    if b >= len(row):
        return "?"
    reach = row[b]
    if not reach.ok:
        return KINDS[reach.kind][1]
    return _ms(reach.round_trip_s) if reach.round_trip_s is not None else "ok"


def _ms(seconds: float) -> str:
    ms = max(0.0, seconds * 1000)
    return f"{ms:.0f}" if ms >= 99.5 else f"{ms:.1f}" if ms >= 0.1 else f"{ms:.2f}"


def _untold(picture: Picture) -> list[str]:
    """Nodes whose own view did not come."""
    silent = [picture.names[at] for at in range(len(picture.nodes)) if at not in picture.rows]
    if not silent:
        return []
    shown = ", ".join(silent[:8]) + (f" and {len(silent) - 8} more" if len(silent) > 8 else "")
    return [f"not known: whom {shown} can reach; {'it says' if len(silent) == 1 else 'each says'} so itself where it runs"]


def _judgement(picture: Picture, code: int) -> str:
    count = len(picture.nodes)
    if count == 1:
        return "1 node: there is nobody else to reach"
    known = picture.known()
    works = sum(reach.ok for reach in known.values())
    trips = [reach.round_trip_s for reach in known.values() if reach.ok and reach.round_trip_s is not None]
    speed = f"; round trip {_ms(statistics.median(trips))} ms, at most {_ms(max(trips))} ms" if trips else ""
    every = count * (count - 1)
    if code == FULL:
        return f"all {count} nodes reach each other{speed}"
    if code == NONE:
        return f"none: {picture.names[picture.own]} reaches no other node: a job over these {count} cannot start"
    if works == every:
        return f"degraded: all {count} nodes reach each other, with what is listed above{speed}"
    return f"degraded: {works} of {every} connections are known to work; a job that needs the others waits or fails{speed}"


def _known(reach: Reach) -> dict[str, Any]:
    fields = {"node": reach.node, "address": reach.address, "version": reach.version, "clock_offset_s": reach.offset_s}
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _outcome(reach: Reach) -> dict[str, Any]:
    fields = {"kind": reach.kind, "detail": reach.detail, "round_trip_s": reach.round_trip_s}
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _document(fault: Fault) -> dict[str, Any]:
    return {"what": fault.what, "kind": fault.kind, "from": list(fault.sources), "to": list(fault.targets), "cause": fault.cause, "do": fault.do}
