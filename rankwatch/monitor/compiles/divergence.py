"""Same program, different compiles: on which ranks, in what, and since when. Pure.

Compiles are compared by (frame, variant, ordinal) and the fingerprint of the graph. A compile that only some ranks have done is told once the
others have gone on without it; a rank of which events were lost is never said not to have done something. A frame that only some ranks ever
run is no divergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankwatch.monitor.compiles import rank_sets
from rankwatch.monitor.compiles.clusters import by_design

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rankwatch.model import RankState, Waited
    from rankwatch.monitor.compiles.book import Book
    from rankwatch.monitor.compiles.frame import Compiled, FrameBook

ORDER = ("different_split", "split_mode", "failed_alone", "lone_recompile", "different_guard", "different_graph", "cache")
MAX_FOUND = 100
MAX_GROUPS = 8  # sides of one divergence
GRACE_STEPS = 2  # that ranks must have gone on without a compile to be said not to do it
GRACE_S = 30.0  # ... where no steps are known
LONGEST_GRACE_S = 120.0  # ... where they are and do not move


@dataclass(frozen=True, slots=True)
class Scene:
    """What comparisons look at beside the book.

    frames: in the order in which they are told. clusters: sets of ranks that should be equal; subgroups: the job's process groups, as sets.
    """

    ranks: Mapping[int, RankState]
    frames: Sequence[FrameBook]
    clusters: Sequence[int]
    subgroups: Sequence[int]
    waiting: Sequence[Waited]
    now: float
    wall_at: float
    over: bool = False


def find(book: Book, scene: Scene) -> list[dict[str, Any]]:
    """The document's `divergence`, gravest first. `book.seen` keeps since when each is known."""
    found = [*_splits(book, scene), *_modes(book, scene)]
    for cluster in scene.clusters:
        for frame in scene.frames:
            if (frame.mask & cluster).bit_count() > 1:
                found += _in_frame(book, scene, frame, frame.mask & cluster)
    found = _merged(found)
    found.sort(key=lambda one: ORDER.index(one["kind"]))
    for one in found[:MAX_FOUND]:
        key = (one["kind"], one["frame"], one["ordinal"])
        one["since_wall"] = round(book.seen.setdefault(key, one["since_wall"] or scene.wall_at), 3)
        blamed = {row.rank for row in scene.waiting if row.rank_s > 0 and one["frame"] and row.reason.endswith(f"compiling {one['frame']}")}
        one["correlated"] = any(one["odd"] >> rank & 1 for rank in blamed if rank >= 0)
        del one["odd"]
    return found[:MAX_FOUND]


def _entry(kind: str, frame: str, ordinal: int | None, sides: Sequence[tuple[int, str]], words: str, since_wall: float, odd: int = 0) -> dict[str, Any]:
    """odd: the ranks that a wait would be blamed on; where it is empty all of them."""
    everybody = 0
    for mask, _what in sides:
        everybody |= mask
    groups = [{"ranks": rank_sets.written(mask), "what": what} for mask, what in sides[:MAX_GROUPS]]
    return {
        "kind": kind, "frame": frame, "ordinal": ordinal, "groups": groups, "words": words, "since_wall": since_wall, "correlated": False,
        "odd": odd or everybody,
    }  # fmt: skip


def _in_frame(book: Book, scene: Scene, frame: FrameBook, base: int) -> Iterator[dict[str, Any]]:
    alone: dict[int, list[tuple[int, Compiled]]] = {}  # ranks -> the compiles that only these have done
    for (variant, ordinal), compiled in sorted(frame.compiled.items()):
        done = compiled.mask & base
        if not done:
            continue
        yield from _failed(frame, ordinal, compiled, base)
        yield from _cache(frame, ordinal, compiled, base)
        if done != base:
            if (variant or ordinal) and not _known_graph(frame, compiled, base) and _others_went_on(book, scene, frame, compiled, base):
                alone.setdefault(done, []).append((ordinal, compiled))
        else:
            yield from _different(scene, frame, ordinal, compiled, base)
    for done, compiles in alone.items():
        others = base & ~done & ~(book.lost & ~done)
        if others and not by_design((done, base & ~done), scene.subgroups):
            yield _lone(frame, done, others, compiles)
    yield from _by_record(book, scene, frame, base)


# -- a compile that only some have done --------------------------------------------------------------------------------------


def _known_graph(frame: FrameBook, compiled: Compiled, base: int) -> bool:
    """First compile of another piece of code of this name, whose graph the others have as well: they met the pieces in another order."""
    return not compiled.guards and bool(compiled.graphs) and all(base & ~frame.graphs.get(fingerprint, 0) == 0 for fingerprint in compiled.graphs)


