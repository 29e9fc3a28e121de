"""Where a panel leads. Grafana fills `${...}` when the link is followed."""

from __future__ import annotations

from .sdk import dashboard, model

UIDS = {name: f"rankwatch-{name}" for name in ("job", "rank", "fleet", "compile")}
"""Fixed for ever: bookmarks and alerts point at them."""

_SHARED = "${datasource:queryparam}&${cluster:queryparam}"


def _link(title: str, url: str, new_tab: bool = False) -> dashboard.DashboardLink:
    return dashboard.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url).target_blank(new_tab)


def board(name: str, title: str, **variables: str) -> dashboard.DashboardLink:
    """Another dashboard, same data source and time range, with these variables."""
    chosen = "".join(f"&var-{key}={value}" for key, value in variables.items())
    return _link(title, f"/d/{UIDS[name]}/{UIDS[name]}?{_SHARED}{chosen}&${{__url_time_range}}")


def rank_of_series() -> dashboard.DashboardLink:
    """The rank dashboard, for a series with the label `rank`."""
    return board("rank", "Rank ${__field.labels.rank}", job_id="${job_id:percentencode}", rank="${__field.labels.rank}")


def rank_of_row() -> dashboard.DashboardLink:
    """The rank dashboard, for a table's row with the column Rank."""
    return board("rank", "Rank ${__data.fields.Rank}", job_id="${job_id:percentencode}", rank="${__data.fields.Rank}")


def job_of_row() -> dashboard.DashboardLink:
    """The job dashboard, for a table's row with the column Job."""
    return board("job", "Job ${__data.fields.Job}", job_id="${__data.fields.Job}")


def job_of_series() -> dashboard.DashboardLink:
    """The job dashboard, for a series with the label `job_id`."""
    return board("job", "Job ${__field.labels.job_id}", job_id="${__field.labels.job_id}")


def incident_of_row() -> dashboard.DashboardLink:
    """The incident's page on the launcher's own address as Prometheus scrapes it, for a row with the columns Launcher and Incident."""
    return _link("Page of ${__data.fields.Incident}", "http://${__data.fields.Launcher}/incidents/${__data.fields.Incident}/", new_tab=True)


ALERTS = {
    "stuck": "RankwatchStuck",
    "timeout": "RankwatchTimeoutImminent",
    "failed": "RankwatchFailed",
    "diverged": "RankwatchDiverged",
    "straggler": "RankwatchStraggler",
    "restarts": "RankwatchRestartLoop",
    "recompiles": "RankwatchRecompileStorm",
    "limit": "RankwatchFellBack",
    "nothing": "RankwatchCompiledNothing",
    "failing": "RankwatchCompileFailing",
    "splits": "RankwatchDifferentSplit",
    "graphs": "RankwatchCudagraphGrowth",
    "replicas": "RankwatchReplicaMismatch",
    "node": "RankwatchRanksUnseen",
    "blind": "RankwatchBlindRanks",
    "probe": "RankwatchProbeDown",
    "errors": "RankwatchMonitorErrors",
    "gone": "RankwatchExporterDown",
}
"""What a panel is about -> the alert whose runbook says what to do."""


def runbook(about: str) -> str:
    """The alert whose runbook, dashboards/runbooks/<alert>.md, says what to do. `rankwatch dashboards export --runbook-base URL` makes links of these words."""
    return ALERTS[about]
