"""The compile probe fed with the events of torch 2.13, as recorded from a real compile."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_fakes import FakeRank
from fake_dynamo import CODE, FRAME, Torch, metrics

from rankwatch.agent.compiling.names import frame_name, ordinal
from rankwatch.agent.threads import clean
from rankwatch.wire import layout


@pytest.fixture
def fake(tmp_path: Path) -> FakeRank:
    return FakeRank(tmp_path)


@pytest.fixture
def torch(fake: FakeRank) -> Torch:
    return Torch(fake)


def test_the_innermost_region_is_the_phase_and_the_outermost_gives_the_frame(fake: FakeRank, torch: Torch) -> None:
    torch._compile(CODE)
    torch.begin("entire_frame_compile")
    torch.begin("backend_compile")
    (live,) = fake.threads()
    assert (live["compile_id"], live["kind"], live["phase"], live["frame"], live["depth"]) == ("0/0", "forward", "backend_compile", FRAME, 3)
    assert live["started_ns"] < live["phase_ns"]
    assert live["native_id"] == threading.get_native_id()
    torch.end("backend_compile")
    assert fake.threads()[0]["phase"] == "entire_frame_compile"
    torch.end("entire_frame_compile")
    torch.end("dynamo")
    assert fake.threads() == []


def test_another_hook_in_that_place_is_still_called(torch: Torch) -> None:
    torch._compile(CODE)
    assert [event["name"] for event in torch.chained] == ["dynamo"]


def test_the_recompile_reason_is_there_while_it_recompiles(fake: FakeRank, torch: Torch) -> None:
    """torch notes the failed guard after `dynamo` has begun; the first reason of this compile counts, not an older one."""
    torch.guard_failures[CODE].append("0/0: an older one")
    torch._compile(CODE, "0/1")
    torch.begin("entire_frame_compile", "0/1")
    torch.guard_failures[CODE] += ["0/0: tensor 'x' size mismatch at index 1. expected 32, actual 48\nUser stack trace:\n  ...", "0/0: second"]
    torch.begin("compile_attempt_0", "0/1")
    assert fake.threads()[0]["reason"] == "0/0: tensor 'x' size mismatch at index 1. expected 32, actual 48"


def test_a_first_compile_has_no_reason(fake: FakeRank, torch: Torch) -> None:
    torch._compile(CODE, "0/0")
    torch.guard_failures[CODE].append("0/0: of another compile")
    torch.begin("entire_frame_compile")
    assert fake.threads()[0]["reason"] == ""


def test_backward_is_named_after_its_forward(fake: FakeRank, torch: Torch) -> None:
    torch._compile(CODE)
    torch.end("dynamo")
    torch.begin("entire_backward_compile")
    torch.begin("inductor_compile")
    (live,) = fake.threads()
    assert (live["kind"], live["frame"], live["phase"]) == ("backward", FRAME, "inductor_compile")


def test_work_at_run_time_is_runtime(fake: FakeRank, torch: Torch) -> None:
    torch.begin("CachingAutotuner.benchmark_all_configs", "None")
    (live,) = fake.threads()
    assert (live["kind"], live["compile_id"], live["frame"]) == ("runtime", "", "")


def test_library_frames_are_marked(fake: FakeRank, torch: Torch) -> None:
    torch._compile(threading.Thread.start.__code__)
    assert fake.threads()[0]["detail"] == "library frame"
    torch.begin("entire_frame_compile")
    assert fake.threads()[0]["detail"] == "library frame"
    torch.begin("backend_compile")  # it has a graph after all, as that of torch.compile(torch.nn.Sequential(...))
    assert fake.threads()[0]["detail"] == ""


def test_an_end_that_skips_regions_closes_them_too(fake: FakeRank, torch: Torch) -> None:
    torch._compile(CODE)
    for name in ("entire_frame_compile", "compile_attempt_0", "bytecode_tracing"):
        torch.begin(name)
    torch.hook({"name": "entire_frame_compile", "ph": "E", "args": {}})
    assert fake.threads()[0]["phase"] == "dynamo"


def test_an_end_without_a_beginning_changes_nothing(fake: FakeRank, torch: Torch) -> None:
    torch.hook({"name": "gc", "ph": "E", "args": {}})
    torch._compile(CODE)
    torch.hook({"name": "gc", "ph": "E", "args": {}})
    assert fake.threads()[0]["phase"] == "dynamo"


def test_regions_that_torch_forgot_do_not_outlive_the_next_compile(fake: FakeRank, torch: Torch) -> None:
    """A Ctrl-C inside a hook may leave a region without an end; torch's own stack knows better."""
    torch._compile(CODE, "0/0")
    torch.begin("bytecode_tracing", "0/0")
    torch.stack.clear()
    torch._compile(CODE, "1/0")
    (live,) = fake.threads()
    assert (live["compile_id"], live["depth"]) == ("1/0", 1)


