"""What a webhook is sent: one JSON object when an incident that pages opens, gets worse or ends. Pure.

`text` is for chats (Slack, Mattermost, Rocket.Chat and what is compatible show it as it is), everything beside it for programs. Slack itself gets
`text` alone: it refuses what it does not know.
"""

from __future__ import annotations

import json
from typing import Any

from rankwatch import shown
from rankwatch.model import PAGING, Incident, Status
from rankwatch.notify.alertmanager import page_link, report_place
from rankwatch.notify.pages import pages

SLACK = "hooks.slack.com"
SCHEMA = 1
MAX_RANKS = 64
MAX_TEXT = 3000
_VERBS = {"recovered": "RECOVERED", "merge": "MERGED", "restart": "RESTARTED", "job_ended": "JOB ENDED"}


def tells(kind: str, incident: Incident) -> bool:
    """Whether a change (opened, escalated, closed) is news for a person: it pages, or what has paged is over."""
    if kind == "closed":
        return any(change.verdict in PAGING for change in incident.history)
    return incident.verdict.verdict in PAGING


def body(kind: str, reason: str, incident: Incident, status: Status, host: str) -> bytes:
    """The request. reason: why it is closed (recovered, merge, restart, job_ended). host: of the webhook's address."""
    text = shown.cut(_text(kind, reason, incident, status), MAX_TEXT)
    if host == SLACK:
        return json.dumps({"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}).encode()
    return json.dumps({"text": text, **_fields(kind, reason, incident, status)}).encode()


def _text(kind: str, reason: str, incident: Incident, status: Status) -> str:
    judged = incident.verdict
    over = kind == "closed"
    word = _VERBS.get(reason, "CLOSED") if over else judged.verdict.upper()
    hosts = dict.fromkeys(shown.one_line(incident.hosts[rank]) for rank in judged.culprit_ranks if rank in incident.hosts)
    where = f" on {','.join(list(hosts)[:3])}" if hosts else ""
    summary = shown.public_line(judged.summary) or f"cause {judged.cause}"
    lines = [f"{word} job {shown.one_line(status.job.job_id)}, {shown.rank_words(judged.culprit_ranks)}{where}: {shown.past(summary) if over else summary}"]
    if not over and judged.advice:
        lines.append(f"Do: {shown.public_line(judged.advice[0])}")
    if owner := status.job.labels.get("owner", ""):
        lines.append(f"Owner: {shown.one_line(owner)}")
    if not over and (place := page_link(incident, status) or report_place(incident, status)):
        lines.append(f"Report: {place}")
    return "\n".join(lines)


def _fields(kind: str, reason: str, incident: Incident, status: Status) -> dict[str, Any]:
    judged, job = incident.verdict, status.job
    severity = next((page.severity for page in pages((incident,))), "")
    return {
        "schema": SCHEMA,
        "change": kind,
        "reason": reason,
        "severity": severity,
        "job_id": job.job_id,
        "incident": incident.id,
        "verdict": judged.verdict,
        "cause": judged.cause,
        "domain": judged.domain,
        "confidence": judged.confidence,
        "culprit_ranks": sorted(judged.culprit_ranks)[:MAX_RANKS],
        "culprits": len(judged.culprit_ranks),
        "hosts": sorted({shown.one_line(incident.hosts[rank]) for rank in judged.culprit_ranks if rank in incident.hosts})[:MAX_RANKS],
        "waiting": len(judged.waiting_ranks),
        "summary": shown.public_line(judged.summary),
        "advice": [shown.public_line(line) for line in judged.advice[:5]],
        "opened_at": float(incident.opened_wall_at),
        "at": float(shown.now_wall(status)),
        "timeout_left_s": judged.timeout_left_s if kind != "closed" else None,
        "lost_rank_s": round(incident.lost_rank_s, 3),
        "world_size": job.world_size,
        "labels": dict(job.labels),
        "report": report_place(incident, status),
        "url": page_link(incident, status),
    }
