"""Compile events and records of ranks as the agent writes them, for tests of what the monitor makes of them. Nothing here reads a clock."""

from __future__ import annotations

from typing import Any

from build_status import NOW, WALL, job

from rankwatch.model import Group, JobSnapshot, NodeReport, RankState, Waited
from rankwatch.monitor.compiles.book import Book
from rankwatch.monitor.compiles.document import document
from rankwatch.monitor.compiles.events import take

FRAME = "forward@model.py:31"


def event(rank: int, kind: str, after_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    """`after_s`: seconds after NOW."""
    return {"rank": rank, "kind": kind, "wall_ns": int((WALL + after_s) * 1e9), "mono_ns": int((NOW + after_s) * 1e9), **fields}


def compiled(rank: int, compile_id: str = "0/0", frame: str = FRAME, at: float = 0.0, **fields: Any) -> dict[str, Any]:
    """A forward compile of 2 s that went well."""
    ordinary = {
        "compile_kind": "forward", "compile_id": compile_id, "frame": frame, "duration_s": 2.0, "ok": True, "fail_type": None, "fail_reason": "",
        "recompile_reason": "", "graph_ops": 12, "graph_inputs": 3, "guards": 8, "fingerprint": f"{compile_id.partition('/')[2]:0>12}", "cache_size": 0,
        "limit": 8, "step": 0, "phases": {"dynamo": 0.5, "inductor": 1.5}, "cache": {"fx": "miss"},
    }  # fmt: skip
    return event(rank, "compile_end", at, **{**ordinary, **fields})


def resized(rank: int, compile_id: str, expected: int, actual: int, **fields: Any) -> dict[str, Any]:
    """A recompile because a batch had another size."""
    frame_id, _, ordinal = compile_id.partition("/")
    reason = f"{frame_id}/{int(ordinal) - 1}: tensor 'x' size mismatch at index 0. expected {expected}, actual {actual}"
    return compiled(rank, compile_id, recompile_reason=reason, **fields)


def rank_state(rank: int, **fields: Any) -> RankState:
    return RankState(**{"rank": rank, "stage": "joined", "steps": 50, "last_step_at": NOW, "step_s": 0.1, **fields})


def snapshot(world: int, at: float = 60.0, final: bool = False, **fields: Any) -> JobSnapshot:
    """`world` ranks, each with `fields`; a field that is a function is asked with the rank's number."""
    fields = {"groups": (Group("0", "default_pg", "gloo", tuple(range(world)), 600.0),), **fields}
    states = [rank_state(rank, **{key: value(rank) if callable(value) else value for key, value in fields.items()}) for rank in range(world)]
    return JobSnapshot(NOW + at, WALL + at, world, 0, (NodeReport("node05", tuple(states)),), final=final)


def told(events: list[dict[str, Any]], look: JobSnapshot, waiting: tuple[Waited, ...] = (), with_events: Any = None, over: bool = False) -> dict[str, Any]:
    """The document after these events and one look."""
    book = Book()
    take(book, events)
    ranks = look.ranks()
    book.look(ranks, ranks if with_events is None else with_events, look.now, look.wall_at)
    return document(book, job(), look, waiting, over=over)
