"""The alerts that a launcher posts to Alertmanager itself (API v2): what they say, when they are due, when they end. Pure.

Labels are those of the rules that Prometheus evaluates, so that Alertmanager merges both paths into one alert. What the job's other labels are is said
by `via="launcher"`: then the label sets differ, and the inhibition in dashboards/alertmanager.yml keeps the rule's alert silent.

An alert is posted again each minute with an end in the future: it outlives a launcher that is killed as long as the rules' do. Once its incident is
over nothing is posted for RESOLVE_AFTER_S, then that it is resolved: Prometheus, which sends what it scraped last, would otherwise open it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any
from urllib.parse import urlsplit

from rankwatch import shown
from rankwatch.model import Incident, Status
from rankwatch.notify.pages import FAILED_BY_ITSELF, Page, pages

REPOST_S = 60.0
HOLD_S = 600.0
"""How long a page outlives its launcher: the `--hold` that rules are exported with unless told otherwise."""
FIRES_FOR_S = HOLD_S + 90.0  # past the rule's end, or its alert would be one more page when ours is over
RESOLVE_AFTER_S = 45.0
RESOLVED_KEPT_S = 300.0  # posts that did not arrive are repeated, those that end an alert too
MAX_TOLD = 3  # incidents in one text
VIA = "launcher"
_LOOPBACK = ("localhost", "127.", "::1")


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert as Alertmanager takes it, without its end."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_wall_at: float
    link: str = ""


@dataclass(frozen=True, slots=True)
class _Row:
    alert: Alert
    resolve_after_s: float
    over_at: float | None = None  # its incident is over
    ended_at: float | None = None  # it is resolved
    ended_wall_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Board:
    """What was posted: alerts that fire, and those that have ended lately. due: it has to be posted now."""

    rows: Mapping[tuple[str, str], _Row] = field(default_factory=dict)
    posted_at: float | None = None
    due: bool = False


def look(board: Board, incidents: Iterable[Incident], status: Status, labels: Mapping[str, str], now: float, wall_at: float) -> Board:
    """The next Board, by the incidents that are open `now` (monotonic; wall_at the same moment in unix seconds). labels: `--label` pairs."""
    rows, due = dict(board.rows), False
    wanted = {(page.name, page.severity): (page, those) for page, those in pages(incidents).items()}
    for key, (page, those) in wanted.items():
        alert, before = alert_of(page, those, status, labels), rows.get(key)
        keeps = before is not None and before.ended_at is None
        starts = min(before.alert.starts_wall_at, alert.starts_wall_at) if keeps and before is not None else alert.starts_wall_at
        alert = replace(alert, starts_wall_at=starts)
        due = due or before is None or before.over_at is not None or before.alert.annotations["summary"] != alert.annotations["summary"]
        rows[key] = _Row(alert, HOLD_S if page == FAILED_BY_ITSELF else RESOLVE_AFTER_S)
    for key in rows.keys() - wanted.keys():
        row = rows[key]
        if row.ended_at is not None:
            if now - row.ended_at >= RESOLVED_KEPT_S:
                del rows[key]
        elif row.over_at is None:
            rows[key] = replace(row, over_at=now)
        elif now - row.over_at >= row.resolve_after_s:
            rows[key], due = replace(row, ended_at=now, ended_wall_at=wall_at), True
    due = due or (bool(wanted) and (board.posted_at is None or now - board.posted_at >= REPOST_S))
    return Board(rows, now if due else board.posted_at, due)


def ended(board: Board, now: float, wall_at: float) -> Board:
    """The last Board of a launcher: what fires stays for as long as the rules' alerts do, what is over is resolved now. due where there is any."""
    rows = {
        key: replace(row, ended_at=now, ended_wall_at=wall_at) if row.over_at is not None and row.ended_at is None else row for key, row in board.rows.items()
    }
    return Board(rows, now, bool(rows))


