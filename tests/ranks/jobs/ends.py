"""One small gloo job that begins or ends in one planned way: `ends.py KIND [--timeout S]`. Knows nothing of rankwatch.

Kinds of BEFORE act before the process group is joined, the others after STEPS steps of training.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import faulthandler
import os
import signal
import sys
import threading
import time

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
STEPS = 6


def wait_for_ever() -> None:
    threading.Event().wait()


def say(text: str) -> None:
    print(f"rank {RANK} {text}", flush=True)


# -- before torch is imported, and before init_process_group --------------------------------------------------------


def import_slowly() -> None:
    """Rank 1 sits in an import from a cold file system; torch is not imported yet."""
    if RANK == 1:
        read_module_from_cold_storage()


def read_module_from_cold_storage() -> None:
    time.sleep(100_000)


def leaves_before_join() -> None:
    if RANK == 1:
        os._exit(0)


def raises_before_join() -> None:
    if RANK == 1:
        read_configuration()


def read_configuration() -> None:
    raise FileNotFoundError("/data/vocabulary.json")


def world_too_large() -> None:
    """WORLD_SIZE set by hand, one more than there are ranks."""
    os.environ["WORLD_SIZE"] = str(WORLD + 1)


def world_too_large_by_argument() -> None:
    pass


def wrong_address() -> None:
    """Rank 1 is told an address at which nobody listens."""
    if RANK == 1:
        os.environ["MASTER_PORT"] = "1"


def same_rank_twice() -> None:
    if RANK == 1:
        os.environ["RANK"] = "0"


# -- waits in the store ---------------------------------------------------------------------------------------------


def key_while_others_reduce() -> None:
    """Rank 1 waits in the store for what rank 0 sets after the collective in which it waits for rank 1."""
    store = dist.distributed_c10d._get_default_store()
    if RANK == 1:
        store.set_timeout(datetime.timedelta(seconds=3600))
        store.get("dataset/path")
    train(1)
    store.set("dataset/path", "/data")


def own_store() -> None:
    """A TCPStore of the job's own, as vLLM and data services use: rank 1 waits there, the others in a collective."""
    port = 29400 + os.getppid() % 1000
    if RANK == 0:
        globals()["server"] = dist.TCPStore("localhost", port, None, True, datetime.timedelta(seconds=3600))
    train(1)
    if RANK == 1:
        dist.TCPStore("localhost", port, None, False, datetime.timedelta(seconds=3600)).wait(["shard/7"])
    train(1)


def group_of_some() -> None:
    """new_group is collective over the whole world; rank 1 does not call it."""
    if RANK != 1:
        dist.new_group([0, 1])
    train(1)


def upload_logs() -> None:
    wait_for_ever()


def store_barrier() -> None:
    """torch's own barrier in the store, as torchelastic and checkpoint libraries use it."""
    from torch.distributed.elastic.utils import store as util

    if RANK == 1:
        upload_logs()
    util.barrier(dist.distributed_c10d._get_default_store(), WORLD, "end", barrier_timeout=3600)


# -- deaths ---------------------------------------------------------------------------------------------------------


def raised_on_all() -> None:
    """The same cause everywhere; rank 1 is first by a second, the others raise the same later."""
    time.sleep(0.0 if RANK == 1 else 1.0)
    raise KeyError("learning_rate")


def exits_in_thread() -> None:
    """sys.exit in a thread ends only the thread; the main thread then waits for its answer."""
    if RANK == 1:
        done = threading.Event()
        threading.Thread(target=lambda: (sys.exit(3), done.set()), name="prefetch").start()
        done.wait()
    train(1)


def thread_dies() -> None:
    """An exception in a helper thread; the main thread waits for a queue that nobody fills any more."""
    import queue

    batches: queue.Queue[int] = queue.Queue()

    def fill() -> None:
        raise OSError("shard 7 is truncated")

    if RANK == 1:
        threading.Thread(target=fill, name="prefetch").start()
        next_batch(batches)
    train(1)


def next_batch(batches) -> None:  # type: ignore[no-untyped-def]
    batches.get()


def exited_3() -> None:
    if RANK == 1:
        sys.exit(3)
    train(1000)


def exits_well() -> None:
    """sys.exit(0) of one rank, with all that Python does at its end."""
    if RANK == 1:
        sys.exit(0)
    train(1000)


def segfault() -> None:
    faulthandler.enable()
    if RANK == 1:
        decode_image()
    train(1000)


