"""rankwatch / Fleet: every job on one screen, what paged, what waiting has cost. Over time it reads job-level families only; ranks are read for now alone."""

from __future__ import annotations

from . import looks, page
from .links import job_of_row, job_of_series, runbook
from .names import FLEET, PAGING, RANGE, RATE, fleet
from .panels import About, Column, Query, bands, bar_each, lines, number, rows

LOST = fleet(f"sum(increase(rankwatch_lost_rank_seconds_total{RANGE}))")


def build() -> str:
    """The JSON text."""
    rows_ = [
        page.Row("Now, and in this time range", _numbers()),
        page.Row("Job by job", _jobs()),
        page.Row("Over time", _over_time()),
        page.Row("What runs", _what_runs()),
    ]
    text = "All jobs: which needs somebody, what has paged, how many rank-hours waiting has cost. Click a job."
    return page.page("fleet", "rankwatch / Fleet", text, rows_, page.of_all_jobs(), page.events(FLEET, alerts=False), since="now-24h", refresh="1m")


def _paged(by: str = "") -> str:
    counted = f"increase(rankwatch_incidents_total{{{FLEET},{PAGING}}}{RANGE})"
    return f"round(sum {by} ({counted}))" if by else f"round(sum({counted}))"


def _numbers() -> list[object]:
    small = {"width": 4, "height": 4}
    return [
        number(
            About(
                "Jobs that report",
                "none",
                "Jobs whose judging launcher Prometheus reaches now.",
                "fewer than the scheduler runs: look at `up` and at service discovery.",
                [runbook("node")],
                no_value="0",
                **small,
            ),
            Query(fleet("count(max by (cluster, job_id) (rankwatch_job_state))"), "jobs", now=True),
        ),
        number(
            About(
                "Jobs in trouble",
                "none",
                "With an open incident that pages.",
                "open it in the table: the worst are on top.",
                [runbook("stuck"), runbook("failed"), runbook("timeout")],
                no_value="0",
                **small,
            ),
            Query(f"count(max by (cluster, job_id) (rankwatch_verdict{{{FLEET},{PAGING}}}) > 0) or vector(0)", "in trouble", now=True),
            thresholds=looks.steps(looks.GOOD, (1, looks.BAD)),
        ),
        number(
            About(
                "Ranks watched",
                "none",
                "Ranks that some launcher reports.",
                "fewer than the jobs have: a node does not answer.",
                [runbook("node")],
                no_value="0",
                **small,
            ),
            Query(fleet("sum(max by (cluster, job_id) (rankwatch_ranks_seen))"), "seen", now=True),
            Query(fleet("sum(max by (cluster, job_id) (rankwatch_world_size))"), "of", now=True),
        ),
        number(
            About(
                "Pages",
                "none",
                "Incidents in this time range that reached stuck, timeout imminent, failed or diverged; a crash of the user's own code counts.",
                "many from one job: its owner. Many from one node: drain it.",
                [runbook("stuck"), runbook("failed"), runbook("diverged")],
                no_value="0",
                decimals=0,
                **small,
            ),
            Query(_paged(), "pages", now=True),
            thresholds=looks.steps(looks.GOOD, (1, looks.WARN)),
        ),
        number(
            About(
                "Rank-hours lost to waiting",
                "suffix: rank-h",
                "In this time range, over all jobs, short waits included.",
                "see by job below; a rank-hour is a GPU-hour.",
                [runbook("straggler")],
                no_value="0",
                decimals=1,
                **small,
            ),
            Query(f"{LOST} / 3600", "lost", now=True),
        ),
        number(
            About(
                "Share of rank-time lost",
                "percentunit",
                "Of all rank-time in this time range, looked at once a minute.",
                "above a few percent: the jobs at the top of the bars below.",
                [runbook("straggler")],
                no_value="0",
                decimals=2,
                **small,
            ),
            Query(f"{LOST} / (60 * sum(sum_over_time({fleet('rankwatch_world_size')}[$__range:1m])))", "lost", now=True),
            thresholds=looks.steps(looks.GOOD, (0.02, looks.WARN), (0.1, looks.BAD)),
        ),
    ]