def _others_went_on(book: Book, scene: Scene, frame: FrameBook, compiled: Compiled, base: int) -> bool:
    """Whether the ranks without this compile have had their chance to do it."""
    others = rank_sets.members(base & ~compiled.mask & ~book.lost)
    if not others or any(activity.frame == frame.name for rank in others for activity in book.compiling.get(rank, ())):
        return False
    age_s = scene.now - compiled.seen_at if compiled.seen_at else 0.0
    steps = [scene.ranks[rank].steps if rank in scene.ranks else 0 for rank in others]
    if not any(steps) or compiled.step is None:
        return scene.over or age_s >= GRACE_S
    past = compiled.step + 1 + (0 if scene.over else GRACE_STEPS)
    return min(steps) >= past or age_s >= LONGEST_GRACE_S


def _lone(frame: FrameBook, done: int, others: int, compiles: Sequence[tuple[int, Compiled]]) -> dict[str, Any]:
    guards = [guard for _ordinal, compiled in compiles for _mask, guard in compiled.guards.values()]
    what = f"guard {guards[-1].words}" if guards else "compiled it anew" if compiles[0][0] == 0 else "recompiled it"
    what += f", and {len(compiles) - 1} more" if len(compiles) > 1 else ""
    who, rest = rank_sets.words(done), rank_sets.words(others)
    times = f" {len(compiles)} times" if len(compiles) > 1 else ""
    alone = " alone" if done.bit_count() < others.bit_count() or done.bit_count() == 1 else ""
    cause = f": {guards[-1].words}{_place(guards[-1].at)}" if guards else ""
    words = f"{who}{alone} recompiled {frame.name}{times}{cause}; {rest} did not"
    return _entry("lone_recompile", frame.name, compiles[0][0], [(others, "no recompile"), (done, what)], words, compiles[0][1].seen_wall, done)


def _place(at: str) -> str:
    return f" ({at})" if at else ""


# -- a compile that all have done --------------------------------------------------------------------------------------------


def _different(scene: Scene, frame: FrameBook, ordinal: int, compiled: Compiled, base: int) -> Iterator[dict[str, Any]]:
    """Other graphs or other guards. Graphs that every rank has got by now, in whatever order, are the same program."""
    graphs = {fingerprint: (mask & base, words) for fingerprint, (mask, words) in compiled.graphs.items() if mask & base}
    guards = {place: (mask & base, guard) for place, (mask, guard) in compiled.guards.items() if mask & base}
    cause = ""
    uneven = [place for place, (mask, _guard) in guards.items() if base & ~(frame.guards[place].mask if place in frame.guards else mask)]
    if len(guards) > 1 and uneven:
        sides = [(mask, f"guard {guard.words}") for mask, guard in guards.values()]
        kind, thing = "different_guard", "recompiled for different guards"
    elif len(graphs) > 1 and any(base & ~frame.graphs.get(fingerprint, 0) for fingerprint in graphs):
        same = len({words for _mask, words in graphs.values()}) == 1
        sides = [(mask, f"{words}, graph {fingerprint[:6]}" if same else words) for fingerprint, (mask, words) in graphs.items()]
        kind, thing = "different_graph", "compiled different graphs"
        if same:  # what differs then is what the fingerprint sees and the counts do not
            sized = any(failed.guard.kind == "tensor_size" and failed.mask & base for failed in frame.guards.values())
            cause, thing = ("sizes", "compiled graphs for other sizes") if sized else ("sizes_or_branch", "compiled graphs of equal counts that differ")
    else:
        return
    sides.sort(key=lambda side: (-side[0].bit_count(), rank_sets.lowest(side[0])))
    if not by_design([mask for mask, _what in sides], scene.subgroups):
        told = "; ".join(f"{rank_sets.words(mask)}: {what}" for mask, what in sides[:4])
        entry = _entry(kind, frame.name, ordinal, sides, f"{thing} of {frame.name}{_which(ordinal)}: {told}", compiled.seen_wall)
        yield entry | ({"cause": cause} if cause else {})


def _failed(frame: FrameBook, ordinal: int, compiled: Compiled, base: int) -> Iterator[dict[str, Any]]:
    failed, well = compiled.failed & ~compiled.ok & base, compiled.ok & base
    if failed and well:
        words = f"{rank_sets.words(failed)} failed to compile {frame.name}{_which(ordinal)}: {compiled.failure}; {rank_sets.words(well)} compiled it"
        yield _entry("failed_alone", frame.name, ordinal, [(well, "compiled"), (failed, compiled.failure)], words, compiled.seen_wall, failed)


