"""Sets of ranks as people and files write them: "0-3,7"."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_RANKS = 1 << 17


def compress(ranks: Iterable[int]) -> str:
    """`[0, 1, 2, 7]` -> "0-2,7"; "" for none. Order and repetition do not matter."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def expand(text: str, most: int = MOST_RANKS) -> tuple[int, ...]:
    """ "0-2,7" -> (0, 1, 2, 7). ValueError names the part that is no range of ranks below MOST_RANKS, or makes it more than `most`; before anything is built.

    A file or a slot may hold any text: "0-99999999" would be gigabytes, made in one call that holds the GIL.
    """
    bounds: list[tuple[int, int]] = []
    total = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()) or max(len(first), len(last)) > 9:
            raise ValueError(f"{part[:40]!r} in {text[:200]!r} is no rank and no range such as 0-3")
        low, high = int(first), int(last or first)
        total += high - low + 1
        if high < low or high >= MOST_RANKS or total > most:
            raise ValueError(f"{part[:40]!r} in {text[:200]!r} is no range of at most {most} ranks from 0 to {MOST_RANKS - 1}")
        bounds.append((low, high))
    return tuple(sorted({rank for low, high in bounds for rank in range(low, high + 1)}))
