"""Does timed turns when told to: `timed_job.py gpt|all_reduce --backend nccl --truth DIR`, under torchrun.

Once it has compiled and warmed up it waits for DIR/go_N, a number of steps; does them, notes how long they took, and sleeps again, until DIR/stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts import Job
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_STEPS = 5  # of each turn: clocks rise, ranks meet
LOOK_S = 0.01
LOG_EVERY = 10


@dataclass(frozen=True)
class Size:
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    sequence: int = 1024
    batch: int = 8


TINY = Size(layers=2, width=64, heads=4, vocabulary=512, sequence=64, batch=2)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.mix = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, sequence, width)
        x = x + self.mix(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """124 million parameters at the default size, the embedding shared with the output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.sequence, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.out = nn.Linear(size.width, size.vocabulary, bias=False)
        self.out.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(self.norm(x))[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def training(job: Job) -> Callable[[], None]:
    size = Size() if job.cuda else TINY
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = torch.compile(DistributedDataParallel(Gpt(size).to(job.device)), backend="inductor" if job.cuda else "eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=job.cuda)
    batches = [torch.randint(0, size.vocabulary, (size.batch, size.sequence), device=job.device) for _ in range(8)]
    count = 0

    def step() -> None:
        nonlocal count
        with torch.autocast(job.device.type, torch.bfloat16):
            loss = model(batches[count % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count += 1
        if count % LOG_EVERY == 0:
            loss.item()

    return step


def all_reduce(job: Job) -> Callable[[], None]:
    megabyte = torch.zeros(1 << 18, device=job.device)

    def step() -> None:
        dist.all_reduce(megabyte)

    return step


def main() -> None:
    job = Job()
    job.join()
    step = {"gpt": training, "all_reduce": all_reduce}[job.kind](job)
    for _ in range(2 * LOG_EVERY):
        step()
    job.sync()
    memory = torch.cuda.max_memory_reserved() if job.cuda else 0
    dist.barrier()
    job.sync()
    job.note("ready", reserved_bytes=memory)
    number = 1
    while True:
        go = job.options.truth / f"go_{number}"
        while not go.exists():
            if (job.options.truth / "stop").exists():
                dist.destroy_process_group()
                return
            time.sleep(LOOK_S)
        steps = int(go.read_text())
        for _ in range(WARM_STEPS):
            step()
        job.sync()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        job.sync()
        took = time.perf_counter() - began
        job.note("turn", number=number, steps=steps, s_per_step=took / steps)
        number += 1


if __name__ == "__main__":
    main()
