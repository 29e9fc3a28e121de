"""A small transformer under DDP on gloo, compiled; each case is one way in which torch.compile goes wrong. Usage: compile_cases.py CASE BACKEND STEPS."""

import os
import sys
import time

if "CACHES" in os.environ:  # one for each rank
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ["CACHES"].split(",")[int(os.environ["RANK"])]

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

case, backend, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
caps = [float(cap) for cap in case.partition("=")[2].split(",") if cap]  # splits=1.5 for all ranks, splits=1.5,4 for one each
rank = int(os.environ["RANK"])
WIDTH = 512 if caps else 32
BLOCKS = 2 if caps or case == "breaks" else 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + gelu(self.out(scaled_dot_product_attention(q, k, v)))


class Small(nn.Module):
    """What Inductor makes of it are three kernels; the C++ compiler takes many seconds for each."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(self.out(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Small() if case.startswith("small") else Block() for _ in range(BLOCKS))
        self.round = 0
        self.long = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # the whole model
        for block in self.blocks:
            x = block(x)
            if case == "breaks":
                print("", end="")
        if case in ("storm", "limit"):
            x = x * (self.round + 1)
        if self.long:
            x = x.sin().cos()
        return x


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def broken(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    store().wait(["rank 0 has compiled"])
    raise ValueError("no kernel for this graph on this node")


def break_lowering() -> None:
    """Inductor cannot lower gelu in this process."""
    from torch._inductor import lowering

    def no_lowering(*_args: object, **_kwargs: object) -> None:
        store().wait(["rank 0 has compiled"])
        raise NotImplementedError("erf has no lowering here")

    for name in [name for name in lowering.lowerings if "erf" in str(name)]:
        lowering.lowerings[name] = no_lowering


def wrapped() -> nn.Module:
    if case == "zero":
        return DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))
    if case == "zero_cured":
        return DistributedDataParallel(torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), backend=backend))
    return DistributedDataParallel(Model(), bucket_cap_mb=caps[rank % len(caps)] if caps else 25)


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = wrapped()
    if case == "storm":
        torch._dynamo.config.recompile_limit = 64
    if case == "limit":
        torch._dynamo.config.recompile_limit = 4
    if case == "small_failing" and rank == 1:
        break_lowering()
    if case == "stance":
        torch.compiler.set_stance("force_eager")
    chosen = broken if case == "failing_backend" and rank == 1 else backend
    step = model if case == "zero_cured" else torch.compile(model, backend=chosen, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(steps):
        if case in ("storm", "limit"):
            model.module.round = number
        if case == "branch":
            model.module.long = bool(torch.full((1,), float(rank)).mean() > 0.5)  # what this rank's own data says
        if case == "small_lock" and rank == 1:
            while not os.path.exists(os.environ["LOCK_IS_HELD"]):
                time.sleep(0.2)
        optimizer.zero_grad()
        loss = step(torch.randn(4, 8, WIDTH)).sum()
        if rank == 0:
            store().set("rank 0 has compiled", "")
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
