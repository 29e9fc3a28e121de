"""One small gloo job with one planned trouble: `trouble.py KIND [--timeout S]`. Knows nothing of rankwatch; says nothing.

Every job trains for STEPS steps first. The trouble sits in a function of its own name, so that stacks can be told apart.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

STEPS = 6
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def train(steps: int = STEPS) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(100))
        time.sleep(0.05)


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


# -- faults: each is entered by every rank after STEPS steps --------------------------------------------------------


def asleep() -> None:
    if RANK == 1:
        load_batch_that_never_comes()
    train(1)


def load_batch_that_never_comes() -> None:
    time.sleep(100_000)


def gil_held() -> None:
    if RANK == 1:
        parse_native()
    train(1)


def parse_native() -> None:
    ctypes.PyDLL(None).sleep(3600)  # C code that does not release the GIL


def killed() -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(1000)


def crashed() -> None:
    if RANK == 2:
        read_sample()
    train(1000)


def read_sample() -> None:
    raise ValueError("sample 17 has no label")


def aborted() -> None:
    if RANK == 2:
        os.abort()
    train(1000)


def exited() -> None:
    if RANK == 1:
        os._exit(0)
    train(1000)


def stopped() -> None:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    train(1)


def mismatch() -> None:
    if RANK == 2:
        dist.barrier()
    train(1)


def larger_tensor() -> None:
    """gloo aborts an innocent rank."""
    dist.all_reduce(torch.ones(400 if RANK == 1 else 100))
    train(1000)


def groups_in_other_order() -> None:
    for ranks in ([0, 1], [0, 1, 2]) if RANK == 0 else ([0, 1, 2], [0, 1]):
        dist.new_group(ranks)
    train(1000)


def absent_from_barrier() -> None:
    if RANK == 1:
        load_batch_that_never_comes()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=40))


def handler_that_waits() -> None:
    """The error never reaches the log: the handler calls a collective that the others do not."""
    try:
        if RANK == 1:
            read_sample()
        train(1000)
    except ValueError:
        dist.barrier()
        raise


def order_deadlock() -> None:
    first, second = dist.new_group(), dist.new_group()
    for group in (first, second) if RANK == 0 else (second, first):
        dist.all_reduce(torch.ones(10), group=group)


class Records(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 8 and RANK == 1:
            threading.Lock().acquire() and threading.Event().wait()
        return torch.ones(4)


def data_loading() -> None:
    for batch in DataLoader(Records(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
        dist.all_reduce(batch)


def compile_hung() -> None:
    if RANK == 1:
        torch.compile(lambda x: x.sin() + 1, backend=backend_that_waits)(torch.ones(3))
    train(1)


def backend_that_waits(module, inputs):  # type: ignore[no-untyped-def]
    sleep_for_ever()


# -- healthy: slow or odd, but they end by themselves ---------------------------------------------------------------


def slow_backend(module, inputs):  # type: ignore[no-untyped-def]
    if module.graph.find_nodes(op="call_method", target="sum") and inputs[0].shape[0] > 4:
        time.sleep(float(os.environ.get("TROUBLE_COMPILE_S", "9")))
    return module.forward


@torch.compile(backend=slow_backend, dynamic=False)
def block(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2).sum(0)


def lone_recompile() -> None:
    for step in range(8):
        rows = 9 if (step, RANK) == (3, 1) else 4
        dist.all_reduce(block(torch.ones(rows, 16)).clone())


def busy_rank0() -> None:
    if RANK == 0:
        evaluate(9)
    train(3)


def evaluate(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(256, 256) @ torch.ones(256, 256)


def checkpoint() -> None:
    if RANK == 0:
        save_slowly("/dev/null")
    train(3)


class SlowDisk:
    def __init__(self, path: str) -> None:
        self.file = open(path, "wb")  # noqa: SIM115

    def write(self, data) -> int:  # type: ignore[no-untyped-def]
        time.sleep(0.8 if len(data) > 1 << 20 else 0)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def save_slowly(path: str) -> None:
    torch.save({f"w{n}": torch.ones(1 << 20) for n in range(10)}, SlowDisk(path))


def staggered_exit() -> None:
    dist.destroy_process_group()
    if RANK == 0:
        time.sleep(7)
    sys.exit(0)


def fork_children() -> None:
    """Children that end in every way while the parent's worker server lives."""
    for way in ("exit", "exception", "abort"):
        pid = os.fork()
        if pid == 0:
            if way == "exit":
                sys.exit(0)
            if way == "exception":
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                raise RuntimeError("planned, in a child")
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        train(2)
    for _ in DataLoader(torch.ones(8, 2), num_workers=2, multiprocessing_context="fork"):
        train(1)


def sigint_storm() -> None:
    """Ctrl-C lands anywhere in training, is handled by the script, and the job still ends well."""
    seen = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    threading.Thread(target=lambda: [(time.sleep(0.01), os.kill(os.getpid(), signal.SIGINT)) for _ in range(100)], daemon=True).start()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(60):
        torch.compile(model, backend="eager", dynamic=False)(torch.ones(2 + step % 4, 4)).sum().backward()
        optimizer.step()
        train(1)
    if len(seen) < 20:
        sys.exit(9)


def ddp() -> None:
    model = torch.compile(DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]), bucket_cap_mb=2), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        model(torch.ones(4, 512)).square().mean().backward()
        optimizer.step()


def trained() -> None:
    train(40)


def long() -> None:
    train(100_000)


def late_at_start() -> None:
    train(3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.kind == "late_at_start" and RANK == 1:
        time.sleep(12)
    if options.kind == "never_joins" and RANK == 1:
        load_batch_that_never_comes()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    train()
    print(f"rank {RANK} trains", flush=True)
    globals()[options.kind]()
    if dist.is_initialized():
        dist.destroy_process_group()


main()
