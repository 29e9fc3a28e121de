"""rankwatch / Rank: what one rank does, beside what the others do. `rank` is typed or comes with the link that led here."""

from __future__ import annotations

from . import looks, page, rank_inside
from .job import COMPILE, PHASES, STANDING
from .links import board, runbook
from .names import JOB, RATE, job, rank
from .panels import COARSE, About, Column, Query, bands, lines, number, rows

JOB_BOARD = board("job", "The whole job", job_id="${job_id:percentencode}")
GONE = "no such rank now"
LOW = "not at this metrics level"


def build() -> str:
    """The JSON text."""
    rows_ = [
        page.Row("Rank $rank now", _now()),
        page.Row("What it did", _did()),
        page.Row("torch.compile", rank_inside.compiles()),
        page.Row("Memory, processor, GPU", rank_inside.memory()),
        page.Row("What is known of it", rank_inside.known(), folded=True),
    ]
    text = "One rank of a job, beside the others. Type a rank at the top, or come here by a link of another rankwatch dashboard."
    return page.page("rank", "rankwatch / Rank", text, rows_, page.of_a_job(rank=page.rank_box()), page.events(JOB))


def _now() -> list[object]:
    small = {"width": 3, "height": 4, "no_value": GONE}
    return [
        number(
            About(
                "Phase",
                "none",
                "What it does.",
                "collective wait: it is a victim, go back to the job. Anything else while others wait: read its stack.",
                [JOB_BOARD],
                **small,
            ),
            Query(rank("max(rankwatch_rank_phase)"), "phase", now=True),
            mappings=looks.phases(),
        ),
        number(
            About(
                "In it for",
                "s",
                "Since when it is in this phase; for running, since its last step.",
                "compare with What it did.",
                [JOB_BOARD],
                decimals=0,
                **small,
            ),
            Query(f"time() - {rank('max(rankwatch_rank_phase_start_timestamp_seconds)')}", "for", now=True),
        ),
        number(
            About(
                "Judged",
                "none",
                "Whether an open incident names it.",
                "open the incident from the job's table.",
                [JOB_BOARD, runbook("stuck"), runbook("failed")],
                **small,
            ),
            Query(rank("max(clamp_max(rankwatch_rank_waiting + 2 * rankwatch_rank_stuck + 4 * (1 - rankwatch_rank_up), 4))"), "judged", now=True),
            mappings=STANDING,
        ),
        number(
            About(
                "Behind by",
                "none",
                "How far its last collective is behind the job's highest.",
                "a number that stays: this rank holds the others up.",
                [runbook("stuck")],
                **{**small, "no_value": "no collective yet"},
            ),
            Query(rank("max(rankwatch_collective_lag)"), "behind", now=True),
            thresholds=looks.steps(looks.GOOD, (100, looks.WARN)),
        ),
        number(
            About(
                "Timeout used",
                "percentunit",
                "Of its oldest open collective.",
                "at 100 % its watchdog ends it, and with it the job.",
                [runbook("timeout")],
                decimals=0,
                **small,
            ),
            Query(rank("max(rankwatch_collective_timeout_ratio)"), "timeout used", now=True),
            thresholds=looks.steps(looks.GOOD, (0.5, looks.WARN), (0.8, looks.BAD)),
        ),
        number(
            About(
                "Last heartbeat",
                "s",
                "Age of the agent's last beat; it stops while something holds the GIL.",
                "above 5 s: see gil_held in its incident, C code that never releases the GIL.",
                [runbook("stuck")],
                decimals=0,
                **small,
            ),
            Query(f"time() - {rank('max(rankwatch_rank_heartbeat_timestamp_seconds)')}", "heartbeat", now=True),
            thresholds=looks.steps(looks.GOOD, (5, looks.WARN), (30, looks.BAD)),
        ),
        number(
            About(
                "Since its last step",
                "s",
                "Not exported above 2,048 ranks.",
                "compare with Time of a step.",
                [JOB_BOARD],
                width=3,
                height=4,
                no_value=LOW,
                decimals=0,
            ),
            Query(f"time() - {rank('max(rankwatch_rank_last_step_timestamp_seconds)')}", "since", now=True),
        ),
        number(
            About("Steps", "none", "Steps finished since it started.", "fewer than its peers: it restarted, or skips steps.", [JOB_BOARD], decimals=0, **small),
            Query(rank("max(rankwatch_rank_steps_total)"), "steps", now=True),
        ),
        rows(
            About(
                "Who it is",
                "none",
                "Its process and node.",
                "on that node: `rankwatch stacks`, or `py-spy dump --pid PROCESS`.",
                [runbook("stuck")],
                width=16,
                height=4,
                no_value=LOW,
            ),
            [
                Column("Rank", "rank"),
                Column("Local rank", "local_rank"),
                Column("Process", "pid"),
                Column("Node", "node"),
                Column("Attempt", "restart"),
                Column("Launcher", "instance"),
            ],
            Query(rank("max by (rank, local_rank, pid, node, restart, instance) (rankwatch_rank_info)")),
            sort="Rank",
        ),
        rows(
            About(
                "Its GPU",
                "none",
                "Index and UUID, as dcgm-exporter and nvidia-smi name it.",
                "look it up in dcgm-exporter's dashboard: Xid, ECC, clocks.",
                [runbook("straggler")],
                width=8,
                height=4,
                no_value="no GPU",
            ),
            [Column("Rank", "rank"), Column("GPU", "gpu"), Column("UUID", "uuid")],
            Query(rank("max by (rank, gpu, uuid) (rankwatch_rank_gpu_info)")),
            sort="Rank",
        ),
    ]


