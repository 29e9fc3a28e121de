"""The table with a site's settings, as the document that Prometheus or the Prometheus operator reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankwatch.commands.alerts.table import ALERTS, RECORDINGS, Alert
from rankwatch.commands.alerts.words import HOLD, filled

DEFAULT_HOLD = "10m"
OUR_LABELS = ("alertname", "severity", "verdict", "job_id")
DASHBOARD = "rankwatch-job"
"""uid of the dashboard that an alert links to."""
_NOW_MS = '{{ with <<(time() AT) * 1000>> }}{{ . | first | value | printf "%.0f" }}{{ end }}'


@dataclass(frozen=True, slots=True)
class Settings:
    """What a site sets. labels: on every alert. severities: ours -> theirs. runbooks, grafana: addresses without a slash at the end, "" for no link."""

    labels: Mapping[str, str] = field(default_factory=dict)
    severities: Mapping[str, str] = field(default_factory=dict)
    runbooks: str = ""
    grafana: str = ""
    hold: str = DEFAULT_HOLD


def rule_file(settings: Settings) -> dict[str, Any]:
    """What stands in a rule file of Prometheus. One group: the alerts read the recording rules of the same evaluation."""
    recordings = [{"record": rule.name, "expr": _held(rule.expr, settings)} for rule in RECORDINGS]
    return {"groups": [{"name": "rankwatch", "rules": [*recordings, *(_alert(alert, settings) for alert in ALERTS)]}]}


def prometheus_rule(settings: Settings, metadata_labels: Mapping[str, str]) -> dict[str, Any]:
    """The same as a PrometheusRule of the Prometheus operator. metadata_labels: what its ruleSelector looks for, such as release=prometheus."""
    metadata: dict[str, Any] = {"name": "rankwatch", **({"labels": dict(metadata_labels)} if metadata_labels else {})}
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": metadata, "spec": rule_file(settings)}


def _alert(alert: Alert, settings: Settings) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": _held(alert.expr, settings)}
    if alert.wait:
        rule["for"] = alert.wait
    if alert.keep:
        rule["keep_firing_for"] = alert.keep
    rule["labels"] = {
        "severity": settings.severities.get(alert.severity, alert.severity),
        **({"verdict": alert.verdict} if alert.verdict else {}),
        **settings.labels,
    }
    rule["annotations"] = {"summary": alert.summary, "description": _held(alert.description, settings)}
    if settings.runbooks:
        rule["annotations"]["runbook_url"] = f"{settings.runbooks}/{alert.name}.md"
    if settings.grafana:
        rule["annotations"]["dashboard_url"] = _dashboard(settings.grafana)
    return rule


def _held(text: str, settings: Settings) -> str:
    return re.sub(rf"\b{HOLD}\b", settings.hold, text)


def _dashboard(grafana: str) -> str:
    """The job in Grafana, from half an hour before to a quarter after the page."""
    begin, end = filled(_NOW_MS.replace("AT", "- 1800")), filled(_NOW_MS.replace("AT", "+ 900"))
    cluster = "{{ with $labels.cluster }}&var-cluster={{ . | urlquery }}{{ end }}"
    return f"{grafana}/d/{DASHBOARD}?var-job_id={{{{ $labels.job_id | urlquery }}}}{cluster}&from={begin}&to={end}"
