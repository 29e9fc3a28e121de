"""A picture of all ranks as SVG geometry: numbered cells for few, run-length strokes for many, so that 16k ranks stay small and need no script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankwatch import shown

MAX_CELLS = 128
CELL_WIDTH, CELL_HEIGHT = 44, 26


@dataclass(frozen=True, slots=True)
class Cell:
    """One rank of a small job; x and y in pixels."""

    rank: int
    x: int
    y: int
    kind: str
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
    """Either cells or layers. `rings` are (x, y) around culprits in a large job, at most 64."""

    width: int
    height: int
    shown_width: int
    cells: tuple[Cell, ...] = ()
    layers: tuple[Layer, ...] = ()
    rings: tuple[tuple[int, int], ...] = ()


def build(world_size: int, kinds: Mapping[str, Iterable[int]], culprits: Iterable[int], titles: Mapping[int, str] | None = None) -> RankMap | None:
    """The map of ranks 0..world_size-1; None for no ranks. A rank in no kind is `other`; the last kind that holds it wins."""
    if world_size < 1:
        return None
    kind_of = dict.fromkeys(range(world_size), "other")
    for kind, ranks in kinds.items():
        kind_of.update((rank, kind) for rank in ranks if 0 <= rank < world_size)
    marked = {rank for rank in culprits if 0 <= rank < world_size}
    return _cells(world_size, kind_of, marked, titles or {}) if world_size <= MAX_CELLS else _layers(world_size, kind_of, marked)


def _cells(world_size: int, kind_of: Mapping[int, str], culprits: set[int], titles: Mapping[int, str]) -> RankMap:
    columns = min(world_size, 8 if world_size <= 64 else 16)
    cells = tuple(
        Cell(
            rank=rank,
            x=rank % columns * CELL_WIDTH,
            y=rank // columns * CELL_HEIGHT,
            kind=kind,
            culprit=rank in culprits,
            title=f"rank {rank}: {titles.get(rank) or kind.replace('_', ' ')}",
        )
        for rank, kind in kind_of.items()
    )
    width, height = columns * CELL_WIDTH, -(-world_size // columns) * CELL_HEIGHT
    return RankMap(width, height, width, cells=cells)


def _layers(world_size: int, kind_of: Mapping[int, str], culprits: set[int]) -> RankMap:
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
    return RankMap(columns, -(-world_size // columns), min(1024, columns * 12), layers=layers, rings=rings)
