"""rankwatch / Job: rankwatch itself, what it costs and what it could not see."""

from __future__ import annotations

from .links import runbook
from .names import JOB, RATE, job
from .panels import About, Column, Query, lines, rows


def itself() -> list[object]:
    """The panels."""
    itself = [runbook("errors")]
    return [
        lines(
            About(
                "Processor time of the launchers' monitors",
                "percentunit",
                "Share of a core; the busiest node and the average.",
                "above a few percent: `rankwatch doctor` on that node; report it with its run.json.",
                itself,
            ),
            Query(job(f"max(rate(rankwatch_monitor_cpu_seconds_total{RATE}))"), "busiest node"),
            Query(job(f"avg(rate(rankwatch_monitor_cpu_seconds_total{RATE}))"), "average"),
        ),
        lines(
            About(
                "A poll, a scrape, a stack dump",
                "s",
                "The slowest node of each: the last poll of its ranks, the last rendering of /metrics, the last run of py-spy.",
                "seconds instead of milliseconds: the node is starved of CPU, or a rank does not answer; verdicts come later there.",
                itself,
            ),
            Query(job("max(rankwatch_monitor_poll_duration_seconds)"), "poll"),
            Query(job("max(rankwatch_agent_collect_duration_seconds)"), "scrape"),
            Query(job("max(rankwatch_stack_dump_duration_seconds)"), "stack dump"),
        ),
        lines(
            About(
                "Polls a second",
                "ops",
                "Slowest and fastest node.",
                "zero on a node: its launcher hangs or is stopped; nothing is judged there.",
                itself,
            ),
            Query(job(f"min(rate(rankwatch_monitor_polls_total{RATE}))"), "slowest node"),
            Query(job(f"max(rate(rankwatch_monitor_polls_total{RATE}))"), "fastest node"),
        ),
        lines(
            About(
                "Ages of what is known",
                "s",
                "The oldest report of a node at the judge, and of the agent's thread in a rank (it stops while something holds the GIL).",
                "a node's report older than 10 s: its ranks are unknown, verdicts partial. A rank's: see gil_held in its incident.",
                [runbook("node"), runbook("stuck")],
            ),
            Query(job("max(rankwatch_peer_report_age_seconds)"), "oldest node report"),
            Query(f"time() - {job('min(rankwatch_rank_heartbeat_timestamp_seconds)')}", "oldest heartbeat of a rank"),
        ),
        lines(
            About(
                "What was lost",
                "none",
                "In ten minutes: errors that the monitor swallowed, events that a rank's ring lost, writes that a slow directory made it give up, messages "
                "to Alertmanager, a webhook or a command that failed or were dropped.",
                "writes: put --run-dir on a faster file system. Messages: is the address right and up? Errors: they are in the run directory's events.jsonl; "
                "report them.",
                itself,
                decimals=0,
            ),
            Query(job("sum(increase(rankwatch_monitor_errors_total[10m]))"), "errors"),
            Query(job("sum(increase(rankwatch_events_dropped_total[10m]))"), "events"),
            Query(job("sum(increase(rankwatch_writes_dropped_total[10m]))"), "writes"),
            Query(f'sum(increase(rankwatch_notifications_total{{{JOB},result!="ok"}}[10m]))', "messages"),
            bars=True,
        ),
        lines(
            About(
                "Stack dumps",
                "none",
                "Runs of py-spy in ten minutes, by how they ended.",
                "failed: `rankwatch doctor` says what tracing lacks on that node.",
                itself,
                decimals=0,
            ),
            Query(job("sum by (result) (increase(rankwatch_stack_dumps_total[10m]))"), "{{result}}"),
            bars=True,
        ),
        lines(
            About(
                "What is not watched",
                "none",
                "Ranks on which a probe failed or found no hook, by probe, and ranks without the agent at all.",
                "the first line of the run says why; `rankwatch doctor` too. A probe of which all ranks are down: a torch that is too new.",
                [runbook("probe"), runbook("blind")],
                width=12,
                decimals=0,
            ),
            Query(job("sum by (probe) (rankwatch_probe_ranks_down)"), "{{probe}}"),
            Query(job("max(rankwatch_blind_ranks)"), "blind"),
        ),
        rows(
            About(
                "The job, and who watches it",
                "none",
                "Versions, world size and nodes, as the judging launcher says.",
                "compare with a run that worked: `rankwatch ls` lists them, run.json has the same.",
                [runbook("node")],
                width=12,
            ),
            [
                Column("rankwatch", "version"),
                Column("torch", "torch"),
                Column("CUDA", "cuda"),
                Column("NCCL", "nccl"),
                Column("Backend", "backend"),
                Column("Ranks", "world_size"),
                Column("Nodes", "nnodes"),
                Column("Launcher", "instance"),
            ],
            Query(job("max by (version, torch, cuda, nccl, backend, world_size, nnodes, instance) (rankwatch_job_info)")),
            sort="Launcher",
            falling=False,
        ),
    ]
