"""What is tried and compiled for Triton, in and after a compile: choices compiled ahead, configurations tried, kernels of the user's own.

Inductor (torch 2.9-2.14): select_algorithm waits for the choices of max-autotune, compiled ahead, through its global `as_completed`; a kernel's
coordinate descent, mostly at its first launch, when the compile has long ended, calls one method a configuration; where a configuration is compiled in
this process, CachingAutotuner._precompile_config does it. Triton (3.5-3.6): Autotuner calls prune_configs once before it tunes, then _bench for each
configuration; JITFunction._do_compile is called for a kernel that is in no cache. These are shown as compiles of kind `runtime`. The hooks in
triton.knobs have one place each, which stays the user's: methods are wrapped instead. None of this runs at a launch of a kernel that is ready.
"""

from __future__ import annotations

from threading import get_ident

from rankwatch.agent import compat
from rankwatch.agent.compiling.names import frame_name
from rankwatch.agent.guard import guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from rankwatch.agent.compiling.regions import Regions
    from rankwatch.agent.guard import Probe
    from rankwatch.agent.threads import LiveThreads

TARGETS = {
    "torch._inductor.select_algorithm": (compat.PRECOMPILED,),
    "torch._inductor.runtime.coordinate_descent_tuner": (compat.DESCENT, compat.DESCENT_CALL),
    "torch._inductor.runtime.triton_heuristics": (compat.PRECOMPILE_CONFIG,),
    "triton.runtime.autotuner": (compat.TRITON_PRUNE, compat.TRITON_BENCH),
    "triton.runtime.jit": (compat.TRITON_COMPILE,),
}
TRITON_MODULES = ("triton.runtime.autotuner", "triton.runtime.jit")
TUNES, COMPILES, PRECOMPILES = "triton_autotune", "triton_jit", "triton_jit.precompile_config"


