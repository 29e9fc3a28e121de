"""rankwatch / Job: memory, GPUs, processors, and the numbers that the job computes."""

from __future__ import annotations

from .links import rank_of_series, runbook
from .names import RATE, job
from .panels import About, Query, lines


def memory() -> list[object]:
    """The panels."""
    none = "no GPU, or not at this metrics level"
    memory = [runbook("failed")]
    return [
        lines(
            About(
                "GPU memory, fullest rank",
                "bytes",
                "Handed out, held and most ever handed out by torch's allocator, of the rank that has most of each.",
                "held far above handed out: fragmentation, see beside. Both grow step by step: something keeps tensors.",
                memory,
                no_value=none,
            ),
            Query(job("max(rankwatch_device_memory_allocated_bytes)"), "handed out"),
            Query(job("max(rankwatch_device_memory_reserved_bytes)"), "held"),
            Query(job("max(rankwatch_device_memory_peak_bytes)"), "most handed out"),
        ),
        lines(
            About(
                "GPU memory that is fragmented",
                "bytes",
                "Free, in parts of blocks in use; the five ranks with most.",
                "large beside what is free: try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
                memory,
                [rank_of_series()],
                no_value=none,
            ),
            Query(f"topk(5, max by (rank) ({job('rankwatch_device_memory_fragmented_bytes')}))", "rank {{rank}}"),
        ),
        lines(
            About(
                "Failed allocations of GPU memory",
                "none",
                "In the last ten minutes, by rank, caught or not.",
                "what held the memory then is in the incident, or an event in events.jsonl if the job went on.",
                memory,
                [rank_of_series()],
                no_value=none,
                decimals=0,
            ),
            Query(job("topk(10, max by (rank) (increase(rankwatch_gpu_ooms_total[10m])) > 0)"), "rank {{rank}}"),
            bars=True,
        ),
        lines(
            About(
                "Use of the GPUs",
                "percentunit",
                "The driver's utilisation: least, average, most. A rank that waits in NCCL shows 100 % too: this never proves work.",
                "the least is far below: that rank waits for its host; look at its CPU use.",
                [runbook("straggler")],
                no_value=none,
            ),
            Query(job("min(rankwatch_gpu_utilization_ratio)"), "least"),
            Query(job("avg(rankwatch_gpu_utilization_ratio)"), "average"),
            Query(job("max(rankwatch_gpu_utilization_ratio)"), "most"),
            most=1,
        ),
        lines(
            About(
                "Memory of the processes",
                "bytes",
                "Resident memory; the five largest ranks and the median.",
                "a rank that grows away from the median is killed by the kernel one day: look at what it caches or loads.",
                memory,
                [rank_of_series()],
            ),
            Query(f"topk(5, max by (rank) ({job('rankwatch_process_resident_memory_bytes')}))", "rank {{rank}}"),
            Query(f"quantile(0.5, {job('rankwatch_process_resident_memory_bytes')})", "median"),
        ),
        lines(
            About(
                "Processors used by a rank",
                "none",
                "Cores; least, median, most. A waiting rank spins on NCCL and sleeps on gloo, so neither proves anything alone.",
                "the culprit of a hang at 0: it is blocked, see its stack. At 1: it computes or spins.",
                [runbook("stuck")],
                decimals=2,
            ),
            Query(job(f"min(rate(rankwatch_process_cpu_seconds_total{RATE}))"), "least"),
            Query(job(f"quantile(0.5, rate(rankwatch_process_cpu_seconds_total{RATE}))"), "median"),
            Query(job(f"max(rate(rankwatch_process_cpu_seconds_total{RATE}))"), "most"),
        ),
    ]


def numbers() -> list[object]:
    """The panels."""
    off = "off: --probe numerics"
    return [
        lines(
            About(
                "Losses and gradient norms that are not finite",
                "none",
                "Looked at and not finite, in the last ten minutes, by what it was.",
                "the loss tells which rank was first; gradients are reduced before they can be seen. `NUMERICS` on stderr has the first step and rank.",
                [runbook("diverged")],
                no_value=off,
                decimals=0,
            ),
            Query(job("sum by (what) (increase(rankwatch_nonfinite_total[10m]))"), "{{what}}"),
            bars=True,
        ),
        lines(
            About(
                "Gradient norm",
                "none",
                "Smallest and largest of the ranks' last finite norm.",
                "it grows without bound before a loss turns to NaN: lower the learning rate or clip. Ranks that differ under DDP: see beside.",
                [runbook("diverged")],
                no_value=off,
            ),
            Query(job("min(rankwatch_gradient_norm)"), "smallest"),
            Query(job("max(rankwatch_gradient_norm)"), "largest"),
        ),
        lines(
            About(
                "Ranks whose parameters differ",
                "none",
                "From their DDP replicas, when last compared. With two replicas both are counted.",
                "anything but zero: that rank trains another model; `NUMERICS` on stderr names the rank and the parameter.",
                [runbook("replicas")],
                no_value=off,
                decimals=0,
            ),
            Query(job("max(rankwatch_replica_mismatch_ranks)"), "ranks"),
        ),
    ]
