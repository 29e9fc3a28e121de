"""A gloo job over several nodes: `many_nodes.py KIND [--rank R] [--timeout S] [--seconds S] [--once FILE] [--restarted]`. Rank R gets into trouble after STEPS
steps, if KIND is one; with --once only if FILE is not there yet, which it then makes; with --restarted only in later attempts.

Knows nothing of rankwatch. Each rank says once that it trains. It goes on for so many seconds, or until the file in $STOP_FILE is there.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

STEPS = 10
RANK = int(os.environ["RANK"])


def train(seconds: float) -> None:
    """Every rank leaves after the same step: rank 0 says when."""
    until, going, steps = time.monotonic() + seconds, torch.ones(1), 0
    while going.item():
        dist.all_reduce(torch.ones(1000))
        over = time.monotonic() > until or os.path.exists(os.environ.get("STOP_FILE", "/nonexistent/file"))
        going.fill_(0.0 if RANK == 0 and over else 1.0)
        dist.broadcast(going, 0)
        steps += 1
        if steps == 3:
            print(f"rank {RANK} trains", flush=True)
        time.sleep(0.1)


def warm_up() -> None:
    for step in range(STEPS):
        dist.all_reduce(torch.ones(1000))
        if step == 3:
            print(f"rank {RANK} trains", flush=True)
        time.sleep(0.1)


def asleep() -> None:
    load_batch_that_never_comes()


def load_batch_that_never_comes() -> None:
    time.sleep(100_000)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def crashed() -> None:
    raise ValueError("sample 17 has no label")


def mismatch() -> None:
    dist.barrier()


def exited() -> None:
    os._exit(0)


def slow() -> None:
    """Late for eight seconds, once."""
    time.sleep(8)


FAULTS = {fault.__name__: fault for fault in (asleep, killed, stopped, crashed, mismatch, exited, slow)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*FAULTS, "trained"])
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--once", default="")
    parser.add_argument("--restarted", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    too_early = args.restarted and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if args.kind in FAULTS and not too_early and not (args.once and os.path.exists(args.once)):
        warm_up()
        if args.rank == RANK:
            if args.once:
                open(args.once, "x").close()
            print(f"rank {RANK} is {args.kind} at {time.time():.3f}", flush=True)
            FAULTS[args.kind]()
    train(args.seconds)
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
