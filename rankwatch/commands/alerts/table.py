"""Every alert and recording rule. Alerts are `Rankwatch` + the verdict or regime in CamelCase, all `by (cluster, job_id)`, so that one hang is one page.

What wakes somebody reads metrics of the level `low` only: they are there at any number of ranks.

Why `last_over_time` and not `keep_firing_for` on verdicts: both keep a page alive when the launcher dies and its series vanish, but rankwatch_verdict says 0
when it is over, so that recovery resolves the page at once and the next hang is a new one, and nothing is forgotten when Prometheus restarts.
keep_firing_for is on tickets, where one ticket for an hour of coming and going is what people want.
"""

from __future__ import annotations

from typing import NamedTuple

from rankwatch.commands.alerts.words import HOLD, LAST, filled, headline, story
from rankwatch.notify import pages
from rankwatch.notify.pages import Page

SEVERITIES = {
    "critical": "wakes somebody: the job stands, or computes garbage, and does not help itself",
    "warning": "tells the owner now; nobody is woken",
    "ticket": "can wait for working hours",
}


class Alert(NamedTuple):
    """One alert. A name may occur twice with different severities; of those one fires at a time. wait: `for`, keep: `keep_firing_for`, "" for none."""

    name: str
    severity: str
    expr: str
    summary: str
    description: str
    wait: str = ""
    keep: str = ""
    verdict: str = ""


class Recording(NamedTuple):
    """One recording rule, named level:metric:operations."""

    name: str
    expr: str


_BY = "by (cluster, job_id)"
_ON = "on (cluster, job_id)"
_TICKET_KEPT = "30m"
_REPORT = "`rankwatch report RUN_DIR` on the node of rank 0 (the job's first [rankwatch] line names RUN_DIR)"
_COMPILE = "`rankwatch compile RUN_DIR`"

_AT_WORK = f'{_ON} {LAST}{{verdict="timeout_imminent",cause!~"{"|".join(pages.AT_WORK)}"}}'
_NOT_OURS = f'{_ON} {LAST}{{verdict="failed",domain=~"{"|".join(pages.NOT_OURS)}"}}'


def _told(verdict: str) -> str:
    return f'max {_BY} (last_over_time(rankwatch_verdict{{verdict="{verdict}"}}[{HOLD}])) > 0'


def _judged(page: Page, more: str = "", expr: str = "") -> Alert:
    verdict = page.verdict
    told = story(verdict, page.todo.replace("REPORT", _REPORT))
    return Alert(page.name, page.severity, expr or _told(verdict) + more, headline(verdict, page.says), told, verdict=verdict)


def _of_job(name: str, severity: str, expr: str, says: str, description: str, wait: str = "", keep: str = "") -> Alert:
    return Alert(name, severity, expr, f"Job {{{{ $labels.job_id }}}}: {says}", filled(description), wait, keep)


def _regime(name: str, regime: str, says: str, description: str) -> Alert:
    expr = f'max {_BY} (rankwatch_compile_regime{{regime="{regime}"}}) > 0'
    return _of_job(name, "ticket", expr, says, description, "2m", _TICKET_KEPT)


_SEEN = "job:rankwatch_incident_info:timestamp"
_LAST_SEEN = f"max_over_time({_SEEN}[{HOLD}])"

