"""CUDA graphs: the `cudagraph` record {warmups, recordings, rerecords, eager, skips, captures, pool_bytes, last, skip_reasons}.

warmups: first runs of a function in a graph tree; recordings: graphs recorded there, rerecords: those of a function that had one; eager:
later runs outside a graph; skips: functions that were not captured; captures: graphs captured by hand. pool_bytes: reserved by private pools,
null where torch does not tell (before 2.13). Event: cudagraph.

Nothing is wrapped that runs at replay. Reads of the device's counters happen after a recording only, never while a stream captures.
Sources (torch 2.9-2.14): torch/_inductor/cudagraph_trees.py, cudagraph_utils.py, torch/cuda/graphs.py.
"""

from __future__ import annotations

import sys
from threading import get_ident
from time import monotonic_ns

from rankwatch.agent import compat
from rankwatch.agent.guard import guarded
from rankwatch.agent.threads import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank

_POOL_PREFIX = "reserved_bytes_by_private_pools."
_POOL_SUFFIX = ".all.current"
_SKIP_REASONS = 6

_graphs: Graphs | None = None


def arm(rank: Rank, probe: Probe, module: Any) -> None:
    """Hook one of the three modules: torch._inductor.cudagraph_trees, torch._inductor.cudagraph_utils, torch.cuda.graphs."""
    global _graphs
    if not probe.on:
        return
    if _graphs is None:
        _graphs = Graphs(rank, probe)
        rank.on_claim.append(_graphs.write)
    reasons = _graphs.hook(module)
    probe.report("armed", "; ".join(reasons))


