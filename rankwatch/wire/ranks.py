"""Sets of ranks as people and files write them: "0-3,7"."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def compress(ranks: Iterable[int]) -> str:
    """`[0, 1, 2, 7]` -> "0-2,7"; "" for none. Order and repetition do not matter."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def expand(text: str) -> tuple[int, ...]:
    """ "0-2,7" -> (0, 1, 2, 7); ValueError names the part that is no range."""
    ranks: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or (last and int(last) < int(first)):
            raise ValueError(f"{part!r} in {text!r} is no rank and no range such as 0-3")
        ranks.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(ranks))
