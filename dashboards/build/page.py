"""One dashboard: variables, annotations, links, rows. Panels get their places and numbers here, in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import links, names
from .sdk import DATASOURCE, GENERATION, JSONEncoder, dashboard, model, prometheus

TAG = "rankwatch"


@dataclass(frozen=True)
class Row:
    """Panels under a title. A folded row asks Prometheus nothing until somebody opens it."""

    title: str
    panels: Sequence[Any]
    folded: bool = False


def page(
    name: str,
    title: str,
    description: str,
    rows: Sequence[Row],
    variables: Sequence[Any],
    annotations: Sequence[Any],
    since: str = "now-30m",
    refresh: str = "10s",
) -> str:
    """The JSON text of a dashboard: the same for the same panels."""
    board = dashboard.Dashboard(title).uid(links.UIDS[name]).description(description).tags([TAG]).time(since, "now").refresh(refresh)
    board = board.timezone("browser").tooltip(model.DashboardCursorSync.CROSSHAIR).readonly().variables(list(variables)).annotations(list(annotations))
    others = dashboard.DashboardLink("rankwatch").type(model.DashboardLinkType.DASHBOARDS).tags([TAG]).as_dropdown(False).include_vars(True).keep_time(True)
    board = board.link(others)
    number = 0
    for row in rows:
        number += 1
        built = dashboard.Row(row.title).id(number)
        for panel in row.panels:
            number += 1
            panel.id(number)
            if row.folded:
                built = built.with_panel(panel)
        board = board.with_row(built)
        if not row.folded:
            for panel in row.panels:
                board = board.with_panel(panel)
    made = board.build()
    made.schema_version = GENERATION
    plain = json.loads(json.dumps(made, cls=JSONEncoder))
    _close_up(plain["panels"])
    return json.dumps(_trimmed(plain), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _close_up(panels: list[dict[str, Any]]) -> None:
    """Moves what lies below a folded row up to it, as Grafana stores it; the builder leaves the height of the open row."""
    gap = 0
    for panel in panels:
        inner = panel.get("panels", ())
        for moved in (panel, *inner):
            moved["gridPos"]["y"] -= gap
        if inner:
            gap += max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in inner) - (panel["gridPos"]["y"] + 1)


def _trimmed(value: Any) -> Any:
    """Without what the builder adds: `placement` hides links and annotations in a menu since Grafana 12."""
    if isinstance(value, list):
        return [_trimmed(item) for item in value]
    if not isinstance(value, dict):
        return value
    drop = {"placement", "repeatDirection"} | ({"auto", "auto_count", "auto_min"} if "skipUrlSync" in value else set())
    return {key: _trimmed(item) for key, item in value.items() if key not in drop}


def of_a_job(**extra: Any) -> list[Any]:
    """Variables of a dashboard that shows one job: data source, cluster, job (newest first), and hidden ones."""
    started = f"query_result(sort_desc(max by (job_id) (last_over_time(rankwatch_job_start_timestamp_seconds{{{names.FLEET}}}{names.RANGE}))))"
    few = f"query_result(max by (job_id) (last_over_time(rankwatch_world_size{{{names.JOB}}}{names.RANGE})) <= {names.SMALL_RANKS})"
    job = _query("job_id", "Job", started, "Jobs that were seen in the time range, the newest first.").regex(_JOB_OF_RESULT)
    small = _query("small_job", "Job, if small", few, f"The job again if it has at most {names.SMALL_RANKS} ranks, else empty.").regex(_JOB_OF_RESULT)
    return [*of_all_jobs(), job, *extra.values(), small.hide(model.VariableHide.HIDE_VARIABLE)]


def of_all_jobs() -> list[Any]:
    """Variables that every dashboard has: data source and cluster."""
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    cluster = _query("cluster", "Cluster", "label_values(rankwatch_world_size, cluster)", "The target label `cluster`, where Prometheus gives one.")
    cluster = cluster.include_all(True).all_value(".*").multi(False).sort(model.VariableSort.NATURAL_ASC)
    cluster = cluster.current(model.VariableOption(selected=True, text="All", value="$__all"))
    return [source, cluster]


def rank_box() -> Any:
    """The variable `rank`, typed by hand: a list of 16,384 choices helps nobody."""
    zero = model.VariableOption(selected=True, text="0", value="0")
    return dashboard.TextBoxVariable("rank").label("Rank").description("A global rank.").default_value("0").current(zero).options([zero])


_JOB_OF_RESULT = '/job_id="([^"]*)"/'


def _query(name: str, label: str, query: str, description: str) -> dashboard.QueryVariable:
    made = dashboard.QueryVariable(name).label(label).description(description).datasource(DATASOURCE).query({"query": query, "refId": name}).definition(query)
    return made.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(model.VariableSort.DISABLED)


def events(selector: str, alerts: bool = True) -> list[Any]:
    """Restarts, incidents and alerts, as marks on every panel with a time axis."""
    restarts = f"max by (job_id) (changes(rankwatch_job_restarts_total{{{selector}}}[$__interval])) > 0"
    incidents = f"max by (job_id, incident, verdict) (rankwatch_incident_open_timestamp_seconds{{{selector}}}) * 1000"
    chosen = selector.replace('cluster=~"$cluster",', "")
    firing = f'max by (job_id, alertname, severity) (ALERTS{{alertname=~"Rankwatch.*",alertstate="firing"{"," + chosen if "job_id" in chosen else ""}}})'
    return [
        _marks("Restarts", restarts, "blue", "restart", "job {{job_id}}", "job_id"),
        _marks("Incidents", incidents, "red", "{{verdict}}", "incident {{incident}}, job {{job_id}}", "verdict").use_value_for_time(True),
        _marks("Alerts", firing, "orange", "{{alertname}}", "{{severity}}, job {{job_id}}", "severity").enable(alerts),
    ]


def _marks(name: str, expression: str, colour: str, title: str, text: str, tags: str) -> Any:
    target = prometheus.Dataquery().expr(expression).ref_id("Anno").range()
    made = dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(colour).expr(expression).target(target)
    return made.title_format(title).text_format(text).tag_keys(tags).step("15s")
