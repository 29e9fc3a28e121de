"""rankwatch / Job: is it healthy, which rank holds it up, in what, what does it cost. Reads from symptom to place to cause.

Layouts by size: up to 64 ranks one by one (a band, a cell, a bar a rank); above, nodes and phases; at any size the table of culprits, which stays short.
"""

from __future__ import annotations

from . import job_memory, job_watch, job_work, looks, page
from .links import board, incident_of_row, rank_of_row, rank_of_series, runbook
from .names import JOB, RANGE, RATE, SMALL_RANKS, job, rank_by_rank, with_node
from .panels import COARSE, About, Column, Query, bands, bar_each, cells, heat_rows, lines, number, rows

COMPILE = board("compile", "What compiles", job_id="${job_id:percentencode}")
PHASES = {str(code): (name.replace("_", " "), looks.PHASE_COLOURS[name]) for name, code in looks.PHASE_CODES.items()}
SUSPECTS = f"({job('rankwatch_rank_stuck')} == 1 or topk(10, {job('rankwatch_collective_lag')} > 0))"
LOW = "not at this metrics level"
TOO_LARGE = f"only for jobs of at most {SMALL_RANKS} ranks"
STANDING = looks.named(
    fine=(0, looks.GOOD), waits=(1, "yellow"), holds_the_others_up=(2, looks.BAD), holds_them_up_and_waits=(3, looks.BAD), dead=(4, "dark-red")
)


def build() -> str:
    """The JSON text."""
    rows_ = [
        page.Row("Is it healthy?", _healthy()),
        page.Row("Which rank, and what does it do?", _which()),
        page.Row("Rank by rank, for jobs of at most 64 ranks (empty for larger ones)", _ranks()),
        page.Row("How fast is it?", job_work.fast()),
        page.Row("Collectives", job_work.collectives()),
        page.Row("Memory and GPUs", job_memory.memory(), folded=True),
        page.Row("Numbers: losses, gradients, replicas (--probe numerics)", job_memory.numbers(), folded=True),
        page.Row("rankwatch itself", job_watch.itself(), folded=True),
    ]
    text = "One job: is it healthy, which rank holds it up, and what to do. Start at the top left; every panel's description says what to do next."
    return page.page("job", "rankwatch / Job", text, rows_, page.of_a_job(), page.events(JOB))


def _healthy() -> list[object]:
    gone = "not reporting"
    stuck, timeout = runbook("stuck"), runbook("timeout")
    return [
        number(
            About(
                "State",
                "none",
                "What the judging launcher says at the end of the time range. Not reporting: the job has ended, or Prometheus does not reach that launcher.",
                "stuck or failed: read Open incidents below. Not reporting: move the range's end to when the job ran; if it should run, look at `up`.",
                [stuck, runbook("failed"), runbook("node")],
                width=3,
                height=4,
                no_value=gone,
            ),
            Query(job("max(rankwatch_job_state)"), "state", now=True),
            mappings=looks.states(),
        ),
        number(
            About(
                "Verdicts now",
                "none",
                "The verdict of each open incident. slow may heal by itself and pages nobody; stuck, timeout imminent, failed and diverged page.",
                "open the incident's page from the table below.",
                [stuck, timeout, runbook("failed"), runbook("diverged"), runbook("straggler")],
                width=3,
                height=4,
                no_value="none",
            ),
            Query(job("max by (verdict) (rankwatch_verdict) == 1"), "{{verdict}}", now=True),
            names=looks.VERDICT_COLOURS,
        ),
        number(
            About(
                "Stuck ranks",
                "none",
                "Ranks judged to be the cause of a paging verdict; those that wait for them are not counted.",
                "see who in Culprits, then open its dashboard.",
                [stuck],
                width=3,
                height=4,
                no_value=gone,
            ),
            Query(job("sum(rankwatch_rank_stuck)"), "stuck", now=True),
            thresholds=looks.steps(looks.GOOD, (1, looks.BAD)),
        ),
        number(
            About(
                "Waiting ranks",
                "none",
                "Ranks judged to wait for another one: victims.",
                "leave them alone; the culprits are in the table below.",
                [stuck],
                width=3,
                height=4,
                no_value=gone,
            ),
            Query(job("sum(rankwatch_rank_waiting)"), "waiting", now=True),
            thresholds=looks.steps(looks.GOOD, (1, looks.WARN)),
        ),
        number(
            About(
                "Timeout used",
                "percentunit",
                "Of the oldest unfinished collective: its age as a share of its group's timeout. At 100 % the watchdog ends the job.",
                "above 80 % save what you need now (stacks are kept by rankwatch); raise the timeout only if the culprit progresses.",
                [timeout],
                width=3,
                height=4,
                no_value=gone,
                decimals=0,
            ),
            Query(job("max(rankwatch_collective_timeout_ratio)"), "timeout used", now=True),
            thresholds=looks.steps(looks.GOOD, (0.5, looks.WARN), (0.8, looks.BAD)),
        ),
        number(
            About(
                "Since the last step",
                "s",
                "Since any rank ended a step. Above 2,048 ranks the metrics level is low and this is not exported: see Steps a second.",
                "longer than a few steps with no rank stuck: see whether ranks compile or write a checkpoint in What the ranks do.",
                [runbook("straggler")],
                width=3,
                height=4,
                no_value=LOW,
                decimals=0,
            ),
            Query(f"time() - {job('max(rankwatch_rank_last_step_timestamp_seconds)')}", "since the last step", now=True),
        ),
        number(
            About(
                "Ranks",
                "none",
                "Seen: ranks that some launcher reports; of: the job's ranks.",
                "fewer seen than there are: a node does not answer; verdicts are partial. See Age of the oldest node report under rankwatch itself.",
                [runbook("node")],
                width=3,
                height=4,
                no_value=gone,
            ),
            Query(job("max(rankwatch_ranks_seen)"), "seen", now=True),
            Query(job("max(rankwatch_world_size)"), "of", now=True),
        ),
        number(
            About(
                "Rank-time lost waiting",
                "s",
                "Since the launcher started, short waits included: ranks x time that they waited for others.",
                "see where it goes in Ranks that wait for others, on average; `rankwatch report RUN_DIR` has it by rank and reason.",
                [runbook("straggler")],
                width=3,
                height=4,
                no_value=gone,
            ),
            Query(job("max(rankwatch_lost_rank_seconds_total)"), "lost", now=True),
        ),
    ]


