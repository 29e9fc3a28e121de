"""The compile document: what all ranks compiled, where they differ, what it has cost. JSON values only; keys are only ever added. Pure.

Counts of `totals` are those of the rank with most (compile_s, cache, guards and waited_rank_s are sums over ranks), `compiles`, `recompiles`, `graphs` and
`cache_size` of a frame likewise; `phases` and `cache` of a frame are sums over ranks. Sets of ranks are texts, "0-3,7"; one that is very long is cut,
"0,2,4,...(8191)". At most MAX_BYTES as JSON: where that does not suffice, the newest part of the timeline and the costliest frames are kept.
"""

from __future__ import annotations

import json
from statistics import median
from typing import Any

from rankwatch import shown
from rankwatch.monitor.compiles import cudagraphs, divergence, rank_sets, stepping
from rankwatch.monitor.compiles.clusters import clusters, subgroups
from rankwatch.monitor.compiles.frame_rows import frame_row
from rankwatch.monitor.compiles.sums import MAX_GROUPS, Groups, group, lost_by_frame, ranks_part, totals, written_groups
from rankwatch.monitor.compiles.told import COUNTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwatch.model import CompileActivity, JobInfo, JobSnapshot, RankState, Waited
    from rankwatch.monitor.compiles.book import Book

SCHEMA = 1
MAX_BYTES = 1_000_000
ROOM_BYTES = 60_000  # for what others add: regime, advice
MAX_FRAMES = 200
MAX_NOW = 256
_SIZES = ((MAX_FRAMES, 2000, 1000), (MAX_FRAMES, 500, 200), (100, 200, 100), (50, 100, 60), (20, 50, 40))
"""(frames, rows of the timeline, characters of a set of ranks), tried until the document is small enough."""


def document(
    book: Book, job: JobInfo, snapshot: JobSnapshot, waiting: Sequence[Waited] = (), attempts: Sequence[Mapping[str, Any]] = (), over: bool = False
) -> dict[str, Any]:
    """What is known at the snapshot's moment. waiting: the ledger of the whole run. attempts: `summary` of each attempt before."""
    for frames, rows, letters in _SIZES:
        found = _document(book, job, snapshot, waiting, attempts, over, frames, rows, letters)
        if len(json.dumps(found, separators=(",", ":"), ensure_ascii=False, default=str).encode("utf-8", "replace")) <= MAX_BYTES - ROOM_BYTES:
            break
    return found


def summary(doc: Mapping[str, Any]) -> dict[str, Any]:
    """What a later attempt's document keeps of this one."""
    sums, run = doc.get("totals") or {}, doc.get("run") or {}
    kinds: dict[str, int] = {}
    for one in doc.get("divergence") or ():
        kinds[one["kind"]] = kinds.get(one["kind"], 0) + 1
    return {
        "attempt": run.get("attempt"),
        "as_of": doc.get("as_of"),
        "steps_max": run.get("steps_max"),
        **{name: sums.get(name, 0) for name in (*COUNTS, "compile_s")},
        "frames_compiled": len(doc.get("frames") or ()),
        "limited": sum(bool(frame.get("limited")) for frame in doc.get("frames") or ()),
        "divergence": kinds,
        "regime": (doc.get("regime") or {}).get("name"),
    }


def _document(
    book: Book,
    job: JobInfo,
    snapshot: JobSnapshot,
    waiting: Sequence[Waited],
    attempts: Sequence[Mapping[str, Any]],
    over: bool,
    max_frames: int,
    max_rows: int,
    letters: int,
) -> dict[str, Any]:
    def written(mask: int) -> str:
        return rank_sets.written(mask, letters)

    ranks = {rank: state for rank, state in snapshot.ranks().items() if 0 <= rank < rank_sets.MAX_RANK}
    compared = clusters(book)
    lost_s = lost_by_frame(waiting)
    rows = [frame_row(frame, lost_s.get(frame.name, 0.0), written, _only(book, frame.mask)) for frame in book.frames.values()]
    rows = [row for row in rows if row["ranks"] or row["breaks"] or row["failures"] or row["limited"]]
    rows.sort(key=lambda row: (-(row["seconds_max"] + row["lost_rank_s"]), row["frame"]))
    in_order = [book.frames[row["frame"]] for row in rows]
    scene = divergence.Scene(ranks, in_order, compared, subgroups(book), waiting, snapshot.now, snapshot.wall_at, over)
    return {
        "schema": SCHEMA,
        "as_of": round(snapshot.wall_at, 3),
        "over": over,
        "run": _run(book, job, snapshot, ranks),
        "ranks": ranks_part(book, ranks, compared, written),
        "totals": totals(book, ranks, waiting),
        "now": _now(book, snapshot.now, written),
        "skew": _skew(book, written),
        "frames": rows[:max_frames],
        "frames_left_out": max(0, len(rows) - max_frames),
        "divergence": divergence.find(book, scene),
        "ddp": _ddp(book, written),
        "cudagraphs": cudagraphs.document(ranks, snapshot.wall_at, over, written),
        "steps": _steps(book, compared, written),
        "timeline": _timeline(book, snapshot, max_rows),
        "attempts": [dict(attempt) for attempt in attempts],
    }


