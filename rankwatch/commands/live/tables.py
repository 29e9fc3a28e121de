"""The tables below the map: ranks that stand out, compiles under way with the time that is left, incidents, what waiting has cost. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rankwatch import shown
from rankwatch.commands.live.styled import Line, fit, line, text_of
from rankwatch.model import PAGING

MAX_CELL = 24
BAR = 10
CLOSED_SHOWN = 3
_CALM = ("running", "collective_wait")


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def rows(value: object) -> list[Mapping[str, Any]]:
    """The objects in a list."""
    return [row for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []


def number(value: object) -> float | None:
    """A finite number, else None."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None


def whole(value: object) -> int | None:
    """A count, else None."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 1e15 else None


def ranks(state: Mapping[str, Any], width: int, most: int) -> list[Line]:
    """Culprits first, then those that are behind, then rare phases; of a large job only those that stand out."""
    told = rows(state.get("ranks"))
    world = whole(mapping(state.get("run")).get("world_size")) or len(told)
    small = world <= 16
    chosen = [row for row in told if small or _stands_out(row)]
    chosen.sort(key=lambda row: (not row.get("culprit"), -(whole(row.get("lag")) or 0), row.get("phase") in _CALM, whole(row.get("rank")) or 0))
    if not chosen:
        return []
    body = [_rank(row) for row in chosen[: most - 1]]
    table = aligned([("RANK", "NODE", "DOES", "FOR", "STEP", "BEHIND", "WHERE"), *body], width)
    styles = ["dim", *("bad" if row.get("culprit") else "warn" if _stands_out(row) else "" for row in chosen)]
    lines = [line((text, style)) for text, style in zip(table, styles, strict=False)]
    left = len(chosen) - len(body)
    return [*lines[:-1], line((f"... {left + 1} more", "dim"))] if left > 0 and len(lines) > 2 else lines


def _stands_out(row: Mapping[str, Any]) -> bool:
    return bool(row.get("culprit")) or bool(whole(row.get("lag"))) or row.get("phase") not in _CALM


def _rank(row: Mapping[str, Any]) -> tuple[str, ...]:
    phase_s, lag = number(row.get("phase_s")), whole(row.get("lag"))
    return (
        text_of(row.get("rank"), 8),
        text_of(row.get("node"), MAX_CELL),
        text_of(row.get("label") or row.get("phase"), MAX_CELL),
        shown.duration(phase_s) if phase_s is not None else "-",
        text_of(row.get("steps"), 12),
        str(lag) if lag else "-",
        text_of(row.get("detail"), 120),
    )


def aligned(table: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Rows with columns of equal width, cut at the screen's."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return ["  ".join(f"{cell:{room}}" for cell, room in zip(row, widths, strict=True)).rstrip()[:width] for row in table]


def compiles(state: Mapping[str, Any], document: Mapping[str, Any], width: int, most: int) -> list[Line]:
    """What compiles now, one line for equal frame and phase, with what peers took and what is left by that; else the regime alone."""
    now = rows(document.get("now")) or [{"rank": row.get("rank"), **one} for row in rows(state.get("compile")) for one in rows(row.get("now"))]
    regime = text_of(mapping(document.get("regime")).get("name"), 30).replace("_", " ")
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in now:
        groups.setdefault((text_of(row.get("frame"), 60) or "?", text_of(row.get("phase"), 30) or "?"), []).append(row)
    title = f"torch.compile: {regime}" if regime else "torch.compile"
    if not groups:
        return [line((title, "dim"))] if regime and regime != "not used" else []
    ordered = sorted(groups.items(), key=lambda item: -max(number(row.get("elapsed_s")) or 0.0 for row in item[1]))
    lines = [line((title, "dim"))] + [_compile(frame, phase, each, width) for (frame, phase), each in ordered[: most - 1]]
    return lines if len(ordered) < most else [*lines[:-1], line((f"... {len(ordered) - most + 2} more frames compile", "dim"))]


def _compile(frame: str, phase: str, group: Sequence[Mapping[str, Any]], width: int) -> Line:
    members = [rank for row in group if (rank := whole(row.get("rank"))) is not None]
    slowest = max(group, key=lambda row: number(row.get("elapsed_s")) or 0.0)
    elapsed_s = number(slowest.get("elapsed_s")) or 0.0
    took_s, left_s = number(slowest.get("peers_took_s")), number(slowest.get("eta_s"))
    split, splits = whole(slowest.get("split")), whole(slowest.get("splits"))
    if took_s:
        share: float | None = min(1.0, elapsed_s / took_s)
        ends = f"about {shown.duration(left_s)} left" if left_s else f"{shown.duration(elapsed_s - took_s)} over"
    else:
        share, ends = (min(1.0, (split - 1) / splits) if split and splits else None), ""
    bar = f"[{'#' * round(BAR * share):{BAR}}] " if share is not None else ""
    where = f"split {split} of {splits}" if split and splits else text_of(slowest.get("detail"), 40)
    peers = f"peers took {shown.duration(took_s)}" if took_s else ""
    words = ", ".join(filter(None, (f"{phase} {shown.duration(elapsed_s)}", peers, where)))
    style = "bad" if took_s is not None and left_s == 0 else "good"
    return line(
        (f"{shown.rank_words(members, 24):12}  ", "warn"),
        (bar, style),
        (f"{ends}  " if ends else "", style),
        fit(f"{frame}: {words}", max(20, width - 29 - len(ends))),
    )


def incidents(state: Mapping[str, Any], width: int, most: int) -> list[Line]:
    """Open ones, the gravest first, then the newest of those that are over."""
    part = mapping(state.get("incidents"))
    as_of = number(state.get("as_of"))
    opened = sorted(rows(part.get("open")), key=lambda row: -_gravity(row))
    chosen = [(row, True) for row in opened] + [(row, False) for row in rows(part.get("closed"))[:CLOSED_SHOWN]]
    if not chosen:
        return []
    table = aligned(
        [("INCIDENT", "VERDICT", "CAUSE", "RANK", "FOR", "TIMEOUT IN"), *(_incident(row, is_open, as_of) for row, is_open in chosen[: most - 1])], width
    )
    styles = ["dim", *(("bad" if row.get("verdict") in PAGING else "warn") if is_open else "dim" for row, is_open in chosen)]
    return [line((text, style)) for text, style in zip(table, styles, strict=False)]


def _gravity(row: Mapping[str, Any]) -> int:
    verdict = row.get("verdict")
    return shown.VERDICT_ORDER.index(verdict) if verdict in shown.VERDICT_ORDER else -1


def _incident(row: Mapping[str, Any], is_open: bool, as_of: float | None) -> tuple[str, ...]:
    since, closed, left_s = number(row.get("since")), number(row.get("closed_at")), number(row.get("timeout_left_s"))
    until = as_of if is_open else closed
    culprits = row.get("culprit_ranks")
    named = [rank for rank in culprits if isinstance(rank, int)] if isinstance(culprits, list) else []
    verdict = str(row.get("verdict") if is_open else row.get("worst_verdict") or row.get("verdict"))
    return (
        text_of(row.get("id"), 32),
        text_of(verdict if is_open else f"({verdict})", MAX_CELL),
        text_of(row.get("cause"), MAX_CELL),
        shown.short_ranks(named, 20) or "-",
        shown.duration(until - since) if until is not None and since is not None else "-",
        shown.duration(left_s) if left_s is not None and is_open else "-",
    )


def lost(state: Mapping[str, Any], width: int) -> list[Line]:
    """What waiting has cost, and for whom."""
    part = mapping(state.get("waiting"))
    total = number(part.get("lost_rank_s")) or 0.0
    if total < 1.0:
        return []
    costs = []
    for row in rows(part.get("rows"))[:3]:
        rank, cost = whole(row.get("rank")), number(row.get("lost_rank_s")) or 0.0
        who = f"rank {rank} " if rank is not None else ""
        costs.append(f"{who}{text_of(row.get('reason'), 60)} {shown.lost_words(cost, total)}")
    return [line(("lost waiting  ", "dim"), fit(f"{shown.lost_words(total)}: {'; '.join(costs)}" if costs else shown.lost_words(total), width - 14))]


def problems(state: Mapping[str, Any], width: int, most: int) -> list[Line]:
    """Nodes that do not answer, and what cannot be seen here."""
    lines = []
    for node in rows(state.get("nodes")):
        if node.get("silent_ranks"):
            age_s = number(node.get("report_age_s"))
            ago = f" for {shown.duration(age_s)}" if age_s is not None else ""
            words = f"{text_of(node.get('node'), 60)} has not answered{ago} ({text_of(node.get('problem'), 60)}): ranks {text_of(node.get('silent_ranks'), 40)}"
            lines.append(line((f"{words} are unknown"[:width], "bad")))
    for name, reason in mapping(mapping(state.get("run")).get("capabilities")).items():
        if reason != "ok":
            lines.append(line((f"{text_of(name, 20)}: {text_of(reason, 200)}"[:width], "warn")))
    return lines[:most] if len(lines) <= most else [*lines[: most - 1], line((f"... {len(lines) - most + 1} more", "dim"))]
