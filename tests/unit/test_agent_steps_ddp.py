"""Counting steps, and DDPOptimizer's splits, with stand-ins for torch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_fakes import FakeRank, Strict

import rankwatch
from rankwatch.agent import public
from rankwatch.agent.probes import ddp, steps


@pytest.fixture
def fake(tmp_path: Path) -> FakeRank:
    return FakeRank(tmp_path)


@pytest.fixture
def counted(fake: FakeRank) -> steps.Steps:
    return steps.Steps(fake.rank, fake.rank.probes["steps"])


def test_each_step_of_one_optimizer_is_a_step(fake: FakeRank, counted: steps.Steps) -> None:
    optimizer = object()
    for _ in range(3):
        counted.optimizer_stepped(optimizer)
    record = fake.record("steps")
    assert (record["count"], record["explicit"]) == (3, False)
    assert record["last_s"] >= 0
    assert record["last_mono_ns"] > 0


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        pytest.param("ABABAB", 3, id="two optimizers in turn"),
        pytest.param("AAABAAAB", 6, id="one steps more often"),
        pytest.param("ABCDABCD", 2, id="one optimizer a parameter"),
        pytest.param("AAAABBBB", 7, id="an optimizer made anew loses one"),
    ],
)
def test_a_round_of_optimizers_is_one_step(counted: steps.Steps, order: str, expected: int) -> None:
    optimizers = {name: object() for name in set(order)}
    for name in order:
        counted.optimizer_stepped(optimizers[name])
    assert counted.count == expected


def test_the_users_own_step_replaces_counting(fake: FakeRank, counted: steps.Steps) -> None:
    optimizer = object()
    counted.optimizer_stepped(optimizer)
    counted.optimizer_stepped(optimizer)
    counted.explicit_step()
    counted.optimizer_stepped(optimizer)
    record = fake.record("steps")
    assert (record["count"], record["explicit"]) == (1, True)


def test_step_outside_a_run_does_nothing() -> None:
    assert public._on_step is None
    assert rankwatch.step() is None  # type: ignore[func-returns-value]


def test_arming_registers_a_plain_function_hidden_from_dynamo(fake: FakeRank) -> None:
    """torch keeps the hidden variant as an attribute of the function, which a bound method does not take."""
    registered: list[Any] = []

    def register_optimizer_step_post_hook(hook: Any) -> None:
        registered.append(hook)

    def hide(function: Any) -> Any:
        function.__dynamo_disable = True
        return function

    module = SimpleNamespace(register_optimizer_step_post_hook=register_optimizer_step_post_hook, torch=SimpleNamespace(_disable_dynamo=hide))
    try:
        steps.arm(fake.rank, fake.rank.probes["steps"], module)
        registered[0](object(), (), {})
        rankwatch.step()
    finally:
        public._set_on_step(None)
    assert fake.record("steps")["count"] == 1
    assert fake.record("steps")["explicit"] is True


# -- DDPOptimizer


class Bucket:
    def __init__(self, size: int, *params: str) -> None:
        self.size, self.params = size, list(params)
        self.opcount_increased_to_capture_external_output = 0


class Backend:
    """torch._dynamo.backends.distributed: compile_fn makes buckets, then compiles each of them."""

    class DDPOptimizer:
        def __init__(self, bucket_bytes_cap: int, backend_compile_fn: Any, first_bucket_cap: int | None = None) -> None:
            self.first_bucket_cap, self.bucket_bytes_cap = 1000, bucket_bytes_cap
            assert self.first_bucket_cap <= bucket_bytes_cap, "First bucket should be smaller/equal to other buckets"
            self.backend_compile_fn = backend_compile_fn

        def compile_fn(self, gm: Any, example_inputs: Any, **compiler_configs: Any) -> Any:
            self.buckets = gm
            if len(gm) == 1:
                return self.backend_compile_fn(gm[0])
            compiler = Backend.SubmodCompiler()
            compiler.compile = self.backend_compile_fn
            return [compiler.compile_submod(bucket, [], {}) for bucket in gm]

    class SubmodCompiler:
        compile: Any

        def compile_submod(self, input_mod: Any, args: Any, kwargs: Any) -> Any:
            return self.compile(input_mod)


@pytest.fixture
def backend(fake: FakeRank, monkeypatch: pytest.MonkeyPatch) -> type[Backend]:
    fresh: Any = type("Fresh", (Backend,), {})
    fresh.DDPOptimizer = type("DDPOptimizer", (), dict(Backend.DDPOptimizer.__dict__))
    fresh.SubmodCompiler = type("SubmodCompiler", (), dict(Backend.SubmodCompiler.__dict__))
    monkeypatch.setattr(Backend, "SubmodCompiler", fresh.SubmodCompiler)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    ddp.arm(fake.rank, fake.rank.probes["ddp"], fresh)
    return fresh  # type: ignore[no-any-return]


BUCKETS = [Bucket(2000, "L_self_modules_a_parameters_weight_", "L_self_modules_a_parameters_bias_"), Bucket(3000, "L_self_modules_b_parameters_weight_")]


def test_a_split_is_recorded_with_its_buckets(fake: FakeRank, backend: type[Backend]) -> None:
    seen = []

    def compile_one(bucket: Bucket) -> int:
        live = fake.threads()
        seen.append((live[0]["split"], live[0]["splits"]))
        return bucket.size

    live = fake.rank.threads.here()
    live.compile_id, live.kind, live.frame = "2/0", "forward", "forward@model.py:31"
    fake.rank.threads.opens(live)
    live.regions.append(("backend_compile", 1, 0))
    assert backend.DDPOptimizer(4000, compile_one).compile_fn(BUCKETS, []) == [2000, 3000]
    assert seen == [(1, 2), (2, 2)]
    assert (fake.threads()[0]["split"], fake.threads()[0]["splits"]) == (0, 0)
    record = fake.record("ddp")
    assert (record["status"], record["compile_id"], record["frame"], record["mode"]) == ("split", "2/0", "forward@model.py:31", "ddp_optimizer")
    assert (record["splits"], record["bytes"], record["cap_bytes"], record["first_cap_bytes"]) == (2, 5000, 4000, 1000)
    assert record["buckets"][0] == {"bytes": 2000, "n_params": 2, "first_param": "a_weight", "last_param": "a_bias", "extended_ops": 0}
    assert fake.events("ddp_split")[0]["fingerprint"] == record["fingerprint"]
    assert len(record["fingerprint"]) == 12


def test_equal_splits_have_equal_fingerprints(fake: FakeRank, backend: type[Backend]) -> None:
    for gm in (BUCKETS, list(BUCKETS), BUCKETS[:1]):
        backend.DDPOptimizer(4000, lambda bucket: None).compile_fn(gm, [])
    first, second, third = [event["fingerprint"] for event in fake.events("ddp_split")]
    assert first == second != third
    assert (fake.record("ddp")["status"], fake.record("ddp")["splits"]) == ("single_bucket", 1)
    assert fake.record("ddp")["calls"] == 3


def test_a_failing_subgraph_raises_as_without_us_and_is_recorded(fake: FakeRank, backend: type[Backend]) -> None:
    def compile_one(bucket: Bucket) -> None:
        if bucket.size == 3000:
            raise RuntimeError("boom\nmore")

    with pytest.raises(RuntimeError, match="boom"):
        backend.DDPOptimizer(4000, compile_one).compile_fn(BUCKETS, [])
    record = fake.record("ddp")
    assert (record["status"], record["error"], record["failures"]) == ("failed", "in split 2 of 2: RuntimeError: boom", 1)


def test_a_bucket_cap_below_the_first_bucket_is_recorded(fake: FakeRank, backend: type[Backend]) -> None:
    with pytest.raises(AssertionError, match="First bucket"):
        backend.DDPOptimizer(bucket_bytes_cap=500, backend_compile_fn=None)
    record = fake.record("ddp")
    assert (record["status"], record["cap_bytes"], record["failures"]) == ("init_failed", 500, 1)
    assert record["error"] == "AssertionError: First bucket should be smaller/equal to other buckets"


def test_a_large_ddp_module_that_was_not_split_is_said(fake: FakeRank, backend: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = Strict(numel=lambda: 1000, element_size=lambda: 4, requires_grad=True)
    module = Strict(bucket_bytes_cap=2000, parameters=lambda: [parameter])
    active = SimpleNamespace(DistributedDataParallel=SimpleNamespace(_get_active_ddp_module=lambda: module))
    monkeypatch.setitem(sys.modules, "torch.nn.parallel.distributed", active)
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(get_optimize_ddp_mode=lambda: "python_reducer"))
    for tell in fake.rank.on_compiled:
        tell("2/0", "forward@model.py:31")
    record = fake.record("ddp")
    assert (record["status"], record["reason"], record["not_applied"]) == ("not_applied", "torch._dynamo.config.optimize_ddp gives python_reducer", 1)
    module.__dict__["bucket_bytes_cap"] = 5000
    for tell in fake.rank.on_compiled:
        tell("3/0", "forward@model.py:31")
    assert fake.record("ddp")["not_applied"] == 1


@pytest.fixture
def large_ddp(monkeypatch: pytest.MonkeyPatch) -> Strict:
    """A DDP module of 4000 bytes and a cap of 2000, whose forward runs."""
    parameter = Strict(numel=lambda: 1000, element_size=lambda: 4, requires_grad=True)
    module = Strict(bucket_bytes_cap=2000, parameters=lambda: [parameter])
    active = SimpleNamespace(DistributedDataParallel=SimpleNamespace(_get_active_ddp_module=lambda: module))
    monkeypatch.setitem(sys.modules, "torch.nn.parallel.distributed", active)
    return module


def test_a_graph_break_that_puts_the_loop_outside_is_named(fake: FakeRank, backend: type[Backend], large_ddp: Strict) -> None:
    fake.rank.last_graph_break = "model.py:40: call to print"
    for tell in fake.rank.on_skipped:
        tell("2/0", "forward@model.py:31")
    backend.DDPOptimizer(2000, lambda bucket: None).compile_fn(BUCKETS[:1], [])
    for _block in range(6):
        for tell in fake.rank.on_compiled:
            tell("3/0", "forward@block.py:5")
    skipped, _single, compiled = fake.events("ddp_split")
    assert (skipped["status"], skipped["frame"]) == ("not_applied", "forward@model.py:31")
    assert skipped["reason"] == "a graph break leaves this frame to Python (graph break at model.py:40: call to print)"
    assert compiled["reason"].endswith("graph breaks have cut the forward into frames (graph break at model.py:40: call to print)")
    assert (fake.record("ddp")["status"], fake.record("ddp")["not_applied"]) == ("not_applied", 7)


def test_a_small_frame_beside_a_split_forward_is_not_held_against_it(fake: FakeRank, backend: type[Backend], large_ddp: Strict) -> None:
    fake.rank.threads.here().compile_id = "2/0"
    backend.DDPOptimizer(2000, lambda bucket: None).compile_fn(BUCKETS, [])
    for compile_id in ("2/0", "3/0"):
        for tell in fake.rank.on_compiled:
            tell(compile_id, "forward@model.py:31")
    for tell in fake.rank.on_skipped:
        tell("4/0", "log@model.py:90")
    assert (fake.record("ddp")["status"], fake.record("ddp")["not_applied"]) == ("split", 0)


def test_splits_add_up_over_recompiles(fake: FakeRank, backend: type[Backend]) -> None:
    for _ in range(3):
        backend.DDPOptimizer(4000, lambda bucket: None).compile_fn(BUCKETS, [])
    assert [(event["calls"], event["subgraphs"], event["failures"], event["not_applied"]) for event in fake.events("ddp_split")] == [
        (1, 2, 0, 0),
        (2, 4, 0, 0),
        (3, 6, 0, 0),
    ]


def test_the_python_reducer_is_told_though_no_module_is_ever_active(fake: FakeRank, backend: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.parallel.distributed", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(get_optimize_ddp_mode=lambda: "python_reducer"))
    config = SimpleNamespace(_fuse_ddp_communication=False)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    for _ in range(3):
        for tell in fake.rank.on_compiled:
            tell("2/0", "forward@model.py:31")
        config._fuse_ddp_communication = True
    (event,) = fake.events("ddp_split")
    assert (event["status"], event["mode"], event["reason"]) == (
        "not_applied",
        "python_reducer",
        "torch._dynamo.config.optimize_ddp gives python_reducer",
    )


def test_another_mode_is_told_for_a_small_model_without_an_event(
    fake: FakeRank, backend: type[Backend], large_ddp: Strict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(get_optimize_ddp_mode=lambda: "no_optimization"))
    large_ddp.__dict__["bucket_bytes_cap"] = 5000
    for tell in fake.rank.on_compiled:
        tell("2/0", "forward@model.py:31")
    assert (fake.record("ddp")["status"], fake.record("ddp")["mode"]) == ("", "no_optimization")
    assert fake.events("ddp_split") == []


def test_many_buckets_still_make_a_whole_record(fake: FakeRank, backend: type[Backend]) -> None:
    buckets = [Bucket(1000 + n, f"L_self_modules_layer_{n}_parameters_weight_" * 3) for n in range(200)]
    backend.DDPOptimizer(4000, lambda bucket: None).compile_fn(buckets, [])
    record = fake.record("ddp")
    assert (record["status"], record["splits"]) == ("split", 200)
    assert record["buckets"][0]["bytes"] == 1000
