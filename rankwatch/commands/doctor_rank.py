"""One real rank for `rankwatch doctor`: joins a gloo world of one, compiles, steps, says "ready" and waits for the end of its input.

Run in the job's interpreter with the agent injected, so that every hook meets the torch that the user has.
"""

from __future__ import annotations

import sys


def main(store: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    torch.compile(layer, backend="eager")(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    dist.all_reduce(torch.ones(1))
    try:
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else ""
    except Exception as error:
        device = f"error: {error}"
    print(f"ready {device}", flush=True)
    sys.stdin.read()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
