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
    (
        "compile",
        (
            "torch._dynamo.utils",
            "torch._dynamo.eval_frame",
            "torch._inductor.async_compile",
            "torch._inductor.select_algorithm",
            "torch._inductor.runtime.triton_heuristics",
            "torch._inductor.runtime.coordinate_descent_tuner",
        ),
    ),
    ("ddp", ("torch._dynamo.backends.distributed",)),
    ("steps", ("torch.optim.optimizer",)),
    ("cudagraph", ("torch._inductor.cudagraph_utils", "torch._inductor.cudagraph_trees", "torch.cuda.graphs")),
    ("memory", ("torch.cuda",)),
)
"""Each probe and the torch modules whose import arms it; the probe's module has one function `arm(rank, probe, torch_module)`."""
MORE_PROBES: tuple[tuple[str, tuple[str, ...]], ...] = (("numerics", ("torch.optim.optimizer", "torch.nn.utils.clip_grad", "torch.nn.parallel.distributed")),)
"""The same for those that run only if asked for (`--probe`)."""

ABLATED = ("torch", "numpy", "torch.optim.optimizer", "torch._dynamo.eval_frame", "torch._dynamo.convert_frame", "torch._inductor.config")
"""The modules that `rankwatch ablate` changes, in its own runs only."""

_PR_SET_PTRACER = 0x59616D61


def start(environ: Mapping[str, str]) -> bool:
    """Hang the import hooks into this process; False where there is nothing to watch. Raises nothing that a rank could meet in practice;
    its caller swallows the rest."""
    rank = environ.get("RANK", "")
    if not rank.isdigit() or is_torch_helper(sys.orig_argv) or foreign_world(environ):
        return False
    if environ.get(env.PTRACE_OPT_IN) == "1":
        _grant_tracing(int(environ.get(env.LAUNCHER_PID, "0")))
    if env.TRACE_DIR in environ:
        _trace(int(rank))
    for probe, modules in probes(environ):
        for module in modules:
            when_imported(module, lambda torch_module, probe=probe: _arm(probe, torch_module))  # type: ignore[misc]
    if env.ABLATE_PLAN in environ:
        _ablate(environ)
    if "--multiprocessing-fork" not in sys.orig_argv:
        _leave_mark(environ)
    return True


def probes(environ: Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """PROBES, and of MORE_PROBES those that this run asks for."""
    asked = env.more_probes(environ)
    return PROBES + tuple(entry for entry in MORE_PROBES if entry[0] in asked)


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


def _ablate(environ: Mapping[str, str]) -> None:
    for module in ABLATED:
        when_imported(module, lambda torch_module: __import__("rankwatch.agent.ablate", fromlist=["arm"]).arm(torch_module, environ))


def _trace(rank: int) -> None:
    """Let torch, which is not imported yet, write its structured trace into the rank's own folder, unless the user says where."""
    import os

    if env.TORCH_TRACE in os.environ:
        return
    folder = os.path.join(os.environ[env.TRACE_DIR], env.trace_folder(rank))
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return  # torch would raise in the middle of a compile
    os.environ[env.TORCH_TRACE] = folder


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
