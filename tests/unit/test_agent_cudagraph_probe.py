"""The CUDA-graph probe against a tree manager that raises on every call and attribute that it does not know."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agent_fakes import FakeRank, Strict

from rankwatch.agent.probes import cudagraph


class FunctionID:
    def __init__(self, number: int) -> None:
        self.id = number


class Manager(Strict):
    """CUDAGraphTreeManager as the probe may use it: the two wrapped methods and the fields that it reads."""

    def __init__(self) -> None:
        super().__init__(compile_id="0/0", cuda_graphs_thread_pool=(0, 3), warmed_up_functions=set(), calls=[], capture=None)

    def record_function(self, new_inputs: Any, function_id: Any) -> str:
        self.calls.append(("record", function_id.id, new_inputs))
        if self.capture is not None:
            self.capture()
        return "recorded"

    def run_eager(self, new_inputs: Any, function_id: Any) -> str:
        self.calls.append(("eager", function_id.id, new_inputs))
        self.warmed_up_functions.add(function_id)
        return "ran"

    def __eq__(self, other: object) -> bool:
        raise AssertionError("managers are not compared")

    __hash__ = None  # type: ignore[assignment]


class CUDAGraph(Strict):
    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> str:
        return f"begun {pool} {capture_error_mode}"

    def capture_end(self) -> None:
        return None

    def replay(self) -> None:
        return None


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    return made


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRank:
    monkeypatch.setattr(cudagraph, "_graphs", None)
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
    return FakeRank(tmp_path)


@pytest.fixture
def manager(fake: FakeRank) -> Manager:
    manager_class = type("CUDAGraphTreeManager", (Manager,), {"record_function": Manager.record_function, "run_eager": Manager.run_eager})
    trees = module("torch._inductor.cudagraph_trees", CUDAGraphTreeManager=manager_class)
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], trees)
    return manager_class()  # type: ignore[no-any-return]


def test_warm_up_recording_and_recording_again_are_told_apart(fake: FakeRank, manager: Manager) -> None:
    function = FunctionID(4)
    assert manager.run_eager([1], function) == "ran"
    assert manager.record_function([1], function) == "recorded"
    assert manager.record_function([2], function) == "recorded"
    totals = fake.record("cudagraph")
    assert (totals["warmups"], totals["recordings"], totals["rerecords"], totals["eager"]) == (1, 2, 1, 0)
    assert manager.calls == [("eager", 4, [1]), ("record", 4, [1]), ("record", 4, [2])]
    told = [(event["action"], event["fn_id"], event["compile_id"]) for event in fake.events("cudagraph")]
    assert told == [("warmup", 4, "0/0"), ("record", 4, "0/0"), ("rerecord", 4, "0/0")]
    assert fake.events("cudagraph")[1]["pool"] == "(0, 3)"


def test_eager_runs_at_every_step_do_not_flood_the_ring(fake: FakeRank, manager: Manager) -> None:
    function = FunctionID(1)
    for _ in range(1 + 100):
        manager.run_eager([], function)
    assert [event["action"] for event in fake.events("cudagraph")] == ["warmup"] + ["eager"] * 7
    assert fake.record("cudagraph")["eager"] == 64


def test_an_exception_of_a_recording_passes_and_is_no_recording(fake: FakeRank, manager: Manager) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    manager.capture = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        manager.record_function([], FunctionID(1))
    assert fake.record("cudagraph") == {}


def test_skips_are_counted_by_reason_and_still_logged(fake: FakeRank) -> None:
    logged = []

    def log_cudagraph_skip_and_bump_counter(msg: str) -> None:
        logged.append(msg)

    utils = module("torch._inductor.cudagraph_utils", log_cudagraph_skip_and_bump_counter=log_cudagraph_skip_and_bump_counter)
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], utils)
    for message in ("skipping cudagraphs due to cpu device (x)\nFound from: ...", "skipping cudagraphs due to cpu device (x)", "other"):
        utils.log_cudagraph_skip_and_bump_counter(message)
    totals = fake.record("cudagraph")
    assert totals["skips"] == 3
    assert totals["skip_reasons"] == {"skipping cudagraphs due to cpu device (x)": 2, "other": 1}
    assert len(logged) == 3


def test_captures_by_hand_are_counted_and_those_of_a_tree_are_not(fake: FakeRank, manager: Manager) -> None:
    graph_class = type("CUDAGraph", (CUDAGraph,), {"capture_begin": CUDAGraph.capture_begin, "capture_end": CUDAGraph.capture_end})
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], module("torch.cuda.graphs", CUDAGraph=graph_class))
    graph = graph_class()
    assert graph.capture_begin((1, 2), capture_error_mode="relaxed") == "begun (1, 2) relaxed"
    manager.capture = graph.capture_begin
    manager.record_function([], FunctionID(1))
    totals = fake.record("cudagraph")
    assert (totals["captures"], totals["recordings"]) == (1, 1)
    assert graph_class.replay is CUDAGraph.replay  # the hot path is not touched


def test_memory_of_private_pools_is_read_after_a_recording(fake: FakeRank, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "reserved_bytes_by_private_pools.0_1.all.current": 100,
        "reserved_bytes_by_private_pools.0_1.small_pool.current": 60,
        "reserved_bytes_by_private_pools.0_2.all.current": 20,
        "reserved_bytes.all.current": 999,
    }
    cuda = Strict(is_initialized=lambda: True, is_current_stream_capturing=lambda: False, memory_stats=lambda: stats)
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]
    manager.record_function([], FunctionID(1))
    assert fake.record("cudagraph")["pool_bytes"] == 120


def test_a_device_that_is_not_in_use_or_captures_is_not_asked(fake: FakeRank, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    for cuda in (Strict(is_initialized=lambda: False), Strict(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)):
        monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]
        manager.record_function([], FunctionID(1))
    assert fake.record("cudagraph")["pool_bytes"] is None
    assert fake.record("probes")["cudagraph"]["errors"] == 0


def test_a_missing_function_is_said(fake: FakeRank) -> None:
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], module("torch._inductor.cudagraph_utils", __version__="2.99"))
    shown = fake.record("probes")["cudagraph"]
    assert shown["detail"] == "torch._inductor.cudagraph_utils.log_cudagraph_skip_and_bump_counter is absent in torch 2.99"


def test_a_probe_that_is_off_wraps_nothing(fake: FakeRank) -> None:
    fake.rank.probes["cudagraph"].report("off")
    trees = module("torch._inductor.cudagraph_trees", CUDAGraphTreeManager=Manager)
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], trees)
    assert trees.CUDAGraphTreeManager.record_function is Manager.record_function
