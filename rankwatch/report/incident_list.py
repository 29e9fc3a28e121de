"""/api/v1/incidents: the incidents of a run, of very many the gravest whole and the others as a row each. Bounded at any number of incidents and ranks."""

from __future__ import annotations

import json
from typing import Any

from rankwatch import shown
from rankwatch.model import Incident, Status
from rankwatch.report import incident as incidents
from rankwatch.report.run import brief

MAX_WHOLE = 50
MAX_WHOLE_BYTES = 8 << 20
"""Of the whole documents together, as JSON: one of 16,384 ranks has 0.3 MB and more. The first is whole in any case."""
MAX_ROWS = 200


def to_json(status: Status) -> dict[str, Any]:
    """`incidents`: whole documents, open ones first, closed ones newest first. `more`: of the others a row as in run.json, gravest first.

    `num_incidents` counts them all. What is not whole here is so by its id: /api/v1/incidents?id=ID.
    """
    every = (*status.open_incidents, *reversed(status.closed_incidents))
    order = list(every) if len(every) <= MAX_WHOLE else sorted(every, key=_gravity)
    whole: dict[str, dict[str, Any]] = {}
    size = 0
    for incident in order[:MAX_WHOLE]:
        document = incidents.to_json(incident, status)
        size += len(json.dumps(document, default=str, separators=(",", ":")))
        if whole and size > MAX_WHOLE_BYTES:
            break
        whole[incident.id] = document
    rest = [incident for incident in sorted(every, key=_gravity) if incident.id not in whole]
    return {
        "incidents": [whole[incident.id] for incident in every if incident.id in whole],
        "more": [brief(incident, status) for incident in rest[:MAX_ROWS]],
        "num_incidents": len(every),
    }


def _gravity(incident: Incident) -> tuple[bool, int, float]:
    """Open before closed, then the gravest, then the newest."""
    return (incident.closed_at is not None, -shown.VERDICT_ORDER.index(shown.worst(incident)), -incident.opened_wall_at)
