"""What is tuned and compiled for Triton is shown while it runs, also when no compile of torch's is under way; fakes raise on what they do not know."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_fakes import FakeRank, Strict
from fake_dynamo import CODE, FRAME, Torch

from rankwatch.agent import compat, guard
from rankwatch.agent.compiling import regions as regions_module
from rankwatch.agent.compiling import work as work_module
from rankwatch.agent.probes import compile as probe_module
from rankwatch.wire.phases import phase_of


@pytest.fixture
def fake(tmp_path: Path) -> FakeRank:
    return FakeRank(tmp_path)


@pytest.fixture
def torch(fake: FakeRank) -> Torch:
    return Torch(fake)


def now(fake: FakeRank) -> list[tuple[str, str, str, str]]:
    """(kind, frame, phase, detail) of each thread that compiles."""
    return [(each["kind"], each["frame"], phase_of(each["phase"]), each["detail"]) for each in fake.threads()]


def add_kernel(x: int) -> int:
    return x


KERNEL = f"add_kernel@test_agent_tuning.py:{add_kernel.__code__.co_firstlineno}"


class Autotuner(Strict):
    """Triton's, as far as it is known; `run` as of 3.6: from the second launch on nothing of it is called but the kernel."""

    def __init__(self, fake: FakeRank, configs: int) -> None:
        super().__init__(base_fn=add_kernel, fn=SimpleNamespace(fn=add_kernel), configs=list(range(configs)), cache=None, fake=fake, shown=[], fails_at=None)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[int]:
        return self.configs[:-1]

    def _bench(self, *args: Any, config: int, **meta: Any) -> int:
        self.shown.append(now(self.fake))
        if config == self.fails_at:
            raise KeyboardInterrupt
        return config

    def run(self, *args: Any, **kwargs: Any) -> int:
        if self.cache is None:
            configs = self.prune_configs(kwargs)
            self.cache = min(configs, key=lambda config: self._bench(*args, config=config))
        return int(self.cache)


@pytest.fixture
def tuner(fake: FakeRank, torch: Torch) -> Autotuner:
    tuner_class = type("Autotuner", (Autotuner,), {name: vars(Autotuner)[name] for name in ("prune_configs", "_bench")})
    module = SimpleNamespace(Autotuner=tuner_class)
    assert torch.compiles.work.hook(module, "triton.runtime.autotuner") == []
    return tuner_class(fake, 4)  # type: ignore[no-any-return]


def test_a_users_own_kernel_that_tunes_is_a_runtime_compile_with_progress(fake: FakeRank, torch: Torch, tuner: Autotuner) -> None:
    assert tuner.run(1) == 0
    assert tuner.shown == [[("runtime", KERNEL, "autotune", f"autotune {done}/3")] for done in range(3)]
    assert now(fake) == []
    torch.compiles.write()
    totals = fake.record("compile")
    assert (totals["configs_tried"], totals["tunings"]) == (3, 1)
    tuner.run(1)
    assert len(tuner.shown) == 3


def test_seconds_of_tuning_outside_of_a_compile_are_counted_as_autotune(
    fake: FakeRank, torch: Torch, tuner: Autotuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(10**12, 10**13, 10**9))
    monkeypatch.setattr(regions_module, "clock", Strict(now_ns=lambda: next(ticks)))
    tuner.run(1)
    torch.compiles.write()
    assert fake.record("compile")["phases"] == {"autotune": 1.0}


def test_a_tuning_that_is_interrupted_leaves_nothing_behind(fake: FakeRank, tuner: Autotuner) -> None:
    tuner.fails_at = 1
    with pytest.raises(KeyboardInterrupt):
        tuner.run(1)
    assert now(fake) == []
    tuner.fails_at = None
    assert tuner.run(1) == 0
    assert [shown[0][3] for shown in tuner.shown] == ["autotune 0/3", "autotune 1/3", "autotune 0/3", "autotune 1/3", "autotune 2/3"]


def test_a_tuner_whose_best_configuration_is_known_on_disk_shows_nothing(fake: FakeRank, tuner: Autotuner) -> None:
    tuner.prune_configs({})
    assert now(fake) == []


def test_a_tuning_inside_a_compile_stays_that_compile(fake: FakeRank, torch: Torch, tuner: Autotuner) -> None:
    torch._compile(CODE, inside=lambda: tuner.run(1))
    assert tuner.shown[1] == [("forward", FRAME, "autotune", "autotune 1/3")]
    assert now(fake) == [("forward", FRAME, "dynamo", "")]


def test_a_kernel_that_is_compiled_at_its_launch_is_shown(fake: FakeRank, torch: Torch) -> None:
    class JITFunction:
        fn = staticmethod(add_kernel)

        def _do_compile(self, key: str, signature: Any, warmup: bool = False) -> Any:
            return now(fake)

    torch.compiles.work.hook(SimpleNamespace(JITFunction=JITFunction), "triton.runtime.jit")
    assert JITFunction()._do_compile("k", None) == [("runtime", KERNEL, "kernel_compile", "")]
    assert now(fake) == []
    assert torch.compiles.work.fields()["jit_kernels"] == 1