def test_a_compile_whose_end_torch_forgot_too_does_not_outlive_the_next_one(fake: FakeRank, torch: Torch) -> None:
    """The interrupt came in the end's hook: torch's stack keeps the region as well. Only one `_compile` is on the Python stack, so it is over."""
    torch._compile(CODE, "0/0")
    torch.begin("bytecode_tracing", "0/0")
    torch._compile(CODE, "1/0")
    (live,) = fake.threads()
    assert (live["compile_id"], live["depth"]) == ("1/0", 1)


def test_a_record_that_an_interrupt_left_behind_is_swept_up(fake: FakeRank, torch: Torch) -> None:
    torch._compile(CODE)
    fake.rank.threads.sweep()
    assert len(fake.threads()) == 1
    fake.rank.threads.here().regions.clear()
    fake.rank.threads.sweep()
    assert fake.threads() == []


def test_a_compile_inside_a_compile_shows_the_outer_one(fake: FakeRank, torch: Torch) -> None:
    torch._compile(CODE, "0/0", inside=lambda: torch._compile(threading.Thread.start.__code__, "1/0"))
    (live,) = fake.threads()
    assert (live["compile_id"], live["frame"], live["depth"]) == ("0/0", FRAME, 2)


def test_each_thread_has_a_record_and_helper_threads_without_an_id_have_none(fake: FakeRank, torch: Torch) -> None:
    torch._compile(CODE, "0/0")
    done = threading.Event()
    began = threading.Barrier(3)

    def compile_backward() -> None:
        torch.begin("entire_backward_compile", "0/0")
        began.wait(5)
        done.wait(5)

    def compile_file() -> None:
        torch.begin("compile_file", "None")
        began.wait(5)
        done.wait(5)

    threads = [threading.Thread(target=target) for target in (compile_backward, compile_file)]
    for thread in threads:
        thread.start()
    began.wait(5)
    seen = sorted(live["kind"] for live in fake.threads())
    done.set()
    for thread in threads:
        thread.join()
    assert seen == ["backward", "forward"]


def test_records_of_dead_threads_are_used_again(fake: FakeRank, torch: Torch) -> None:
    for n in range(2 * layout.THREADS):
        thread = threading.Thread(target=torch.begin, args=("entire_backward_compile", f"{n}/0"))
        thread.start()
        thread.join()
    torch._compile(CODE, "99/0")
    assert "99/0" in [live["compile_id"] for live in fake.threads()]


def test_an_error_in_the_hook_never_reaches_the_compile(fake: FakeRank, torch: Torch) -> None:
    for _ in range(9):
        torch.hook({"ph": "B"})
    assert fake.record("probes")["compile"]["status"] == "failed"
    assert fake.record("probes")["compile"]["errors"] == 5


def test_a_finished_compile_is_counted_and_written(fake: FakeRank, torch: Torch) -> None:
    torch.compiles.finished(metrics(dynamo_cumulative_compile_time_us=2_000_000, aot_autograd_cumulative_compile_time_us=1_500_000))
    torch.compiles.finished(metrics(compile_id="0/1", recompile_reason="0/0: k == 1.0\n  more"))
    totals = fake.record("compile")
    assert (totals["frames"], totals["recompiles"], totals["failures"], totals["graphs"]) == (2, 1, 0, 2)
    assert totals["seconds"] == {"dynamo": 2.5, "aot": 1.5, "inductor": 0.0, "triton": 0.0, "autotune": 0.0}
    assert totals["last_reason"] == "0/0: k == 1.0"
    assert totals["by_frame"]["forward@model.py:31"][:2] == [2, 4.0]
    first, second = fake.events("compile_end")
    assert (first["frame"], first["compile_kind"], first["ok"], first["duration_s"]) == ("forward@model.py:31", "forward", True, 2.0)
    assert (second["compile_id"], second["recompile_reason"]) == ("0/1", "0/0: k == 1.0")
    assert first["fingerprint"] == second["fingerprint"]


