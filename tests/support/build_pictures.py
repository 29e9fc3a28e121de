"""State documents of jobs of any size, as /api/v1/state gives them: small enough to write by hand, fast enough for 16,384 ranks."""

from __future__ import annotations

from typing import Any

from rankwatch.wire.ranks import compress

WALL = 1796008364.0  # 2026-11-30 03:12:44Z


def row(rank: int, per_node: int, **changes: Any) -> dict[str, Any]:
    """A rank that waits in all_reduce."""
    base = {
        "rank": rank, "node": f"node{rank // per_node:04}", "phase": "collective_wait", "label": "waiting", "kind": "collective_wait", "phase_s": 60.0,
        "detail": "all_reduce seq 26 of default_pg", "culprit": False, "waiting": True, "seq": 26, "lag": 0, "steps": 24,
    }  # fmt: skip
    return {**base, **changes}


def culprit(rank: int, per_node: int) -> dict[str, Any]:
    """A rank that sits in load_batch."""
    told = {"phase": "running", "label": "culprit: not_entered", "kind": "culprit", "phase_s": 61.0, "detail": "train.py:31:load_batch"}
    return row(rank, per_node, **told, culprit=True, waiting=False, seq=25, lag=1)


def stuck(world: int, nodes: int, rank: int, **changes: Any) -> dict[str, Any]:
    """One rank sits in load_batch, all others wait for it."""
    per_node = world // nodes
    waits = compress(other for other in range(world) if other != rank)
    words = f"rank {rank} has not entered all_reduce seq 26 of default_pg: it has been in load_batch (train.py:31) for 60 s; ranks {waits} wait"
    shown = [other for other in range(world) if other != rank][: 64 if world > 64 else world]
    base: dict[str, Any] = {
        "schema": 1, "as_of": WALL, "state": "stuck", "headline": words, "restarts": 0, "exit_code": None,
        "ranks_seen": world, "steps_min": 24, "steps_max": 24,
        "step_s": 0.42, "odd": str(rank), "culprits": str(rank), "stuck": str(rank), "phases": {"collective_wait": waits, "running": str(rank)},
        "run": {
            "job_id": "48213", "run_dir": "/scratch/alice/rankwatch-runs/20261130T030300Z-48213", "node": "node0000", "world_size": world, "nnodes": nodes,
            "attempt": 0, "started_at": WALL - 584, "status_url": "http://127.0.0.1:27435", "capabilities": {"compile": "ok", "stacks": "ok"},
        },
        "ranks": [culprit(rank, per_node), *(row(other, per_node) for other in shown)],
        "nodes": [{"node": "node0000", "ranks": f"0-{per_node - 1}", "report_age_s": 0.4}],
        "waiting": {"lost_rank_s": 420.0, "rows": [{"rank": rank, "reason": "not_entered at train.py:31:load_batch", "lost_rank_s": 420.0}]},
        "compile": [],
        "incidents": {
            "open": [{
                "id": "20261130T031149Z-1", "verdict": "stuck", "worst_verdict": "stuck", "cause": "not_entered", "culprit_ranks": [rank],
                "since": WALL - 60, "closed_at": None, "timeout_left_s": 540.0,
            }],
            "closed": [{
                "id": "20261130T030905Z-1", "verdict": "recovered", "worst_verdict": "slow", "cause": "compiling", "culprit_ranks": [0], "since": WALL - 224,
                "closed_at": WALL - 190, "timeout_left_s": None,
            }],
        },
    }  # fmt: skip
    return {**base, **changes}


def compiling(world: int, ranks: str, members: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and compile document: these ranks are in inductor, their peers took 55 s for the same frame."""
    doc = stuck(world, 1, members[0])
    others = ",".join(str(rank) for rank in range(world) if rank not in members)
    doc |= {"state": "running", "headline": f"rank {ranks} recompiles forward@model.py:31", "odd": ""}
    doc["phases"] = {"compiling": ranks, "collective_wait": others}
    doc["incidents"] = {"open": [], "closed": []}
    doc["ranks"] = [row(rank, world, **({"phase": "compiling", "label": "compiling"} if rank in members else {})) for rank in range(world)]
    activity = {"frame": "forward@model.py:31", "phase": "inductor", "elapsed_s": 41.0, "phase_s": 12.0, "peers_took_s": 55.0, "eta_s": 14.0, "peers": others}
    return doc, {"run": {}, "regime": {"name": "starting"}, "now": [{"rank": rank, **activity} for rank in members]}
