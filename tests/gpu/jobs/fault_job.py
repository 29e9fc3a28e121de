"""One job with one planted trouble, by rank 1 unless it says otherwise: `fault_job.py KIND --backend nccl --timeout-s 60 --truth DIR`, under torchrun."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from parts import PAUSE_S, RANK, Job, Training
from torch import nn

STEPS_BEFORE = 60
GRAPH_STEPS_BEFORE = 200
FOR_EVER_S = 1000
SPIN_CYCLES = int(2e9 * 150)  # about 150 s at the clock of an H200; the job is ended long before
LARGE = 1 << 27  # 512 MiB: more than NCCL's buffers take in, so that the wrong partner blocks
CULPRIT = 1


def main() -> None:
    job = Job()
    if job.kind == "never_joins":
        never_joins(job)
    job.join()
    KINDS[job.kind](job)


def planted(job: Job) -> None:
    job.note("fault")


def load_batch() -> None:
    time.sleep(FOR_EVER_S)


def wait_input() -> None:
    time.sleep(FOR_EVER_S)


def parse_native() -> None:
    ctypes.PyDLL(None).sleep(FOR_EVER_S)


def train_until(job: Job, fault: Callable[[], None], compiled: bool = False) -> None:
    """Trains; before step STEPS_BEFORE rank 1 calls `fault`."""
    training = Training(job, compiled=compiled)
    for step in range(100_000):
        if step == STEPS_BEFORE and RANK == CULPRIT:
            planted(job)
            fault()
        training.step()


def asleep(job: Job) -> None:
    train_until(job, load_batch)


def gil_held(job: Job) -> None:
    train_until(job, parse_native)


def killed(job: Job) -> None:
    train_until(job, lambda: os.kill(os.getpid(), signal.SIGKILL))


def spin(job: Job) -> None:
    train_until(job, fused_op)


def fused_op() -> None:
    torch.cuda._sleep(SPIN_CYCLES)


def never_joins(job: Job) -> None:
    """Without device_id the communicator is made by the first collective, after init_process_group has returned."""
    if RANK == CULPRIT:
        planted(job)
        load_batch()
    dist.init_process_group(job.options.backend, timeout=job.timeout)
    dist.all_reduce(torch.ones(8, device=job.device))


def shapes(job: Job) -> None:
    """A buffer of another size than the peers': NCCL checks nothing and hangs."""
    training = Training(job)
    usual, large = torch.ones(1 << 12, device=job.device), torch.ones(1 << 24, device=job.device)
    for step in range(100_000):
        training.step()
        wrong = step == STEPS_BEFORE and RANK == CULPRIT
        if wrong:
            planted(job)
        pool_tokens(large if wrong else usual)


def pool_tokens(tokens: torch.Tensor) -> None:
    dist.all_reduce(tokens)
    tokens[0].item()


def operations(job: Job) -> None:
    """One rank broadcasts where the others reduce."""
    training = Training(job)
    small, large = torch.ones(1 << 12, device=job.device), torch.ones(LARGE if job.cuda else 1 << 12, device=job.device)
    for step in range(100_000):
        training.step()
        if step == STEPS_BEFORE:
            if RANK == CULPRIT:
                planted(job)
                share_statistics(large)
            else:
                reduce_statistics(large)
        reduce_statistics(small)


def share_statistics(values: torch.Tensor) -> None:
    dist.broadcast(values, src=CULPRIT)
    values[0].item()


def reduce_statistics(values: torch.Tensor) -> None:
    dist.all_reduce(values)
    values[0].item()