def _jobs() -> list[object]:
    def each(expression: str) -> str:
        return fleet(f"{expression}")

    by = "by (cluster, job_id)"
    return [
        rows(
            About(
                "Jobs",
                "none",
                "One line a job that reports now. Those with stuck ranks come first.",
                "click a job.",
                [runbook("stuck"), runbook("failed"), runbook("restarts")],
                width=24,
                height=11,
                no_value="no job reports",
            ),
            [
                Column("Job", "job_id", links=[job_of_row()]),
                Column("Cluster", "cluster"),
                Column("State", 0, mappings=tuple(looks.states())),
                Column("Ranks", 1),
                Column("Stuck ranks", 2, thresholds=looks.steps(looks.QUIET, (1, looks.BAD))),
                Column("Timeout used", 3, unit="percentunit", decimals=0, thresholds=looks.steps(looks.QUIET, (0.5, looks.WARN), (0.8, looks.BAD))),
                Column("Step", 4, unit="s"),
                Column("Pages", 5, decimals=0, thresholds=looks.steps(looks.QUIET, (1, looks.WARN))),
                Column("Rank-hours lost", 6, unit="suffix: rank-h", decimals=1),
                Column("Restarts", 7, decimals=0),
                Column("Runs for", 8, unit="s", decimals=0),
            ],
            Query(each(f"max {by} (rankwatch_job_state)")),
            Query(each(f"max {by} (rankwatch_world_size)")),
            Query(each(f"sum {by} (rankwatch_rank_stuck)")),
            Query(each(f"max {by} (rankwatch_collective_timeout_ratio)")),
            Query(each(f"max {by} (rankwatch_job_step_seconds)")),
            Query(_paged(by)),
            Query(each(f"sum {by} (increase(rankwatch_lost_rank_seconds_total{RANGE})) / 3600")),
            Query(each(f"max {by} (rankwatch_job_restarts_total)")),
            Query(each(f"time() - max {by} (rankwatch_job_start_timestamp_seconds)")),
            sort="Stuck ranks",
        ),
        bar_each(
            About(
                "Rank-hours lost to waiting, by job",
                "suffix: rank-h",
                "In this time range; the 20 jobs that lost most, ended ones included.",
                "click a bar: Ranks that wait for others shows when.",
                [runbook("straggler")],
                [job_of_series()],
                width=12,
                height=10,
                decimals=1,
            ),
            Query(fleet(f"topk(20, sum by (job_id) (increase(rankwatch_lost_rank_seconds_total{RANGE})) / 3600)"), "{{job_id}}", now=True),
            thresholds=looks.steps(looks.GOOD, (1, looks.WARN), (10, looks.BAD)),
        ),
        bar_each(
            About(
                "Incidents, by verdict",
                "none",
                "Incidents in this time range by the verdicts that they reached; slow, straggler and recovered page nobody.",
                "many timeouts: raise them or look at compiles. Many failed: look for one node.",
                [runbook("stuck"), runbook("timeout"), runbook("failed"), runbook("diverged")],
                width=12,
                height=10,
                decimals=0,
            ),
            Query(fleet(f"round(sum by (verdict) (increase(rankwatch_incidents_total{RANGE})))"), "{{verdict}}", now=True),
            thresholds=looks.steps(looks.GOOD, (1, looks.WARN)),
        ),
    ]


def _over_time() -> list[object]:
    return [
        lines(
            About(
                "Jobs by state",
                "none",
                "How many jobs are in each state.",
                "a red layer that stays: somebody should look.",
                [runbook("stuck"), runbook("failed")],
                width=12,
            ),
            Query(f'count_values("state", {fleet("max by (cluster, job_id) (rankwatch_job_state)")})', "{{state}}"),
            stacked=True,
            renamed={str(code): (name, looks.STATE_COLOURS[name]) for name, code in looks.JOB_STATE_CODES.items()},
        ),
        lines(
            About(
                "Open verdicts",
                "none",
                "Jobs with an open incident of each verdict.",
                "several jobs at the same minute: storage or network, not their code.",
                [runbook("stuck")],
                width=12,
                no_value="none",
            ),
            Query(fleet("sum by (verdict) (max by (cluster, job_id, verdict) (rankwatch_verdict)) > 0"), "{{verdict}}"),
            stacked=True,
            renamed={name: (name.replace("_", " "), colour) for name, colour in looks.VERDICT_COLOURS.items()},
        ),
        lines(
            About(
                "Ranks that wait for others",
                "none",
                "By job, on average; the ten with most.",
                "click a line for its job.",
                [runbook("straggler")],
                [job_of_series()],
                width=12,
            ),
            Query(fleet(f"topk(10, sum by (job_id) (rate(rankwatch_lost_rank_seconds_total{RATE})) > 0.01)"), "{{job_id}}"),
            stacked=True,
        ),
        bands(
            About(
                "Each job's state",
                "none",
                "A band a job; the 40 largest.",
                "click a band for its job.",
                [runbook("stuck")],
                [job_of_series()],
                width=12,
                height=8,
            ),
            Query(fleet("max by (job_id) (rankwatch_job_state) and on (job_id) topk(40, max by (job_id) (rankwatch_world_size))"), "{{job_id}}"),
            mappings=looks.states(),
            per_page=20,
        ),
    ]


def _what_runs() -> list[object]:
    return [
        lines(
            About(
                "What torch.compile does",
                "none",
                "Jobs by regime: compiled is what one wants.",
                "compiles for ever, fell back, compiled nothing: the job pays for compiling and gets little; see its Compile dashboard.",
                [runbook("recompiles"), runbook("limit")],
            ),
            Query(fleet("sum by (regime) (max by (cluster, job_id, regime) (rankwatch_compile_regime)) > 0"), "{{regime}}"),
            stacked=True,
            renamed={name: (name.replace("_", " "), colour) for name, colour in looks.REGIME_COLOURS.items()},
        ),
        lines(
            About(
                "Nodes watched",
                "none",
                "Launchers that Prometheus reaches, by version of rankwatch.",
                "it falls without a job ending: a node or the path to it is gone.",
                [runbook("node")],
                decimals=0,
            ),
            Query(fleet("count by (version) (rankwatch_build_info)"), "rankwatch {{version}}"),
            stacked=True,
        ),
        rows(
            About(
                "Versions in use",
                "none",
                "Jobs and ranks by torch, CUDA, NCCL and backend.",
                "trouble that only one line has: compare versions first.",
                [runbook("failed")],
            ),
            [
                Column("torch", "torch"),
                Column("CUDA", "cuda"),
                Column("NCCL", "nccl"),
                Column("Backend", "backend"),
                Column("Jobs", "Value", decimals=0),
            ],
            Query(fleet("count by (torch, cuda, nccl, backend) (rankwatch_job_info)")),
            sort="Jobs",
        ),
    ]
