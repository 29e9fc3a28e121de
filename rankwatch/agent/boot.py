"""First code of the agent in a process: decides whether to watch it, hangs one light import hook, and leaves a mark in the slot.

Everything else of the agent is imported when torch is. Runs in each process that inherits RANK until one has joined the process group.
"""

from __future__ import annotations

import sys

from rankwatch.agent.when_imported import when_imported
from rankwatch.wire import env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

PROBES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("collectives", ("torch.distributed.distributed_c10d",)),
    ("compile", ("torch._dynamo.utils",)),
    ("ddp", ("torch._dynamo.backends.distributed",)),
    ("steps", ("torch.optim.optimizer",)),
    ("cudagraph", ("torch._inductor.cudagraph_utils", "torch._inductor.cudagraph_trees", "torch.cuda.graphs")),
)
"""Each probe and the torch modules whose import arms it; the probe's module has one function `arm(rank, torch_module)`."""

_PR_SET_PTRACER = 0x59616D61


def start(environ: Mapping[str, str]) -> bool:
    """Hang the import hooks into this process; False where there is nothing to watch. Raises nothing that a rank could meet in practice;
    its caller swallows the rest."""
    rank = environ.get("RANK", "")
    if not rank.isdigit() or is_torch_helper(sys.orig_argv) or foreign_world(environ):
        return False
    if environ.get(env.PTRACE_OPT_IN) == "1":
        _grant_tracing(int(environ.get(env.LAUNCHER_PID, "0")))
    for probe, modules in PROBES:
        for module in modules:
            when_imported(module, lambda torch_module, probe=probe: _arm(probe, torch_module))  # type: ignore[misc]
    if "--multiprocessing-fork" not in sys.orig_argv:
        _leave_mark(environ)
    return True


def is_torch_helper(argv: list[str]) -> bool:
    """Whether this interpreter is one of inductor's compile workers, which import torch but are no rank."""
    return any("torch/_inductor/compile_worker" in argument or argument == "torch._inductor.compile_worker" for argument in argv)


def foreign_world(environ: Mapping[str, str]) -> bool:
    """Whether RANK was changed for a world inside the rank: torchrun's own counts then no longer fit WORLD_SIZE."""
    world_size = environ.get("WORLD_SIZE", "")
    if not world_size.isdigit():
        return False
    counts = (environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"))
    return any(count.isdigit() and int(count) > int(world_size) for count in counts)


def _arm(probe: str, torch_module: Any) -> None:
    from rankwatch.agent.rank import arm

    arm(probe, torch_module)


def _leave_mark(environ: Mapping[str, str]) -> None:
    import atexit

    from rankwatch.agent.mark import leave

    mark = leave(environ)
    if mark is not None:
        atexit.register(mark.exits)


def _grant_tracing(launcher_pid: int) -> None:
    if launcher_pid <= 0:
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(launcher_pid), 0, 0, 0)