def decode_image() -> None:
    import ctypes

    ctypes.string_at(0)


def handler_broadcasts() -> None:
    """The exception is swallowed by a handler that hangs in a broadcast of its own."""
    try:
        if RANK == 1:
            raise ValueError("sample 17 has no label")
        train(1000)
    except ValueError:
        tell_everybody()
        raise


def tell_everybody() -> None:
    dist.broadcast(torch.ones(1), 1)


def handler_reduces() -> None:
    """The handler calls what the others call as well: sizes differ."""
    try:
        if RANK == 1:
            raise ValueError("sample 17 has no label")
        train(1000)
    except ValueError:
        dist.all_reduce(torch.ones(1))
        raise


def finally_waits() -> None:
    """The way out of an exception leads into a wait for a thread; nothing is printed before that ends."""
    try:
        if RANK == 1:
            raise ValueError("sample 17 has no label")
        train(1000)
    finally:
        if RANK == 1:
            close_writer()


def close_writer() -> None:
    wait_for_ever()


# -- planned ends ---------------------------------------------------------------------------------------------------


def long() -> None:
    train(100_000)


def saves_on_sigterm() -> None:
    """Rank 0 saves for a while when it is told to end; the others end at once."""
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    while not told.is_set():
        try:
            train(1)
        except RuntimeError:
            if not told.wait(5):
                raise
    if RANK == 0:
        save_checkpoint(float(os.environ.get("SAVE_S", "8")))
    os._exit(0)


def save_checkpoint(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.2)


def requeues_on_sigusr1() -> None:
    """slurm's --signal=USR1: all ranks agree to end, rank 0 saves, all leave with code 0."""
    told = threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: told.set())
    while True:
        flag = torch.tensor([1.0 if told.is_set() else 0.0])
        dist.all_reduce(flag)
        if flag.item():
            break
        time.sleep(0.05)
    if RANK == 0:
        save_checkpoint(float(os.environ.get("SAVE_S", "8")))
    else:
        sys.exit(0)


def staggered() -> None:
    """sys.exit(0) on all ranks, some seconds apart, with a slow atexit on the last one."""
    dist.destroy_process_group()
    if RANK == WORLD - 1:
        atexit.register(time.sleep, 7)
    time.sleep(2 * RANK)
    sys.exit(0)


def interrupted() -> None:
    """KeyboardInterrupt in every rank, as Ctrl-C in a terminal gives it."""
    train(20)
    os.kill(os.getpid(), signal.SIGINT)
    train(1000)


def ends_by_limit() -> None:
    """A time limit of the job's own: every rank leaves with a code that asks the scheduler for another go."""
    train(20)
    sys.exit(85)


def refuses_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    train(100_000)


# -- restarts -------------------------------------------------------------------------------------------------------


def crashes_once() -> None:
    if RANK == 1 and ATTEMPT == 0:
        raise ValueError("sample 17 has no label")
    train(20)


def crashes_always() -> None:
    if RANK == 1:
        raise ValueError("sample 17 has no label")
    train(1000)


def hangs_in_every_attempt() -> None:
    """Rank 1 is late in each attempt; in the first one torchrun restarts because of rank 0."""
    if ATTEMPT == 0 and RANK == 0:
        time.sleep(9)
        raise ValueError("first attempt")
    if RANK == 1 and ATTEMPT == 1:
        time.sleep(100_000)
    train(1000)


BEFORE_TORCH = {"import_slowly": import_slowly}
BEFORE = {
    each.__name__: each
    for each in (
        leaves_before_join, raises_before_join, world_too_large, world_too_large_by_argument, wrong_address, same_rank_twice,
    )
}  # fmt: skip


def train(steps: int = STEPS) -> None:
    for _ in range(steps):
        dist.all_reduce(torch.ones(100))
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--timeout", type=float, default=600.0)
    options = parser.parse_args()
    BEFORE_TORCH.get(options.kind, lambda: None)()
    global torch, dist
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    BEFORE.get(options.kind, lambda: None)()
    arguments = {"world_size": WORLD + 1, "rank": RANK} if options.kind == "world_too_large_by_argument" else {}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout), **arguments)
    train()
    say("trains")
    if options.kind not in BEFORE and options.kind not in BEFORE_TORCH:
        globals()[options.kind]()
    if dist.is_initialized():
        dist.destroy_process_group()


main()
