"""run.json: what was started, where, with which versions and environment, and how it ended. Secrets are hidden."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rankwatch import redact, shown
from rankwatch.model import Incident, Status
from rankwatch.report import incident as incidents

SCHEMA = 1
MAX_WAITING = 64


def to_json(status: Status) -> dict[str, Any]:
    """The document. `ended_at` and `exit_code` are null while the job runs; times are unix seconds. `ended_by`: the signal to the launcher, "" for none."""
    over = status.state in ("done", "failed")
    everything = (*status.closed_incidents, *status.open_incidents)
    nodes = [shown.clean(node.node) for node in status.snapshot.nodes] if status.snapshot else []
    return {
        "schema": SCHEMA,
        **incidents.run(status),
        "nodes": nodes or [shown.clean(status.job.node)],
        "environment_set": {shown.clean(name): shown.clean(text) for name, text in redact.environment(status.job.set_environment).items()},
        "state": status.state,
        "restarts": status.restarts,
        "ended_at": float(shown.now_wall(status)) if over else None,
        "exit_code": status.exit_code,
        "ended_by": shown.ended_by_signal(status.snapshot.ending) if over and status.snapshot else "",
        "verdicts": dict(sorted((Counter(shown.worst(incident) for incident in everything) + Counter(status.forgotten)).items())),
        "lost_rank_s": round(sum(incident.lost_rank_s for incident in everything) + status.forgotten_lost_rank_s, 3),
        "waiting": waiting(status),
        "incidents": [brief(incident, status) for incident in everything],
        "store": {"calls": status.health.store_calls, "bytes": status.health.store_bytes},
        "health": {
            "polls": status.health.polls,
            "cpu_s": round(status.health.cpu_s, 3),
            "errors": status.health.errors,
            "last_error": shown.one_line(status.health.last_error),
            "events_lost": status.health.events_lost,
            "writes_dropped": status.health.writes_dropped,
            "stack_dumps": dict(status.health.stack_dumps),
        },
    }


def waiting(status: Status) -> dict[str, Any]:
    """What waiting has cost over the whole run, short waits included: the sum, and who was waited for and why, costliest first.

    `rank` is null where no single rank was waited for. `lost_rank_s` of the document is the part that incidents tell.
    """
    rows = [
        {"rank": row.rank if row.rank >= 0 else None, "reason": shown.public_line(row.reason), "lost_rank_s": round(row.rank_s, 3)}
        for row in status.waiting[:MAX_WAITING]
    ]
    return {"lost_rank_s": round(sum((row.rank_s for row in status.waiting), 0.0), 3), "rows": rows}


def brief(incident: Incident, status: Status) -> dict[str, Any]:
    """One incident as a row of a list."""
    verdict = incident.verdict
    return {
        "id": incident.id,
        "verdict": verdict.verdict,
        "worst_verdict": shown.worst(incident),
        "cause": verdict.cause,
        "domain": verdict.domain,
        "culprit_ranks": sorted(verdict.culprit_ranks)[: incidents.MAX_RANKS_SHOWN],
        "waiting": shown.short_ranks(verdict.waiting_ranks),
        "num_waiting": len(verdict.waiting_ranks),
        "summary": incidents.summary(verdict),
        "since": incidents.since_wall(incident, status),
        "opened_at": float(incident.opened_wall_at),
        "updated_at": float(incident.updated_wall_at),
        "closed_at": incidents.closed_at(incident, status),
        "closed_by": incidents.closed_by(incident, status),
        "timeout_left_s": incidents.number(verdict.timeout_left_s),
        "timeout_known": verdict.timeout_known,
        "lost_rank_s": round(incident.lost_rank_s, 3),
        "times": incident.times,
    }
