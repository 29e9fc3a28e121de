"""Steps of a small transformer under DDP with the numerics probe on and off in turn: `numerics_steps.py DEVICE LAYERS WIDTH BLOCKS`; JSON on stdout.

Paired within one process: a block is 50 steps, as many as lie between two looks at the parameters; what else the machine does hurts both alike.
On a CPU all times are processor time. `share`: of the steps' time, what the looks themselves took on the host.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rankwatch.agent import rank as agent

BLOCK = 50


def main() -> None:
    device, layers, width, blocks = sys.argv[1], *map(int, sys.argv[2:5])
    cuda = device == "cuda"
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
    model = nn.parallel.DistributedDataParallel(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    data = torch.randn(8 if cuda else 2, 512 if cuda else 64, width, device=device)
    probe = agent._rank.probes["numerics"]
    clock = time.perf_counter if cuda else time.process_time
    looks = [0.0]
    _numerics = sys.modules["rankwatch.agent.probes.numerics"]._numerics
    for name in ("_look_at_gradients", "_look_at_replica"):
        setattr(_numerics, name, timed(getattr(_numerics, name), clock, looks))

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def block(on: bool) -> float:
        probe.on = on
        if cuda:
            torch.cuda.synchronize()
        started = clock()
        for _ in range(BLOCK):
            step()
        if cuda:
            torch.cuda.synchronize()
        return (clock() - started) / BLOCK

    block(True)
    looks[0] = 0.0
    off, on = [], []
    for number in range(blocks):
        order = (False, True) if number % 2 else (True, False)
        for state in order:
            (on if state else off).append(block(state))
    probe.on = True
    found = {
        "parameters_m": sum(p.numel() for p in model.parameters()) / 1e6,
        "tensors": sum(1 for _ in model.parameters()),
        "step_ms": 1e3 * statistics.median(off),
        "ratio": statistics.median(b / a for a, b in zip(off, on, strict=True)),
        "quietest_ratio": min(on) / min(off),
        "share": looks[0] / (BLOCK * sum(on)),
    }
    if cuda:
        found |= checks_on_a_gpu(model, optimizer, step, data)
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def timed(function: Any, clock: Callable[[], float], spent: list[float]) -> Any:
    """The function, adding the time it takes to spent[0]."""

    def call(*args: Any) -> None:
        started = clock()
        function(*args)
        spent[0] += clock() - started

    return call


def checks_on_a_gpu(model: nn.Module, optimizer: torch.optim.Optimizer, step: object, data: torch.Tensor) -> dict[str, object]:
    """Nothing waits for the device; a captured step is left alone; a NaN is found at its own step."""
    _numerics = sys.modules["rankwatch.agent.probes.numerics"]._numerics
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(120):
        step()  # type: ignore[operator]
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    silent = agent._rank.probes["numerics"].errors == 0

    linear = nn.Linear(64, 64).cuda()
    inner = torch.optim.SGD(linear.parameters(), lr=0.1)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    x = torch.randn(8, 64, device="cuda")
    with torch.cuda.stream(stream):
        for _ in range(3):
            linear(x).sum().backward()
            inner.step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        linear(x).sum().backward()
        inner.step()
    graph.replay()
    torch.cuda.synchronize()

    stride, _numerics._stride = _numerics._stride, 1  # a look that costs more than its share of a step is not taken at each one
    model(data).square().mean().backward()
    next(iter(model.parameters())).grad.view(-1)[0] = float("nan")
    optimizer.step()
    nan_at = _numerics.step
    torch.cuda.synchronize()
    inner.step()
    inner.step()
    _numerics.finish()
    grad = _numerics._grad
    return {
        "no_wait": silent,
        "capture_ok": agent._rank.probes["numerics"].errors == 0,
        "nan_found": grad.bad_step == nan_at,
        "checks": len(_numerics._checks),
        "stride": stride,
        "look_us": _numerics._cost_ns / 1e3,
    }


if __name__ == "__main__":
    main()
