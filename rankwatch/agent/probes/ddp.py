"""DDPOptimizer: how a compiled DistributedDataParallel forward was split. The `ddp` record:

  status      split | single_bucket | failed | init_failed | not_applied, of the newest split; "" where another mode is in force and the model is
              smaller than a bucket
  compile_id, frame, mode (torch._dynamo.config.optimize_ddp), cap_bytes, first_cap_bytes, seconds, error, reason, wall_ns
  buckets     [{bytes, n_params, first_param, last_param, extended_ops}] in forward order, parameters as Dynamo names them;
              splits: how many there are (the list is shortened when the record is full), bytes: of all
  fingerprint 48 bits as hexadecimal over sizes and parameter counts of the buckets: equal on ranks that were split alike
  calls       forwards that were handed to DDPOptimizer, subgraphs: those they were split into, all together: recompiles cost this many compiles
  failures, not_applied: totals

Event: ddp_split, with the totals. While it compiles, the thread record says split k of n.

Sources (torch 2.9-2.14, torch/_dynamo/backends/distributed.py): `buckets` is set before the subgraphs are compiled; __init__ raises
AssertionError when bucket_cap_mb is below the first bucket's 1 MiB; an exception of a subgraph's backend goes through compile_fn. In mode
python_reducer no DDP module is ever the active one; a DDP made in that mode sets torch._inductor.config._fuse_ddp_communication.
"""

from __future__ import annotations

import hashlib
import sys
from threading import get_ident

from rankwatch.agent import compat
from rankwatch.agent.clock import clock
from rankwatch.agent.guard import guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank

_KNOWN_COMPILES = 256


def arm(rank: Rank, probe: Probe, backend: Any) -> None:
    """Wrap DDPOptimizer and SubmodCompiler of torch._dynamo.backends.distributed; their class is looked up at each compile."""
    if not probe.on:
        return
    splits = Splits(rank, probe)
    reasons = []
    for target, wrap in ((compat.DDP_INIT, splits.wrap_init), (compat.DDP_COMPILE, splits.wrap_compile), (compat.DDP_SUBMOD, splits.wrap_submod)):
        function, reason = target.find(backend)
        if function is None:
            reasons.append(reason)
        else:
            class_name, _, method = target.path.partition(".")
            setattr(getattr(backend, class_name), method, wrap(function))
    rank.on_compiled.append(splits.compiled)
    rank.on_skipped.append(splits.skipped)
    rank.on_claim.append(splits.write)
    probe.report("missing" if len(reasons) == 3 else "armed", "; ".join(reasons))


