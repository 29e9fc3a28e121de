"""Sets of ranks as bits of an integer: 2 KB for 16,384 ranks, joined and compared at once. Pure."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_RANK = 1 << 20
_RUN = re.compile("1+")


def bits(ranks: Iterable[int]) -> int:
    """The set of these ranks."""
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


def members(mask: int) -> list[int]:
    """The ranks in it, lowest first."""
    return [rank for first, last in _runs(mask) for rank in range(first, last + 1)]


def lowest(mask: int) -> int:
    """The lowest rank of a set that is not empty."""
    return (mask & -mask).bit_length() - 1


def written(mask: int, limit: int = 1000) -> str:
    """As wire.ranks.compress writes it, "0-3,7"; beyond `limit` characters cut at a comma with the number of all: "0,2,4,...(8191)"."""
    parts: list[str] = []
    length = 0
    for first, last in _runs(mask):
        part = f"{first}-{last}" if last > first else f"{first}"
        length += len(part) + 1
        if length > limit + 1:
            return f"{','.join(parts)},...({mask.bit_count()})"
        parts.append(part)
    return ",".join(parts)


def words(mask: int, limit: int = 80) -> str:
    """ "rank 1", "ranks 0,2-3"."""
    return f"rank{'' if mask.bit_count() == 1 else 's'} {written(mask, limit)}" if mask else "no rank"


def _runs(mask: int) -> Iterable[tuple[int, int]]:
    return ((found.start(), found.end() - 1) for found in _RUN.finditer(bin(mask)[:1:-1]))
