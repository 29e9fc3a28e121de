"""Faults between the ranks: they wait for each other, or meet in the wrong place. Run by torchrun: together.py NAME PLANTED TIMEOUT_S."""

from __future__ import annotations

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils import store as store_of_elastic

RANK = int(os.environ["RANK"])
NAME, PLANTED, TIMEOUT_S = sys.argv[1], sys.argv[2], float(sys.argv[3])
FOR_EVER_S = 300.0


def train(steps: int) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(1000))
        time.sleep(0.1)


def planted() -> None:
    """Tells the demo that the fault begins now."""
    with open(PLANTED, "w") as file:
        file.write(str(time.time()))


def mismatch() -> None:
    if RANK == 2:
        planted()
        log_a_metric_that_others_do_not()
    train(5)


def log_a_metric_that_others_do_not() -> None:
    dist.all_gather([torch.empty(1) for _ in range(dist.get_world_size())], torch.ones(1))


def diverged() -> None:
    """Three layers of equal size and different shape. One rank skips the middle one once; from then on it averages the wrong gradients."""
    shapes = ((8, 32), (16, 16), (32, 8))
    for step in range(300):
        for number, shape in enumerate(shapes):
            if RANK == 1 and step == 15 and number == 1:
                planted()
                continue
            average(torch.ones(shape))
        time.sleep(0.1)


def average(gradient: torch.Tensor) -> None:
    dist.all_reduce(gradient)


def group_order_deadlock() -> None:
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    data_parallel, tensor_parallel = dist.new_group(timeout=timeout), dist.new_group(timeout=timeout)
    train(2)
    if RANK == 0:
        planted()
    for group in (data_parallel, tensor_parallel) if RANK == 0 else (tensor_parallel, data_parallel):
        dist.all_reduce(torch.ones(1000), group=group)


def all_entered() -> None:
    """The demo holds the thread in which rank 1's gloo moves its bytes."""
    if RANK == 1:
        planted()
    train(3000)


def store_wait() -> None:
    """Rank 1 never joins: see main()."""
    train(5)


def prepare_node_local_data() -> None:
    time.sleep(FOR_EVER_S)


def store_barrier() -> None:
    """Rank 0 waits in the store, outside of any group; the others are a step further."""
    if RANK == 0:
        planted()
        wait_for_all_nodes_to_have_the_data()


def wait_for_all_nodes_to_have_the_data() -> None:
    store_of_elastic.barrier(dist.distributed_c10d._get_default_store(), dist.get_world_size(), "data is there")


def main() -> None:
    torch.set_num_threads(1)
    if NAME == "store_wait" and RANK == 1:
        planted()
        prepare_node_local_data()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    train(10)
    globals()[NAME]()
    train(5)
    dist.destroy_process_group()


main()
