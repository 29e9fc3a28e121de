"""GPU memory of a rank, with stand-ins for torch.cuda that raise on what the probe may not call: when it is read, what is kept, what an OOM leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_fakes import FakeRank, Strict

from rankwatch.agent.guard import here
from rankwatch.agent.probes import memory
from rankwatch.agent.probes.steps import Steps

GIB = 1 << 30
S = 1_000_000_000


def stat(current: int, peak: int = 0) -> dict[str, dict[str, int]]:
    return {"all": {"current": current, "peak": peak or current, "allocated": 0, "freed": 0}, "small_pool": {}, "large_pool": {}}


def stats(allocated: int = 12, reserved: int = 16, **more: Any) -> dict[str, Any]:
    return {
        "allocated_bytes": stat(allocated * GIB, 14 * GIB),
        "reserved_bytes": stat(reserved * GIB),
        "active_bytes": stat(allocated * GIB),
        "inactive_split_bytes": stat(1 * GIB),
        "num_alloc_retries": 0,
        "num_ooms": 0,
        **more,
    }


class FakeCuda:
    """torch.cuda of a build with CUDA. The job initialises it; a look before that, or during a capture, is a mistake."""

    def __init__(self, **bindings: Any) -> None:
        self.initialized = self.capturing = False
        self.looks: list[int] = []
        self.stats: Callable[[int], Any] = lambda device: stats()
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self._waiting: list[Callable[[], None]] = []
        known = {"_cuda_memoryStats": self._memory_stats, "_cuda_getDevice": self._device, "_cuda_attach_out_of_memory_observer": self._attach}
        self.module = Strict(
            __name__="torch.cuda",
            torch=Strict(_C=SimpleNamespace(**{**known, **bindings})),
            is_initialized=lambda: self.initialized,
            is_current_stream_capturing=self._capturing,
            _lazy_call=self._lazy_call,
        )

    def initialise(self) -> None:
        self.initialized = True
        for call in self._waiting:
            call()

    def _lazy_call(self, call: Callable[[], None]) -> None:
        (call() if self.initialized else self._waiting.append(call))

    def _memory_stats(self, device: int) -> Any:
        assert self.initialized
        assert not self.capturing
        self.looks.append(device)
        return self.stats(device)

    def _device(self) -> int:
        assert self.initialized
        return 3

    def _capturing(self) -> bool:
        assert self.initialized, "the question would initialise CUDA"
        return self.capturing

    def _attach(self, observer: Callable[[int, int, int, int], None]) -> None:
        assert self.initialized, "it would initialise CUDA"
        self.observers.append(observer)


class Armed:
    def __init__(self, folder: Path, cuda: FakeCuda) -> None:
        self.fake = FakeRank(folder)
        self.cuda = cuda
        self.probe = self.fake.rank.probes["memory"]
        memory.arm(self.fake.rank, self.probe, cuda.module)

    def step(self, at_s: float) -> None:
        for look in self.fake.rank.on_step:
            look(int(at_s * S))

    @property
    def record(self) -> dict[str, Any]:
        return self.fake.record("memory")


@pytest.fixture(autouse=True)
def nothing_armed(monkeypatch):
    monkeypatch.setattr(memory, "_memory", None)


@pytest.fixture
def armed(tmp_path: Path) -> Armed:
    return Armed(tmp_path, FakeCuda())


def test_nothing_is_read_before_the_job_has_initialised_cuda(armed: Armed) -> None:
    armed.step(1)
    armed.step(60)
    assert (armed.cuda.looks, armed.cuda.observers, armed.record) == ([], [], {})
    assert (armed.probe.status, armed.probe.detail) == ("armed", "")


def test_a_step_reads_the_steppers_device_every_ten_seconds(armed: Armed) -> None:
    armed.cuda.initialise()
    for at_s in range(100, 125):
        armed.step(at_s)
    assert armed.cuda.looks == [3, 3, 3]
    record = armed.record
    assert record.pop("read_us") >= 0
    assert record == {
        "device": 3, "allocated": 12 * GIB, "reserved": 16 * GIB, "active": 12 * GIB, "inactive_split": GIB, "peak_allocated": 14 * GIB,
        "peak_reserved": 16 * GIB, "pools": None, "retries": 0, "ooms": 0, "oom": None,
    }  # fmt: skip


def test_no_heartbeat_reads(armed: Armed) -> None:
    """The allocator's lock is taken with the GIL held: a timer's thread could hold it for ever behind a hung cudaMalloc."""
    assert armed.fake.rank.on_beat == []


def test_the_steps_probe_hands_its_steps_on(armed: Armed) -> None:
    armed.cuda.initialise()
    steps = Steps(armed.fake.rank, armed.fake.rank.probes["steps"])
    steps.optimizer_stepped(object())
    assert armed.cuda.looks == [3]


def test_a_capture_is_left_alone_and_the_next_look_comes_soon(armed: Armed) -> None:
    armed.cuda.initialise()
    armed.cuda.capturing = True
    armed.step(100)
    armed.cuda.capturing = False
    armed.step(100.5)
    assert armed.cuda.looks == []
    armed.step(101.5)
    assert armed.cuda.looks == [3]


def test_a_look_that_costs_much_is_taken_rarely(armed: Armed, monkeypatch) -> None:
    monkeypatch.setattr(memory.clock, "now_ns", lambda: 20_000_000 * len(armed.cuda.looks))  # 20 ms a look
    armed.cuda.initialise()
    for at_s in range(100, 180):
        armed.step(at_s)
    assert len(armed.cuda.looks) == 2


def test_private_pools_are_told_one_by_one_and_the_small_ones_together(armed: Armed) -> None:
    pools = {(0, n): stat(n * GIB) for n in range(1, 31)}
    armed.cuda.stats = lambda device: stats(reserved_bytes_by_private_pools=pools)
    armed.cuda.initialise()
    armed.step(100)
    shown = armed.record["pools"]
    assert (len(shown), shown["0_30"], shown["0_7"], shown["others"]) == (25, 30 * GIB, 7 * GIB, 21 * GIB)


def test_a_failed_allocation_leaves_what_held_the_memory(armed: Armed) -> None:
    armed.cuda.initialise()
    armed.cuda.stats = lambda device: stats(130, 134, num_ooms=1, num_alloc_retries=4)
    armed.cuda.observers[0](1, 2 * GIB, 139 * GIB, GIB // 2)
    oom = armed.record["oom"]
    assert oom["wall_ns"] > 0
    assert oom["where"].startswith("test_agent_memory_probe.py:")
    assert {name: oom[name] for name in ("device", "tried", "total", "free", "allocated", "reserved")} == {
        "device": 1, "tried": 2 * GIB, "total": 139 * GIB, "free": GIB // 2, "allocated": 130 * GIB, "reserved": 134 * GIB,
    }  # fmt: skip
    assert (armed.record["ooms"], armed.record["retries"], armed.cuda.looks) == (1, 4, [1])
    assert [(event["tried"], event["ooms"]) for event in armed.fake.events("cuda_oom")] == [(2 * GIB, 1)]


def test_a_step_after_it_keeps_what_was_seen(armed: Armed) -> None:
    armed.cuda.initialise()
    armed.cuda.observers[0](1, 2 * GIB, 139 * GIB, 0)
    armed.step(100)
    assert (armed.record["device"], armed.record["oom"]["tried"], armed.record["ooms"]) == (3, 2 * GIB, 1)


def test_a_loop_that_retries_is_not_slowed(armed: Armed, monkeypatch) -> None:
    now_ns = [S]
    monkeypatch.setattr(memory.clock, "now_ns", lambda: now_ns[0])
    armed.cuda.initialise()
    for _ in range(1000):
        now_ns[0] += S // 1000
        armed.cuda.observers[0](0, GIB, 139 * GIB, 0)
    assert len(armed.cuda.looks) == 1
    now_ns[0] += S
    armed.cuda.observers[0](0, GIB, 139 * GIB, 0)
    assert armed.record["ooms"] == 1001
    assert len(armed.fake.events("cuda_oom")) == 1


def test_the_observer_never_raises_and_five_errors_switch_the_probe_off(armed: Armed) -> None:
    """What it raises would take the place of torch's OutOfMemoryError."""
    armed.cuda.initialise()
    armed.cuda.stats = lambda device: {"rubbish": 1}
    memory._memory._oom_next_ns = -(10**18)  # type: ignore[union-attr]
    for _ in range(6):
        memory._memory._oom_next_ns = -(10**18)  # type: ignore[union-attr]
        armed.cuda.observers[0](0, GIB, GIB, 0)
    assert (armed.probe.status, armed.probe.on) == ("failed", False)
    armed.step(100)
    assert len(armed.cuda.looks) == 5


