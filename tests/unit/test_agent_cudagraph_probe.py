"""The CUDA-graph probe against a tree manager that raises on every call and attribute that it does not know."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from agent_fakes import FakeRank, Strict

from rankwatch.agent import graph_pools, guard
from rankwatch.agent.probes import cudagraph


class FunctionID:
    def __init__(self, number: int) -> None:
        self.id = number


class Tensor(Strict):
    def __init__(self, *shape: int) -> None:
        super().__init__(shape=shape)


class Manager(Strict):
    """CUDAGraphTreeManager as the probe may use it: the two wrapped methods and the fields that it reads. A recording goes below the last one."""

    def __init__(self) -> None:
        super().__init__(
            compile_id="0/0", cuda_graphs_thread_pool=(0, 3), warmed_up_functions=set(), calls=[], capture=None, current_node=None, roots={}, mode="FORWARD",
            device_index=1, num_rerecord={}, ids_to_funcs={},
        )  # fmt: skip

    def record_function(self, new_inputs: Any, function_id: Any) -> str:
        self.calls.append(("record", function_id.id, list(new_inputs)))
        new_inputs.clear()  # as torch does
        if self.capture is not None:
            self.capture()
        self.roots.setdefault(function_id, []).append("graph")
        return "recorded"

    def run_eager(self, new_inputs: Any, function_id: Any) -> str:
        self.calls.append(("eager", function_id.id, new_inputs))
        self.warmed_up_functions.add(function_id)
        return "ran"

    def function(self, number: int, static: tuple[int, ...] = ()) -> FunctionID:
        made = FunctionID(number)
        self.ids_to_funcs[made] = Strict(static_input_idxs=static, model=lambda: None)
        return made

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


def graphs_module() -> tuple[ModuleType, type]:
    """torch.cuda.graphs with a class of its own, of which nothing but the capture's two ends may change."""
    graph_class = type("CUDAGraph", (CUDAGraph,), {"capture_begin": CUDAGraph.capture_begin, "capture_end": CUDAGraph.capture_end})
    return module("torch.cuda.graphs", CUDAGraph=graph_class), graph_class


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRank:
    monkeypatch.setattr(cudagraph, "_graphs", None)
    monkeypatch.delitem(sys.modules, "torch.cuda", raising=False)
    return FakeRank(tmp_path)


def armed(fake: FakeRank, version: str) -> Manager:
    manager_class = type("CUDAGraphTreeManager", (Manager,), {"record_function": Manager.record_function, "run_eager": Manager.run_eager})
    trees = module("torch._inductor.cudagraph_trees", CUDAGraphTreeManager=manager_class, __version__=version)
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], trees)
    return manager_class()  # type: ignore[no-any-return]


@pytest.fixture
def manager(fake: FakeRank) -> Manager:
    return armed(fake, "2.11.0+cu130")


def test_warm_up_recording_and_recording_again_are_told_apart(fake: FakeRank, manager: Manager) -> None:
    function = manager.function(4)
    assert manager.run_eager([1], function) == "ran"
    assert manager.record_function([1], function) == "recorded"
    manager.num_rerecord = {None: {function: 1}}
    assert manager.record_function([1], function) == "recorded"
    totals = fake.record("cudagraph")
    assert (totals["warmups"], totals["recordings"], totals["rerecords"], totals["rerecords_torch"], totals["eager"]) == (1, 2, 1, 1, 0)
    assert manager.calls == [("eager", 4, [1]), ("record", 4, [1]), ("record", 4, [1])]
    told = [(event["action"], event.get("why"), event["fn_id"], event["compile_id"]) for event in fake.events("cudagraph")]
    assert told == [("warmup", None, 4, "0/0"), ("record", "first", 4, "0/0"), ("rerecord", "moved", 4, "0/0")]
    assert fake.events("cudagraph")[1]["pool"] == "(0, 3)"


