"""torch.compile: live phases (`thread_N` records), totals (`compile` record), and events.

`compile` record, since the start of the process:
  requested   {count, disabled, first_at, backends}: calls of torch.compile by the user's code, and those that are switched off where they are made
  stance      torch.compiler.set_stance in force, "" for the default; disabled: what switches torch.compile off, "" when nothing does;
              suppress_errors: true when failures fall back to Python, else absent
  frames      compiles of frames (forward), library: those of torch's and the standard library's that gave no operations, of which no event
              tells; backward, runtime (autotuning, CUDA graphs)
  recompiles  frames compiled again; last_reason: the newest reason; failures: compiles that raised; skipped: frames that Dynamo
              leaves to Python; graphs: compiles that gave a graph with operations; kernels_done: kernels waited for; kernels_pending: that compile workers
              have still to do; configs_tried, tunings: configurations and choices benchmarked, and how often; jit_kernels: of the user's own Triton code
  graph_breaks, last_break; limit_hits, limited: frames that run eagerly now because of the recompile limit (latched); limit: recompile_limit
  seconds     {dynamo, aot, inductor, triton, autotune}, each without the ones inside it, so that their sum is the time spent compiling
  phases      {wire.phases.PHASES: own seconds}, also of the compile that runs now
  cache       {fx|aot: {hit|miss|bypass|disabled: n}}
  by_frame    {frame: [compiles, seconds, fingerprint, cache_size]} of the frames that took longest; fingerprint is a rolling hash of the graphs'
              shape; cache_size: the most compiled versions that the frame had before one of its compiles
  last        the newest compile: {compile_id, frame, kind, seconds, ok, recompile_reason, wall_ns}
  texts_dropped: full texts that were too many to send

Events: compile_end, recompile_limit, graph_break, text.

Sources (torch 2.9-2.14, torch/_dynamo/utils.py): record_chromium_event_internal is called at start and end of each timed region and what it
raises breaks the user's compile; log_compilation_event once per finished compile, inside a handler that swallows.
"""

from __future__ import annotations

from rankwatch.agent import compat
from rankwatch.agent.compiling.asked import Asked
from rankwatch.agent.compiling.finished import Compiles
from rankwatch.agent.compiling.tuning import TRITON_MODULES
from rankwatch.agent.compiling.work import TARGETS
from rankwatch.agent.when_imported import when_imported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank

_compiles: Compiles | None = None
_reasons: list[str] = []


def arm(rank: Rank, probe: Probe, module: Any) -> None:
    """Hook one of boot.PROBES' modules: torch._dynamo.utils, which all else needs, comes first."""
    global _compiles
    if not probe.on:
        return
    name = getattr(module, "__name__", "")
    if name in TARGETS:
        if _compiles is not None:
            _reasons.extend(_compiles.work.hook(module, name))
    elif name == "torch._dynamo.eval_frame":
        if _compiles is not None:
            _reasons.extend(_hook_requests(_compiles.asked, module))
    else:
        _compiles = Compiles(rank, probe, module)
        _reasons[:] = hook_utils(_compiles, module)
        rank.on_claim.append(_compiles.write)
        rank.on_beat.append(_compiles.beat)
        rank.on_exit.append(_compiles.last_words)
        _compiles.write()
        for awaited in TRITON_MODULES:
            when_imported(awaited, lambda triton: arm(rank, probe, triton))
        if len(_reasons) == 3:
            probe.report("missing", "; ".join(_reasons))
            return
    off = _compiles.asked.disabled() if _compiles is not None else ""
    probe.report("armed", "; ".join(_reasons) or (f"torch.compile is switched off: {off}" if off else ""))


def hook_utils(compiles: Compiles, utils: Any) -> list[str]:
    """Replace the hooks in torch._dynamo.utils, where its own code looks them up by name. Gives the reasons of those that are not there."""
    reasons = []
    for target, wrap in ((compat.CHROMIUM_EVENT, compiles.live.wrap_event), (compat.COMPILATION_EVENT, compiles.wrap_finished)):
        function, reason = target.find(utils)
        if function is None:
            reasons.append(reason)
        else:
            setattr(utils, target.path, wrap(function))
    log_instant, reason = compat.INSTANT_EVENT.find(utils)
    if log_instant is None:
        reasons.append(reason)
    else:
        utils.ChromiumEventLogger.log_instant_event = compiles.wrap_instant(log_instant)
    return reasons


def _hook_requests(asked: Asked, eval_frame: Any) -> list[str]:
    optimize, reason = compat.OPTIMIZE.find(eval_frame)
    if optimize is None:
        return [reason]
    eval_frame._optimize = asked.wrap(optimize)
    return []