def test_equal_graphs_have_equal_fingerprints_wherever_the_file_lies(fake: FakeRank, torch: Torch) -> None:
    torch.compiles.finished(metrics(co_filename="/a/model.py"))
    torch.compiles.finished(metrics(co_filename="/b/model.py"))
    torch.compiles.finished(metrics(co_filename="/b/model.py", graph_op_count=4))
    prints = [event["fingerprint"] for event in fake.events("compile_end")]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({"fail_type": "BackendCompilerFailed", "fail_reason": "boom"}, "failures"),
        ({"fail_type": "Unsupported", "fail_reason": "Failed to trace"}, "skipped"),
        ({"is_forward": False}, "backward"),
        ({"is_runtime": True}, "runtime"),
        ({"co_filename": threading.__file__, "graph_op_count": 0}, "library"),
        ({"co_filename": threading.__file__}, "frames"),
        ({"co_filename": threading.__file__, "graph_op_count": None, "fail_type": "BackendCompilerFailed", "fail_reason": "boom"}, "failures"),
        ({}, "frames"),
    ],
)
def test_each_end_is_counted_in_one_place(fake: FakeRank, torch: Torch, fields: dict[str, Any], counted: str) -> None:
    torch.compiles.finished(metrics(**fields))
    totals = fake.record("compile")
    places = ("frames", "library", "backward", "runtime", "failures", "skipped")
    assert {place: totals[place] for place in places} == {**dict.fromkeys(places, 0), counted: 1}


def test_the_recompile_limit_is_latched(fake: FakeRank, torch: Torch) -> None:
    """After it the frame compiles no more: silence is not health."""
    torch.compiles.live.frames["0/8"] = "forward@model.py:31"
    limit = {"compile_id": "0/8", "co_name": None, "fail_type": "Unsupported", "recompile_reason": "0/7: size mismatch", "graph_op_count": None}
    torch.compiles.finished(metrics(**limit, fail_reason="Dynamo recompile limit exceeded\n  Explanation: ..."))
    totals = fake.record("compile")
    assert (totals["limit_hits"], totals["limited"], totals["failures"]) == (1, ["forward@model.py:31"], 0)
    (event,) = fake.events("recompile_limit")
    assert (event["frame"], event["limit_type"], event["limit"], event["last_reason"]) == (
        "forward@model.py:31",
        "recompile_limit",
        8,
        "0/7: size mismatch",
    )


def test_graph_breaks_of_the_user_are_read_once_and_again_after_a_reset(fake: FakeRank, torch: Torch) -> None:
    def broken(file: str, line: int) -> SimpleNamespace:
        return SimpleNamespace(reason="Unsupported call\nmore", graph_break=True, user_stack=[SimpleNamespace(filename=file, lineno=line, name="forward")])

    torch.graph_break_reasons += [broken("/home/u/model.py", 5), broken(threading.__file__, 9)]
    torch.compiles.finished(metrics())
    torch.compiles.finished(metrics())
    assert fake.record("compile")["graph_breaks"] == 1
    torch.graph_break_reasons[:] = [broken("/home/u/model.py", 7)]
    torch.compiles.finished(metrics())
    assert fake.record("compile")["graph_breaks"] == 2
    assert fake.record("compile")["last_break"] == "model.py:7: Unsupported call"
    assert [event["at"] for event in fake.events("graph_break")] == ["model.py:5:forward", "model.py:7:forward"]


def test_cache_looks_are_counted_without_their_payload(fake: FakeRank, torch: Torch) -> None:
    passed = []
    log = torch.compiles.wrap_instant(lambda logger, *args, **kwargs: passed.append((args, kwargs)))
    log(None, "fx_graph_cache_miss", 1, metadata={"key": "f" * 60, "components": ["x"] * 600})
    log(None, "autograd_cache_bypass", 1, {"cache_bypass_reason": "custom op"})
    log(None, "automatic_dynamic", 1)
    assert fake.record("compile").get("cache", {}) == {}  # written with the next compile: a look is no reason to write
    torch.compiles.finished(metrics())
    assert fake.record("compile")["cache"] == {"fx": {"miss": 1}, "aot": {"bypass": 1}}
    assert len(passed) == 3


@pytest.mark.parametrize(("compile_id", "before"), [("0/0", 0), ("3/12", 12), ("!1/0/2", 2), ("!1", 0), ("None", 0), ("", 0)])
def test_the_ordinal_of_a_compile_id(compile_id: str, before: int) -> None:
    assert ordinal(compile_id) == before


def test_texts_are_one_line_without_nul_and_whole_characters() -> None:
    assert clean("  a\0b \nsecond", 100) == "a b"
    assert clean("\u00e4" * 100, 21) == "\u00e4" * 9 + "..."


def test_a_frame_of_any_length_has_one_name_that_every_event_has_room_for():
    assert frame_name("forward", "/home/x/model.py", 31) == "forward@model.py:31"
    assert frame_name("f" * 3000, "/x/model.py", 31) == f"{'f' * 77}...@model.py:31"
    assert len(frame_name("\u6f22" * 3000, "g" * 250, 123456).encode()) <= 160
