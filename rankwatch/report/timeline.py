"""The last ten minutes of phases, rank by rank: as a part of incident.json, as lines of text, and as SVG geometry. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rankwatch import shown
from rankwatch.model import PhaseLook
from rankwatch.wire.ranks import compress

SPAN_S = 600.0
MAX_ROWS = 16
MAX_SPANS = 120
COLUMNS = 60
WIDTH, ROW_HEIGHT = 900, 20
LETTERS = {
    "culprit": "!",
    "dead": "x",
    "no_report": "?",
    "unknown": "?",
    "compiling": "c",
    "cudagraph_capture": "g",
    "data_wait": "d",
    "checkpoint": "s",
    "starting": "o",
    "shutdown": "-",
    "running": ".",
    "collective_wait": "w",
}
"""One letter a phase, for text and for those who do not see the colours."""


def rows(looks: tuple[PhaseLook, ...], ranks: Iterable[int], until_wall: float) -> dict[str, Any]:
    """{"from", "to": unix seconds, "rows": [{"ranks": "0,2-7", "spans": [[from, kind], ...]}]} of these ranks; {} without looks.

    Ranks that did the same share a row; at most MAX_ROWS, and MAX_SPANS in each, the shortest left out.
    """
    if not looks:
        return {}
    start = max(looks[0].at_wall, until_wall - SPAN_S)
    found: dict[tuple[tuple[float, str], ...], list[int]] = {}
    told = [look for look in looks if look.at_wall <= until_wall]
    for rank in dict.fromkeys(ranks):
        found.setdefault(_spans(told, rank, start, until_wall), []).append(rank)
    listed = [{"ranks": compress(group), "spans": [[round(at, 1), kind] for at, kind in spans]} for spans, group in found.items() if spans]
    return {"from": round(start, 1), "to": round(until_wall, 1), "rows": listed[:MAX_ROWS]} if listed else {}


@lru_cache(maxsize=128)
def _runs(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first and the last rank of each run of "0-3,7". Kept: an incident is written again and again from the same looks."""
    bounds = [part.partition("-") for part in text.split(",") if part]
    return tuple(int(first) for first, _, _ in bounds), tuple(int(last or first) for first, _, last in bounds)


def _kind(look: PhaseLook, rank: int) -> str:
    for kind, text in look.kinds:
        firsts, lasts = _runs(text)
        place = bisect_right(firsts, rank) - 1
        if place >= 0 and rank <= lasts[place]:
            return kind
    return "no_report"


def _spans(looks: list[PhaseLook], rank: int, start: float, until: float) -> tuple[tuple[float, str], ...]:
    spans: list[tuple[float, str]] = []
    for look in looks:
        kind = _kind(look, rank)
        if not spans or spans[-1][1] != kind:
            spans.append((max(look.at_wall, start), kind))
        if len(spans) > 1 and spans[-2][0] == spans[-1][0]:  # it had ended before the window
            del spans[-2]
    while len(spans) > MAX_SPANS:
        ends = [*(at for at, _ in spans[1:]), until]
        shortest = min(range(1, len(spans)), key=lambda index: ends[index] - spans[index][0])
        del spans[shortest]
    return tuple(spans)


def lines(found: Mapping[str, Any]) -> list[str]:
    """A row a line of COLUMNS letters, each what was done at the start of its part of the time, with a legend; [] without rows."""
    start, end, listed = _parts(found)
    if not listed:
        return []
    step = max(end - start, 1e-3) / COLUMNS
    names = [shown.cut(shown.one_line(row.get("ranks", "?")), 16) for row in listed]
    wide = max(map(len, names))
    out: list[str] = []
    used: dict[str, str] = {}
    for name, row in zip(names, listed, strict=True):
        spans = _known(row)
        letters = ""
        for column in range(COLUMNS):
            # the last one shows the very end, where the trouble is
            at = end if column == COLUMNS - 1 else start + column * step
            kind = next((kind for since, kind in reversed(spans) if since <= at + 1e-6), "no_report")
            letter = LETTERS.get(kind, "~")
            used[kind] = letter
            letters += letter
        out.append(f"{name.rjust(wide)}  {letters}")
    legend = ", ".join(f"{letter} {kind.replace('_', ' ')}" for kind, letter in used.items())
    return [f"{''.rjust(wide)}  {shown.utc(start, date=False).ljust(COLUMNS - 9)}{shown.utc(end, date=False)}", *out, legend]


@dataclass(frozen=True, slots=True)
class Bar:
    """One phase of one row; x and width in the units of the drawing."""

    x: float
    width: float
    kind: str
    letter: str
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The drawing: `rows` are (ranks, y, bars); `ticks` are (x, words)."""

    width: int
    height: int
    rows: tuple[tuple[str, int, tuple[Bar, ...]], ...]
    ticks: tuple[tuple[float, str], ...]
    kinds: tuple[str, ...]


def chart(found: Mapping[str, Any]) -> Chart | None:
    """The part of incident.json as geometry; None without rows, or where the times are none."""
    start, end, listed = _parts(found)
    if not listed or end <= start:
        return None
    scale = WIDTH / (end - start)
    drawn: list[tuple[str, int, tuple[Bar, ...]]] = []
    kinds: dict[str, None] = {}
    for index, row in enumerate(listed):
        spans = _known(row)
        ends = [*(at for at, _ in spans[1:]), end]
        bars = []
        for (at, kind), until in zip(spans, ends, strict=True):
            width = round((until - max(at, start)) * scale, 1)
            if width <= 0:
                continue
            kinds[kind] = None
            name = kind.replace("_", " ")
            letter = LETTERS.get(kind, "~") if width >= 14 and kind not in ("running", "other") else ""
            title = f"{name} from {shown.utc(at, date=False)} for {shown.duration(until - at)}"
            bars.append(Bar(round((max(at, start) - start) * scale, 1), width, kind, letter, title))
        drawn.append((shown.cut(shown.one_line(row.get("ranks", "?")), 24), index * ROW_HEIGHT, tuple(bars)))
    ticks = tuple((round(share * WIDTH, 1), shown.utc(start + share * (end - start), date=False)) for share in (0.0, 0.25, 0.5, 0.75, 1.0))
    return Chart(WIDTH, len(listed) * ROW_HEIGHT, tuple(drawn), ticks, tuple(kinds))


def _parts(found: Mapping[str, Any]) -> tuple[float, float, list[dict[str, Any]]]:
    """Of a document of any age; without rows where a part is not what it should be."""
    start, end, listed = found.get("from"), found.get("to"), found.get("rows")
    if not isinstance(start, (int, float)) or not isinstance(end, (int, float)) or not isinstance(listed, list):
        return 0.0, 0.0, []
    return float(start), float(end), [row for row in listed if isinstance(row, dict) and _known(row)][:MAX_ROWS]


def _known(row: Mapping[str, Any]) -> list[tuple[float, str]]:
    spans = row.get("spans")
    return [
        (float(span[0]), str(span[1])) for span in (spans if isinstance(spans, list) else ())
        if isinstance(span, list) and len(span) == 2 and isinstance(span[0], (int, float)) and not isinstance(span[0], bool)
    ][:MAX_SPANS]  # fmt: skip
