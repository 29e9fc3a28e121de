"""The next step of torch's own troubleshooting, for what was found."""

from __future__ import annotations

from collections.abc import Sequence

from rankwatch.commands.ablation.judge import FAILS, HANGS, LAYER_FOUND, NOT_FINITE, QUIET, SLOWER, WRONG, Conclusion, Outcome
from rankwatch.commands.ablation.ladder import AOT_EAGER, DECOMP, EAGER, GIVEN, INDUCTOR

NUMBERS = (WRONG, NOT_FINITE)


def next_steps(found: Conclusion, outcome: Outcome | None, culprits: Sequence[str], bisected: bool) -> list[str]:
    """Lines for people, the most useful first. Empty where no layer was found."""
    if found.code != LAYER_FOUND or outcome is None:
        return []
    lines = []
    frame = culprits[0] if culprits else outcome.frame
    if outcome.kind == SLOWER:
        lines.append("profile it: TORCH_LOGS=recompiles,graph_breaks,perf_hints, and `rankwatch compile` for frames that compile again and again")
    elif outcome.kind == HANGS:
        lines.append("the hanging run's directory has stacks of the ranks that matter: rankwatch report <its run directory>")
    elif found.rung == EAGER:
        lines.append('Dynamo itself: TORCH_LOGS="+dynamo,guards,bytecode" on one rank; the minifier does not look below the captured graph')
    elif outcome.kind in (*NUMBERS, FAILS, QUIET):
        lines.append(_minifier(found.rung, outcome.kind))
    inductors = found.rung in (INDUCTOR, GIVEN) and "inductor" in found.layer.lower()
    if inductors and outcome.kind in NUMBERS:
        lines.append("a stale cache? run it once with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1; right numbers then mean that a cached artefact is wrong")
    if found.rung == DECOMP or inductors:
        lines.append(
            "which pass or lowering, where one process shows it: python -m torch._inductor.compiler_bisector run <a command that exits 1 when it is bad>"
        )
    if frame:
        lines.append(f"until it is mended keep that frame out: @torch.compiler.disable on {frame.partition('#')[0]}")
    elif not bisected and outcome.kind != HANGS:
        lines.append("which frame: the same command with --bisect")
    return lines


def _minifier(rung: str, kind: str) -> str:
    after = "aot" if rung == INDUCTOR else "dynamo"
    level = 4 if kind in NUMBERS else 2
    what = "compares each graph with eager in float64 and stops at the first that differs" if level == 4 else "stops at the graph that fails"
    how = {AOT_EAGER: 'with backend="aot_eager"', DECOMP: 'with backend="aot_eager_decomp_partition"'}.get(rung, "as the job is")
    return (
        f"minify the graph, {how}: TORCHDYNAMO_REPRO_AFTER={after} TORCHDYNAMO_REPRO_LEVEL={level} ({what}; run minifier_launcher.py, which it writes"
        " under torch_compile_debug/)"
    )
