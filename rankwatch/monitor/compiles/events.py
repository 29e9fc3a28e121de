"""Finished compiles, recompile limits, graph breaks and splits, as ranks tell them one by one, into the book. Pure.

Whatever a field holds, nothing is raised: the events come out of memory that a training process writes.
"""

from __future__ import annotations

from typing import Any

from rankwatch import redact, shown
from rankwatch.monitor.compiles import guards, rank_sets
from rankwatch.monitor.compiles.frame import SAMPLES, Compiled, FrameBook
from rankwatch.monitor.compiles.told import number, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rankwatch.monitor.compiles.book import Book

SKIPPED = ("Unsupported", "SkipFrame")
LAYERS = ("fx", "aot")
MAX_GRAPHS = 16  # different ones of one compile
MAX_GRAPHS_EVER = 256  # ... of one frame


def take(book: Book, events: Iterable[Mapping[str, Any]]) -> None:
    """Events of ranks, oldest first, each with `rank`, `kind`, `wall_ns` and `mono_ns`; other kinds than compiles' are left alone."""
    for event in events:
        rank, do = event.get("rank"), _KINDS.get(str(event.get("kind")))
        if do is not None and isinstance(rank, int) and 0 <= rank < rank_sets.MAX_RANK:
            do(book, rank, event, number(event.get("wall_ns")) / 1e9)
            book.version += 1


def _compile_end(book: Book, rank: int, event: Mapping[str, Any], wall_at: float) -> None:
    kind, compile_id = str(event.get("compile_kind") or "forward"), str(event.get("compile_id") or "")[:48]
    seconds, ended_at = number(event.get("duration_s")), number(event.get("mono_ns")) / 1e9
    guard = _guard(event.get("recompile_reason"))
    name = book.name_of(event.get("frame"))
    rank_book = book.rank(rank)
    step = event.get("step")
    step = step if isinstance(step, int) and step >= 0 else rank_book.stepping.count
    rank_book.stepping.compiled(step)
    rank_book.idle_since = ended_at
    row = {"rank": rank, "start_wall": round(wall_at - _length_s(event), 3), "end_wall": round(wall_at, 3), "frame": name, "kind": kind}
    row |= {"compile_id": compile_id, "ok": bool(event.get("ok", True)), "skipped": _skipped(event)}
    row |= {"reason_class": guard.kind if guard else "", "step": step}
    book.timeline.append(row)
    frame = book.frame(name, rank)
    if frame is None or kind == "runtime":
        return
    own = frame.of(rank)
    own.seconds += seconds
    phases = event.get("phases")
    caches = _states(event.get("cache"))
    frame.add_costs({str(phase): number(spent) for phase, spent in phases.items()} if isinstance(phases, dict) else {}, caches)
    if kind == "forward":
        own.compiled_in(step)
        compiled = _forward(frame, rank, event, compile_id, guard)
    else:
        key = frame.key_of(rank, compile_id)
        compiled = frame.compiled.get(key) if key is not None else None
    if compiled is None:
        return
    if not compiled.seen_at:
        compiled.seen_at, compiled.seen_wall = ended_at, wall_at
    compiled.step = max(step, compiled.step if compiled.step is not None else 0)
    samples = compiled.samples.setdefault(kind, [])
    if len(samples) < SAMPLES and event.get("ok", True):
        samples.append(seconds)
    if seconds > compiled.longest_s:
        compiled.longest_s, compiled.longest_rank = seconds, rank
    for layer, state in caches.items():
        states = compiled.caches.setdefault(layer, {})
        states[state] = states.get(state, 0) | 1 << rank


def _forward(frame: FrameBook, rank: int, event: Mapping[str, Any], compile_id: str, guard: guards.Guard | None) -> Compiled | None:
    own, bit = frame.of(rank), 1 << rank
    compiled = frame.begin(rank, compile_id)
    key = frame.key_of(rank, compile_id)
    ops, fingerprint = whole(event.get("graph_ops")), str(event.get("fingerprint") or "")[:16]
    fail_type = str(event.get("fail_type") or "")[:80]
    own.graphs += ops > 0
    own.cache_size = max(own.cache_size, whole(event.get("cache_size")))
    frame.limit = whole(event.get("limit")) or frame.limit
    frame.ops = ops or frame.ops
    if guard is not None:
        frame.last_reason = guard.text
        frame.guard_failed(rank, guard, key, compiled, text_key(event.get("recompile_key")))
    if _skipped(event):
        if compiled is not None:
            compiled.skipped |= bit
    elif fail_type or event.get("ok") is False:
        why = shown.public_line(event.get("fail_reason") or "")[:300]
        frame.failed(rank, fail_type or "?", why, shown.one_line(event.get("fail_at") or "")[:160], text_key(event.get("fail_key")))
        if compiled is not None:
            compiled.failed |= bit
            compiled.failure = f"{fail_type}: {why}"[:200]
    else:
        own.compiles += 1
        own.recompiles += bool(key and key[1] > 0)
        if compiled is not None:
            compiled.ok |= bit
    if fingerprint and (fingerprint in frame.graphs or len(frame.graphs) < MAX_GRAPHS_EVER):
        frame.graphs[fingerprint] = frame.graphs.get(fingerprint, 0) | bit
    if compiled is not None and fingerprint and (fingerprint in compiled.graphs or len(compiled.graphs) < MAX_GRAPHS):
        mask, _words = compiled.graphs.get(fingerprint, (0, ""))
        compiled.graphs[fingerprint] = (mask | bit, _graph_words(event, ops))
    return compiled


