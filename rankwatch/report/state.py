"""/api/v1/state: the whole picture as JSON, and what the status page is drawn from. Bounded at any world size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from zlib import crc32

from rankwatch import shown
from rankwatch.model import Incident, RankState, Status
from rankwatch.report import alike, collectives, outcome
from rankwatch.report import incident as incidents
from rankwatch.report.run import brief, waiting
from rankwatch.wire.ranks import compress

SCHEMA = 1
MAX_ROWS = 64
REPRESENTATIVES = 4
MAX_CLOSED = 20
MAX_OPEN = 64
MAX_ADVICE = 4
_REDRAW_S = 10.0

_last: tuple[Status, dict[str, Any]] | None = None


def to_json(status: Status) -> dict[str, Any]:
    """The document. Above MAX_ROWS ranks `ranks` holds those that stand out; `phases` always holds every rank, as "0-3,7". Nodes that
    do not answer come first among `nodes`.

    The newest picture's document is kept: many viewers cost one. Do not change what this returns.
    """
    global _last
    kept = _last
    if kept is None or kept[0] is not status:
        kept = (status, _build(status))
        _last = kept
    return kept[1]


def _build(status: Status) -> dict[str, Any]:
    snapshot, health = status.snapshot, status.health
    views = shown.rank_views(status)
    states = snapshot.ranks() if snapshot else {}
    phases = {phase: compress(ranks) for phase, ranks in shown.phase_sets(views, status.job.world_size).items()}
    verdicts = shown.current_verdicts(status)
    chosen = _chosen(states, views)
    step_s = shown.median_step_s(snapshot)
    steps = [state.steps for state in states.values()]
    doc: dict[str, Any] = {
        "schema": SCHEMA,
        "as_of": float(shown.now_wall(status)),
        "state": status.state,
        "headline": headline(status, views),
        "ending": shown.one_line(snapshot.ending) if snapshot else "",
        "restarts": status.restarts,
        "exit_code": status.exit_code,
        "ended_by": shown.ended_by_signal(snapshot.ending) if status.state in outcome.OVER and snapshot else "",
        "run": incidents.run(status),
        "ranks_seen": len(states),
        "steps_min": min(steps, default=0),
        "steps_max": max(steps, default=0),
        "step_s": step_s,
        "steps_per_s": round(1 / step_s, 4) if step_s else None,
        "timeout_s": incidents.number(shown.smallest_timeout_s(snapshot)),
        "timeout_used": round(max((view.inflight_s / view.timeout_s for view in views.values() if view.timeout_s), default=0.0), 4),
        "waiting": waiting(status),
        "phases": phases,
        "culprits": compress(rank for verdict in verdicts for rank in verdict.culprit_ranks if rank >= 0),
        "odd": compress(rank for rank, view in views.items() if view.kind == "culprit"),
        "stuck": compress(rank for rank, view in views.items() if view.stuck),
        "alike": alike.to_json(alike.groups(views, alike.places(states, status.open_incidents), _silent(views, status.job.world_size))),
        "ranks": [incidents.rank_row(states[rank], views[rank], status) for rank in chosen],
        "groups": incidents.groups(status, verdicts),
        "collectives": collectives.rows(status),
        "compile": [_compile_row(states[rank], status) for rank in _compile_ranks(states)],
        "probes": _probes(states),
        "incidents": {
            "open": [_open_row(incident, status) for incident in _gravest(status)],
            "num_open": len(status.open_incidents),
            "closed": [brief(incident, status) for incident in reversed(status.closed_incidents[-MAX_CLOSED:])],
        },
        "nodes": [
            {
                "node": shown.one_line(node.node),
                "ranks": compress(state.rank for state in node.ranks),
                "report_age_s": round(node.report_age_s, 3),
                **({"silent_ranks": compress(node.silent_ranks), "problem": shown.one_line(node.problem)} if node.silent_ranks else {}),
            }
            for node in sorted(snapshot.nodes if snapshot else (), key=lambda node: not node.silent_ranks)
        ],
        "health": {
            "polls": health.polls,
            "last_poll_s": round(health.last_poll_s, 6),
            "cpu_s": round(health.cpu_s, 3),
            "errors": health.errors,
            "last_error": shown.one_line(health.last_error),
            "events_lost": health.events_lost,
            "writes_dropped": health.writes_dropped,
            "stack_dumps": dict(health.stack_dumps),
        },
    }
    under_way = [(row["rank"], [(one["frame"], one["phase"]) for one in row["now"]]) for row in doc["compile"]]
    drawn = (doc["state"], doc["incidents"], phases, doc["odd"], doc["stuck"], under_way, doc["ranks_seen"], int(doc["as_of"] // _REDRAW_S))
    doc["revision"] = f"{crc32(json.dumps(drawn, sort_keys=True).encode()):08x}"
    return doc


def _open_row(incident: Incident, status: Status) -> dict[str, Any]:
    """An open incident as a row of a list, with what to do about it and where its culprit is."""
    seen_at, verdict = float(shown.now_wall(status)), incident.verdict
    left_s = incidents.number(verdict.timeout_left_s)
    return {
        **brief(incident, status),
        "at": shown.one_line(shown.at(verdict, incident.stacks)),
        "advice": incidents.lines(verdict.advice[:MAX_ADVICE]),
        "timeout_at": round(seen_at + left_s, 3) if left_s is not None else None,
    }


def _silent(views: Mapping[int, shown.RankView], world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if rank not in views]


def _gravest(status: Status) -> list[Incident]:
    """The open incidents in their order; of very many, as where a network stalls as a whole, the gravest and among these the oldest."""
    if len(status.open_incidents) <= MAX_OPEN:
        return list(status.open_incidents)
    order = sorted(status.open_incidents, key=lambda incident: (-shown.VERDICT_ORDER.index(incident.verdict.verdict), incident.opened_at))
    return order[:MAX_OPEN]


def headline(status: Status, views: Mapping[int, shown.RankView]) -> str:
    """The sentence on top: the gravest open incident's, else how the job does."""
    if status.state in ("done", "failed"):
        ending = shown.one_line(status.snapshot.ending) if status.snapshot else ""
        return outcome.sentence(status.exit_code, shown.ended_by_signal(ending), ending)
    if status.judge:
        return f"The whole job is judged elsewhere: {shown.one_line(status.judge)}. This page shows this node's ranks."
    if status.open_incidents:
        gravest = max(status.open_incidents, key=lambda incident: (shown.VERDICT_ORDER.index(incident.verdict.verdict), -incident.opened_at))
        return incidents.summary(gravest.verdict)
    if status.snapshot and status.snapshot.ending:
        return f"The job is ending: {shown.one_line(status.snapshot.ending)}."
    if not views:
        return "No rank has reported yet."
    common = max({view.phase for view in views.values()}, key=lambda phase: sum(view.phase == phase for view in views.values()))
    number = sum(view.phase == common for view in views.values())
    return f"No trouble: {number} of {shown.plural(status.job.world_size, 'rank')} {common.replace('_', ' ')}."