class Graphs:
    """Counts. The wrapped functions behave exactly as torch's."""

    def __init__(self, rank: Rank, probe: Probe) -> None:
        self._rank = rank
        self._recording: set[int] = set()  # threads inside a tree's recording: its captures are not by hand
        self._recorded: set[tuple[int, int]] = set()
        self._written = False
        self._reasons: list[str] = []
        self.totals: dict[str, Any] = {
            "warmups": 0,
            "recordings": 0,
            "rerecords": 0,
            "eager": 0,
            "skips": 0,
            "captures": 0,
            "pool_bytes": None,
            "last": None,
            "skip_reasons": {},
        }
        guard = guarded(probe)
        self._recorded_one, self._ran_eagerly = guard(self._recorded_one), guard(self._ran_eagerly)  # type: ignore[method-assign]
        self._skipped, self._captured = guard(self._skipped), guard(self._captured)  # type: ignore[method-assign]

    def hook(self, module: Any) -> list[str]:
        """Wrap what this module has of the hooked functions; gives the reasons of all that were not there so far."""
        for target, wrap in (
            (compat.GRAPH_RECORD, self.wrap_record),
            (compat.GRAPH_EAGER, self.wrap_eager),
            (compat.GRAPH_SKIP, self.wrap_skip),
            (compat.CAPTURE_BEGIN, self.wrap_capture),
        ):
            if target.module != module.__name__:
                continue
            function, reason = target.find(module)
            if function is None:
                self._reasons.append(reason)
                continue
            holder_name, _, name = target.path.rpartition(".")
            setattr(getattr(module, holder_name) if holder_name else module, name, wrap(function))
        return self._reasons

    def wrap_record(self, record_function: Any) -> Any:
        def wrapped(manager: Any, new_inputs: Any, function_id: Any, *args: Any, **kwargs: Any) -> Any:
            started_ns = monotonic_ns()
            thread = get_ident()
            self._recording.add(thread)
            try:
                result = record_function(manager, new_inputs, function_id, *args, **kwargs)
            finally:
                self._recording.discard(thread)
            self._recorded_one(manager, function_id, started_ns)
            return result

        wrapped.__name__, wrapped.__wrapped__ = "record_function", record_function  # type: ignore[attr-defined]
        return wrapped

    def wrap_eager(self, run_eager: Any) -> Any:
        def wrapped(manager: Any, new_inputs: Any, function_id: Any, *args: Any, **kwargs: Any) -> Any:
            self._ran_eagerly(manager, function_id)
            return run_eager(manager, new_inputs, function_id, *args, **kwargs)

        wrapped.__name__, wrapped.__wrapped__ = "run_eager", run_eager  # type: ignore[attr-defined]
        return wrapped

    def wrap_skip(self, log_skip: Any) -> Any:
        def log_cudagraph_skip_and_bump_counter(msg: str) -> Any:
            self._skipped(msg)
            return log_skip(msg)

        log_cudagraph_skip_and_bump_counter.__wrapped__ = log_skip  # type: ignore[attr-defined]
        return log_cudagraph_skip_and_bump_counter

    def wrap_capture(self, capture_begin: Any) -> Any:
        def wrapped(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = capture_begin(graph, *args, **kwargs)
            self._captured()  # host work only: nothing that a capturing stream could mind
            return result

        wrapped.__name__, wrapped.__wrapped__ = "capture_begin", capture_begin  # type: ignore[attr-defined]
        return wrapped

    def write(self) -> None:
        """Write the totals, once there is something to tell."""
        if self._written:
            self._rank.slot.write_json("cudagraph", self.totals)

    def _recorded_one(self, manager: Any, function_id: Any, started_ns: int) -> None:
        key = (id(manager), _number(function_id))
        again = key in self._recorded
        if len(self._recorded) < 4096:
            self._recorded.add(key)
        self.totals["recordings"] += 1
        self.totals["rerecords"] += again
        self.totals["pool_bytes"] = _pool_bytes(sys.modules.get("torch.cuda"))
        self._tell(
            "rerecord" if again else "record",
            compile_id=_compile_id(manager),
            fn_id=_number(function_id),
            pool=str(getattr(manager, "cuda_graphs_thread_pool", "")),
            duration_s=round((monotonic_ns() - started_ns) / 1e9, 4),
        )

    def _ran_eagerly(self, manager: Any, function_id: Any) -> None:
        if function_id in getattr(manager, "warmed_up_functions", ()):
            self.totals["eager"] += 1
            if self.totals["eager"] & (self.totals["eager"] - 1) == 0:  # this may happen every step: written at 1, 2, 4, 8, ...
                self._tell("eager", compile_id=_compile_id(manager), fn_id=_number(function_id))
        else:
            self.totals["warmups"] += 1
            self._tell("warmup", compile_id=_compile_id(manager), fn_id=_number(function_id))

    def _skipped(self, message: str) -> None:
        reason = clean(str(message), 160)
        self.totals["skips"] += 1
        reasons = self.totals["skip_reasons"]
        if reason in reasons or len(reasons) < _SKIP_REASONS:
            reasons[reason] = reasons.get(reason, 0) + 1
        self._tell("skip", reason=reason)

    def _captured(self) -> None:
        if get_ident() not in self._recording:
            self.totals["captures"] += 1
            self._tell("manual_capture")

    def _tell(self, action: str, **fields: Any) -> None:
        self._written = True
        self.totals["last"] = {"action": action, **fields}
        self.write()
        self._rank.slot.event("cudagraph", action=action, **fields)


def _compile_id(manager: Any) -> str:
    return str(getattr(manager, "compile_id", None) or "")


def _number(function_id: Any) -> int:
    """torch's FunctionID is a dataclass around `id`."""
    return int(getattr(function_id, "id", function_id))


def _pool_bytes(cuda: Any) -> int | None:
    """Bytes that private pools have reserved on the current device; None where torch does not tell. Never initialises CUDA."""
    if cuda is None or not cuda.is_initialized() or cuda.is_current_stream_capturing():
        return None
    found = [value for key, value in cuda.memory_stats().items() if key.startswith(_POOL_PREFIX) and key.endswith(_POOL_SUFFIX)]
    return sum(found) if found else None