def _run(book: Book, job: JobInfo, snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> dict[str, Any]:
    steps = [state.steps for state in ranks.values()]
    groups = max((rank.groups for rank in book.ranks.values()), key=len, default=())
    return {
        "id": shown.public_line(job.job_id),
        "world_size": snapshot.world_size,
        "ranks_seen": len(ranks),
        "attempt": snapshot.attempt,
        "torch": shown.public_line(job.versions.get("torch", "")),
        "backend": shown.public_line(groups[0].backend) if groups else "",
        "steps_min": min(steps, default=0),
        "steps_max": max(steps, default=0),
        "smallest_timeout_s": _smallest_timeout(book),
        "run_dir": shown.public_line(job.run_dir),
    }


def _smallest_timeout(book: Book) -> float | None:
    return min((group.timeout_s for rank in book.ranks.values() for group in rank.groups if group.timeout_s is not None), default=None)


def _only(book: Book, mask: int) -> str:
    """ "only rank 0 runs it" where that is so and nobody else of those who compile does."""
    everybody = 0
    for frame in book.frames.values():
        everybody |= frame.mask
    if not mask or mask == everybody or mask.bit_count() > everybody.bit_count() // 2:
        return ""
    return f"only {rank_sets.words(mask)} {'runs' if mask.bit_count() == 1 else 'run'} it"


def _steps(book: Book, compared: Sequence[int], written: Callable[[int], str]) -> dict[str, Any]:
    """Of the whole job, and under `groups` of each set of ranks that are compared, where there are several."""
    found = stepping.document(rank.stepping for rank in book.ranks.values())
    groups = {written(mask): stepping.document(book.ranks[rank].stepping for rank in rank_sets.members(mask)) for mask in compared[:MAX_GROUPS]}
    return {**found, "groups": groups if len(groups) > 1 else {}}


def _ddp(book: Book, written: Callable[[int], str]) -> dict[str, Any]:
    """{} where nothing is known of DDPOptimizer."""
    newest = book.splits.newest
    if not newest:
        return {}
    modes: Groups = {}
    groups: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
    for rank, row in newest.items():
        if row["mode"]:
            group(modes, row["mode"], rank, row["mode"])
        if row["status"]:
            key = (row["status"], row["fingerprint"], row["cap_bytes"], row["error"], row["reason"])
            if key in groups or len(groups) < MAX_GROUPS:
                groups[key] = (groups.get(key, (0, row))[0] | 1 << rank, groups.get(key, (0, row))[1])
    shown_keys = ("status", "frame", "splits", "bytes", "cap_bytes", "first_cap_bytes", "buckets", "fingerprint", "error", "reason")
    ordered = sorted(groups.values(), key=lambda one: (-one[0].bit_count(), rank_sets.lowest(one[0])))
    return {
        "mode": written_groups(modes, written),
        "groups": [{"ranks": written(mask), **{key: row[key] for key in shown_keys}} for mask, row in ordered],
        "calls": max(row["calls"] for row in newest.values()),
        "forwards": max(book.splits.events.values(), default=0),
        "recompiles_x_splits": book.splits.split_again(),
        "not_applied": max(row["not_applied"] for row in newest.values()),
    }


# -- now and then ------------------------------------------------------------------------------------------------------------


def _now(book: Book, now: float, written: Callable[[int], str]) -> list[dict[str, Any]]:
    """Who compiles, longest first, and what peers took for the same compile."""
    rows = [_running(book, rank, activity, now, written) for rank, activities in book.compiling.items() for activity in activities]
    return sorted(rows, key=lambda row: (-row["elapsed_s"], row["rank"]))[:MAX_NOW]


def _running(book: Book, rank: int, activity: CompileActivity, now: float, written: Callable[[int], str]) -> dict[str, Any]:
    frame = book.frames.get(activity.frame)
    key = frame.key_of(rank, activity.compile_id) if frame is not None else None
    compiled = frame.compiled.get(key) if frame is not None and key is not None else None
    samples = compiled.samples.get(activity.kind, ()) if compiled is not None else ()
    peers = compiled.ok & ~(1 << rank) if compiled is not None else 0
    took_s = median(samples) if samples and peers else None
    elapsed_s = max(0.0, now - activity.started_at)
    return {
        "rank": rank,
        "frame": activity.frame,
        "kind": activity.kind,
        "compile_id": activity.compile_id,
        "phase": activity.phase,
        "elapsed_s": round(elapsed_s, 3),
        "phase_s": round(max(0.0, now - activity.phase_since), 3),
        "detail": shown.public_line(activity.detail or (f"split {activity.split} of {activity.splits}" if activity.splits else "")),
        "reason": shown.public_line(activity.recompile_reason)[:300],
        "eta_s": None if took_s is None else round(max(0.0, took_s - elapsed_s), 3),
        "peers_took_s": None if took_s is None else round(took_s, 3),
        "peers": written(peers) if took_s is not None else "",
    }


def _skew(book: Book, written: Callable[[int], str]) -> dict[str, Any]:
    skew = book.skew
    return {
        "now_s": round(skew.seconds, 3),
        "smallest_timeout_s": _smallest_timeout(book),
        "ranks": written(skew.compiling) if skew.seconds else "",
        "others": written(skew.others) if skew.seconds else "",
        "worst_s": round(skew.worst_s, 3),
        "worst_frame": skew.worst_frame,
        "worst_ranks": written(skew.worst_mask),
        "worst_at": round(skew.worst_wall, 3) if skew.worst_wall else None,
    }


def _timeline(book: Book, snapshot: JobSnapshot, max_rows: int) -> list[dict[str, Any]]:
    """The newest compiles, oldest first; those that run, or ran when their process ended, have no end."""
    running = [
        {
            "rank": rank, "start_wall": round(snapshot.wall_at - max(0.0, snapshot.now - activity.started_at), 3), "end_wall": None, "frame": activity.frame,
            "kind": activity.kind, "compile_id": activity.compile_id, "ok": None, "reason_class": "", "step": book.ranks[rank].stepping.count,
        }
        for rank, activities in {**book.cut_off, **book.compiling}.items() for activity in activities
    ]  # fmt: skip
    return sorted([*book.timeline, *running[:MAX_NOW]][-max_rows:], key=lambda row: (row["start_wall"], row["rank"]))