def test_a_new_size_is_a_recording_and_no_re_recording(fake: FakeRank, manager: Manager) -> None:
    """Dynamic sizes: one compile, one function a size, the integer among its inputs. Parameters (input 0) are the same in all."""
    for rank_compiled in fake.rank.on_compiled:
        rank_compiled("0/0", "forward@model.py:31")
    for number, size in enumerate((8, 16, 24, 16)):
        manager.record_function([Tensor(4, 4), size, Tensor(size, 4)], manager.function(number, static=(0,)))
    totals = fake.record("cudagraph")
    assert (totals["recordings"], totals["rerecords"], totals["rerecords_torch"]) == (4, 0, 0)
    row = totals["frames"]["forward@model.py:31"]
    assert (row["recordings"], row["rerecords"], row["sizes"], row["shape"]) == (4, 0, 3, "[16, 4]; sizes 16")
    assert [event["why"] for event in fake.events("cudagraph")] == ["first", "size", "size", "first"]


def test_sizes_of_static_compiles_count_and_the_parts_of_one_compile_do_not(fake: FakeRank, manager: Manager) -> None:
    for ordinal, size in enumerate((8, 16)):  # a recompile a size; each has a split with other widths, and a backward
        fake.rank.on_compiled[0](f"0/{ordinal}", "forward@model.py:31")
        manager.compile_id = f"0/{ordinal}"
        for number, shape in enumerate(((size, 4), (size, 32), (size, 64))):
            manager.mode = "BACKWARD" if number == 2 else "FORWARD"
            manager.record_function([Tensor(*shape)], manager.function(10 * ordinal + number))
    row = fake.record("cudagraph")["frames"]["forward@model.py:31"]
    assert (row["recordings"], row["sizes"]) == (6, 2)


def test_a_recompile_for_another_reason_is_no_new_size(fake: FakeRank, manager: Manager) -> None:
    for ordinal in range(3):
        fake.rank.on_compiled[0](f"0/{ordinal}", "forward@model.py:31")
        manager.compile_id = f"0/{ordinal}"
        manager.record_function([Tensor(8, 4)], manager.function(ordinal))
    assert fake.record("cudagraph")["frames"]["forward@model.py:31"]["sizes"] == 1


def test_the_same_function_behind_another_graph_is_no_re_recording(fake: FakeRank, manager: Manager) -> None:
    function = manager.function(1)
    manager.record_function([], function)
    manager.current_node = Strict(children={})
    manager.record_function([], function)
    assert [event["why"] for event in fake.events("cudagraph")] == ["first", "path"]
    assert fake.record("cudagraph")["rerecords"] == 0


def test_from_2_13_on_moved_parameters_count_although_torch_does_not_count_them(fake: FakeRank) -> None:
    manager = armed(fake, "2.13.0")
    function = manager.function(1)
    manager.record_function([], function)
    manager.record_function([], function)
    totals = fake.record("cudagraph")
    assert (totals["rerecords"], totals["rerecords_torch"]) == (1, 0)


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


def test_skips_are_counted_by_reason_line_and_frame_and_still_logged(fake: FakeRank) -> None:
    logged = []

    def log_cudagraph_skip_and_bump_counter(msg: str) -> None:
        logged.append(msg)

    utils = module("torch._inductor.cudagraph_utils", log_cudagraph_skip_and_bump_counter=log_cudagraph_skip_and_bump_counter)
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], utils)
    live = fake.rank.threads.here()
    live.frame = "forward@model.py:31"
    live.regions.append(("inductor_compile", 1, 0))
    trace = '  File "/job/train.py", line 9, in main\n    m(x)\n  File "/job/model.py", line 33, in forward\n    self.n += 1\n'
    for _ in range(2):
        utils.log_cudagraph_skip_and_bump_counter(f"skipping cudagraphs due to mutated inputs (1 instances). Found from : \n {trace}")
    live.regions.clear()
    utils.log_cudagraph_skip_and_bump_counter("other")
    totals = fake.record("cudagraph")
    assert totals["skips"] == 3
    assert totals["skip_reasons"] == [
        {"reason": "skipping cudagraphs due to mutated inputs (1 instances)", "at": "model.py:33", "frame": "forward@model.py:31", "count": 2},
        {"reason": "other", "at": "", "frame": "", "count": 1},
    ]
    assert len(logged) == 3


