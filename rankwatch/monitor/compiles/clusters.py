"""Which ranks should compile alike. Pure.

By default all of them. Where stages of a pipeline run different code, ranks whose frames have little in common are not compared. What then
still differs along the lines of the job's own process groups (each side is made up of whole groups) is how the job is built, and no divergence.
"""

from __future__ import annotations

from rankwatch.monitor.compiles import rank_sets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rankwatch.monitor.compiles.book import Book

COMMON = 1 / 3  # of all their frames that two ranks must share
MAX_SUBGROUPS = 4096
MAX_KINDS = 256  # sets of frames that are told apart; the ranks of rarer ones are not compared


def clusters(book: Book) -> list[int]:
    """Sets of ranks that are compared with each other, largest first; ranks that compiled nothing, or nothing in common, are in none.

    Ranks with the same frames are alike, and so are those that are linked by sets of frames which have enough in common.
    """
    everybody = 0
    for frame in book.frames.values():
        everybody |= frame.mask
    kinds: list[tuple[int, frozenset[str]]] = [(everybody, frozenset())] if everybody else []  # ranks that compiled exactly these frames
    shared = 0
    for name, frame in book.frames.items():
        if frame.mask == everybody:
            shared += 1  # it tells nobody apart
            continue
        split: list[tuple[int, frozenset[str]]] = []
        for mask, names in kinds:
            inside, outside = mask & frame.mask, mask & ~frame.mask
            if inside:
                split.append((inside, names | {name}))
            if outside:
                split.append((outside, names))
        kinds = split
    kinds = sorted(kinds, key=lambda kind: (-kind[0].bit_count(), sorted(kind[1])))[:MAX_KINDS]
    linked = [mask for mask, _names in kinds]
    for place, (_mask, names) in enumerate(kinds):
        for other in range(place):
            if shared + len(names & kinds[other][1]) >= COMMON * (shared + len(names | kinds[other][1])) and linked[place] != linked[other]:
                both = linked[place] | linked[other]
                linked = [both if mask & both else mask for mask in linked]
    return sorted({mask for mask in linked if mask.bit_count() > 1}, key=lambda mask: (-mask.bit_count(), rank_sets.lowest(mask)))


def subgroups(book: Book) -> list[int]:
    """Process groups of more than one rank and less than all, as sets."""
    seen: set[tuple[int, ...]] = set()
    for rank in book.ranks.values():
        for group in rank.groups:
            if 1 < len(group.ranks) < len(book.ranks) and len(seen) < MAX_SUBGROUPS:
                seen.add(group.ranks)
    return [rank_sets.bits(rank for rank in group if 0 <= rank < rank_sets.MAX_RANK) for group in seen]


def by_design(sides: Sequence[int], groups: Iterable[int]) -> bool:
    """Whether every side is made up of whole process groups: the job itself tells these ranks apart."""
    covered = [0] * len(sides)
    for group in groups:
        for place, side in enumerate(sides):
            if group & ~side == 0:
                covered[place] |= group
    return len(sides) > 1 and all(whole == side for whole, side in zip(covered, sides, strict=True))
