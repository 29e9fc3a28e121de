"""One healthy job: `control_job.py KIND --backend nccl --timeout-s 120 --truth DIR`, under torchrun. Ends by itself with exit code 0."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from fault_job import captured
from parts import PAUSE_S, RANK, Job, Training

SAVE_S = 35.0  # longer than an absent rank that does nothing would be left alone
SHARD_ELEMENTS = 1 << 24  # 64 MiB


def main() -> None:
    job = Job()
    job.join()
    longest_s = KINDS[job.kind](job)
    job.note("end", longest_s=longest_s)
    dist.barrier()
    dist.destroy_process_group()


def autotune(job: Job) -> float:
    """Both the first compile and the recompile for a new batch size search long for kernels, on all ranks."""
    config = torch._inductor.config
    config.max_autotune = config.max_autotune_gemm = True
    config.max_autotune_gemm_backends = "ATEN,TRITON" if job.cuda else "ATEN,CPP"
    config.coordinate_descent_tuning = True
    training = Training(job, (1024, 1536), compiled=True)  # one product forward and one backward: some 25 s each where ranks share a GPU
    for step in range(300):
        training.step(64 if step < 150 else 96)
    return training.longest_s


def graphs(job: Job) -> float:
    gradient, total = torch.ones(1 << 20, device=job.device), torch.zeros(1, device=job.device)

    def work() -> None:
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
        total.add_(gradient.mean())

    longest_s = 0.0
    for _recording in range(3):
        began = time.monotonic()
        graph = captured(work)
        for _ in range(300):
            graph.replay()
            total.item()
            time.sleep(PAUSE_S)
            longest_s, began = max(longest_s, time.monotonic() - began), time.monotonic()
        time.sleep(4.0)  # all ranks look at their results
    return longest_s


def checkpoint(job: Job) -> float:
    training = Training(job)
    for step in range(300):
        if step == 150 and RANK == 0:
            save_checkpoint()
        training.step()
    return training.longest_s


def save_checkpoint() -> None:
    """Shard after shard to a real file for SAVE_S."""
    shard = {"weights": torch.ones(SHARD_ELEMENTS)}
    end = time.monotonic() + SAVE_S
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            path = os.path.join(folder, "shard.pt")
            torch.save(shard, path)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            time.sleep(0.05)


def plain(job: Job) -> float:
    training = Training(job)
    for _ in range(700):
        training.step()
    return training.longest_s


def small_calls(job: Job) -> float:
    other = dist.new_group(timeout=job.timeout)
    values = [torch.ones(256, device=job.device) for _ in range(64)]
    longest_s = 0.0
    end = time.monotonic() + 20.0
    more = torch.ones(1, device=job.device)
    while more.item():
        began = time.monotonic()
        works = [dist.all_reduce(value, group=other if number % 2 else None, async_op=True) for number, value in enumerate(values)]
        for work in works:
            work.wait()
        more.fill_(float(time.monotonic() < end))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        job.sync()
        longest_s = max(longest_s, time.monotonic() - began)
    return longest_s


KINDS: dict[str, Callable[[Job], float]] = {"autotune": autotune, "graphs": graphs, "checkpoint": checkpoint, "plain": plain, "small_calls": small_calls}

if __name__ == "__main__":
    main()