def _skipped(event: Mapping[str, Any]) -> bool:
    """Whether Dynamo has left the frame to Python. With fullgraph=True a graph break is an exception, and its place is told."""
    return event.get("fail_type") in SKIPPED and not event.get("fail_at")


def _length_s(event: Mapping[str, Any]) -> float:
    """From the start of the compile's outermost region to its end; the compile's own seconds where the start is not told."""
    started_ns, ended_ns = number(event.get("started_mono_ns")), number(event.get("mono_ns"))
    return (ended_ns - started_ns) / 1e9 if 0 < started_ns < ended_ns else number(event.get("duration_s"))


def _recompile_limit(book: Book, rank: int, event: Mapping[str, Any], _wall_at: float) -> None:
    frame = book.frame(book.name_of(event.get("frame")), rank)
    if frame is None:
        return
    guard, compile_id = _guard(event.get("last_reason")), str(event.get("compile_id") or "")
    if guard is not None:
        frame.last_reason = guard.text
        frame.guard_failed(rank, guard, frame.key_of(rank, compile_id), None, text_key(event.get("recompile_key")))
    frame.limited |= 1 << rank
    frame.limit = whole(event.get("limit")) or frame.limit
    own = frame.of(rank)
    own.cache_size = max(own.cache_size, whole(event.get("cache_size")))


def _graph_break(book: Book, rank: int, event: Mapping[str, Any], _wall_at: float) -> None:
    frame = book.frame(book.name_of(event.get("frame")), rank)
    if frame is not None:
        at, reason = shown.one_line(event.get("at") or "")[:160], shown.public_line(event.get("reason") or "")[:300]
        frame.broke(rank, at, reason, str(event.get("gb") or "")[:16], whole(event.get("times")), text_key(event.get("key")))


def _ddp_split(book: Book, rank: int, event: Mapping[str, Any], wall_at: float) -> None:
    name, compile_id = book.name_of(event.get("frame")), str(event.get("compile_id") or "")
    frame = book.frames.get(name)
    # The split is told before the compile that it is a part of has ended: its number is the next one there.
    key = frame.key_of(rank, compile_id) if frame is not None else FrameBook("").key_of(rank, compile_id)
    book.splits.add(rank, event, name, key, wall_at, event=True)


def _text(book: Book, rank: int, event: Mapping[str, Any], wall_at: float) -> None:
    book.texts.add(event, rank, wall_at)


_KINDS = {"compile_end": _compile_end, "recompile_limit": _recompile_limit, "graph_break": _graph_break, "ddp_split": _ddp_split, "text": _text}


def _guard(reason: object) -> guards.Guard | None:
    """None for no reason. Blanks stay as they are: two of them part a guard from the user's line."""
    line = redact.text(shown.clean(str(reason).split("\n", 1)[0]))[:600] if reason else ""
    return guards.parse(line) if line.strip() else None


def text_key(value: object) -> str:
    """Key of a full text in texts.jsonl, "" for none."""
    return value[:16] if isinstance(value, str) else ""


def _states(caches: object) -> dict[str, str]:
    """layer -> state of one compile's cache lookups; of several the one that made work."""
    states: dict[str, str] = {}
    for layer, state in list(caches.items())[:4] if isinstance(caches, dict) else ():
        several = state if isinstance(state, (list, dict)) else [state]
        worst = next((name for name in ("miss", "bypass", "disabled", "hit") if name in several), "")
        if worst and layer in LAYERS:
            states[layer] = worst
    return states


def _graph_words(event: Mapping[str, Any], ops: int) -> str:
    """ "12 operations, 3 inputs, 8 guards"."""
    parts = [shown.plural(ops, "operation")]
    for field, word in (("graph_inputs", "input"), ("guards", "guard")):
        if isinstance(event.get(field), int):
            parts.append(shown.plural(event[field], word))
    return ", ".join(parts)