def test_captures_by_hand_are_counted_by_line_and_those_of_a_tree_are_not(fake: FakeRank, manager: Manager) -> None:
    graphs, graph_class = graphs_module()
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], graphs)
    graph = graph_class()
    assert graph.capture_begin((1, 2), capture_error_mode="relaxed") == "begun (1, 2) relaxed"
    graph.capture_end()
    manager.capture = graph.capture_begin
    manager.record_function([], FunctionID(1))
    totals = fake.record("cudagraph")
    assert (totals["captures"], totals["recordings"]) == (1, 1)
    (site,) = totals["capture_sites"]
    assert site["at"].startswith("test_agent_cudagraph_probe.py:")
    assert (site["via"], site["count"]) == ("CUDAGraph.capture_begin", 1)
    assert graph_class.replay is CUDAGraph.replay  # the hot path is not touched


@pytest.mark.parametrize(
    ("calls", "via"),
    [
        (("/x/torch/cuda/graphs.py:__enter__",), "graph"),
        (("/x/torch/cuda/graphs.py:__enter__", "/x/torch/cuda/graphs.py:make_graphed_callables"), "make_graphed_callables"),
        (("/x/torch/cuda/graphs.py:__enter__", "/x/torch/_inductor/cudagraph_trees.py:__init__"), ""),  # the empty graph that holds a tree's pool
        (("/x/torch/cuda/graphs.py:__enter__", "/x/triton/testing.py:do_bench_cudagraph"), ""),
    ],
)
def test_what_was_called_for_a_capture_is_told_and_torchs_own_are_none(fake: FakeRank, calls: tuple[str, ...], via: str) -> None:
    graphs, graph_class = graphs_module()
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], graphs)
    call: Any = graph_class().capture_begin
    for each in calls:
        file, name = each.rsplit(":", 1)
        names: dict[str, Any] = {"call": call}
        exec(compile(f"def {name}():\n    return call()", file, "exec"), names)  # the caller's frame has this file and name
        call = names[name]
    assert call() == "begun None global"
    assert [site["via"] for site in fake.record("cudagraph").get("capture_sites", [])] == ([via] if via else [])


