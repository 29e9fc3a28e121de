"""rankwatch / Rank: what goes on inside one rank: its compiles, memory and processor, and what the probes know of it."""

from __future__ import annotations

from . import looks
from .job import COMPILE
from .links import runbook
from .names import RATE, job, rank
from .panels import About, Query, bands, lines

LOW = "not at this metrics level"
STAGES = {stage: (stage, colour) for stage, colour in looks.STAGE_COLOURS.items()}


def compiles() -> list[object]:
    """The panels."""
    return [
        bands(
            About(
                "Compiles",
                "none",
                "Whether one of its threads compiled.",
                "alone while the others wait: a lone recompile, see its reason on Compile.",
                [COMPILE, runbook("timeout")],
                height=6,
            ),
            Query(rank("max by (rank) (rankwatch_compile_active)"), "rank {{rank}}"),
            mappings=looks.named(compiles=(1, "purple"), no=(0, looks.QUIET)),
        ),
        lines(
            About(
                "Compile time so far, by stage",
                "s",
                "Since the rank started; a stage counts once it has ended.",
                "more than its peers have on Compile: caches are cold on this node, or it sees other sizes.",
                [COMPILE],
                height=6,
            ),
            Query(rank("max by (stage) (rankwatch_compile_seconds_total)"), "{{stage}}"),
            stacked=True,
            renamed=STAGES,
        ),
        lines(
            About(
                "Frames, recompiles, breaks",
                "none",
                "Since it started.",
                "recompiles that do not stop: `rankwatch compile` names the guard and the cure.",
                [COMPILE, runbook("recompiles"), runbook("limit")],
                height=6,
                decimals=0,
            ),
            Query(rank("max(rankwatch_compiled_frames_total)"), "frames"),
            Query(rank("max(rankwatch_recompiles_total)"), "recompiles"),
            Query(rank("max(rankwatch_graph_breaks_total)"), "graph breaks"),
            Query(rank("max(rankwatch_recompile_limit_hits_total)"), "limit hits"),
            Query(rank("max(rankwatch_compile_failures_total)"), "failures"),
            Query(rank("max(rankwatch_autotune_configs_total)"), "configurations tried"),
        ),
        lines(
            About(
                "DDP splits",
                "none",
                "Subgraphs of DDPOptimizer's last split; how many ranks have the very same split, and how many any.",
                "the two counts differ: ranks split differently, a hang is near.",
                [runbook("splits"), COMPILE],
                height=6,
                decimals=0,
            ),
            Query(rank("max(rankwatch_ddp_graph_splits)"), "subgraphs"),
            Query(
                f"count({job('rankwatch_ddp_graph_split_hash')} == on (job_id) group_left () max by (job_id) ({rank('rankwatch_ddp_graph_split_hash')}))",
                "ranks with the same split",
            ),
            Query(job("count(rankwatch_ddp_graph_split_hash)"), "ranks with a split"),
            Query(rank("max(rankwatch_ddp_split_failures_total)"), "failures"),
            Query(rank("max(rankwatch_ddp_not_split_total)"), "not split"),
        ),
        lines(
            About(
                "CUDA graphs",
                "none",
                "Recordings, re-recordings and functions that were not captured, since it started.",
                "re-recordings that go on: new sizes each step; pad them or mark them dynamic.",
                [runbook("graphs"), COMPILE],
                height=6,
                no_value="no CUDA graphs",
                decimals=0,
            ),
            Query(rank("max(rankwatch_cudagraph_recordings_total)"), "recordings"),
            Query(rank("max(rankwatch_cudagraph_rerecordings_total)"), "re-recordings"),
            Query(rank("max(rankwatch_cudagraph_skips_total)"), "not captured"),
        ),
        lines(
            About(
                "Memory of CUDA graphs",
                "bytes",
                "In private pools: this rank and the median.",
                "it grows with the re-recordings: see CUDA graphs.",
                [runbook("graphs")],
                height=6,
                no_value="no CUDA graphs",
            ),
            Query(rank("max(rankwatch_cudagraph_pool_bytes)"), "rank $rank"),
            Query(job("quantile(0.5, rankwatch_cudagraph_pool_bytes)"), "median"),
        ),
    ]


