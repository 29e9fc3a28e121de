"""Rank 0 writes a checkpoint to storage that takes a few megabytes, stops dead for 35 s, and goes on.

The storage is a FIFO whose reader pauses: rank 0's write() blocks in the kernel, without CPU, bytes or a new line for all that time. The group's
timeout is 120 s: a rank that does nothing anywhere else would be stuck after 24 s.
"""

import os
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from control import begin, finish, truth

STALL_AFTER_BYTES, STALL_S = 6 << 20, 35.0


def storage(path: str) -> None:
    """The far end: not a thread of the rank, so that nothing of it counts as the rank's own work."""
    taken = 0
    with open(path, "rb", buffering=0) as fifo:
        while piece := fifo.read(65536):
            before, taken = taken, taken + len(piece)
            if before < STALL_AFTER_BYTES <= taken:
                time.sleep(STALL_S)


def save_checkpoint(path: str) -> None:
    with open(path, "wb") as file:
        torch.save({"w": torch.ones(4 << 20)}, file)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="storage_stall_") as folder:
        path = os.path.join(folder, "checkpoint")
        os.mkfifo(path)
        rank = begin(timeout_s=120)
        shared = [path]
        dist.broadcast_object_list(shared, 0)
        far_end = threading.Thread(target=storage, args=(shared[0],), daemon=True) if rank == 1 else None
        if far_end is not None:
            far_end.start()
        if rank == 0:
            truth("save begins")
            save_checkpoint(path)
            truth("save ends")
        dist.barrier()
        finish()


main()
