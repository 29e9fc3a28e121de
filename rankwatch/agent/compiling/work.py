"""Kernels that a compile waits for and autotuning choices that it benchmarks, done of total, while it runs: `detail` of the thread's record.

Kernels: torch._inductor.async_compile makes one progress bar over all futures of a graph, disabled or not, through its global `tqdm`, and
moves it with each kernel that is there (torch 2.9-2.14). Choices: AlgorithmSelectorCache.benchmark_choices (max-autotune, in this process)
and CachingAutotuner.benchmark_all_configs (Triton, at the first run) call one method a choice. None of this runs in a training step.
"""

from __future__ import annotations

import sys

from rankwatch.agent import compat
from rankwatch.agent.compiling import tuning
from rankwatch.agent.compiling.regions import Regions
from rankwatch.agent.compiling.tuning import Tuning
from rankwatch.agent.guard import guarded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sized
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.threads import LiveThreads

TARGETS = {
    "torch._inductor.async_compile": (compat.KERNEL_PROGRESS,),
    "torch._inductor.select_algorithm": (compat.CHOICES, compat.CHOICE),
    "torch._inductor.runtime.triton_heuristics": (compat.CONFIGS, compat.CONFIG),
    **{name: () for name in tuning.TARGETS if name.startswith(("torch._inductor.runtime.coordinate", "triton."))},
}


class Work:
    """Wraps what counts; `kernels_done`: kernels that were waited for in this process. The wrapped functions behave exactly as torch's.

    spent_ns: own time of all compiles by phase, to which what runs outside of torch's regions is added.
    """

    def __init__(self, probe: Probe, threads: LiveThreads, spent_ns: list[int]) -> None:
        self._threads = threads
        self.kernels_done = self._kernels_pending = 0
        self.tuning = Tuning(probe, threads, Regions(threads, spent_ns))
        guard = guarded(probe)
        self._kernels_begin, self._kernel_done = guard(self._kernels_begin), guard(self._kernel_done)  # type: ignore[method-assign]
        self._choices_begin, self._choice, self._choices_end = guard(self._choices_begin), guard(self._choice), guard(self._choices_end)  # type: ignore[method-assign]

    def hook(self, module: Any, name: str) -> list[str]:
        """Wrap what module `name` of TARGETS has; gives the reasons of what is not there."""
        absent = self.tuning.hook(module, name) if name in tuning.TARGETS else []
        found = [target.find(module) for target in TARGETS[name]]
        reasons = [reason for _function, reason in found if reason]
        if reasons:
            return [*absent, *reasons]
        if name == "torch._inductor.async_compile":
            module.tqdm = self.wrap_progress(module.tqdm)
        elif name == "torch._inductor.select_algorithm":
            cache = module.AlgorithmSelectorCache
            if not all(isinstance(vars(cache).get(method), classmethod) for method in ("benchmark_choices", "benchmark_choice")):
                return [*absent, "AlgorithmSelectorCache benchmarks in other methods than before"]
            cache.benchmark_choices = classmethod(self._around(cache.benchmark_choices.__func__, lambda _cls, choices, *_: choices))
            cache.benchmark_choice = classmethod(self._before(cache.benchmark_choice.__func__))
        elif name == "torch._inductor.runtime.triton_heuristics":
            tuner = module.CachingAutotuner
            tuner.benchmark_all_configs = self._around(tuner.benchmark_all_configs, lambda tuner, *_: tuner.launchers)
            tuner.bench = self._before(tuner.bench)
        return absent

    def fields(self) -> dict[str, int]:
        """What the `compile` record tells of it."""
        counts = self.tuning
        return {
            "kernels_done": self.kernels_done,
            "kernels_pending": self._kernels_pending,
            "configs_tried": counts.tried,
            "tunings": counts.tunings,
            "jit_kernels": counts.jit_kernels,
        }

    def look(self) -> bool:
        """Twice a second: whether the number of kernels that compile workers have to do has changed."""
        before, self._kernels_pending = self._kernels_pending, _pending(sys.modules.get("torch._inductor.async_compile"))
        return self._kernels_pending != before

    def wrap_progress(self, make: Any) -> Any:
        """async_compile's `tqdm`."""

        def tqdm(*args: Any, **kwargs: Any) -> Any:
            bar = make(*args, **kwargs)
            self._kernels_begin(bar, kwargs.get("total"))
            return bar

        tqdm.__wrapped__ = make  # type: ignore[attr-defined]
        return tqdm

    def _kernels_begin(self, bar: Any, total: Any) -> None:
        if not isinstance(total, int) or total <= 0:
            return
        update, counted = bar.update, [0, total, self._threads.progress(f"kernels 0/{total}")]

        def update_and_count(*args: Any, **kwargs: Any) -> Any:
            self._kernel_done(counted)
            return update(*args, **kwargs)

        bar.update = update_and_count

    def _kernel_done(self, counted: list[Any]) -> None:
        counted[0] += 1
        done, total, before = counted
        self.kernels_done += 1
        self._threads.here().kernels += 1
        self._threads.progress(before if done >= total else f"kernels {done}/{total}")

    def _around(self, benchmark: Any, choices: Any) -> Any:
        def benchmark_all(*args: Any, **kwargs: Any) -> Any:
            before = self._choices_begin(choices, args, kwargs)
            try:
                return benchmark(*args, **kwargs)
            finally:
                self._choices_end(before)

        benchmark_all.__name__, benchmark_all.__wrapped__ = benchmark.__name__, benchmark  # type: ignore[attr-defined]
        return benchmark_all

    def _before(self, benchmark: Any) -> Any:
        def benchmark_one(*args: Any, **kwargs: Any) -> Any:
            self._choice()
            return benchmark(*args, **kwargs)

        benchmark_one.__name__, benchmark_one.__wrapped__ = benchmark.__name__, benchmark  # type: ignore[attr-defined]
        return benchmark_one

    def _choices_begin(self, choices: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str] | None:
        found: Sized = kwargs["choices"] if "choices" in kwargs else choices(*args)
        live = self._threads.here()
        before, live.choices = live.choices, (0, len(found))
        return before, self._threads.progress(f"autotune 0/{len(found)}")

    def _choice(self) -> None:
        """One more choice is about to be benchmarked: the ones before are done."""
        live = self._threads.here()
        if live.choices is not None and live.choices[0] < live.choices[1]:
            done, total = live.choices
            live.choices = (done + 1, total)
            self.tuning.tried += 1
            self._threads.progress(f"autotune {done}/{total}")

    def _choices_end(self, before: tuple[Any, str] | None) -> None:
        if before is not None:
            self.tuning.tunings += 1
            self._threads.here().choices = before[0]
            self._threads.progress(before[1])


def _pending(async_compile: Any) -> int:
    """Kernels that inductor's pool of compile workers has been given and has not done. Asking for the pool would start one that is not there."""
    process_pool: Any = getattr(getattr(async_compile, "AsyncCompile", None), "process_pool", None)
    if not hasattr(process_pool, "cache_info") or not process_pool.cache_info().currsize:
        return 0
    pool: Any = process_pool()
    jobs: Any = getattr(pool, "pending_futures", None) or getattr(pool, "_pending_work_items", ())
    return len(jobs)
