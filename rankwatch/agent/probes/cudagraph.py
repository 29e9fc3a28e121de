"""CUDA graphs: the `cudagraph` record, since the start of the process.

  warmups     first runs of a function in a graph tree; recordings: graphs recorded there, seconds: what that took
  rerecords   recordings of a function in a place of the tree where it had one: torch's own count (num_rerecord) before 2.13; from there on torch
              counts moved parameters no more, and this does. rerecords_torch: torch's own count, null where it is not told
  eager       later runs outside a graph
  skips       functions that were not captured; skip_reasons: [{reason, at, frame, count}]
  captures    graphs captured by hand; capture_sites: [{at, via, count}], the line of the job and the function of torch that it called
  pool_bytes  reserved by private pools, null where torch does not tell (pools_reason says why); pools: {"0,1": bytes}; pool_first_bytes: after the
              first recording
  frames      {frame: {recordings, rerecords, sizes, seconds, pool_bytes, first_step, new_step, first_wall, new_wall, shape}}, see graph_frames.py
  last        the newest event

Event: cudagraph {action: warmup|record|rerecord|eager|skip|manual_capture, ...}; a record tells why: first, size, path (behind another graph), moved.

Nothing is wrapped that runs at replay. Sources (torch 2.9-2.14): torch/_inductor/cudagraph_trees.py, cudagraph_utils.py, torch/cuda/graphs.py.
"""

from __future__ import annotations

from threading import get_ident

from rankwatch.agent import compat
from rankwatch.agent.graph_counts import Counts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank


_graphs: Graphs | None = None


def arm(rank: Rank, probe: Probe, module: Any) -> None:
    """Hook one of the three modules: torch._inductor.cudagraph_trees, torch._inductor.cudagraph_utils, torch.cuda.graphs."""
    global _graphs
    if not probe.on:
        return
    if _graphs is None:
        _graphs = Graphs(rank, probe)
        rank.on_claim.append(_graphs.counts.write)
        rank.on_compiled.append(_graphs.counts.compiled)
        rank.on_beat.append(_graphs.counts.beat)
    reasons = _graphs.hook(module)
    probe.report("armed", "; ".join(reasons))


class Graphs:
    """Wraps what counts. The wrapped functions behave exactly as torch's."""

    def __init__(self, rank: Rank, probe: Probe) -> None:
        self.counts = Counts(rank, probe)
        self._reasons: list[str] = []

    def hook(self, module: Any) -> list[str]:
        """Wrap what this module has of the hooked functions; gives the reasons of all that were not there so far."""
        for target, wrap in (
            (compat.GRAPH_RECORD, self.wrap_record),
            (compat.GRAPH_EAGER, self.wrap_eager),
            (compat.GRAPH_SKIP, self.wrap_skip),
            (compat.CAPTURE_BEGIN, self.wrap_capture),
            (compat.CAPTURE_END, self.wrap_capture_end),
        ):
            if target.module != module.__name__:
                continue
            function, reason = target.find(module)
            if function is None:
                self._reasons.append(reason)
                continue
            if target is compat.GRAPH_RECORD:
                self.counts.torch_counts_all = compat.counts_moved_parameters(module)
            holder_name, _, name = target.path.rpartition(".")
            setattr(getattr(module, holder_name) if holder_name else module, name, wrap(function))
        return self._reasons

    def wrap_record(self, record_function: Any) -> Any:
        def wrapped(manager: Any, new_inputs: Any, function_id: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.counts.before(manager, new_inputs, function_id)
            thread = get_ident()
            self.counts.recording.add(thread)
            try:
                result = record_function(manager, new_inputs, function_id, *args, **kwargs)
            finally:
                self.counts.recording.discard(thread)
            if before is not None:
                self.counts.recorded(manager, function_id, *before)
            return result

        wrapped.__name__, wrapped.__wrapped__ = "record_function", record_function  # type: ignore[attr-defined]
        return wrapped

    def wrap_eager(self, run_eager: Any) -> Any:
        def wrapped(manager: Any, new_inputs: Any, function_id: Any, *args: Any, **kwargs: Any) -> Any:
            self.counts.ran_eagerly(manager, function_id)
            return run_eager(manager, new_inputs, function_id, *args, **kwargs)

        wrapped.__name__, wrapped.__wrapped__ = "run_eager", run_eager  # type: ignore[attr-defined]
        return wrapped

    def wrap_skip(self, log_skip: Any) -> Any:
        def log_cudagraph_skip_and_bump_counter(msg: str) -> Any:
            self.counts.skipped(msg)
            return log_skip(msg)

        log_cudagraph_skip_and_bump_counter.__wrapped__ = log_skip  # type: ignore[attr-defined]
        return log_cudagraph_skip_and_bump_counter

    def wrap_capture(self, capture_begin: Any) -> Any:
        def wrapped(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = capture_begin(graph, *args, **kwargs)
            self.counts.captured()  # host work only: nothing that a capturing stream could mind
            return result

        wrapped.__name__, wrapped.__wrapped__ = "capture_begin", capture_begin  # type: ignore[attr-defined]
        return wrapped

    def wrap_capture_end(self, capture_end: Any) -> Any:
        def wrapped(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return capture_end(graph, *args, **kwargs)
            finally:
                self.counts.capture_ended()

        wrapped.__name__, wrapped.__wrapped__ = "capture_end", capture_end  # type: ignore[attr-defined]
        return wrapped
