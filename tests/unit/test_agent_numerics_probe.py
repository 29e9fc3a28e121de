"""The numerics probe with stand-ins for torch: which step a number belongs to, what is judged, and that a hook breaks nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_fakes import FakeRank

import rankwatch
from rankwatch.agent import public, replicas
from rankwatch.agent.guard import ERROR_LIMIT, Probe
from rankwatch.agent.probes import numerics

CPU = SimpleNamespace(type="cpu")
NAN = float("nan")


class Tensor:
    """Some numbers on a device."""

    requires_grad = True

    def __init__(self, *values: float, device: Any = CPU) -> None:
        self.values, self.device = list(values), device

    def numel(self) -> int:
        return len(self.values)

    def detach(self) -> Tensor:
        return self

    def reshape(self, *_shape: Any) -> Tensor:
        return self

    def to(self, _dtype: Any) -> Tensor:
        return self

    def tolist(self) -> list[float]:
        return self.values


class Job:
    """A rank whose optimizers step; gradients and parameters are what the test says they are."""

    def __init__(self, folder: Path, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiling = False
        torch = SimpleNamespace(
            Tensor=Tensor,
            nn=SimpleNamespace(Parameter=type("Parameter", (Tensor,), {})),
            float32=None,
            stack=lambda tensors: Tensor(*(value for tensor in tensors for value in tensor.values)),
            compiler=SimpleNamespace(is_compiling=lambda: self.compiling),
            distributed=SimpleNamespace(get_process_group_ranks=lambda _group: [0, 1]),
        )
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr(numerics, "WRITE_EVERY_NS", 0)
        self.gradient: float | Exception = 1.5
        monkeypatch.setattr(numerics, "gradient_norm", self._gradient_norm)
        monkeypatch.setattr(numerics, "checksums", lambda _torch, tensors: Tensor(*(int(t.values[0]) for t in tensors), *(0 for _ in tensors)))
        self.fake = FakeRank(folder)
        self.probe = Probe("numerics", lambda: None)
        self.probe.report("armed")
        self.numerics = numerics.Numerics(self.fake.rank, self.probe, every)
        self.parameter = Tensor(7)
        self.optimizer = self.make_optimizer()
        self.step = self.numerics.hook()
        self.log_loss = self.numerics.loss_hook()

    def _gradient_norm(self, _torch: Any, _optimizer: Any, _device: Any) -> Tensor:
        if isinstance(self.gradient, Exception):
            raise self.gradient
        return Tensor(self.gradient)

    def make_optimizer(self, **more: Any) -> Any:
        return SimpleNamespace(param_groups=[{"params": [self.parameter]}], **more)

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.step(self.optimizer, (), {})

    @property
    def record(self) -> dict[str, Any]:
        return self.fake.record("numerics")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, 5, monkeypatch)


def test_on_a_cpu_gradients_are_looked_at_every_fifth_step(job: Job) -> None:
    job.steps(9)
    job.gradient = NAN
    job.steps(8)
    grad = job.record["grad"]
    assert (grad["checks"], grad["bad"], grad["bad_step"], grad["bad_value"], grad["good_step"], grad["value"]) == (3, 2, 10, "nan", 5, 1.5)


def test_what_clip_grad_norm_returned_is_free_and_seen_at_every_step(job: Job) -> None:
    norms = iter([1.0, 2.0, float("inf"), NAN])
    clip = job.numerics.wrap_clip(lambda _parameters, _max_norm: Tensor(next(norms)))
    for _ in range(4):
        assert isinstance(clip([], 1.0), Tensor)
        job.steps()
    assert job.record["grad"] == {
        "checks": 4, "step": 4, "value": 2.0, "bad": 2, "bad_step": 3, "bad_value": "inf", "good_step": 2, "by": "clip",
    }  # fmt: skip


def test_a_step_that_the_scaler_or_the_script_skips_is_no_news(job: Job) -> None:
    clip = job.numerics.wrap_clip(lambda _parameters, _max_norm: Tensor(float("inf")))
    clip([], 1.0)  # and the optimizer is not called
    job.optimizer = job.make_optimizer(found_inf=Tensor(1.0))  # GradScaler leaves the skipping to a fused optimizer
    job.steps(10)
    assert job.record["grad"]["checks"] == 0


def test_clipping_inside_a_compiled_frame_is_torchs_own_business(job: Job) -> None:
    clip = job.numerics.wrap_clip(lambda _parameters, _max_norm: Tensor(NAN))
    job.compiling = True
    clip([], 1.0)
    job.log_loss(Tensor(NAN))
    job.compiling = False
    job.steps()
    assert (job.record["grad"]["checks"], job.record["loss"]["checks"]) == (0, 0)


@pytest.mark.parametrize("after", [False, True], ids=["before the optimizer steps", "after it"])
def test_a_loss_belongs_to_the_step_under_way_wherever_the_script_logs_it(job: Job, after: bool) -> None:
    for loss in (2.0, 1.0, NAN):
        if not after:
            job.log_loss(Tensor(loss))
        job.steps()
        if after:
            job.log_loss(loss)
    loss = job.record["loss"]
    assert (loss["bad_step"], loss["good_step"], loss["value"]) == (3, 2, 1.0)


def test_what_is_no_single_number_is_no_loss(job: Job) -> None:
    job.log_loss(Tensor(NAN, NAN))
    job.log_loss(Tensor(NAN, device=SimpleNamespace(type="xpu")))
    job.steps()
    assert job.record["loss"]["checks"] == 0
    assert job.probe.errors == 0


def ddp(job: Job, parameters: list[Tensor], **more: Any) -> Any:
    group = SimpleNamespace(group_name="0", _get_sequence_number_for_group=lambda: 3 * job.numerics.step)
    named = [(f"layer{number}.weight", parameter) for number, parameter in enumerate(parameters)]

    class Module:
        module = SimpleNamespace(named_parameters=lambda: named)
        process_group = group
        require_forward_param_sync = True

    module = Module()
    module.__dict__.update(more)
    job.numerics.wrap_ddp(lambda _module, _parameters: None)(module, parameters)
    return module


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_plain", lambda _parameter: True)


@pytest.mark.usefixtures("whole")
def test_parameters_are_looked_at_in_turn_before_every_fifth_step(job: Job) -> None:
    others = [Tensor(number) for number in range(9)]
    module = ddp(job, [job.parameter, *others])
    job.steps(6)
    shown = job.record["replicas"]
    assert (shown["ranks"], shown["total"], shown["model"], shown["unsynced"]) == ("0-1", 10, 1, "")
    first, second = shown["checks"]
    assert first[:4] == [0, 3, 1, 0]  # after 0 steps, when 3 collectives had been issued
    assert first[4].split() == [f"{number:016x}" for number in (7, 0, 1, 2, 3, 4, 5, 6)]
    assert second[:4] == [5, 18, 1, 8]
    assert second[4].split() == [f"{number:016x}" for number in (7, 8)]
    assert shown["names"] == {"8": "layer8.weight", "9": "layer9.weight"}
    assert module.require_forward_param_sync


def local_sgd_hook() -> None:
    """A communication hook of the job's own."""


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"require_forward_param_sync": False}, "it steps without reducing gradients (no_sync)"),
        ({"_comm_hooks": [(local_sgd_hook, None)]}, "its gradients go through the communication hook local_sgd_hook"),
    ],
)
def test_replicas_that_may_differ_are_not_looked_at(job: Job, more: dict[str, Any], why: str) -> None:
    module = ddp(job, [job.parameter], **more)
    job.steps(11)
    assert job.record["replicas"]["unsynced"] == why
    assert job.record["replicas"]["checks"] == []
    del module


