"""The healthy job of soak.py: compiled DDP on gloo at the cadence of real training. Run by torchrun; it knows nothing of rankwatch.

A step every 0.4 s from a DataLoader with two workers that now and then stutters; a checkpoint every 2.5 minutes, written by rank 0 for 1-9 s
while the others wait; an evaluation by rank 0 alone every 5 minutes, 20 s long. What a GPU would do is slept, so that four ranks fit two cores.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

GROUP_TIMEOUT = datetime.timedelta(minutes=10)
WIDTH, BATCH = 256, 8
WEIGHTS_MB = 48  # of a checkpoint


class Samples(Dataset):  # type: ignore[type-arg]
    """Each sample costs a little; about one in 4,000 comes from a file system that thinks for seconds."""

    def __init__(self, rank: int, sample_s: float) -> None:
        self.rank, self.sample_s = rank, sample_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        chance = random.Random(self.rank * 1_000_003 + index)
        time.sleep(self.sample_s if chance.random() > 1 / 4000 else chance.uniform(1.0, 7.0))
        return torch.full((WIDTH,), 0.001 * (index % 1000))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class SlowFile:
    """A file on storage that takes `pause_s` for each of the pieces that a checkpoint is cut into."""

    def __init__(self, path: Path, pause_s: float) -> None:
        self.file, self.pause_s = path.open("wb"), pause_s

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), 4 << 20):
            self.file.write(view[start : start + (4 << 20)])
            if len(view) > 1 << 20:
                time.sleep(self.pause_s)
        return len(view)

    def flush(self) -> None:
        self.file.flush()


def save_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, pause_s: float) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "padding": torch.zeros(WEIGHTS_MB << 18)}
    new = path.with_suffix(".new")
    torch.save(state, SlowFile(new, pause_s))  # type: ignore[arg-type]
    os.replace(new, path)


def evaluate(model: Any, seconds: float) -> float:
    total, end = 0.0, time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < end:
            total += float(model(torch.ones(BATCH, WIDTH)).mean())
            time.sleep(0.25)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where checkpoints go")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--step-s", type=float, default=0.4)
    parser.add_argument("--checkpoint-s", type=float, default=150.0)
    parser.add_argument("--evaluate-s", type=float, default=300.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    rank = dist.get_rank()
    net = Net()
    model = torch.compile(DistributedDataParallel(net), backend=arguments.backend)
    evaluated = torch.compile(net, backend=arguments.backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    samples = Samples(rank, sample_s=arguments.step_s * 0.5 / BATCH)  # two workers: they keep ahead, the queue is what a hiccup eats
    loader = DataLoader(samples, batch_size=BATCH, num_workers=2, persistent_workers=True)
    started = saved = evaluated_at = time.monotonic()
    due = torch.zeros(3)  # rank 0's watch decides for all: stop, save, evaluate
    for step, batch in enumerate(loader):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        time.sleep(arguments.step_s * 0.75)
        if step == 1 and rank == 0:
            print("rank 0 trains", flush=True)
        if step % 10:
            continue
        now = time.monotonic()
        if rank == 0:
            passed = (now - started > arguments.minutes * 60, now - saved > arguments.checkpoint_s, now - evaluated_at > arguments.evaluate_s)
            due = torch.tensor([float(each) for each in passed])
        dist.broadcast(due, 0)
        if due[1]:
            saved = now
            if rank == 0:
                save_checkpoint(arguments.folder / "last.pt", model, optimizer, pause_s=random.Random(step).uniform(0.05, 0.75))
            dist.barrier()
        if due[2]:
            evaluated_at = now
            if rank == 0:
                print(f"step {step} loss {loss.item():.2e} evaluation {evaluate(evaluated, 20.0):.3f}", flush=True)
            dist.barrier()
        if due[0]:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
