"""A picture of a job as lines of text with styles, for a screen of any size or for a pipe. Reads state documents of any age and origin. Pure.

Nothing in a document is trusted: every text is made one clean line, every number is checked; a document that still cannot be drawn raises.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rankwatch import shown
from rankwatch.commands.live import rank_grid, tables
from rankwatch.commands.live.styled import Line, Part, fit, line, plain, text_of
from rankwatch.model import PAGING
from rankwatch.report import outcome
from rankwatch.wire.ranks import MOST_RANKS, expand

PLAIN_WIDTH = 100
GRID_ROWS, SMALL_GRID_ROWS = 16, 5
SMALL_HEIGHT = 40
MIN_WIDTH = 40
_STYLES = {"culprit": "bad", "dead": "bad", "unknown": "bad", "no_report": "bad", "running": "good", "collective_wait": "dim"}

__all__ = ["draw", "plain"]


def draw(state: Mapping[str, Any], compiles: Mapping[str, Any], width: int, height: int | None = None, note: str = "") -> list[Line]:
    """The picture in at most `height` lines (None: as many as it takes) of `width` characters. note: a line of ours, at the end."""
    width = max(MIN_WIDTH, width)
    small = height is not None and height < SMALL_HEIGHT
    phases = _phases(state)
    top = [_head(state, width), *_trouble(state, width, 2 if small else 4)]
    grid = _map(state, phases, width, SMALL_GRID_ROWS if small else GRID_ROWS)
    blocks = [
        _legend(phases, width, 3 if small else 8),
        grid,
        tables.ranks(state, width, 8 if small else 20),
        tables.compiles(state, compiles, width, 3 if small else 10),
        tables.incidents(state, width, 4 if small else 12),
        tables.lost(state, width),
        tables.problems(state, width, 2 if small else 5),
    ]
    foot = _foot(state, note, width)
    shown_blocks = [block for block in blocks if block]
    if height is not None:
        shown_blocks = _fitted(shown_blocks, height - len(top) - len(foot))
    used = sum(map(len, shown_blocks)) + len(top) + len(foot)
    spaced = height is None or used + len(shown_blocks) + 1 <= height
    body: list[Line] = []
    for block in shown_blocks:
        body += [line(), *block] if spaced else block
    lines = [*top, *body, *([line()] if spaced and foot else []), *foot]
    return [_cut(each, width) for each in (lines if height is None else lines[:height])]


def _fitted(blocks: list[list[Line]], room: int) -> list[list[Line]]:
    """The blocks within `room` lines: the longest gives first, down to three lines each; then the last ones go."""
    blocks = [list(block) for block in blocks]
    while sum(map(len, blocks)) > max(0, room):
        longest = max(blocks, key=len)
        if len(longest) > 3:
            longest[-2:] = [line(("...", "dim"))]
        else:
            blocks[-1].pop()
            if not blocks[-1]:
                blocks.pop()
    return blocks


def _head(state: Mapping[str, Any], width: int) -> Line:
    run = tables.mapping(state.get("run"))
    world, nodes = tables.whole(run.get("world_size")), tables.whole(run.get("nnodes"))
    said = text_of(outcome.word(state), 16)
    over = state.get("state") in outcome.OVER
    parts: list[str] = [f"job {text_of(run.get('job_id'), 30)}"]
    if said == outcome.ENDED:
        parts.append(f"by {text_of(state.get('ended_by'), 12)}")
    if world:
        parts.append(f"{shown.plural(world, 'rank')} on {shown.plural(nodes or 1, 'node')}")
    seen = tables.whole(state.get("ranks_seen"))
    if world and seen is not None and seen < world and state.get("phases") is not None:
        parts.append(f"{seen} seen")
    as_of, started = tables.number(state.get("as_of")), tables.number(run.get("started_at"))
    if as_of is not None and started is not None:
        parts.append(f"{'lasted' if over else 'for'} {shown.duration(as_of - started)}")
    low, high = tables.whole(state.get("steps_min")), tables.whole(state.get("steps_max"))
    if high:
        parts.append(f"step {high}" if low == high else f"steps {low}-{high}")
    step_s = tables.number(state.get("step_s"))
    if step_s is not None:
        parts.append(f"{step_s:.3g} s/step")
    if tables.whole(state.get("restarts")):
        parts.append(shown.plural(int(state["restarts"]), "restart"))
    style = "bad" if said in PAGING else "good" if said in ("running", "done", outcome.ENDED) else "warn"
    clock = f"  {shown.utc(as_of, date=False)}" if as_of is not None else ""
    room = max(10, width - len(said) - 2 - len(clock))
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts.pop()
    words = fit("  ".join(parts), room)
    gap = " " * max(0, width - len(said) - 2 - len(words) - len(clock))
    return line((said.upper().replace("_", " "), f"{style} bold"), "  ", (words, "bold"), gap + clock)


def _trouble(state: Mapping[str, Any], width: int, rows: int) -> list[Line]:
    """The headline, wrapped; in the colour of the gravest open incident."""
    words = shown.one_line(state.get("headline") or "")
    verdicts = [str(row.get("verdict")) for row in tables.rows(tables.mapping(state.get("incidents")).get("open"))]
    style = "bad" if any(verdict in PAGING for verdict in verdicts) else "warn" if verdicts else ""
    wrapped = textwrap.wrap(words, width, break_on_hyphens=False, max_lines=rows, placeholder=" ...")
    return [line((row, style)) for row in wrapped]


def _phases(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Ranks by phase, culprits of open incidents as a phase of their own, the most telling first."""
    found: dict[str, tuple[int, ...]] = {}
    for name, text in tables.mapping(state.get("phases")).items():
        found[text_of(name, 24)] = expand(str(text))
    odd = set(expand(str(state.get("odd") or "")))
    if odd:
        found = {phase: rest for phase, ranks in found.items() if (rest := tuple(rank for rank in ranks if rank not in odd))}
        found["culprit"] = tuple(sorted(odd))
    order = {phase: place for place, phase in enumerate(rank_grid.LETTERS)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def _legend(phases: Mapping[str, Sequence[int]], width: int, most: int) -> list[Line]:
    """A histogram that explains the letters: count, bar, ranks."""
    total = sum(map(len, phases.values()))
    if not total:
        return []
    bar_width = 20 if width >= 80 else 10
    lines = []
    for phase, ranks in list(phases.items())[:most]:
        filled = max(1, round(bar_width * len(ranks) / total))
        name = phase.replace("_", " ")
        head = f"{rank_grid.letter(phase)} {name:18} {len(ranks):6} "
        room = max(8, width - len(head) - bar_width - 1)
        lines.append(line((head, _STYLES.get(phase, "warn")), ("#" * filled + " " * (bar_width - filled), "dim"), f" {shown.short_ranks(ranks, room - 12)}"))
    return lines


def _map(state: Mapping[str, Any], phases: Mapping[str, Iterable[int]], width: int, rows: int) -> list[Line]:
    run = tables.mapping(state.get("run"))
    world, nodes = tables.whole(run.get("world_size")) or 0, tables.whole(run.get("nnodes")) or 1
    if not phases or not 0 < world <= MOST_RANKS:
        return []
    per_node = world // nodes if nodes and world % nodes == 0 else 0
    grid = rank_grid.build(world, per_node, phases, width, rows)
    label = len(str(world - 1))
    lines = [line((f"{'':{label}}  {grid.caption}", "dim"))] if world > 1 else []
    for row in grid.rows:
        parts: list[Part] = [(f"{row.first:{label}}  ", "dim")]
        for place, phase in enumerate(row.cells):
            if place and place % grid.group == 0:
                parts.append((" ", ""))
            parts.append((rank_grid.letter(phase), _STYLES.get(phase, "warn")))
        lines.append(line(*parts))
    return lines


def _foot(state: Mapping[str, Any], note: str, width: int) -> list[Line]:
    run = tables.mapping(state.get("run"))
    link = text_of(run.get("status_url"), 500) if state.get("state") not in ("done", "failed") else ""
    place = text_of(run.get("run_dir"), 500)
    lines = [line((fit(words, width), "dim")) for words in (f"files {place}" if place else "", f"page  {link}" if link else "") if words]
    return [*lines, line((shown.one_line(note), "warn"))] if note else lines


def _cut(whole: Line, width: int) -> Line:
    """Within the width, whatever its parts are."""
    kept: list[Part] = []
    for text, style in whole:
        left = width - sum(len(part) for part, _style in kept)
        if left <= 0:
            break
        kept.append((text[:left], style))
    return tuple(kept)
