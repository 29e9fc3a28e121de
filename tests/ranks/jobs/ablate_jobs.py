"""Jobs with a planted fault of torch.compile: `ablate_jobs.py KIND`. Each trains three small blocks for at most 40 steps; knows nothing of rankwatch.

The faults are backends of the job's own, so that nothing here waits for Inductor: a miscompiled frame, a crash in one frame, NaN on one rank.
"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def first(x, weight):
    return torch.tanh(x @ weight)


def second(x, weight):
    return torch.relu(x @ weight) + x


def third(x, weight):
    return torch.sin(x @ weight)


def operations(graph):
    return {node.target for node in graph.graph.nodes if node.op == "call_function"}


def miscompiles(graph, inputs, wanted=torch.relu):
    """Gives a wrong result for one frame only: the one with `wanted` in it."""
    compiled = lookup_backend("aot_eager")(graph, inputs)
    if wanted not in operations(graph):
        return compiled
    return lambda *args: [1.25 * out if isinstance(out, torch.Tensor) and out.is_floating_point() else out for out in compiled(*args)]


def crashes(graph, inputs):
    if torch.sin in operations(graph):
        raise NotImplementedError("no lowering for aten.sin on this device")
    return graph


def poisons_rank_1(graph, inputs):
    calls = []

    def run(*args):
        calls.append(0)
        late = RANK == 1 and torch.sin in operations(graph) and len(calls) > 2
        return [out * float("nan") if late else out for out in graph(*args)]

    return run


BACKENDS = {"wrong": miscompiles, "crash": crashes, "nan": poisons_rank_1}


class Model(torch.nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(16, 16) / 4) for _ in range(3)])
        self.functions = [torch.compile(function, backend=backend) for function in (first, second, third)]

    def forward(self, x):
        for function, weight in zip(self.functions, self.weights, strict=True):
            x = function(x, weight)
        return x.square().mean()


def main() -> None:
    torch.set_num_threads(1)
    kind = sys.argv[1]
    if WORLD > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    if kind != "unseeded":
        torch.manual_seed(7)
    model = Model(BACKENDS.get(kind, "aot_eager"))
    trained = DistributedDataParallel(model) if WORLD > 1 and kind != "nan" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    try:
        for _step in range(40):
            optimizer.zero_grad()
            trained(torch.randn(8, 16)).backward()
            optimizer.step()
    finally:
        print(f"rank {RANK} cleans up", flush=True)
        if dist.is_initialized():
            dist.destroy_process_group()


main()
