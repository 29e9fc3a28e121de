"""CUDA graphs and Triton tuning on one GPU, in stages: `graphs_job.py graphs --backend nccl --truth DIR`, under torchrun with one rank.

After each stage it notes torch's own accounting (event `stage`) and goes on once DIR/next_N exists, so that somebody else can compare.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from parts import Job, Net
from torch import nn

WIDTH = 2048
SEGMENTS = 1000
SEGMENT_BYTES = 21 << 20  # above 20 MiB each tensor is a segment of its own
TUNED_WIDTHS = (1024, 1536)


class Stages:
    def __init__(self, job: Job) -> None:
        self.job, self.number, self.manual = job, 0, 0

    def done(self, name: str) -> None:
        self.job.sync()
        self.job.note("stage", number=self.number, name=name, manual=self.manual, **(accounting() if self.job.cuda else {}))
        while not (self.job.options.truth / f"next_{self.number}").exists():
            time.sleep(0.05)
        self.number += 1


def accounting() -> dict[str, Any]:
    """What torch itself says: bytes by private pool (both ways, where there are two), re-recordings, graphs, skips, and what asking costs."""
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    pools: dict[str, int] = {}
    segments = torch.cuda.memory_snapshot(include_traces=False)
    for segment in segments:
        if tuple(segment["segment_pool_id"]) != (0, 0):
            name = ",".join(map(str, segment["segment_pool_id"]))
            pools[name] = pools.get(name, 0) + segment["total_size"]
    stats = torch.cuda.memory_stats()
    prefix, suffix = "reserved_bytes_by_private_pools.", ".all.current"
    by_stats = {key[len(prefix) : -len(suffix)]: value for key, value in stats.items() if key.startswith(prefix) and key.endswith(suffix)}
    manager = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    rerecords = sum(sum(functions.values()) for functions in manager.num_rerecord.values()) if manager else 0
    recorded = re.search(r"\d+", repr(manager.graph_counter)) if manager else None  # itertools.count tells its next number in its repr alone
    return {
        "pools": pools,
        "pools_by_stats": by_stats,
        "segments": len(segments),
        "rerecords": rerecords,
        "graphs": int(recorded[0]) if recorded else 0,
        "skips": counters["inductor"]["cudagraph_skips"],
        "snapshot_ms": cost_ms(lambda: torch.cuda.memory_snapshot(include_traces=False)),
        "stats_ms": cost_ms(torch.cuda.memory_stats),
        "reading_ms": cost_of_the_agents_reading(),
    }


def cost_of_the_agents_reading() -> list[float] | None:
    """Of whatever agent watches this process, where it has such a thing."""
    probe = sys.modules.get("rankwatch.agent.probes.cudagraph")
    pools = getattr(getattr(getattr(probe, "_graphs", None), "counts", None), "pools", None)
    return cost_ms(lambda: pools.read(torch.cuda)) if pools is not None and pools.device is not None else None


def cost_ms(function: Callable[[], object]) -> list[float]:
    """[least, median, most] of 20 calls."""
    times = []
    for _ in range(20):
        began = time.perf_counter()
        function()
        times.append((time.perf_counter() - began) * 1e3)
    return [round(value, 4) for value in (min(times), statistics.median(times), max(times))]


def graphs(job: Job, stages: Stages) -> None:
    torch._dynamo.config.recompile_limit = 64
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]).to(job.device)
    fixed = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def run(function: Callable[[torch.Tensor], torch.Tensor], rows: int) -> None:
        for _ in range(4):
            with torch.no_grad():
                torch.compiler.cudagraph_mark_step_begin()
                function(torch.randn(rows, WIDTH, device=job.device))

    for rows in (64, 128, 192, 4096):
        run(fixed, rows)
        stages.done(f"{rows} rows")
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    run(fixed, 64)
    run(fixed, 128)
    stages.done("parameters moved")
    growing = torch.compile(lambda x: torch.relu(model(x)), mode="reduce-overhead", dynamic=True)
    for rows in range(32, 32 + 10 * 16, 16):
        run(growing, rows)
    stages.done("10 sizes, dynamic")
    mutating = torch.compile(lambda x: x.add_(1).relu(), mode="reduce-overhead")
    for _ in range(3):
        mutating(torch.randn(64, WIDTH, device=job.device))
    stages.done("a mutated input")
    x = torch.randn(64, WIDTH, device=job.device)
    with torch.no_grad():
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = x @ x.t()
            graph.replay()
            stages.manual += 1
            kept.append((graph, y))
    stages.done("2 captures by hand")
    layer = nn.Linear(WIDTH, WIDTH, device=job.device)
    kept.append(torch.cuda.make_graphed_callables(layer, (torch.randn(64, WIDTH, device=job.device, requires_grad=True),)))
    stages.manual += 2  # forward and backward
    stages.done("make_graphed_callables")
    many = [torch.empty(SEGMENT_BYTES, dtype=torch.uint8, device=job.device) for _ in range(SEGMENTS)]
    stages.done(f"{SEGMENTS} more segments")
    del many


kept: list[Any] = []


def tuned(job: Job, stages: Stages) -> None:
    """max-autotune without coordinate descent: what is tried stands in the log, block by block."""
    config = torch._inductor.config
    config.max_autotune_gemm_backends = "ATEN,TRITON" if job.cuda else "ATEN,CPP"
    widths = TUNED_WIDTHS if job.cuda else (128, 96)
    net = torch.compile(Net(widths).to(job.device), mode="max-autotune-no-cudagraphs", dynamic=False)
    stages.done("before the tuning")
    with torch.no_grad():
        net(torch.randn(192, widths[0], device=job.device))
    stages.done("after the tuning")
    config.coordinate_descent_tuning = True
    net = torch.compile(lambda x: torch.softmax(x.float() * 2 + 1, -1).sum(), dynamic=False)
    net(torch.randn(2048, 3000, device=job.device))
    stages.done("coordinate descent")


def main() -> None:
    job = Job()
    job.join()
    dist.barrier()
    stages = Stages(job)
    stages.done("start")
    if job.cuda:
        graphs(job, stages)
    tuned(job, stages)
    job.note("end")
    dist.destroy_process_group()


main()