RECORDINGS = (
    # Open incidents. Of a job that tells none: those of the last scrape that had one, so that a page keeps its text when the launcher is gone.
    Recording(_SEEN, "timestamp(rankwatch_incident_info)"),
    Recording(LAST, f"rankwatch_incident_info\nor {_ON} ({_LAST_SEEN} == {_ON} group_left () max {_BY} ({_LAST_SEEN}))"),
    # For big jobs, so that nobody has to draw a line a rank.
    Recording("job_phase:rankwatch_rank_phase:count", 'count_values by (cluster, job_id) ("phase", rankwatch_rank_phase)'),
    Recording("job:rankwatch_rank_steps:rate5m_min", f"min {_BY} (rate(rankwatch_rank_steps_total[5m]))"),
    Recording("job_instance:rankwatch_collective_lag:max", "max by (cluster, job_id, instance) (rankwatch_collective_lag)"),
    Recording("job:rankwatch_collective_timeout_ratio:max", f"max {_BY} (rankwatch_collective_timeout_ratio)"),
    Recording("job:rankwatch_lost_rank_seconds:rate5m", f"max {_BY} (rate(rankwatch_lost_rank_seconds_total[5m]))"),
)

ALERTS = (
    # -- verdicts
    _judged(pages.STUCK),
    _judged(pages.TIMEOUT, f"\nand {_AT_WORK}"),
    _judged(pages.TIMEOUT_AT_WORK, f"\nunless {_AT_WORK}"),
    _judged(pages.DIVERGED),
    _judged(pages.FAILED, f"\nand {_NOT_OURS}"),
    _judged(
        pages.FAILED_BY_ITSELF,
        # a restart takes the verdict away within a second, the counter stays
        expr=f'(\n  {_told("failed")}\n  or max {_BY} (increase(rankwatch_incidents_total{{verdict="failed"}}[{HOLD}])) > 0\n)\nunless {_NOT_OURS}',
    ),
    Alert(
        "RankwatchStraggler",
        "ticket",
        f'max {_BY} (rankwatch_verdict{{verdict="straggler"}}) > 0',
        headline("straggler", "waits for a straggler"),
        story("straggler", f"{_REPORT} says how late the rank is and what that costs. Compare its node with the others: clocks, throttling, data, neighbours."),
        keep=_TICKET_KEPT,
        verdict="straggler",
    ),
    # -- torch.compile
    _regime(
        "RankwatchRecompileStorm",
        "compiles_for_ever",
        "torch.compile compiles for ever.",
        f"A frame is compiled again and again; ranks wait for each other meanwhile.\nNext: {_COMPILE} names frame, guard and setting.",
    ),
    _regime(
        "RankwatchCompiledNothing",
        "compiled_nothing",
        "torch.compile was asked for and has compiled nothing.",
        f"The job runs eagerly.\nNext: {_COMPILE} says why, and which line to change.",
    ),
    _regime(
        "RankwatchFellBack",
        "fell_back",
        "a frame runs eagerly that was to be compiled.",
        f"It is a recompile limit, or a graph break in its loop.\nNext: {_COMPILE} names the frame and the guard.",
    ),
    _regime(
        "RankwatchCompileFailing",
        "failing",
        "a compile raises.",
        f"Next: {_COMPILE} has the error; `rankwatch ablate -- torchrun ...` finds the layer of torch.compile that is to blame.",
    ),
    _of_job(
        "RankwatchDifferentSplit",
        "ticket",
        f'max {_BY} (rankwatch_compile_divergence{{kind=~"different_split|split_mode"}}) > 0',
        "ranks split the same DDP graph differently.",
        f"Their gradient buckets do not pair: a hang or a mismatch may follow.\nNext: {_COMPILE} shows the splits of every rank.",
        "1m",
        _TICKET_KEPT,
    ),
    _of_job(
        "RankwatchCudagraphGrowth",
        "ticket",
        f"max {_BY} (rankwatch_cudagraph_growing_frames) > 0",
        "a CUDA graph is recorded for every new size.",
        "Frames that do so: {{ $value }}.{{ with <<max(rankwatch_cudagraph_pool_bytes{JOB})>> }} Private pools hold up to "
        "{{ . | first | value | humanize1024 }}B a rank.{{ end }} Memory grows with every size.\n"
        f"Next: {_COMPILE} names the frame and its line. Pad the sizes, or leave the frame out of CUDA graphs.",
        "5m",
        _TICKET_KEPT,
    ),
    # -- the job
    _of_job(
        "RankwatchRestartLoop",
        "warning",
        f"max {_BY} (increase(rankwatch_job_restarts_total[30m])) > 2.5",
        "torchrun restarts the workers again and again.",
        f"Restarts within 30 minutes: about {{{{ $value | humanize }}}}.\nNext: {_REPORT}; the oldest incident has the first cause.",
        keep="10m",
    ),
    _of_job(
        "RankwatchReplicaMismatch",
        "ticket",
        f"max {_BY} (rankwatch_replica_mismatch_ranks) > 0",
        "parameters differ between DDP replicas.",
        "Ranks that differ: {{ $value }}. The replicas no longer train the same model.\nNext: the NUMERICS line of the job's log has the rank and the step.",
        keep=_TICKET_KEPT,
    ),
    # -- rankwatch itself
    _of_job(
        "RankwatchRanksUnseen",
        "ticket",
        f"max {_BY} (rankwatch_world_size) - {_ON} max {_BY} (rankwatch_ranks_seen) > 0\nand {_ON} (max {_BY} (rankwatch_job_state) >= 1 < 3)",
        "nobody reports some of its ranks.",
        "Ranks without a report: {{ $value }}. They are unknown, not missing; verdicts are partial.\n"
        "Next: the job's log says which node does not answer, `rankwatch doctor --peers` on all nodes says why.",
        "1m",
    ),
    _of_job(
        "RankwatchBlindRanks",
        "ticket",
        f"max {_BY} (rankwatch_blind_ranks) > 0",
        "ranks run without rankwatch's agent.",
        "Blind ranks: {{ $value }}. Only exits and stacks are known of them.\nNext: the BLIND lines of the job's log say why.",
        "2m",
    ),
    _of_job(
        "RankwatchProbeDown",
        "ticket",
        f"max {_BY} (rankwatch_probe_ranks_down) > 0",
        "a probe of rankwatch does not work.",
        "{{ range <<max by (probe) (rankwatch_probe_ranks_down{JOB}) > 0>> }}Probe {{ .Labels.probe }}: {{ .Value }} ranks of a node. {{ end }}"
        "Verdicts and metrics go without what it sees.\nNext: the job's first [rankwatch] line and `rankwatch doctor` say why.",
        "2m",
    ),
    _of_job(
        "RankwatchMonitorErrors",
        "ticket",
        f"sum {_BY} (rankwatch_monitor_errors_total) > 0",
        "rankwatch has swallowed errors of its own.",
        "Errors so far: {{ $value }}. The job is not touched by them, but a verdict may be late or missing.\n"
        "Next: the job's log and the foot of its status page have the error; please report it.",
    ),
    _of_job(
        "RankwatchExporterDown",
        "ticket",
        f"(\n  count {_BY} (\n"
        "    max by (cluster, job_id, node) (max_over_time(rankwatch_build_info[10m])) unless on (cluster, job_id, node) rankwatch_build_info\n  )\n"
        f"  and {_ON} (max {_BY} (rankwatch_job_state) < 4)\n"
        f"  unless {_ON} (max {_BY} (changes(rankwatch_world_size[10m])) > 0)\n)\n"
        f"or (count {_BY} (rankwatch_build_info) unless {_ON} rankwatch_job_state)",
        "a launcher is not scraped any more while the job runs.",
        "{{ if <<rankwatch_job_state{JOB}>> }}{{ range "
        "<<max by (node) (max_over_time(rankwatch_build_info{JOB}[10m])) unless on (node) rankwatch_build_info{JOB}>> }}"
        "No answer from {{ .Labels.node }}. {{ end }}{{ else }}No answer from the launcher of rank 0, which judges. {{ end }}"
        "Ranks of a node whose launcher is gone are watched by nobody.\nNext: see there whether `rankwatch torchrun` still runs and its port can be reached.",
        "1m",
    ),
)
