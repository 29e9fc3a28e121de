"""rankwatch / Job: its steps and its collectives over time."""

from __future__ import annotations

from . import looks
from .links import board, rank_of_series, runbook
from .names import RATE, job
from .panels import COARSE, About, Query, lines

COMPILE = board("compile", "What compiles", job_id="${job_id:percentencode}")


def fast() -> list[object]:
    """The panels."""
    rate = job(f"rate(rankwatch_rank_steps_total{RATE})")
    return [
        lines(
            About(
                "Steps a second",
                "ops",
                "Slowest, median and fastest rank. In a synchronous job they are one line.",
                "all fall together: look at What the ranks do. One falls away: the slowest ranks are in the panel beside.",
                [runbook("straggler")],
                decimals=2,
            ),
            Query(f"min({rate})", "slowest"),
            Query(f"quantile(0.5, {rate})", "median"),
            Query(f"max({rate})", "fastest"),
            points=COARSE,
        ),
        lines(
            About(
                "Time of a step",
                "s",
                "Median over ranks of the last step, and the five ranks whose last step took longest.",
                "the same rank on top again and again is a straggler: open its dashboard, compare CPU and GPU use.",
                [runbook("straggler")],
                [rank_of_series()],
            ),
            Query(job("max(rankwatch_job_step_seconds)"), "median of all ranks"),
            Query(f"topk(5, max by (rank) ({job('rankwatch_rank_step_seconds')}))", "rank {{rank}}"),
        ),
        lines(
            About(
                "Ranks that wait for others, on average",
                "none",
                "Rank-seconds lost a second: 3 means that three ranks' worth of hardware did nothing. Hills are the price of incidents, a floor is imbalance.",
                "a floor: look for a straggler or uneven data. A step: find its incident by the mark.",
                [runbook("straggler")],
                decimals=2,
            ),
            Query(job(f"sum(rate(rankwatch_lost_rank_seconds_total{RATE}))"), "ranks waiting"),
        ),
        lines(
            About(
                "Verdicts",
                "none",
                "Which verdicts an open incident had, over time.",
                "find the incident in the table above while it is open, later with `rankwatch report RUN_DIR`.",
                [runbook("stuck")],
                width=12,
                height=6,
            ),
            Query(job("max by (verdict) (rankwatch_verdict) > 0"), "{{verdict}}"),
            bars=True,
            renamed={name: (name.replace("_", " "), colour) for name, colour in looks.VERDICT_COLOURS.items()},
        ),
        lines(
            About(
                "Restarts",
                "none",
                "Restarts of the workers by torchelastic since the launcher started.",
                "more than two in half an hour: the same cause ends it each time; read the failed incidents with `rankwatch report RUN_DIR`.",
                [runbook("restarts"), runbook("failed")],
                width=12,
                height=6,
                decimals=0,
            ),
            Query(job("max by (reason) (rankwatch_job_restarts_total)"), "by {{reason}}"),
        ),
    ]


def collectives() -> list[object]:
    """The panels."""
    device = job(f"rate(rankwatch_collective_device_seconds_total{RATE})")
    return [
        lines(
            About(
                "Age of the oldest open collective",
                "s",
                "The oldest of any rank, and the smallest timeout of any group: where the lines meet the watchdog ends the job.",
                "a saw-tooth is normal. A slope that does not fall back: see Culprits.",
                [runbook("timeout"), runbook("stuck")],
            ),
            Query(job("max(rankwatch_collective_inflight_seconds)"), "oldest open collective"),
            Query(job("min(rankwatch_collective_timeout_seconds)"), "smallest timeout"),
            points=COARSE,
        ),
        lines(
            About(
                "Collectives behind",
                "none",
                "How far the last rank is behind the first, and how many ranks are behind at all.",
                "a lead that is constant and never zero: see Ranks that do something else.",
                [runbook("stuck"), runbook("diverged")],
            ),
            Query(job("max(rankwatch_collective_lag)"), "furthest behind"),
            Query(f"count({job('rankwatch_collective_lag')} > 0) or vector(0)", "ranks behind"),
            points=COARSE,
        ),
        lines(
            About(
                "Ranks that do something else",
                "none",
                "By group: ranks whose operation, shape or order differs from the rest. Anything but zero: results are garbage or a hang is near.",
                "open the incident: it has both sides' operation, size and line.",
                [runbook("diverged")],
                decimals=0,
            ),
            Query(job("max by (group) (rankwatch_job_desync_ranks)"), "{{group}}"),
        ),
        lines(
            About(
                "Collectives finished a second",
                "ops",
                "A rank's collectives in all its groups: slowest and fastest rank.",
                "it falls with the steps: look there. It rises without more steps: more and smaller collectives, look at DDP splits on Compile.",
                [COMPILE],
            ),
            Query(job(f"min(rate(rankwatch_collectives_total{RATE}))"), "slowest rank"),
            Query(job(f"max(rate(rankwatch_collectives_total{RATE}))"), "fastest rank"),
        ),
        lines(
            About(
                "Last to arrive: least time in NCCL",
                "percentunit",
                "Share of time that a rank's GPU spends in NCCL collectives, waits included. Whoever comes last waits least: the five lowest, and the median.",
                "a rank far below the median, all the time, makes the others wait: open its dashboard.",
                [runbook("straggler")],
                [rank_of_series()],
                no_value="no NCCL timing (gloo, or without --nccl-timing on)",
            ),
            Query(f"bottomk(5, max by (rank) ({device}))", "rank {{rank}}"),
            Query(f"quantile(0.5, {device})", "median"),
        ),
        lines(
            About(
                "Bus bandwidth, by operation and size",
                "Bps",
                "Of the newest collectives, as nccl-tests reckons it, waits taken out; the slowest node of each.",
                "one operation falls on all nodes: the network. Compare with nccl-tests on the same nodes before blaming the code.",
                [runbook("straggler")],
                no_value="no NCCL timing (gloo, or without --nccl-timing on)",
            ),
            Query(job("min by (op, size) (rankwatch_collective_bus_bandwidth_bytes_per_second)"), "{{op}} {{size}}"),
        ),
        lines(
            About(
                "Process groups of a rank",
                "none",
                "Fewest and most. It should not grow.",
                "it grows: a group is made in the loop, each with threads and memory of its own; make it once.",
                [runbook("diverged")],
                width=12,
                height=6,
                decimals=0,
            ),
            Query(job("min(rankwatch_process_groups)"), "fewest"),
            Query(job("max(rankwatch_process_groups)"), "most"),
        ),
        lines(
            About(
                "Recorder entries lost",
                "ops",
                "Records of collectives that torch's recorder overwrote before they were read.",
                "above zero what is proved from records becomes partial: raise TORCH_FR_BUFFER_SIZE.",
                [runbook("errors")],
                width=12,
                height=6,
            ),
            Query(job(f"sum(rate(rankwatch_collective_records_lost_total{RATE}))"), "lost a second"),
        ),
    ]