def _cache(frame: FrameBook, ordinal: int, compiled: Compiled, base: int) -> Iterator[dict[str, Any]]:
    for layer, states in compiled.caches.items():
        missed = states.get("miss", 0) & base
        hit = states.get("hit", 0) & base & ~missed
        if missed and hit:
            name = {"fx": "FX graph", "aot": "AOTAutograd"}.get(layer, layer)
            words = f"{rank_sets.words(missed)} missed the {name} cache for {frame.name}{_which(ordinal)}, {rank_sets.words(hit)} hit it"
            sides = [(hit, f"{layer} hit"), (missed, f"{layer} miss")]
            yield _entry("cache", frame.name, ordinal, sides, words, compiled.seen_wall, missed)


def _merged(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What lies between the same ranks is told once: cache lookups of all frames, other differences by frame. With the number of those alike."""
    first: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in found:
        key = (one["kind"], "" if one["kind"] == "cache" else one["frame"], *(group["ranks"] for group in one["groups"]))
        if key in first:
            first[key]["more"] = first[key].get("more", 0) + 1
            first[key]["since_wall"] = min(first[key]["since_wall"], one["since_wall"])
        else:
            first[key] = one
    for one in first.values():
        if more := one.pop("more", 0):
            one["words"] += f"; {more} more alike"
    return list(first.values())


def _which(ordinal: int) -> str:
    return f" (recompile {ordinal})" if ordinal else ""


# -- ranks that are known by their records only -------------------------------------------------------------------------------


def _by_record(book: Book, scene: Scene, frame: FrameBook, base: int) -> Iterator[dict[str, Any]]:
    """As many compiles by the ranks' own count, and another hash over all their graphs. Counts alone may differ for a moment."""
    alone = base & ~book.with_events
    if alone.bit_count() < 2:
        return
    hashes: dict[tuple[int, str], int] = {}
    for rank, own in frame.own.items():
        if alone >> rank & 1 and own.rolling and own.recorded:
            hashes[own.recorded, own.rolling] = hashes.get((own.recorded, own.rolling), 0) | 1 << rank
    for count in sorted({count for count, _rolling in hashes}):
        sides = [(mask, f"graphs {rolling[:6]}") for (times, rolling), mask in hashes.items() if times == count]
        sides.sort(key=lambda side: (-side[0].bit_count(), rank_sets.lowest(side[0])))
        if len(sides) > 1 and not by_design([mask for mask, _what in sides], scene.subgroups):
            told = "; ".join(f"{rank_sets.words(mask)}: {what}" for mask, what in sides[:4])
            words = f"compiled different graphs of {frame.name} (by their totals): {told}"
            yield {**_entry("different_graph", frame.name, None, sides, words, 0.0), "cause": "sizes_or_branch"}


# -- DDPOptimizer ------------------------------------------------------------------------------------------------------------


def _splits(book: Book, scene: Scene) -> Iterator[dict[str, Any]]:
    """One forward that was split in several ways. Ways that all ranks know, in whatever order, are the same program's."""
    told: set[tuple[str, tuple[int, ...]]] = set()
    ever: dict[tuple[str, str], int] = {}
    for (frame, _key), ways in book.splits.ways.items():
        for fingerprint, way in ways.items():
            ever[frame, fingerprint] = ever.get((frame, fingerprint), 0) | way.mask
    for (frame, (_variant, ordinal)), ways in sorted(book.splits.ways.items()):
        for cluster in scene.clusters:
            sides = [(way.mask & cluster, way.words) for way in ways.values() if way.mask & cluster]
            sides.sort(key=lambda side: (-side[0].bit_count(), rank_sets.lowest(side[0])))
            masks = tuple(mask for mask, _what in sides)
            everybody = sum(masks)  # of sets that share no rank: their union
            if all(everybody & ~ever[frame, fingerprint] == 0 for fingerprint, way in ways.items() if way.mask & cluster):
                continue
            if len(sides) < 2 or (frame, masks) in told or by_design(masks, scene.subgroups):
                continue
            told.add((frame, masks))
            words = f"DDPOptimizer has split {frame} differently: " + "; ".join(f"{rank_sets.words(mask)}: {what}" for mask, what in sides[:4])
            yield _entry("different_split", frame, ordinal, sides, words, max(way.seen_wall for way in ways.values()))


def _modes(book: Book, scene: Scene) -> Iterator[dict[str, Any]]:
    modes: dict[str, int] = {}
    for rank, row in book.splits.newest.items():
        if row["mode"] and row["mode"] != "?":
            modes[row["mode"]] = modes.get(row["mode"], 0) | 1 << rank
    sides = sorted(((mask, f"optimize_ddp: {mode}") for mode, mask in modes.items()), key=lambda side: (-side[0].bit_count(), rank_sets.lowest(side[0])))
    if len(sides) > 1 and not by_design([mask for mask, _what in sides], scene.subgroups):
        words = "torch._dynamo.config.optimize_ddp differs: " + "; ".join(f"{rank_sets.words(mask)}: {what}" for mask, what in sides[:4])
        yield _entry("split_mode", "", None, sides, words, 0.0)