def _which() -> list[object]:
    opened = job("max by (instance, incident, verdict) (rankwatch_incident_open_timestamp_seconds)")
    behind = job(f"max by (instance, job_id) (min_over_time(rankwatch_collective_lag{RATE}))")
    most_behind = job(f"max by (instance) (avg_over_time(rankwatch_collective_lag{RANGE} @ end()))")
    info = job("max by (instance, incident, verdict, cause, domain, rank, node) (rankwatch_incident_info)")
    return [
        rows(
            About(
                "Open incidents",
                "none",
                "What the judge says now. Empty is good. Closed ones are in the run directory (`rankwatch report RUN_DIR`) and are marks on the panels below.",
                "click an incident: its page has the stacks of culprit and victims, and advice. The address is the launcher's as Prometheus scrapes it.",
                [runbook("stuck"), runbook("timeout"), runbook("failed"), runbook("diverged"), runbook("straggler")],
                width=24,
                height=5,
                no_value="no incident is open",
            ),
            [
                Column("Incident", "incident", links=[incident_of_row()]),
                Column("Verdict", "verdict"),
                Column("Cause", "cause"),
                Column("Domain", "domain"),
                Column("Rank", "rank", links=[rank_of_row()]),
                Column("Node", "node"),
                Column("Open for", "Value", unit="s", decimals=0),
                Column("Launcher", "instance"),
            ],
            Query(f"(time() - {opened}) * on (instance, incident, verdict) group_right () {info}"),
            sort="Open for",
        ),
        rows(
            About(
                "Culprits, and who is furthest behind",
                "none",
                "Ranks judged stuck, and at most ten whose last collective has the lowest number. In a hang every rank's age grows alike: the culprit is the "
                "one with another phase or a lower number. A healthy job shows small numbers here that change.",
                "click the rank: its dashboard shows what it did before. Then read its stack on the incident's page.",
                [runbook("stuck"), COMPILE],
                width=24,
                height=7,
                no_value="no rank is stuck or behind",
            ),
            [
                Column("Rank", "rank", links=[rank_of_row()]),
                Column("Node", "node"),
                Column("Process", "pid"),
                Column("Stuck", 0, mappings=tuple(looks.named(stuck=(1, looks.BAD), no=(0, looks.QUIET)))),
                Column("Phase", 1, mappings=tuple(looks.phases())),
                Column("Phase for", 2, unit="s", decimals=0),
                Column("Collectives behind", 3),
                Column("In a collective for", 4, unit="s", decimals=0),
                Column("Timeout used", 5, unit="percentunit", decimals=0, thresholds=looks.steps(looks.QUIET, (0.5, looks.WARN), (0.8, looks.BAD))),
                Column("Launcher", "instance"),
            ],
            Query(with_node(f"max by (instance, job_id, rank) ({_of_suspects('rankwatch_rank_stuck')})")),
            Query(f"max by (instance, job_id, rank) ({_of_suspects('rankwatch_rank_phase')})"),
            Query(f"time() - max by (instance, job_id, rank) ({_of_suspects('rankwatch_rank_phase_start_timestamp_seconds')})"),
            Query(f"max by (instance, job_id, rank) ({_of_suspects('rankwatch_collective_lag')})"),
            Query(f"max by (instance, job_id, rank) ({_of_suspects('rankwatch_collective_inflight_seconds')})"),
            Query(f"max by (instance, job_id, rank) ({_of_suspects('rankwatch_collective_timeout_ratio')})"),
            Query(f"max by (instance, job_id, rank, pid) ({_of_suspects('rankwatch_rank_info')})"),
            sort="Collectives behind",
        ),
        lines(
            About(
                "What the ranks do",
                "none",
                "How many ranks are in each phase. A hang is a flat wall: all but a few in collective wait, and the few in the phase that is to blame.",
                "the phase of the few is the answer (the legend counts them); find their ranks in the table above.",
                [runbook("stuck"), COMPILE],
                width=12,
                height=9,
            ),
            Query(f'count_values("phase", {job("rankwatch_rank_phase")})', "{{phase}}"),
            stacked=True,
            counted=True,
            points=COARSE,
            renamed=PHASES,
        ),
        heat_rows(
            About(
                "How far each node is behind",
                "none",
                "A row a node (at most 128, those that were furthest behind on average): collectives that one of its ranks has been behind the job's highest "
                "for at least four scrapes. A line that stays is a node to look at.",
                "find the node's ranks in the table above, or look at the node itself if all of its ranks are behind.",
                [runbook("stuck"), runbook("straggler"), runbook("node")],
                width=12,
                height=9,
            ),
            Query(f"{with_node(behind)} and on (instance) topk(128, {most_behind})", "{{node}}"),
        ),
    ]


