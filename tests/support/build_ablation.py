"""Runs of an ablation by hand: what ranks would have recorded, without ranks."""

from __future__ import annotations

from rankwatch.commands.ablation.judge import Run
from rankwatch.commands.ablation.records import Graph, RankRun, Step

NAMES = ("embed.weight", "block.weight", "head.bias")
FRAMES = ("first@model.py:10", "second@model.py:20")


def rank_run(rank=0, losses=(4.0, 3.0, 2.5, 2.25, 2.0), grads=(2.0, 1.0, 0.001), seconds=0.010, graphs=(), given=None, dtypes=("float32",), **more) -> RankRun:
    """One rank whose step n has losses[n-1]; its gradients are the same at every step. The first step compiles."""
    steps = [
        Step(number, loss, sum(norm * norm for norm in grads) ** 0.5, 10.0, tuple(grads), seconds * (30 if number == 1 else 1), number == 1)
        for number, loss in enumerate(losses, 1)
    ]
    found = RankRun(rank, "2.13.0+cpu", steps, list(NAMES), list(graphs), given={"inductor": 4} if given is None else given, dtypes=set(dtypes))
    for name, value in more.items():
        setattr(found, name, value)
    return found


def graphs(backend, ok=True):
    found = [Graph(frame, f"{frame}#0", 4, True, backend) for frame in FRAMES]
    return found if ok else [found[0], Graph(FRAMES[1], f"{FRAMES[1]}#0", 4, False, backend, "NotImplementedError: no lowering for aten.sin")]


def run(rung, ranks=None, exit_code=0, timed_out=False, incidents=(), wall_s=9.5, **more) -> Run:
    """more: of every rank, as `rank_run` takes it."""
    if ranks is None:
        known = {"graphs": () if rung == "off" else graphs(rung), **more}
        ranks = {rank: rank_run(rank, **known) for rank in (0, 1)}
    return Run(rung, f"/runs/ablate/rungs/{rung}", exit_code, wall_s, timed_out, ranks, incidents)


def exception(kind="torch._dynamo.exc.BackendCompilerFailed", message="", where="train.py:60:main", wall_ns=1) -> dict:
    return {"type": kind, "message": message, "where": where, "traceback": "", "wall_ns": wall_ns}