def device(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    cuda = Strict(is_initialized=lambda: True, **names)
    monkeypatch.setitem(sys.modules, "torch.cuda", cuda)  # type: ignore[arg-type]


def test_memory_of_private_pools_is_read_from_the_counters_of_the_trees_device(fake: FakeRank, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    stats = {
        "reserved_bytes_by_private_pools.0_1.all.current": 100,
        "reserved_bytes_by_private_pools.0_1.small_pool.current": 60,
        "reserved_bytes_by_private_pools.0_2.all.current": 20,
        "reserved_bytes.all.current": 999,
    }
    device(monkeypatch, memory_stats=lambda index: asked.append(index) or stats)
    manager.record_function([], FunctionID(1))
    totals = fake.record("cudagraph")
    assert (totals["pool_bytes"], totals["pools"], totals["pool_first_bytes"]) == (120, {"0,1": 100, "0,2": 20}, 120)
    assert asked == [1]


def segments(bytes_of_pool: int, others: int = 0) -> list[dict[str, Any]]:
    of_pool = {"device": 1, "segment_pool_id": (0, 1), "total_size": bytes_of_pool}
    return [of_pool, {"device": 0, "segment_pool_id": (0, 1), "total_size": 7}] + [{"device": 1, "segment_pool_id": (0, 0), "total_size": 2}] * others


def test_before_2_13_the_segments_are_read_without_traces_and_growth_goes_to_the_frame(
    fake: FakeRank, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter((100, 250))
    device(monkeypatch, memory_stats=lambda _index: {"reserved_bytes.all.current": 9}, memory_snapshot=lambda include_traces: segments(next(sizes)))
    for number in (1, 2):
        manager.record_function([], FunctionID(number))
    totals = fake.record("cudagraph")
    assert (totals["pool_bytes"], totals["pools"], totals["pool_first_bytes"]) == (250, {"0,1": 250}, 100)
    assert totals["frames"]["[0/0]"]["pool_bytes"] == 250
    assert [event["pool_grown_bytes"] for event in fake.events("cudagraph")] == [100, 150]


def test_many_segments_are_left_to_the_heartbeat_and_the_more_the_more_rarely(fake: FakeRank, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    now = [10**12]
    monkeypatch.setattr(graph_pools, "clock", Strict(now_ns=lambda: now[0]))
    device(monkeypatch, memory_stats=lambda _index: {}, memory_snapshot=lambda include_traces: reads.append(now[0]) or segments(100, others=1998))
    manager.record_function([], FunctionID(1))
    manager.record_function([], FunctionID(2))
    assert len(reads) == 1
    for _ in range(60):
        now[0] += 500_000_000
        for beat in fake.rank.on_beat:
            beat()
    assert [(at - 10**12) / 1e9 for at in reads] == [0.0, 10.0]  # then nothing new is recorded, and a minute may pass


@pytest.mark.parametrize(("keeps", "read"), [(False, True), (True, False)])
def test_a_torch_that_cannot_leave_out_the_history_is_not_asked_while_it_keeps_one(
    fake: FakeRank, manager: Manager, monkeypatch: pytest.MonkeyPatch, keeps: bool, read: bool
) -> None:
    def memory_snapshot(mempool_id: Any = None) -> list[dict[str, Any]]:
        return segments(100)

    history = Strict(_C=Strict(_cuda_isHistoryEnabled=lambda: keeps), __version__="2.9.1")
    device(monkeypatch, memory_stats=lambda _index: {}, memory_snapshot=memory_snapshot, torch=history)
    manager.record_function([], FunctionID(1))
    totals = fake.record("cudagraph")
    assert totals["pool_bytes"] == (100 if read else None)
    assert ("allocation history" in totals["pools_reason"]) is not read


def test_nothing_is_read_while_a_capture_runs_or_before_the_device_is_in_use(fake: FakeRank, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda", Strict(is_initialized=lambda: False))  # type: ignore[arg-type]
    manager.record_function([], FunctionID(1))
    graphs, graph_class = graphs_module()
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], graphs)
    monkeypatch.setitem(sys.modules, "torch.cuda", Strict(is_initialized=lambda: True, current_device=lambda: 1))  # type: ignore[arg-type]
    graph = graph_class()
    graph.capture_begin()
    for beat in fake.rank.on_beat:
        beat()
    assert fake.record("cudagraph")["pool_bytes"] is None
    device(monkeypatch, memory_stats=lambda _index: {"reserved_bytes_by_private_pools.0_1.all.current": 5})
    graph.capture_end()
    for beat in fake.rank.on_beat:
        beat()
    assert fake.record("cudagraph")["pool_bytes"] == 5
    assert fake.record("probes")["cudagraph"]["errors"] == 0


def test_a_tree_that_raises_where_it_is_read_costs_the_probe_and_not_the_job(fake: FakeRank, manager: Manager) -> None:
    del manager.__dict__["ids_to_funcs"]
    for number in range(6):
        assert manager.record_function([], FunctionID(number)) == "recorded"
    assert fake.record("probes")["cudagraph"]["status"] == "failed"
    assert len(manager.calls) == 6


def test_a_fork_child_records_nothing(fake: FakeRank, manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard.here, "pid", 0)
    assert manager.record_function([], FunctionID(1)) == "recorded"
    assert fake.record("cudagraph") == {}


def test_a_missing_function_is_said(fake: FakeRank) -> None:
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], module("torch._inductor.cudagraph_utils", __version__="2.99"))
    shown = fake.record("probes")["cudagraph"]
    assert shown["detail"] == "torch._inductor.cudagraph_utils.log_cudagraph_skip_and_bump_counter is absent in torch 2.99"


def test_a_probe_that_is_off_wraps_nothing(fake: FakeRank) -> None:
    fake.rank.probes["cudagraph"].report("off")
    trees = module("torch._inductor.cudagraph_trees", CUDAGraphTreeManager=Manager)
    cudagraph.arm(fake.rank, fake.rank.probes["cudagraph"], trees)
    assert trees.CUDAGraphTreeManager.record_function is Manager.record_function