def _of_suspects(metric: str) -> str:
    return f"{job(metric)} and on (job_id, rank) {SUSPECTS}"


def _ranks() -> list[object]:
    standing = "rankwatch_rank_waiting + 2 * rankwatch_rank_stuck + 4 * (1 - rankwatch_rank_up)"
    return [
        bands(
            About(
                "What each rank does",
                "none",
                "A band a rank, coloured by phase. The odd band out is the rank to look at.",
                "click a band for the rank's dashboard; compare when it left the common phase with the marks of incidents and restarts.",
                [runbook("stuck"), COMPILE],
                [rank_of_series()],
                width=12,
                no_value=TOO_LARGE,
                height=10,
            ),
            Query(rank_by_rank("rankwatch_rank_phase"), "rank {{rank}}"),
            mappings=looks.phases(),
        ),
        cells(
            About(
                "Who is out of line",
                "none",
                "Quiet green until a rank waits (yellow), holds the others up (red) or is dead (dark red).",
                "click a red cell: that rank's dashboard. Yellow ranks are victims.",
                [runbook("stuck"), runbook("failed")],
                [rank_of_series()],
                width=12,
                no_value=TOO_LARGE,
                height=10,
            ),
            Query(rank_by_rank(f"clamp_max({standing}, 4)"), "rank {{rank}}"),
            mappings=STANDING,
        ),
        bar_each(
            About(
                "Timeout used by each rank",
                "percentunit",
                "How much of its group's timeout the oldest open collective of each rank has used. An empty bar among full ones is the rank that never came.",
                "click the empty bar; at 100 % the watchdog ends the job.",
                [runbook("timeout")],
                [rank_of_series()],
                width=12,
                no_value=TOO_LARGE,
                height=9,
                decimals=0,
            ),
            Query(rank_by_rank("rankwatch_collective_timeout_ratio"), "rank {{rank}}", now=True),
            thresholds=looks.steps(looks.GOOD, (0.5, looks.WARN), (0.8, looks.BAD)),
            most=1,
        ),
        lines(
            About(
                "Number of the last collective",
                "none",
                "Of the default group, rank by rank. Lines on each other: all go together. The line that turns flat first is the culprit, the others follow.",
                "click the lowest line; different collectives at the same number are told as diverged.",
                [runbook("stuck"), runbook("diverged")],
                [rank_of_series()],
                width=12,
                no_value=TOO_LARGE,
                height=9,
            ),
            Query(rank_by_rank("rankwatch_collective_seq"), "rank {{rank}}"),
            least=None,
        ),
    ]