def body(board: Board, wall_at: float) -> bytes:
    """The request of one post: every alert that fires, and those that have ended. What is over but not resolved yet is left out."""
    documents = []
    for row in board.rows.values():
        if row.ended_at is not None or row.over_at is None:
            ends_wall_at = row.ended_wall_at if row.ended_at is not None else wall_at + FIRES_FOR_S
            document: dict[str, Any] = {"labels": row.alert.labels, "annotations": row.alert.annotations}
            document |= {"startsAt": _time(min(row.alert.starts_wall_at, ends_wall_at - 0.001)), "endsAt": _time(ends_wall_at)}
            documents.append(document | ({"generatorURL": row.alert.link} if row.alert.link else {}))
    return json.dumps(documents).encode()


def alert_of(page: Page, incidents: list[Incident], status: Status, labels: Mapping[str, str]) -> Alert:
    """The alert of these incidents of one verdict."""
    more = {name: shown.one_line(value) for name, value in labels.items() if value}
    via = {"via": VIA} if more.keys() - {"cluster"} else {}
    ours = {"alertname": page.name, "severity": page.severity, "verdict": page.verdict, "job_id": shown.clean(status.job.job_id)}
    newest = sorted(incidents, key=lambda incident: incident.id)[-MAX_TOLD:]
    summary = f"Job {ours['job_id']} {page.says}: {'; '.join(map(_who, newest))}."
    annotations = {"summary": summary, "description": _story(page, newest, status)}
    return Alert({**more, **via, **ours}, annotations, min(_began(incident, page.verdict) for incident in incidents), page_link(newest[-1], status))


def page_link(incident: Incident, status: Status) -> str:
    """The incident's page, where somebody else than this machine can open it."""
    url = shown.page_url(status.job, incident.id)
    host = urlsplit(url).hostname or ""
    return "" if host.startswith(_LOOPBACK) else url


def report_place(incident: Incident, status: Status) -> str:
    """Where the report lies, "" where there is no run directory."""
    return f"{status.job.run_dir}/incidents/{incident.id}/report.txt" if status.job.run_dir else ""


def _began(incident: Incident, verdict: str) -> float:
    """Since when it pages, not since when it is known: Alertmanager's group_wait counts from here."""
    return next((change.at_wall for change in incident.history if change.verdict == verdict), incident.updated_wall_at)


def _who(incident: Incident) -> str:
    """As the rules say it: "rank 1 on node05, cause stopped"."""
    judged = incident.verdict
    if not judged.culprit_ranks:
        return f"no single rank, cause {judged.cause}"
    names = list(dict.fromkeys(shown.one_line(incident.hosts[rank]) for rank in judged.culprit_ranks if rank in incident.hosts))
    hosts = ",".join(names[:3]) + (f",...({len(names)})" if len(names) > 3 else "")
    return f"{shown.rank_words(judged.culprit_ranks, 60)}{f' on {hosts}' if hosts else ''}, cause {judged.cause}"


def _story(page: Page, incidents: list[Incident], status: Status) -> str:
    lines = []
    for incident in incidents:
        judged = incident.verdict
        link = page_link(incident, status)
        lines.append(
            f"Incident {incident.id}, domain {judged.domain}, open since {shown.utc(incident.opened_wall_at)}{f': {link}' if link else ''}"
            f"{chr(10) + shown.public_line(judged.summary) if judged.summary else ''}"
        )
    lines += [f"Waiting: {shown.rank_words(judged.waiting_ranks)}." for judged in (incidents[-1].verdict,) if judged.waiting_ranks]
    owner = status.job.labels.get("owner", "")
    lines += [f"Owner: {shown.one_line(owner)}."] if owner else []
    place = report_place(incidents[-1], status)
    report = f"{place} on {status.job.node}" if place else "the job's log"
    return "\n".join([*lines, f"Next: {page.todo.replace('REPORT', report)}"])


def _time(wall_at: float) -> str:
    return datetime.fromtimestamp(wall_at, timezone.utc).isoformat(timespec="milliseconds")
