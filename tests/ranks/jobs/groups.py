"""Small gloo jobs over several process groups: `groups.py KIND [--timeout S]`. Knows nothing of rankwatch.

Every job trains for STEPS steps, says so, and enters the kind: a fault, or a round of what healthy jobs do with groups.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

STEPS = 6
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
LAST = WORLD - 1
PAUSE_S = 0.05


def train(steps: int = STEPS) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(100))
        time.sleep(PAUSE_S)


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def load_batch_that_never_comes() -> None:
    sleep_for_ever()


# -- ranks pair different calls and train on ----------------------------------------------------------------------------------


def started() -> None:
    """The moment from which the alarm is timed."""
    print(f"rank {RANK} fault {time.time():.3f}", flush=True)


def transposed() -> None:
    started()
    for _ in range(2000):
        weights = torch.ones(4, 8)
        dist.all_reduce(weights.T.contiguous() if RANK == LAST else weights)
        time.sleep(PAUSE_S)


def other_dtype() -> None:
    started()
    for _ in range(2000):
        dist.all_reduce(torch.ones(100, dtype=torch.int32 if RANK == LAST else torch.float32))
        dist.all_reduce(torch.ones(7))
        time.sleep(PAUSE_S)


def larger_buffer_once() -> None:
    """A root's message fits into a buffer that is too large: gloo says nothing."""
    for step in range(2000):
        if step == 20:
            started()
        dist.broadcast(torch.ones(64 if (RANK, step) == (LAST, 20) else 32), 0)
        train(1)


# -- a rank's sequence of calls is another one ----------------------------------------------------------------------------------


def step_of_three() -> None:
    dist.all_reduce(torch.ones(100))
    dist.broadcast(torch.ones(100), 0)
    dist.barrier()


def extra() -> None:
    for step in range(1000):
        if (RANK, step) == (LAST, 5):
            dist.all_gather([torch.ones(1) for _ in range(WORLD)], torch.ones(1))
        step_of_three()


def skipped() -> None:
    """An exception that is swallowed takes a collective with it."""
    for step in range(1000):
        dist.all_reduce(torch.ones(100))
        try:
            if (RANK, step) == (1, 5):
                raise RuntimeError("CUDA out of memory, planned")
            dist.broadcast(torch.ones(100), 0)
        except RuntimeError:
            pass
        dist.barrier()


def swapped() -> None:
    for step in range(1000):
        calls = [lambda: dist.all_reduce(torch.ones(100)), lambda: dist.barrier()]
        for call in reversed(calls) if (RANK, step) == (LAST, 5) else calls:
            call()


def finally_barrier() -> None:
    """One rank leaves its loop by an exception and meets the others' all_reduce in its own barrier."""
    try:
        for step in range(1000):
            if (RANK, step) == (1, 5):
                return
            dist.all_reduce(torch.ones(100))
    finally:
        dist.barrier()


# -- groups -----------------------------------------------------------------------------------------------------------------


def mesh() -> None:
    """2 x 2: the last rank sleeps before the all_reduce of its row; the other row waits behind in the columns."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for step in range(1000):
        if (RANK, step) == (LAST, 5):
            load_batch_that_never_comes()
        dist.all_reduce(torch.ones(10), group=grid.get_group("tp"))
        dist.all_reduce(torch.ones(20), group=grid.get_group("dp"))


def chain() -> None:
    """Pairs (0,1), (1,2), (2,3) ...: the last rank sleeps, and each one waits for the next."""
    pairs = [pair_of([rank, rank + 1]) for rank in range(WORLD - 1)]
    for step in range(1000):
        if (RANK, step) == (LAST, 5):
            load_batch_that_never_comes()
        for first, pair in reversed(list(enumerate(pairs))):
            if RANK in (first, first + 1):
                dist.all_reduce(torch.ones(10), group=pair)


def two_hangs() -> None:
    """Two pairs that have nothing to do with each other; one rank of each sleeps."""
    pairs = [pair_of([0, 1]), pair_of([2, 3])]
    for step in range(1000):
        if RANK in (1, 3) and step == 5:
            load_batch_that_never_comes()
        dist.all_reduce(torch.ones(10), group=pairs[RANK // 2])


def ring_deadlock() -> None:
    """Three pairs, and every rank begins with another one."""
    pairs = {first: pair_of(sorted([first, (first + 1) % 3])) for first in range(3)}
    mine = [RANK, (RANK - 1) % 3]
    for step in range(1000):
        order = sorted(mine) if step < 5 else mine
        for first in order:
            dist.all_reduce(torch.ones(10), group=pairs[first])


# -- point to point, which no recorder shows --------------------------------------------------------------------------------------


def pipeline() -> None:
    """Rank 0 sleeps, rank 1 waits for its message, and rank 2 waits for rank 1 in an all_reduce."""
    pair = pair_of([1, 2])
    for step in range(1000):
        if (RANK, step) == (0, 5):
            load_batch_that_never_comes()
        if RANK == 0:
            dist.send(torch.ones(10), 1)
        elif RANK == 1:
            dist.recv(torch.ones(10), 0)
        if RANK in (1, 2):
            dist.all_reduce(torch.ones(10), group=pair)


def message_that_nobody_sends() -> None:
    """Rank 1 waits for a message of rank 0, which waits for it in an all_reduce like everybody else."""
    train(5)
    if RANK == 1:
        dist.recv(torch.ones(10), 0)
    train(1)


# -- healthy ---------------------------------------------------------------------------------------------------------------


def many() -> None:
    """One round of everything that healthy jobs do with groups, for some seconds each."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = grid.get_group("tp"), grid.get_group("dp")
    some = dist.new_group([0, 2, 3])
    for part in (meshes, roots, objects, uneven, messages, outsiders):
        end = time.monotonic() + 1.5
        number = 0
        while True:
            part(number, tp, dp, some)
            number += 1
            go_on = torch.tensor([float(time.monotonic() < end)])
            dist.broadcast(go_on, 0)
            if not go_on.item():
                break
    dist.monitored_barrier()
    again()


