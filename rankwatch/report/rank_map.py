"""A picture of all ranks: cards for few, a grid by node to MAX_CELLS, run-length strokes above, so that 16k ranks stay small and need no script. Pure.

Colour is never alone: culprits are outlined, cells and cards carry a letter of timeline.LETTERS, ranks without a report are hatched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rankwatch import shown
from rankwatch.report.timeline import LETTERS

MAX_CARDS = 16
MAX_CELLS = 512
WIDTH = 1096
CELL, SMALL_CELL = (44, 26), (28, 19)
SMALL_FROM = 129
LABEL_HEIGHT, GAP = 15, 10
_WITHOUT_LETTER = ("running", "other")


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank of a job of up to MAX_CELLS; x and y in pixels."""

    rank: int
    x: int
    y: int
    kind: str
    letter: str
    culprit: bool
    title: str


@dataclass(frozen=True, slots=True)
class Layer:
    """All ranks of one kind in a large job, as the `d` of one stroked path."""

    kind: str
    path: str
    title: str


@dataclass(frozen=True, slots=True)
class RankMap:
    """Either cells, with `labels` (x, y, node), or layers. `rings` are (x, y) around culprits in a large job, at most 64. words: the picture in a sentence."""

    width: int
    height: int
    shown_width: int
    cells: tuple[Cell, ...] = ()
    cell: tuple[int, int] = CELL
    labels: tuple[tuple[int, int, str], ...] = ()
    layers: tuple[Layer, ...] = ()
    rings: tuple[tuple[int, int], ...] = ()
    words: str = ""


def build(
    world_size: int,
    kinds: Mapping[str, Iterable[int]],
    culprits: Iterable[int],
    titles: Mapping[int, str] | None = None,
    nodes: Sequence[tuple[str, Iterable[int]]] = (),
) -> RankMap | None:
    """The map of ranks 0..world_size-1; None for no ranks. A rank in no kind is `other`; the last kind that holds it wins.

    nodes: (name, its ranks), used up to MAX_CELLS; ranks of no node stand last.
    """
    if world_size < 1:
        return None
    kind_of = dict.fromkeys(range(world_size), "other")
    for kind, ranks in kinds.items():
        kind_of.update((rank, kind) for rank in ranks if 0 <= rank < world_size)
    marked = {rank for rank in culprits if 0 <= rank < world_size}
    words = _words(kind_of, marked)
    if world_size > MAX_CELLS:
        return _layers(world_size, kind_of, marked, words)
    return _cells(world_size, kind_of, marked, titles or {}, _blocks(world_size, nodes), words)


def _words(kind_of: Mapping[int, str], culprits: set[int]) -> str:
    """ "7 collective wait, 1 running; culprit: rank 3": what a screen reader says of the picture."""
    counts: dict[str, int] = {}
    for kind in kind_of.values():
        counts[kind] = counts.get(kind, 0) + 1
    told = ", ".join(f"{number} {kind.replace('_', ' ')}" for kind, number in sorted(counts.items(), key=lambda item: -item[1]))
    return f"{told}; culprit: {shown.rank_words(culprits)}" if culprits else told


def _blocks(world_size: int, nodes: Sequence[tuple[str, Iterable[int]]]) -> list[tuple[str, list[int]]]:
    """Every rank once, by node; one block without a name where at most one node is known."""
    placed: set[int] = set()
    blocks = []
    for name, ranks in nodes:
        own = sorted({rank for rank in ranks if 0 <= rank < world_size} - placed)
        placed.update(own)
        if own:
            blocks.append((name, own))
    rest = [rank for rank in range(world_size) if rank not in placed]
    if len(blocks) <= (0 if rest else 1):
        return [("", list(range(world_size)))]
    blocks.sort(key=lambda block: block[1][0])
    return [*blocks, ("no node known", rest)] if rest else blocks


def _cells(
    world_size: int, kind_of: Mapping[int, str], culprits: set[int], titles: Mapping[int, str], blocks: list[tuple[str, list[int]]], words: str
) -> RankMap:
    width, height = cell = CELL if world_size < SMALL_FROM else SMALL_CELL
    alone = len(blocks) == 1
    columns = min(16 if alone and world_size > 64 else 8, max(len(ranks) for _, ranks in blocks))
    across = max(1, (WIDTH + GAP) // (columns * width + GAP))
    cells, labels, top, row_height, used = [], [], 0, 0, 0
    for index, (name, ranks) in enumerate(blocks):
        if index and index % across == 0:
            top, row_height = top + row_height + GAP, 0
        left = index % across * (columns * width + GAP)
        first = top + (0 if alone else LABEL_HEIGHT)
        if not alone:
            labels.append((left + 1, top + LABEL_HEIGHT - 4, shown.cut(shown.one_line(name), columns * width // 7)))
        for place, rank in enumerate(ranks):
            kind = kind_of[rank]
            letter = "" if kind in _WITHOUT_LETTER and rank not in culprits else LETTERS["culprit"] if rank in culprits else LETTERS.get(kind, "")
            title = f"rank {rank}: {titles.get(rank) or kind.replace('_', ' ')}"
            cells.append(Cell(rank, left + place % columns * width, first + place // columns * height, kind, letter, rank in culprits, title))
        row_height = max(row_height, first - top + -(-len(ranks) // columns) * height)
        used = max(used, left + columns * width)
    return RankMap(used, top + row_height, used, tuple(cells), cell, tuple(labels), words=words)


def _layers(world_size: int, kind_of: Mapping[int, str], culprits: set[int], words: str) -> RankMap:
    columns = 64 if world_size <= 4096 else 256
    strokes: dict[str, list[str]] = {}
    members: dict[str, list[int]] = {}
    start = 0
    for rank in range(1, world_size + 1):
        if rank == world_size or kind_of[rank] != kind_of[start] or rank % columns == 0:
            strokes.setdefault(kind_of[start], []).append(f"M{start % columns} {start // columns}.5h{rank - start}")
            members.setdefault(kind_of[start], []).extend(range(start, rank))
            start = rank
    layers = tuple(Layer(kind, "".join(paths), f"{kind.replace('_', ' ')}: {shown.short_ranks(members[kind], 300)}") for kind, paths in strokes.items())
    rings = tuple((rank % columns, rank // columns) for rank in sorted(culprits)[:64])
    return RankMap(columns, -(-world_size // columns), min(1024, columns * 12), layers=layers, rings=rings, words=words)
