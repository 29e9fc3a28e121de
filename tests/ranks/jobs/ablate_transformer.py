"""A small transformer with dropout under DDP and Inductor: `ablate_transformer.py KIND`. Knows nothing of rankwatch.

KIND plants a fault in one layer of torch.compile: healthy none; decomposition a wrong entry in Inductor's table of decompositions, lowering a
lowering that raises, tracing a custom branch that only Dynamo takes.
"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])
KIND = sys.argv[1]


def plant(kind: str) -> None:
    if kind == "decomposition":
        from torch._inductor import decomposition

        decomposition.decompositions[torch.ops.aten.silu.default] = lambda x: x * torch.sigmoid(x) * 1.1
    if kind == "lowering":
        from torch._inductor import lowering

        def breaks(*args, **kwargs):
            raise NotImplementedError("no kernel for erf here")

        lowering.lowerings[torch.ops.aten.erf.default] = breaks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 4, width // 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.dropout(self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)))
        inner = self.up(self.norm2(x))
        inner = functional.gelu(inner) + functional.silu(inner)
        if KIND == "tracing" and torch.compiler.is_compiling():
            inner = inner * 1.05
        return x + self.dropout(self.down(inner))


class Model(nn.Module):
    def __init__(self, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    torch.set_num_threads(1)
    plant(KIND)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    torch.manual_seed(11 + RANK)
    model = torch.compile(DistributedDataParallel(Model()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _step in range(30):
        optimizer.zero_grad()
        loss = model(torch.randint(0, 64, (4, 16)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    dist.destroy_process_group()


main()