def meshes(number, tp, dp, some) -> None:  # type: ignore[no-untyped-def]
    for size in (16, 32, 16):
        dist.all_reduce(torch.ones(size), group=tp)
    dist.all_reduce(torch.ones(1000), group=dp)
    dist.all_gather_into_tensor(torch.ones(20), torch.ones(10), group=dp)
    time.sleep(PAUSE_S)


def roots(number, tp, dp, some) -> None:  # type: ignore[no-untyped-def]
    """Rooted operations return early on some ranks."""
    root = number % WORLD
    dist.broadcast(torch.ones(50), root)
    dist.reduce(torch.ones(50), root)
    dist.scatter(torch.ones(5), [torch.ones(5)] * WORLD if root == RANK else None, root)
    dist.gather(torch.ones(5), [torch.ones(5) for _ in range(WORLD)] if root == RANK else None, root)
    if (root + 1) % WORLD == RANK:
        time.sleep(0.3)


def objects(number, tp, dp, some) -> None:  # type: ignore[no-untyped-def]
    mine = {"rank": RANK, "text": "x" * (RANK * 100 + number)}
    dist.all_gather_object([None] * WORLD, mine)
    dist.broadcast_object_list([mine], 0)
    dist.gather_object(mine, [None] * WORLD if RANK == 0 else None, 0)
    dist.scatter_object_list([None], [mine] * WORLD if RANK == 0 else None, 0)
    dist.all_gather_object([None] * 2, mine, group=tp)


def uneven(number, tp, dp, some) -> None:  # type: ignore[no-untyped-def]
    """Sizes that depend on data and rank, as with experts."""
    sent = [1 + (RANK + other + number) % 3 for other in range(WORLD)]
    got = [1 + (other + RANK + number) % 3 for other in range(WORLD)]
    dist.all_to_all_single(torch.ones(sum(got)), torch.ones(sum(sent)), got, sent)


def messages(number, tp, dp, some) -> None:  # type: ignore[no-untyped-def]
    following, before = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    ops = [dist.P2POp(dist.isend, torch.ones(10), following), dist.P2POp(dist.irecv, torch.ones(10), before)]
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    if RANK == 0:
        dist.send(torch.ones(3), 1)
    elif RANK == 1:
        time.sleep(0.1)
        dist.recv(torch.ones(3), 0)


def outsiders(number, tp, dp, some) -> None:  # type: ignore[no-untyped-def]
    """A group that rank 1 is not in, an asynchronous handle, a barrier in a finally branch."""
    handle = None
    try:
        if RANK != 1:
            handle = dist.all_reduce(torch.ones(30), group=some, async_op=True)
        time.sleep(0.02 * RANK)
    finally:
        dist.barrier()
    if handle is not None:
        handle.wait()


def again() -> None:
    """The world is torn down and made anew, with other operations at the same names and numbers."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, False)  # torchrun's agent serves it
    for round_ in range(5):
        time.sleep(0.15 * RANK)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"round{round_}", store), rank=RANK, world_size=WORLD)
        pair = dist.new_group([0, 1] if round_ % 2 else [1, 2])
        for number in range(40):
            dist.all_reduce(torch.ones(10 + round_)) if (number + round_) % 3 else dist.broadcast(torch.ones(5 + round_), 0)
            if RANK in ((0, 1) if round_ % 2 else (1, 2)):
                dist.all_reduce(torch.ones(3 + round_), group=pair)


def sharded() -> None:
    """FSDP2 and two kinds of DDP beside each other, every layer called or not as they allow it."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    fixed = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), static_graph=True)
    unused = DistributedDataParallel(Experts(), find_unused_parameters=True)
    models = [model, fixed, unused]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in models]
    for _ in range(60):
        for each, optimizer in zip(models, optimizers):  # noqa: B905 - equally long
            optimizer.zero_grad()
            each(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
        time.sleep(PAUSE_S)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.calls = 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.experts[(self.calls + RANK) % 3](batch)


def pair_of(ranks: list[int]) -> dist.ProcessGroup:
    return dist.new_group(ranks, timeout=datetime.timedelta(seconds=40))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    train()
    print(f"rank {RANK} trains", flush=True)
    globals()[options.kind]()
    if dist.is_initialized():
        dist.destroy_process_group()


main()