def test_coordinate_descent_shows_what_it_has_tried(fake: FakeRank, torch: Torch) -> None:
    """At the first launch, long after the compile has ended; torch has a region of its own for it."""

    class CoordescTuner:
        name = "triton_red_3"

        def autotune(self, func: Any, baseline_config: int, baseline_timing: Any = None) -> list[Any]:
            return [self.call_func(func, config) for config in range(2)]

        def call_func(self, func: Any, config: int) -> Any:
            return func(config)

    assert torch.compiles.work.hook(SimpleNamespace(CoordescTuner=CoordescTuner), "torch._inductor.runtime.coordinate_descent_tuner") == []
    torch.begin("CachingAutotuner.coordinate_descent_tuning", "3/1")
    shown = CoordescTuner().autotune(lambda _config: now(fake), 0)
    torch.end("CachingAutotuner.coordinate_descent_tuning")
    assert shown == [[("runtime", "", "autotune", f"tune triton_red_3: {tried} tried")] for tried in (1, 2)]
    assert now(fake) == []
    assert CoordescTuner().call_func(lambda _config: now(fake), 0) == []  # outside of a descent nothing is shown or counted
    assert torch.compiles.work.fields() == {"kernels_done": 0, "kernels_pending": 0, "configs_tried": 2, "tunings": 1, "jit_kernels": 0}


def test_choices_compiled_ahead_are_counted_and_a_timeout_passes(fake: FakeRank, torch: Torch) -> None:
    def as_completed(fs: Any, timeout: Any = None) -> Any:
        yield from fs[:2]
        raise TimeoutError

    cache = type(
        "AlgorithmSelectorCache", (), {name: classmethod(lambda cls, choices, autotune_args: None) for name in ("benchmark_choices", "benchmark_choice")}
    )
    module = SimpleNamespace(as_completed=as_completed, AlgorithmSelectorCache=cache)
    torch.compiles.work.hook(module, "torch._inductor.select_algorithm")
    torch._compile(CODE)
    shown = [now(fake)[0][3]]
    with pytest.raises(TimeoutError):
        shown.extend(now(fake)[0][3] for _future in module.as_completed(["a", "b", "c"], timeout=3600))
    assert shown == ["", "precompile 1/3", "precompile 2/3"]
    assert now(fake)[0][3] == ""


def test_a_configuration_compiled_in_this_process_is_shown(fake: FakeRank, torch: Torch) -> None:
    class CachingAutotuner:
        launchers = ("a",)
        fn = SimpleNamespace(fn=add_kernel)

        def bench(self, launcher: str) -> None: ...

        def benchmark_all_configs(self) -> None: ...

        def _precompile_config(self, cfg: int) -> Any:
            return now(fake)

    assert torch.compiles.work.hook(SimpleNamespace(CachingAutotuner=CachingAutotuner), "torch._inductor.runtime.triton_heuristics") == []
    assert CachingAutotuner()._precompile_config(1) == [("runtime", KERNEL, "kernel_compile", "")]
    assert now(fake) == []


def test_kernels_that_workers_have_to_do_are_counted_without_starting_a_pool(monkeypatch: pytest.MonkeyPatch, fake: FakeRank, torch: Torch) -> None:
    class process_pool:
        size = 0
        cache_info = staticmethod(lambda: SimpleNamespace(currsize=process_pool.size))

        def __new__(cls) -> Any:
            assert cls.size, "asking for the pool would start it"
            return SimpleNamespace(pending_futures={1: "a", 2: "b"})

    module = SimpleNamespace(AsyncCompile=SimpleNamespace(process_pool=process_pool))
    monkeypatch.setitem(work_module.sys.modules, "torch._inductor.async_compile", module)  # type: ignore[arg-type]
    torch.compiles.beat()
    assert fake.record("compile") == {}
    process_pool.size = 1
    torch.compiles.beat()
    assert fake.record("compile")["kernels_pending"] == 2


def test_triton_is_hooked_whether_it_comes_before_dynamo_or_after(fake: FakeRank, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    awaited = {}
    monkeypatch.setattr(probe_module, "when_imported", lambda name, hook: awaited.update({name: hook}))
    monkeypatch.setattr(probe_module, "_compiles", None)
    torch.__name__ = "torch._dynamo.utils"  # type: ignore[attr-defined]
    torch.log_compilation_event = lambda metrics: None  # type: ignore[attr-defined]
    probe_module.arm(fake.rank, fake.rank.probes["compile"], torch)
    assert sorted(awaited) == ["triton.runtime.autotuner", "triton.runtime.jit"]
    awaited["triton.runtime.jit"](SimpleNamespace(__name__="triton.runtime.jit", JITFunction=SimpleNamespace(), __version__="3.9"))
    assert "triton.runtime.jit.JITFunction._do_compile is absent" in fake.record("probes")["compile"]["detail"]


def test_names_of_triton_are_no_names_of_torch() -> None:
    """`rankwatch doctor` and the check of torch's releases look at TARGETS; a machine without Triton lacks nothing."""
    assert all(target.module.startswith("triton.") for target in compat.TRITON_TARGETS)
    assert not any(target.module.startswith("triton.") for target in compat.TARGETS)


def test_a_fork_child_shows_nothing(fake: FakeRank, tuner: Autotuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.here, "pid", 0)
    assert tuner.run(1) == 0
    assert tuner.shown == [[], [], []]


def test_a_hook_that_fails_costs_the_probe_and_not_the_tuning(fake: FakeRank, tuner: Autotuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.rank.threads, "here", lambda: 1 / 0)
    assert tuner.run(1) == 0
    assert fake.record("probes")["compile"]["errors"] > 0