def test_a_hook_that_fails_switches_the_probe_off_and_raises_nothing(job: Job) -> None:
    job.gradient = RuntimeError("CUDA out of memory")
    job.steps(5 * ERROR_LIMIT + 20)
    assert (job.probe.status, job.probe.errors) == ("failed", ERROR_LIMIT)
    assert "CUDA out of memory" in job.probe.detail


def test_the_record_fits_with_the_longest_names(job: Job) -> None:
    """A record that had to be shortened would show sums that were cut."""
    name, digits, norms = "x" * replicas.MAX_NAME, " ".join(["f" * 16] * replicas.SAMPLE), [-1.23457e-38] * replicas.SAMPLE
    job.numerics._names = {10**5 + number: name for number in range(replicas.SAMPLE)}
    job.numerics._checks = [[10**9, 10**10, 10, 10**5, digits, norms]] * numerics.CHECKS_KEPT
    job.numerics._shown = SimpleNamespace(group="g" * 32, ranks="9" * replicas.MAX_RANKS, model=10, parameters=[0] * 10**5, unsynced="u" * 120)  # type: ignore[assignment]
    job.numerics.write()
    assert job.record["replicas"]["checks"][-1][4] == digits


def test_logging_a_loss_outside_a_run_does_nothing() -> None:
    assert public._on_loss is None
    assert rankwatch.log_loss(3.0) is None  # type: ignore[func-returns-value]