class Tuning:
    """Wraps what counts. tried: configurations and choices benchmarked; tunings: that were finished; jit_kernels: the user's, compiled when first launched."""

    def __init__(self, probe: Probe, threads: LiveThreads, regions: Regions) -> None:
        self._threads, self._regions = threads, regions
        self.tried = self.tunings = self.jit_kernels = 0
        self._open: dict[int, list[Any]] = {}  # thread -> [what is tuned, done, total or 0, detail before, begun]
        guard = guarded(probe)
        self._start, self._one_more, self._stop = guard(self._start), guard(self._one_more), guard(self._stop)  # type: ignore[method-assign]
        self._progress, self._pruned = guard(self._progress), guard(self._pruned)  # type: ignore[method-assign]
        self._enter, self._leave, self._step = guard(self._enter), guard(self._leave), guard(self._step)  # type: ignore[method-assign]

    def hook(self, module: Any, name: str) -> list[str]:
        """Wrap what module `name` of TARGETS has; gives the reasons of what is not there."""
        reasons = []
        for target in TARGETS[name]:
            function, reason = target.find(module)
            if function is None:
                reasons.append(reason)
                continue
            holder_name, _, method = target.path.rpartition(".")
            wrapped = self._wraps()[target](function)
            wrapped.__wrapped__ = function
            setattr(getattr(module, holder_name) if holder_name else module, method, wrapped)
        return reasons

    def _wraps(self) -> dict[compat.Target, Callable[[Any], Any]]:
        return {
            compat.PRECOMPILED: self.wrap_as_completed,
            compat.DESCENT: self.wrap_descent,
            compat.DESCENT_CALL: self.wrap_descent_call,
            compat.PRECOMPILE_CONFIG: self.wrap_precompile,
            compat.TRITON_PRUNE: self.wrap_prune,
            compat.TRITON_BENCH: self.wrap_bench,
            compat.TRITON_COMPILE: self.wrap_compile,
        }

    # -- inductor

    def wrap_as_completed(self, as_completed: Any) -> Any:
        def counted(fs: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            done, total = 0, len(fs) if hasattr(fs, "__len__") else 0
            before = self._progress(f"precompile 0/{total}")
            try:
                for future in as_completed(fs, *args, **kwargs):
                    done += 1
                    self._progress(f"precompile {done}/{total}")
                    yield future
            finally:
                self._progress(before or "")

        return counted

    def wrap_descent(self, autotune: Any) -> Any:
        def descend(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            self._start(tuner, 0)
            try:
                return autotune(tuner, *args, **kwargs)
            finally:
                self._stop()

        return descend

    def wrap_descent_call(self, call_func: Any) -> Any:
        def call(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            self._step(tuner)
            return call_func(tuner, *args, **kwargs)

        return call

    def wrap_precompile(self, precompile_config: Any) -> Any:
        def precompile(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            entered = self._enter(PRECOMPILES, tuner, True)
            try:
                return precompile_config(tuner, *args, **kwargs)
            finally:
                if entered:
                    self._leave(PRECOMPILES)

        return precompile

    # -- Triton's own

    def wrap_prune(self, prune_configs: Any) -> Any:
        def prune(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            configs = prune_configs(tuner, *args, **kwargs)
            self._pruned(tuner, configs)
            return configs

        return prune

    def wrap_bench(self, bench: Any) -> Any:
        def bench_one(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            self._one_more(tuner)
            finished = False
            try:
                timing = bench(tuner, *args, **kwargs)
                finished = True
                return timing
            finally:
                self._stop(not finished)

        return bench_one

    def wrap_compile(self, do_compile: Any) -> Any:
        def compile_one(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            entered = self._enter(COMPILES, kernel, False)
            try:
                return do_compile(kernel, *args, **kwargs)
            finally:
                if entered:
                    self._leave(COMPILES)

        return compile_one

    # -- in the hooks

    def _progress(self, detail: str) -> str:
        return self._threads.progress(detail)

    def _enter(self, name: str, kernel: Any, only_here: bool) -> bool:
        """only_here: not on the threads of a pool, whose work another thread waits for."""
        live = self._threads.here()
        if only_here and not live.regions and not live.is_main:
            return False
        self.jit_kernels += name == COMPILES
        self._regions.begin(name, _kernel_frame(kernel))
        return True

    def _leave(self, name: str) -> None:
        self._regions.end(name)

    def _pruned(self, tuner: Any, configs: Any) -> None:
        """Triton is about to try these, unless its cache on disk knows the best one."""
        self._open[get_ident()] = [tuner, 0, len(configs), "", False]

    def _start(self, tuner: Any, total: int) -> None:
        self._open[get_ident()] = [tuner, 0, total, self._threads.progress(_tried(tuner, 0, total)), False]

    def _step(self, tuner: Any) -> None:
        """A coordinate descent is about to try one more; how many there will be nobody knows."""
        opened = self._open.get(get_ident())
        if opened is not None and opened[0] is tuner:
            self.tried += 1
            opened[1] += 1
            self._threads.progress(_tried(tuner, opened[1], 0))

    def _one_more(self, tuner: Any) -> None:
        """Triton is about to try one more configuration: those before are done."""
        self.tried += 1
        opened = self._open.get(get_ident())
        if opened is None or opened[0] is not tuner:
            opened = self._open[get_ident()] = [tuner, 0, 1, "", False]
        if not opened[4]:
            opened[4] = True
            self._regions.begin(TUNES, _kernel_frame(tuner))
            opened[3] = self._threads.here().detail
        self._threads.progress(_tried(tuner, opened[1], opened[2]))
        opened[1] += 1

    def _stop(self, at_once: bool = True) -> None:
        """A configuration was tried; the tuning ends with the last one or, at_once, with this."""
        opened = self._open.get(get_ident())
        if opened is None or (not at_once and opened[1] < opened[2]):
            return
        del self._open[get_ident()]
        self.tunings += 1
        self._threads.progress(opened[3])
        if opened[4]:
            self._regions.end(TUNES)


def _tried(tuner: Any, done: int, total: int) -> str:
    if total:
        return f"autotune {done}/{total}"
    name = getattr(tuner, "name", "")
    return f"tune {name}: {done} tried" if name and name != "unknown" else f"tune: {done} tried"


def _kernel_frame(kernel: Any) -> str:
    """`add_kernel@ops.py:12` of a Triton function or what holds one."""
    for _ in range(4):
        code = getattr(getattr(kernel, "base_fn", kernel), "__code__", None)
        if code is not None:
            return frame_name(code.co_name, code.co_filename, code.co_firstlineno)
        kernel = getattr(kernel, "fn", None)
    return ""