class Splits:
    """Follows every DDPOptimizer of the process; the wrapped methods behave exactly as torch's."""

    def __init__(self, rank: Rank, probe: Probe) -> None:
        self._rank = rank
        self._running: dict[int, list[Any]] = {}  # thread -> [optimizer, subgraphs begun]
        self._multi: dict[str, bool] = {}  # compile id -> it was split into more than one bucket
        self.record: dict[str, Any] = {}
        self.calls = self.failures = self.not_applied = self.subgraphs = 0
        self._was_split = False  # some forward was
        guard = guarded(probe)
        self.skipped = guard(self.skipped)  # type: ignore[method-assign]
        self._begins, self._ends, self._submod = guard(self._begins), guard(self._ends), guard(self._submod)  # type: ignore[method-assign]
        self._init_failed, self.compiled = guard(self._init_failed), guard(self.compiled)  # type: ignore[method-assign]

    def wrap_init(self, init: Any) -> Any:
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            try:
                init(optimizer, *args, **kwargs)
            except Exception as error:
                self._init_failed(args, kwargs, error)
                raise

        __init__.__wrapped__ = init  # type: ignore[attr-defined]
        return __init__

    def wrap_compile(self, compile_fn: Any) -> Any:
        def wrapped(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            started_ns = clock.now_ns()
            self._begins(optimizer)
            try:
                result = compile_fn(optimizer, *args, **kwargs)
            except BaseException as error:
                self._ends(optimizer, started_ns, error)
                raise
            self._ends(optimizer, started_ns, None)
            return result

        wrapped.__name__, wrapped.__wrapped__ = "compile_fn", compile_fn  # type: ignore[attr-defined]
        return wrapped

    def wrap_submod(self, compile_submod: Any) -> Any:
        def wrapped(compiler: Any, *args: Any, **kwargs: Any) -> Any:
            self._submod()
            return compile_submod(compiler, *args, **kwargs)

        wrapped.__name__, wrapped.__wrapped__ = "compile_submod", compile_submod  # type: ignore[attr-defined]
        return wrapped

    def compiled(self, compile_id: str, frame: str) -> None:
        """A frame of the user's was compiled. If DDP's forward runs, is larger than a bucket and was not split, say why."""
        mode = _mode()
        module = compat.active_ddp(sys.modules.get("torch.nn.parallel.distributed"))
        if module is None:
            if mode == "python_reducer" and self.record.get("mode") != mode and _python_reducer_runs():
                self._not_applied(compile_id, frame, mode, f"torch._dynamo.config.optimize_ddp gives {mode}", 0, 0)
            return
        if self._multi.pop(compile_id, False):
            return
        cap, size = _cap_and_size(module)
        if cap <= 0 or size <= cap:
            if mode != "ddp_optimizer" and not self.record:
                self.record = {"status": "", "mode": mode, "cap_bytes": cap, "wall_ns": clock.wall_ns()}
                self.write()
        elif mode != "ddp_optimizer":
            self._not_applied(compile_id, frame, mode, f"torch._dynamo.config.optimize_ddp gives {mode}", cap, size)
        elif not self._was_split:  # else this is a small frame beside the one that was split
            reason = f"this frame holds one bucket or less of {size} bytes: graph breaks have cut the forward into frames{self._last_break()}"
            self._not_applied(compile_id, frame, mode, reason, cap, size)

    def skipped(self, compile_id: str, frame: str) -> None:
        """A frame of the user's is left to Python. If DDP's forward runs and was not split before, what it calls is compiled in smaller frames."""
        module = compat.active_ddp(sys.modules.get("torch.nn.parallel.distributed"))
        if module is None or self._was_split or _mode() != "ddp_optimizer":
            return
        cap, size = _cap_and_size(module)
        if 0 < cap < size:
            self._not_applied(compile_id, frame, "ddp_optimizer", f"a graph break leaves this frame to Python{self._last_break()}", cap, size)

    def write(self) -> None:
        """Write the record as it is."""
        if self.record:
            self.record.update(self._totals())
            self._rank.slot.write_json("ddp", self.record)

    def _begins(self, optimizer: Any) -> None:
        self.calls += 1
        self._running[get_ident()] = [optimizer, 0]

    def _submod(self) -> None:
        running = self._running.get(get_ident())
        if running is not None:
            running[1] += 1
            self._rank.threads.split(running[1], len(getattr(running[0], "buckets", ())))

    def _ends(self, optimizer: Any, started_ns: int, error: BaseException | None) -> None:
        begun = (self._running.pop(get_ident(), None) or [None, 0])[1]
        live = self._rank.threads.here()
        buckets = list(getattr(optimizer, "buckets", ()))
        if len(self._multi) >= _KNOWN_COMPILES:
            self._multi.clear()
        self._multi[live.compile_id] = len(buckets) > 1
        self._was_split = self._was_split or len(buckets) > 1
        self.subgraphs += len(buckets)
        self.failures += error is not None
        status = "failed" if error is not None else "split" if len(buckets) > 1 else "single_bucket"
        self._show(
            status=status,
            compile_id=live.compile_id,
            frame=live.frame,
            mode=_mode(),
            cap_bytes=int(getattr(optimizer, "bucket_bytes_cap", 0)),
            first_cap_bytes=int(getattr(optimizer, "first_bucket_cap", 0)),
            seconds=round((clock.now_ns() - started_ns) / 1e9, 4),
            error=f"in split {begun} of {len(buckets)}: {_text(error)}" if error is not None and begun and len(buckets) > 1 else _text(error),
            **_describe(buckets),
        )
        self._rank.threads.split(0, 0)

    def _init_failed(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        self.failures += 1
        cap = kwargs.get("bucket_bytes_cap", args[0] if args else 0)
        reason = "the bucket cap is below DDPOptimizer's first bucket" if isinstance(error, AssertionError) else ""
        shared = {"compile_id": "", "frame": "", "mode": _mode(), "cap_bytes": int(cap), "first_cap_bytes": _first_cap(args, kwargs)}
        self._show(status="init_failed", **shared, reason=reason, error=_text(error), **_describe([]))

    def _not_applied(self, compile_id: str, frame: str, mode: str, reason: str, cap: int, size: int) -> None:
        """Count it; show it once a reason, not with each of many blocks."""
        self.not_applied += 1
        shown = self.record.get("status") == "not_applied" and (self.record["mode"], self.record["reason"]) == (mode, reason)
        if shown:
            self.write()
        else:
            self._show(status="not_applied", compile_id=compile_id, frame=frame, mode=mode, cap_bytes=cap, reason=reason, param_bytes=size)

    def _last_break(self) -> str:
        return f" (graph break at {self._rank.last_graph_break})" if self._rank.last_graph_break else ""

    def _totals(self) -> dict[str, int]:
        return {"calls": self.calls, "failures": self.failures, "not_applied": self.not_applied, "subgraphs": self.subgraphs}

    def _show(self, **fields: Any) -> None:
        self.record = {**fields, "wall_ns": clock.wall_ns()}
        self.write()
        self._rank.slot.event("ddp_split", **fields, **self._totals())


def _describe(buckets: list[Any]) -> dict[str, Any]:
    """Number, sizes and parameters of DDPOptimizer's buckets, in forward order."""
    sizes = [int(bucket.size) for bucket in buckets]
    counts = [len(bucket.params) for bucket in buckets]
    digest = hashlib.sha1(repr((sizes, counts)).encode(), usedforsecurity=False).hexdigest()
    return {
        "splits": len(buckets),
        "bytes": sum(sizes),
        "fingerprint": digest[:12] if buckets else "",
        "buckets": [
            {
                "bytes": size,
                "n_params": count,
                "first_param": _short(bucket.params[0]) if count else "",
                "last_param": _short(bucket.params[-1]) if count else "",
                "extended_ops": int(getattr(bucket, "opcount_increased_to_capture_external_output", 0)),
            }
            for bucket, size, count in zip(buckets, sizes, counts)  # noqa: B905 - same length
        ],
    }


def _short(parameter: str) -> str:
    """Dynamo's placeholder name without its fixed parts: L_self_modules_a_parameters_weight_ -> a.weight."""
    name = str(parameter).removeprefix("L_").removeprefix("l_").removeprefix("self_").strip("_")
    return name.replace("modules_", "").replace("parameters_", "")[-60:]


def _mode() -> str:
    """torch's name of the mode in force; "?" where it cannot be told."""
    get_mode = getattr(sys.modules.get("torch._dynamo.utils"), "get_optimize_ddp_mode", None)
    return str(get_mode()) if get_mode is not None else "?"


def _cap_and_size(module: Any) -> tuple[int, int]:
    """Bucket cap of a DistributedDataParallel module and bytes of its parameters that are trained."""
    size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return int(getattr(module, "bucket_bytes_cap", 0) or 0), size


def _python_reducer_runs() -> bool:
    """Whether a DistributedDataParallel was made in mode python_reducer."""
    return bool(getattr(sys.modules.get("torch._inductor.config"), "_fuse_ddp_communication", False))


def _first_cap(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Size of the first bucket, DDPOptimizer's third parameter; torch's default where it was not given."""
    default = getattr(sys.modules.get("torch.distributed"), "_DEFAULT_FIRST_BUCKET_BYTES", 0)
    given = kwargs.get("first_bucket_cap", args[2] if len(args) > 2 else None)
    return int(default if given is None else given)


def _text(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