def group_order(job: Job) -> None:
    tensor_parallel, data_parallel = (dist.new_group(timeout=job.timeout, group_desc=name) for name in ("tensor_parallel", "data_parallel"))
    values = torch.ones(1 << 16, device=job.device)

    def reduce_tensor_parallel() -> None:
        dist.all_reduce(values, group=tensor_parallel)
        values[0].item()

    def reduce_data_parallel() -> None:
        dist.all_reduce(values, group=data_parallel)
        values[0].item()

    training = Training(job)
    for step in range(100_000):
        training.step()
        order = [reduce_tensor_parallel, reduce_data_parallel]
        if step == STEPS_BEFORE and RANK == CULPRIT:
            planted(job)
            order.reverse()
        for reduce in order:
            reduce()
        values.fill_(1.0)


def compile_alone(job: Job) -> None:
    """Rank 1 meets a batch of another size and searches long for its kernels; the same frame as before, compiled anew."""
    training = Training(job, compiled=True)
    for step in range(100_000):
        rows = 64
        if step == STEPS_BEFORE and RANK == CULPRIT:
            planted(job)
            config = torch._inductor.config
            config.max_autotune = config.max_autotune_gemm = True
            config.max_autotune_gemm_backends = "ATEN,TRITON" if job.cuda else "ATEN,CPP"
            config.coordinate_descent_tuning = True
            rows = 96
        training.step(rows)
        if step == STEPS_BEFORE and RANK == CULPRIT:
            job.note("compiled")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.widths, self.blocks = widths, nn.ModuleList(Block(width) for width in widths)

    def forward(self, inputs: list[torch.Tensor], skipped: int | None) -> torch.Tensor:
        losses = [block(x).square().mean() for number, (block, x) in enumerate(zip(self.blocks, inputs, strict=True)) if number != skipped]
        return torch.stack(losses).sum()


def fsdp_skip(job: Job) -> None:
    """One rank leaves a layer out of one forward pass (layer drop with an unseeded generator)."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    stack = Stack(tuple((512 + 128 * number) // job.scale for number in range(6))).to(job.device)
    for block in stack.blocks:
        fully_shard(block)
    fully_shard(stack)
    optimizer = torch.optim.SGD(stack.parameters(), lr=1e-4)
    inputs = [torch.ones(16, width, device=job.device) for width in stack.widths]
    for step in range(100_000):
        skips = step == STEPS_BEFORE and RANK == CULPRIT
        if skips:
            planted(job)
        loss = stack(inputs, 2 if skips else None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        time.sleep(PAUSE_S)


def graph_stop(job: Job, logs: bool = False) -> None:
    """Gradients come from a captured graph with its all_reduce; the optimizer steps outside. Rank 1 stops replaying and waits for input."""
    weight = nn.Parameter(torch.randn(1024, 1024, device=job.device) / 32)
    gradient, x = torch.zeros_like(weight), torch.randn(64, 1024, device=job.device)
    weight.grad = gradient
    optimizer = torch.optim.SGD([weight], lr=1e-4)
    loss = torch.zeros((), device=job.device)

    def work() -> None:
        y = x @ weight.detach()
        gradient.copy_(x.t() @ y / y.numel())
        dist.all_reduce(gradient)
        loss.copy_(y.square().mean())

    graph = captured(work)
    for step in range(100_000):
        if step == GRAPH_STEPS_BEFORE and RANK == CULPRIT:
            planted(job)
            wait_input()
        graph.replay()
        if logs:
            dist.all_reduce(loss)
        optimizer.step()
        loss.item()
        time.sleep(PAUSE_S)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    torch.cuda.synchronize()
    return graph


def graph_stop_eager(job: Job) -> None:
    graph_stop(job, logs=True)


KINDS: dict[str, Callable[[Job], None]] = {
    "asleep": asleep,
    "abort": asleep,
    "gil_held": gil_held,
    "killed": killed,
    "spin": spin,
    "spin_untimed": spin,
    "never_joins": asleep,
    "shapes": shapes,
    "operations": operations,
    "group_order": group_order,
    "compile_alone": compile_alone,
    "compile_past_timeout": compile_alone,
    "fsdp_skip": fsdp_skip,
    "graph_stop": graph_stop,
    "graph_stop_eager": graph_stop_eager,
}

if __name__ == "__main__":
    main()