def memory() -> list[object]:
    """The panels."""
    gpu = "no GPU, or not at this metrics level"
    return [
        lines(
            About(
                "GPU memory",
                "bytes",
                "Handed out, held, most ever handed out, fragmented.",
                "it grows step by step: something keeps tensors. Fragmented: expandable segments.",
                [runbook("failed")],
                width=6,
                no_value=gpu,
            ),
            Query(rank("max(rankwatch_device_memory_allocated_bytes)"), "handed out"),
            Query(rank("max(rankwatch_device_memory_reserved_bytes)"), "held"),
            Query(rank("max(rankwatch_device_memory_peak_bytes)"), "most handed out"),
            Query(rank("max(rankwatch_device_memory_fragmented_bytes)"), "fragmented"),
        ),
        lines(
            About(
                "GPU use",
                "percentunit",
                "The driver's utilisation. Waiting in NCCL counts as use.",
                "far below its peers': it waits for its host or its data.",
                [runbook("straggler")],
                width=6,
                no_value=gpu,
            ),
            Query(rank("max(rankwatch_gpu_utilization_ratio)"), "rank $rank"),
            Query(job("avg(rankwatch_gpu_utilization_ratio)"), "average"),
            most=1,
        ),
        lines(
            About(
                "Processor",
                "none",
                "Cores that its process uses, and the median.",
                "0 while it holds the others up: blocked, in the kernel or in a lock. 1: it computes, or spins.",
                [runbook("stuck")],
                width=6,
                no_value=LOW,
                decimals=2,
            ),
            Query(rank(f"max(rate(rankwatch_process_cpu_seconds_total{RATE}))"), "rank $rank"),
            Query(job(f"quantile(0.5, rate(rankwatch_process_cpu_seconds_total{RATE}))"), "median"),
        ),
        lines(
            About(
                "Memory of its process",
                "bytes",
                "Resident, and the median.",
                "it grows away from the median: the kernel will kill it; look at what it caches.",
                [runbook("failed")],
                width=6,
                no_value=LOW,
            ),
            Query(rank("max(rankwatch_process_resident_memory_bytes)"), "rank $rank"),
            Query(job("quantile(0.5, rankwatch_process_resident_memory_bytes)"), "median"),
        ),
    ]


def known() -> list[object]:
    """The panels."""
    return [
        bands(
            About(
                "Probes",
                "none",
                "Which probes work in it.",
                "a probe that is down: its signals are missing here, not zero; the first line of the run says why.",
                [runbook("errors")],
            ),
            Query(rank("max by (probe) (rankwatch_probe_up)"), "{{probe}}"),
            mappings=looks.named(works=(1, looks.GOOD), down=(0, looks.BAD)),
        ),
        lines(
            About(
                "Events lost, allocations failed",
                "none",
                "In ten minutes: events that its ring lost; allocations of GPU memory that failed.",
                "lost events: compile details may lack. Failed allocations: see GPU memory.",
                [runbook("errors")],
                decimals=0,
            ),
            Query(rank("max(increase(rankwatch_events_dropped_total[10m]))"), "events lost"),
            Query(rank("max(increase(rankwatch_gpu_ooms_total[10m]))"), "allocations failed"),
            bars=True,
        ),
        lines(
            About(
                "Gradient norm, and what was not finite",
                "none",
                "Its last finite norm; losses and norms that were not finite, since it started.",
                "its loss went first: this rank's data or hardware.",
                [runbook("diverged")],
                no_value="off: --probe numerics",
            ),
            Query(rank("max(rankwatch_gradient_norm)"), "gradient norm"),
            Query(rank("max by (what) (rankwatch_nonfinite_total)"), "{{what}} not finite"),
        ),
    ]