def test_a_fork_child_is_inert(armed: Armed, monkeypatch) -> None:
    armed.cuda.initialise()
    monkeypatch.setattr(here, "pid", 0)
    armed.cuda.observers[0](0, GIB, GIB, 0)
    armed.step(100)
    assert (armed.cuda.looks, armed.record) == ([], {})


def test_another_owner_of_the_slot_gets_the_record_anew(armed: Armed) -> None:
    armed.cuda.initialise()
    armed.step(100)
    armed.fake.rank.slot.write("memory", b"")
    for write in armed.fake.rank.on_claim:
        write()
    assert armed.record["allocated"] == 12 * GIB


def test_a_build_without_cuda_is_no_trouble(tmp_path: Path) -> None:
    cuda = Strict(__name__="torch.cuda", torch=Strict(_C=SimpleNamespace()))
    fake = FakeRank(tmp_path)
    memory.arm(fake.rank, fake.rank.probes["memory"], cuda)
    assert (fake.rank.probes["memory"].status, fake.rank.probes["memory"].detail) == ("armed", "torch is built without CUDA")
    assert fake.rank.on_step == []


def test_an_allocator_without_an_observer_is_said(tmp_path: Path) -> None:
    def attach(observer: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver.")

    armed = Armed(tmp_path, FakeCuda(_cuda_attach_out_of_memory_observer=attach))
    armed.cuda.initialise()
    assert (armed.probe.status, armed.probe.errors) == ("armed", 0)
    assert armed.probe.detail == "failed allocations are not told: cudaMallocAsync does not yet support attachOutOfMemoryObserver."
    armed.step(100)
    assert armed.record["allocated"] == 12 * GIB


def test_a_probe_that_is_switched_off_touches_nothing(tmp_path: Path) -> None:
    fake = FakeRank(tmp_path)
    fake.rank.probes["memory"].report("off", "switched off by --no-probe")
    memory.arm(fake.rank, fake.rank.probes["memory"], Strict())
    assert fake.rank.on_step == []
