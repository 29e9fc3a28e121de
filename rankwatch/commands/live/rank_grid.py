"""All ranks as letters in a grid that fits: a cell a rank, a node, or some nodes, with the most telling thing that a rank in it does. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankwatch import shown

LETTERS = {
    "culprit": "!",
    "dead": "X",
    "unknown": "?",
    "no_report": "_",
    "compiling": "c",
    "cudagraph_capture": "g",
    "data_wait": "d",
    "checkpoint": "k",
    "starting": "s",
    "shutdown": "e",
    "running": ".",
    "collective_wait": "w",
}
"""Phase -> letter, the most telling first. Of running and waiting ranks the more frequent kind shows."""
OTHER = "*"
_COMMON = ("running", "collective_wait")
_GROUP = 8
_WIDEST = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the grid. first: its first rank. cells: the phase of each; groups of `group` belong together."""

    first: int
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """rows fit the room that was given. caption: what a cell is. group: after so many cells comes a gap."""

    rows: tuple[Row, ...]
    caption: str
    group: int


def letter(phase: str) -> str:
    """The letter of a phase."""
    return LETTERS.get(phase, OTHER)


def build(world_size: int, ranks_per_node: int, phases: Mapping[str, Iterable[int]], width: int, height: int) -> Grid:
    """The grid of ranks 0..world_size-1 in at most `height` lines of `width` characters with the first rank before each.

    A rank in no phase counts as `no_report`. ranks_per_node: 0 where nodes differ.
    """
    kind_of = ["no_report"] * world_size
    for phase, ranks in phases.items():
        for rank in ranks:
            if 0 <= rank < world_size:
                kind_of[rank] = phase
    room = width - len(str(max(0, world_size - 1))) - 2
    per_node = ranks_per_node if 1 < ranks_per_node <= world_size else 1
    each = _cell(world_size, per_node, _columns(room, _GROUP), height)
    group = per_node if each == 1 and 2 <= per_node <= 16 else _GROUP
    columns = _columns(room, group)
    cells = tuple(kind_of) if each == 1 else tuple(_telling(kind_of[first : first + each]) for first in range(0, world_size, each))
    rows = tuple(Row(start * each, cells[start : start + columns]) for start in range(0, len(cells), columns))
    return Grid(rows[:height], _caption(each, per_node), group)


def _columns(room: int, group: int) -> int:
    """Cells a row: whole groups, a power of two of them where that loses little."""
    groups = max(1, min((room + 1) // (group + 1), max(1, _WIDEST // group)))
    return group * (1 << (groups.bit_length() - 1))


def _cell(world_size: int, per_node: int, columns: int, height: int) -> int:
    """Ranks a cell."""
    each = 1
    while -(-world_size // each) > columns * max(1, height):
        each = per_node if each == 1 and per_node > 1 else each * 2
    return each


def _telling(kinds: list[str]) -> str:
    found = set(kinds)
    for phase in LETTERS:
        if phase in found and phase not in _COMMON:
            return phase
    rare = sorted(found - LETTERS.keys())
    return rare[0] if rare else max(_COMMON, key=kinds.count)


def _caption(each: int, per_node: int) -> str:
    if each == 1:
        return "a letter is a rank"
    if per_node > 1 and each % per_node == 0:
        nodes = each // per_node
        return f"a letter is the worst of {'one node' if nodes == 1 else shown.plural(nodes, 'node')}, {each} ranks"
    return f"a letter is the worst of {each} ranks"