def _chosen(states: Mapping[int, RankState], views: Mapping[int, shown.RankView]) -> list[int]:
    """All ranks of a small job in order; of a large one the culprits, then the rare phases, and a few ranks of each common one."""
    if len(states) <= MAX_ROWS:
        return sorted(states)
    phases: dict[str, list[int]] = {}
    for rank in sorted(states):
        phases.setdefault(views[rank].phase, []).append(rank)
    order = [rank for rank in sorted(states) if views[rank].culprit]
    for ranks in sorted(phases.values(), key=len):
        order += ranks if len(ranks) <= MAX_ROWS else ranks[:REPRESENTATIVES]
    return list(dict.fromkeys(order))[:MAX_ROWS]


def _compile_ranks(states: Mapping[int, RankState]) -> list[int]:
    """Ranks of the compile table: those that compile now, and the ones with totals; of a large job a few of the latter."""
    now = [rank for rank, state in sorted(states.items()) if state.compiling]
    known = [rank for rank, state in sorted(states.items()) if state.compile_totals or state.ddp or state.cudagraph]
    if len(states) <= MAX_ROWS:
        return sorted({*now, *known})
    return list(dict.fromkeys((*now, *known[:REPRESENTATIVES])))[:MAX_ROWS]


def _compile_row(state: RankState, status: Status) -> dict[str, Any]:
    totals, ddp, graphs = state.compile_totals, state.ddp, state.cudagraph
    last = totals.get("last")
    return {
        "rank": state.rank,
        "now": [incidents.compile_row(activity, status) for activity in state.compiling[:8]],
        "frames": _count(totals.get("frames")),
        "recompiles": _count(totals.get("recompiles")),
        "limit_hits": _count(totals.get("limit_hits")),
        "graph_breaks": _count(totals.get("graph_breaks")),
        "failures": _count(totals.get("failures")),
        "seconds": _seconds(totals.get("seconds")),
        "last_reason": shown.cut(shown.public_line((last.get("recompile_reason") if isinstance(last, Mapping) else "") or ""), 300),
        "splits": _count(ddp.get("splits")),
        "split_status": shown.one_line(ddp.get("status") or ""),
        "split_hash": shown.one_line(ddp.get("fingerprint") or "")[:12],
        "split_error": shown.cut(shown.public_line(ddp.get("error") or ddp.get("reason") or ""), 300),
        "cudagraph_recordings": _count(graphs.get("recordings")),
        "cudagraph_pool_bytes": _count(graphs.get("pool_bytes")),
    }


def _count(value: object) -> int | None:
    return int(value) if isinstance(value, (int, float)) and incidents.number(value) is not None else None


def _seconds(value: object) -> float | None:
    """Seconds of all stages together: each stage is counted without the ones inside it."""
    return round(shown.compile_seconds(value), 3) if isinstance(value, Mapping) else None


def _probes(states: Mapping[int, RankState]) -> list[dict[str, Any]]:
    """Every probe with its ranks by status, those that do not work first, and ranks that run without the agent. `ok`: nothing to worry about."""
    found: dict[tuple[bool, str, str, str], list[int]] = {}
    said: dict[tuple[str, str | None, str], list[int]] = {}
    for rank, state in states.items():
        if state.agent in ("off", "silent"):
            found.setdefault((False, "agent", state.agent, shown.public_line(state.agent_detail)[:200]), []).append(rank)
        for name, probe in state.probes.items():
            status = probe.get("status")
            key = (name, None if status is None else str(status), "" if status in ("armed", None) else str(probe.get("detail") or ""))
            said.setdefault(key, []).append(rank)
    for (name, status, text), ranks in said.items():
        ok = status in ("armed", None)
        detail = "" if ok else shown.cut(shown.public_line(text), 200)
        found.setdefault((ok, shown.one_line(name), shown.one_line(status or "unknown"), detail), []).extend(ranks)
    return [
        {"probe": name, "status": word, "ok": ok, "detail": detail, "ranks": shown.short_ranks(ranks)}
        for (ok, name, word, detail), ranks in sorted(found.items())[:40]
    ]