def _did() -> list[object]:
    return [
        bands(
            About(
                "Its phases",
                "none",
                "What it did when.",
                "the phase at an incident's mark is what it was blamed for, or waited in.",
                [runbook("stuck"), COMPILE],
                width=12,
                height=5,
            ),
            Query(rank("max by (rank) (rankwatch_rank_phase)"), "rank {{rank}}"),
            mappings=looks.phases(),
        ),
        lines(
            About(
                "What the others did",
                "none",
                "How many ranks were in each phase.",
                "where this rank's band has another colour than the wall, it is the odd one.",
                [JOB_BOARD],
                width=12,
                height=5,
            ),
            Query(f'count_values("phase", {job("rankwatch_rank_phase")})', "{{phase}}"),
            stacked=True,
            counted=True,
            points=COARSE,
            renamed=PHASES,
        ),
        lines(
            About(
                "Steps a second",
                "ops",
                "This rank and the median of all.",
                "it falls alone: a straggler. It falls with the median: it waits like the others.",
                [runbook("straggler")],
                width=6,
                decimals=2,
            ),
            Query(rank(f"max(rate(rankwatch_rank_steps_total{RATE}))"), "rank $rank"),
            Query(job(f"quantile(0.5, rate(rankwatch_rank_steps_total{RATE}))"), "median"),
            points=COARSE,
        ),
        lines(
            About(
                "Time of a step",
                "s",
                "This rank's last step and the median of all ranks.",
                "above the median again and again: its data, its GPU or its node.",
                [runbook("straggler")],
                width=6,
            ),
            Query(rank("max(rankwatch_rank_step_seconds)"), "rank $rank"),
            Query(job("max(rankwatch_job_step_seconds)"), "median"),
        ),
        lines(
            About(
                "Its open collective",
                "s",
                "How long this rank and the longest of all have been in one.",
                "all but this rank are in one: it never came. Only this rank is: its peers never came.",
                [runbook("stuck"), runbook("timeout")],
                width=6,
            ),
            Query(rank("max(rankwatch_collective_inflight_seconds)"), "rank $rank"),
            Query(job("max(rankwatch_collective_inflight_seconds)"), "longest of all"),
            points=COARSE,
        ),
        lines(
            About(
                "Collectives behind",
                "none",
                "Behind the job's highest number.",
                "a line that stays above zero: see the operation at the same number on the incident's page.",
                [runbook("stuck"), runbook("diverged")],
                width=6,
            ),
            Query(rank("max(rankwatch_collective_lag)"), "rank $rank"),
        ),
        lines(
            About(
                "Collectives finished a second",
                "ops",
                "In all groups of this rank, and the median.",
                "unlike the median: it is in other groups, or behind.",
                [runbook("diverged")],
                width=6,
            ),
            Query(rank(f"max(rate(rankwatch_collectives_total{RATE}))"), "rank $rank"),
            Query(job(f"quantile(0.5, rate(rankwatch_collectives_total{RATE}))"), "median"),
        ),
        lines(
            About(
                "Share of time in NCCL",
                "percentunit",
                "On its GPU, waits included, and the median.",
                "far below the median: the others wait for this rank.",
                [runbook("straggler")],
                width=6,
                no_value="no NCCL timing",
            ),
            Query(rank(f"max(rate(rankwatch_collective_device_seconds_total{RATE}))"), "rank $rank"),
            Query(job(f"quantile(0.5, rate(rankwatch_collective_device_seconds_total{RATE}))"), "median"),
        ),
        lines(
            About(
                "Number of its last collective",
                "none",
                "In the default group, and the job's highest.",
                "flat while the highest rises: it left the group or does something else.",
                [runbook("diverged")],
                width=6,
            ),
            Query(rank("max(rankwatch_collective_seq)"), "rank $rank"),
            Query(job("max(rankwatch_collective_seq)"), "highest"),
            least=None,
            points=COARSE,
        ),
        lines(
            About(
                "Groups, and records lost",
                "none",
                "Process groups that it is in; recorder entries lost in ten minutes.",
                "lost: raise TORCH_FR_BUFFER_SIZE. Groups that grow: one is made in the loop.",
                [runbook("errors")],
                width=6,
                decimals=0,
            ),
            Query(rank("max(rankwatch_process_groups)"), "groups"),
            Query(rank("max(increase(rankwatch_collective_records_lost_total[10m]))"), "records lost"),
        ),
    ]
