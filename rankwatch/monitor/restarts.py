"""What a restart of the workers makes of the incidents that it closes: they are over once the new attempt gets anywhere. Pure."""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import Incident, JobSnapshot


def restarted(incident: Incident, snapshot: JobSnapshot) -> Incident:
    """A closed incident that did not recover: torchrun has replaced the processes that it was about."""
    attempt = snapshot.attempt + 1
    summary = incident.verdict.summary.replace("recovered after", f"torchrun restarted the workers (attempt {attempt}) after", 1)
    end = {"ended_at": snapshot.wall_at, "exit_code": None, "ending": snapshot.ending, "state": "restarting", "attempt": attempt}
    return replace(incident, verdict=replace(incident.verdict, summary=summary), kept={**incident.kept, "job": end})


def not_over(incident: Incident) -> Incident:
    """The same before it is known whether the restart gets anywhere: it says the verdict that it had."""
    before = incident.history[:-1] or incident.history
    verdict = replace(incident.verdict, verdict=before[-1].verdict)
    return replace(incident, verdict=verdict, history=before, closed_at=None, closed_wall_at=None)


def attempt_of(incident: Incident) -> int:
    """Of the workers whose trouble it was."""
    return int((incident.kept.get("job") or {}).get("attempt", 1)) - 1


def gets_on(snapshot: JobSnapshot) -> bool:
    """Whether a rank has completed a collective or a step."""
    return any(rank.steps or any(rank.completed.values()) for rank in snapshot.ranks().values())
