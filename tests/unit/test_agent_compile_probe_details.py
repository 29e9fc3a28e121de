"""What the compile probe tells of one compile: own seconds by phase, caches, kernels, failures, graph breaks, full texts; and who asked for it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from agent_fakes import FakeRank
from fake_dynamo import CODE, FRAME, Torch, metrics

from rankwatch.agent.clock import clock as agent_clock
from rankwatch.agent.compiling.asked import Asked
from rankwatch.agent.compiling.finished import Compiles
from rankwatch.agent.compiling.records import fields_of, own_seconds
from rankwatch.agent.compiling.texts import Texts
from rankwatch.agent.compiling.work import Work
from rankwatch.agent.guard import here
from rankwatch.agent.probes import compile as probe_module
from rankwatch.wire.phases import PHASES

MODEL = "/home/u/model.py"
GB = "\n\n For more details about this graph break, please visit: https://x/gb/gb0059.html"


class Clock:
    """The agent's clock in whole seconds that only move when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100
        monkeypatch.setattr(agent_clock, "now_ns", lambda: self.now * 1_000_000_000)


@pytest.fixture
def fake(tmp_path: Path) -> FakeRank:
    return FakeRank(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def torch(fake: FakeRank) -> Torch:
    return Torch(fake)


def end_of(fake: FakeRank) -> dict[str, Any]:
    (event,) = fake.events("compile_end")
    return event


def test_own_seconds_by_phase_add_up_to_the_compile(fake: FakeRank, clock: Clock, torch: Torch) -> None:
    torch._compile(CODE)
    clock.now += 1
    torch.begin("backend_compile")
    clock.now += 2
    torch.begin("additional_fake_tensor_prop")  # no rule knows it: it belongs to the region around it
    clock.now += 3
    torch.end("additional_fake_tensor_prop")
    torch.begin("inductor_compile")
    clock.now += 4
    torch.begin("async_compile.wait")
    clock.now += 5
    for name in ("async_compile.wait", "inductor_compile", "backend_compile"):
        torch.end(name)
    clock.now += 6
    fake.rank.steps_done = lambda: 7
    torch.compiles.finished(metrics())
    end = end_of(fake)
    assert end["phases"] == {"dynamo": 7.0, "backend": 5.0, "inductor": 4.0, "kernel_compile": 5.0}
    assert end["started_mono_ns"] == 100_000_000_000
    assert end["step"] == 7
    assert end["library"] is False
    clock.now += 1
    torch.end("dynamo")
    torch.compiles.write()
    assert fake.record("compile")["phases"] == {"dynamo": 8.0, "backend": 5.0, "inductor": 4.0, "kernel_compile": 5.0}


def test_a_backward_is_reported_after_its_root_and_has_its_phases(fake: FakeRank, clock: Clock, torch: Torch) -> None:
    torch.begin("entire_backward_compile", "0/0")
    clock.now += 2
    torch.end("entire_backward_compile")
    torch.compiles.finished(metrics(co_name=None, is_forward=False, graph_op_count=None))
    end = end_of(fake)
    assert (end["compile_kind"], end["phases"], end["started_mono_ns"]) == ("backward", {"backend": 2.0}, 100_000_000_000)


def test_a_compile_inside_another_takes_nothing_of_the_outer_one(fake: FakeRank, clock: Clock, torch: Torch) -> None:
    torch._compile(CODE, "0/0")
    clock.now += 2
    torch.compiles.finished(metrics(compile_id="1/0"))
    torch.compiles.finished(metrics(compile_id="0/0"))
    inner, outer = fake.events("compile_end")
    assert (inner["phases"], inner["started_mono_ns"], outer["phases"]) == ({}, 0, {"dynamo": 2.0})


def test_helper_threads_do_not_count_what_the_main_thread_waits_for(fake: FakeRank, clock: Clock, torch: Torch) -> None:
    def compile_file() -> None:
        torch.begin("compile_file", "None")
        clock.now += 5
        torch.end("compile_file")

    thread = threading.Thread(target=compile_file)
    thread.start()
    thread.join()
    torch.compiles.write()
    assert fake.record("compile")["phases"] == {}


def test_the_worst_of_several_cache_looks_is_the_compiles(fake: FakeRank, torch: Torch) -> None:
    log = torch.compiles.wrap_instant(lambda *args, **kwargs: None)
    torch._compile(CODE)
    for name in ("fx_graph_cache_hit", "fx_graph_cache_miss", "fx_graph_cache_hit"):
        log(None, name, 1, metadata={"key": "f" * 60, "components": ["x"] * 600})
    log(None, "autograd_cache_bypass", 1, {"cache_bypass_reason": "custom op"})
    torch.compiles.finished(metrics())
    assert end_of(fake)["cache"] == {"fx": "miss", "aot": "bypass"}
    assert end_of(fake)["bypass_reason"] == "custom op"
    torch.compiles.finished(metrics())
    assert fake.events("compile_end")[1]["cache"] == {}
    assert fake.record("compile")["cache"] == {"fx": {"hit": 2, "miss": 1}, "aot": {"bypass": 1}}


def test_a_finished_compile_is_one_event(fake: FakeRank, torch: Torch) -> None:
    torch._compile(CODE)
    torch.compiles.finished(metrics(cache_size=3))
    end = end_of(fake)
    assert (end["cache_size"], end["limit"], end["kernels"], end["recompile_key"], end["fail_key"], end["fail_at"]) == (3, 8, 0, "", "", "")
    assert fake.record("compile")["by_frame"]["forward@model.py:31"][3] == 3


def test_a_failure_names_the_users_line_or_else_the_frames(fake: FakeRank, torch: Torch) -> None:
    torch.compiles.finished(metrics(fail_type="BackendCompilerFailed", fail_reason="backend='bad' raised:\nValueError: boom\nmore"))
    torch.compiles.finished(metrics(fail_type="TorchRuntimeError", fail_reason="no", fail_user_frame_filename=MODEL, fail_user_frame_lineno=40))
    backend, runtime = fake.events("compile_end")
    assert (backend["fail_type"], backend["fail_reason"], backend["fail_at"]) == (
        "BackendCompilerFailed",
        "backend='bad' raised: ValueError: boom",
        "model.py:31",
    )
    assert (runtime["fail_at"], runtime["fail_key"]) == ("model.py:40", "")
    (text,) = fake.events("text")
    assert (text["what"], text["key"], text["text"]) == ("failure", backend["fail_key"], "backend='bad' raised:\nValueError: boom\nmore")


def test_a_graph_break_under_fullgraph_is_a_failure(fake: FakeRank, torch: Torch) -> None:
    broken = {"fail_type": "Unsupported", "fail_reason": "call to print", "fail_user_frame_filename": MODEL, "fail_user_frame_lineno": 40}

    def _compile(code: Any, one_graph: bool) -> None:
        torch.begin("dynamo")

    _compile(CODE, True)
    torch.compiles.finished(metrics(**broken))
    torch.end("dynamo")
    _compile(CODE, False)
    torch.compiles.finished(metrics(**broken))
    totals = fake.record("compile")
    assert (totals["failures"], totals["skipped"], totals["graph_breaks"]) == (1, 1, 1)


@pytest.mark.parametrize(
    "fields",  # as torch 2.11 tells it; torch 2.9 names the line in the text alone
    [
        {"fail_type": "Unsupported", "fail_user_frame_filename": MODEL, "fail_user_frame_lineno": 40, "fail_reason": "print" + GB},
        {"fail_type": "SkipFrame", "fail_reason": f"print\n<FrameSummary file {MODEL}, line 40 in forward>{GB}"},
    ],
)
def test_a_break_inside_a_loop_skips_the_frame_and_is_a_break(fake: FakeRank, torch: Torch, fields: dict[str, Any]) -> None:
    torch.compiles.finished(metrics(**fields))
    (event,) = fake.events("graph_break")
    assert (event["at"], event["reason"], event["gb"], event["skipped"], event["count"]) == ("model.py:40:forward", "print", "gb0059", True, 1)
    assert fake.record("compile")["last_break"] == "model.py:40: print"
    assert fake.rank.last_graph_break == "model.py:40: print"


def test_a_graph_break_is_told_with_what_torch_explains_of_its_cause(fake: FakeRank, torch: Torch) -> None:
    stack = [SimpleNamespace(filename=MODEL, lineno=8, name="forward")]
    reason = "Failed to trace builtin operator\n  Explanation: Dynamo does not know `print`\n  Hint: move it\n\n*** another graph break ***\n\n"
    reason += "graph break in loop\n  Explanation: a break in a loop\n\n gb0059"
    torch.graph_break_reasons.append(SimpleNamespace(reason=reason, graph_break=True, user_stack=stack))
    torch.compiles.finished(metrics())
    (event,) = fake.events("graph_break")
    assert event["reason"] == "Failed to trace builtin operator: Dynamo does not know `print`"
    assert [text["text"] for text in fake.events("text")] == [reason]


def test_a_frame_that_is_skipped_without_a_users_line_is_no_break(fake: FakeRank, torch: Torch) -> None:
    torch.compiles.finished(metrics(fail_type="SkipFrame", fail_reason="no content in function call"))
    assert fake.events("graph_break") == []


def test_a_break_that_comes_again_and_again_is_told_ever_more_rarely(fake: FakeRank, torch: Torch) -> None:
    for _ in range(9):
        stack = [SimpleNamespace(filename=MODEL, lineno=5, name="forward")]
        torch.graph_break_reasons.append(SimpleNamespace(reason="call to print", graph_break=True, user_stack=stack))
        torch.compiles.finished(metrics())
    assert [(event["times"], event["count"], event["skipped"]) for event in fake.events("graph_break")] == [
        (1, 1, False),
        (2, 2, False),
        (4, 4, False),
        (8, 8, False),
    ]
    assert fake.record("compile")["graph_breaks"] == 9


def test_the_text_of_a_recompile_has_the_reasons_of_all_versions(fake: FakeRank, torch: Torch) -> None:
    torch.guard_failures[CODE].append("0/0: of an older compile")
    torch._compile(CODE, "0/2")
    torch.guard_failures[CODE] += ["0/1: k == 2.5\n  File model.py", "0/0: k == 1.5"]
    torch.compiles.finished(metrics(compile_id="0/2", recompile_reason="0/1: k == 2.5\n  File model.py"))
    end = end_of(fake)
    (text,) = fake.events("text")
    assert end["recompile_reason"] == "0/1: k == 2.5"
    assert (text["what"], text["compile_id"], text["key"]) == ("recompile", "0/2", end["recompile_key"])
    assert text["text"] == "0/1: k == 2.5\n  File model.py\n0/0: k == 1.5"


def test_the_accumulated_limit_is_named_and_latched(fake: FakeRank, torch: Torch) -> None:
    torch.config.accumulated_recompile_limit = 64
    torch.compiles.finished(metrics(cache_size=3))
    reason = "Dynamo recompile limit exceeded\n Limit type: accumulated_recompile_limit"
    torch.compiles.live.frames["0/64"] = "forward@model.py:31"
    torch.compiles.finished(metrics(compile_id="0/64", co_name=None, fail_type="Unsupported", fail_reason=reason, graph_op_count=None))
    (event,) = fake.events("recompile_limit")
    assert (event["limit_type"], event["limit"], event["cache_size"], event["frame"]) == ("accumulated_recompile_limit", 64, 4, "forward@model.py:31")
    totals = fake.record("compile")
    compiles, seconds, _mark, cache_size = totals["by_frame"]["forward@model.py:31"]
    assert (totals["limited"], compiles, seconds, cache_size) == (["forward@model.py:31"], 1, 4.0, 4)


# -- full texts


def test_a_long_text_comes_in_parts_a_few_at_a_time(fake: FakeRank, clock: Clock) -> None:
    texts = Texts(fake.rank.slot)
    text = "".join(f'line {n} of "it"\n' for n in range(600))
    key = texts.add("failure", text, text[:300], "0/0", FRAME)
    counts = []
    for _ in range(4):
        texts.send()
        counts.append(len(fake.events("text")))
    assert counts == [4, 8, 8, 8]
    clock.now += 1
    texts.send()
    parts = fake.events("text")
    assert [part["part"] for part in parts] == list(range(1, parts[0]["parts"] + 1))
    assert {part["key"] for part in parts} == {key}
    whole = "".join(part["text"] for part in parts)
    assert whole == text[:8189] + "..."


def test_a_text_goes_out_once(fake: FakeRank) -> None:
    texts = Texts(fake.rank.slot)
    keys = [texts.add("recompile", "a\nb", "a", f"0/{n}", FRAME) for n in range(3)]
    texts.send()
    assert len(set(keys)) == 1
    assert len(fake.events("text")) == 1
    assert texts.add("recompile", "short", "short", "0/9", FRAME) == ""


def test_texts_that_are_too_many_are_dropped_and_counted(fake: FakeRank, clock: Clock) -> None:
    texts = Texts(fake.rank.slot)
    for n in range(300):
        texts.add("recompile", f"text {n}\nmore", "", "0/0", FRAME)
        clock.now += 1
        texts.send()
    assert texts.dropped == 100


# -- who asked


class OfOneThread:
    """torch's config from 2.13 on: what one thread sets, others do not see. Each thread has its own values over the defaults."""

    def __init__(self, **defaults: Any) -> None:
        self.__dict__["_own"], self.__dict__["_defaults"] = threading.local(), defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name, self._defaults.get(name))

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own, name, value)


@pytest.fixture
def asked(fake: FakeRank, monkeypatch: pytest.MonkeyPatch) -> Asked:
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    utils = SimpleNamespace(config=OfOneThread(disable=False, suppress_errors=False, recompile_limit=8), graph_break_reasons=[])
    compiles = Compiles(fake.rank, fake.rank.probes["compile"], utils)
    return compiles.asked


def in_file(file: str, function: Any) -> Any:
    """A function that calls `function` from line 3 of `file`."""
    namespace = {"call": function}
    exec(compile("\ndef outer(**kwargs):\n    return call(**kwargs)\n", file, "exec"), namespace)
    return namespace["outer"]


def test_the_users_line_that_asks_is_told_with_its_backends(fake: FakeRank, asked: Asked) -> None:
    through_torch = in_file("/env/site-packages/torch/__init__.py", asked.wrap(lambda *args, **kwargs: (args, kwargs)))

    class Backend:
        compiler_name = "inductor"

    assert in_file("/home/u/train.py", through_torch)(backend=Backend())[1]["backend"].compiler_name == "inductor"
    in_file("/home/u/other.py", through_torch)(backend="eager", disable=True)
    assert fake.record("compile")["requested"] == {"count": 2, "disabled": 1, "first_at": "train.py:3", "backends": ["inductor", "eager"]}


def test_what_torch_compiles_for_itself_is_not_asked_for(fake: FakeRank, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(__file__="/env/site-packages/torch/__init__.py"))
    inside_torch = in_file("/env/site-packages/torch/nn/attention/flex_attention.py", asked.wrap(lambda **kwargs: None))
    in_file("/home/u/train.py", inside_torch)()
    assert asked.requested["count"] == 0


def test_what_optimize_raises_comes_through(asked: Asked) -> None:
    def fails(**kwargs: Any) -> None:
        raise ValueError("no such backend")

    with pytest.raises(ValueError, match="no such backend"):
        asked.wrap(fails)(backend=object())


@pytest.mark.parametrize(
    ("environ", "config", "said"),
    [
        ({}, False, ""),
        ({"TORCHDYNAMO_DISABLE": "1"}, False, "TORCHDYNAMO_DISABLE=1"),
        ({"TORCH_COMPILE_DISABLE": "1"}, True, "TORCH_COMPILE_DISABLE=1"),
        ({}, True, "torch._dynamo.config.disable"),
    ],
)
def test_what_switches_the_compiler_off_is_said(
    fake: FakeRank, asked: Asked, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], config: bool, said: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    asked._configured._utils.config.disable = config
    one_step(fake)
    assert asked.disabled() == said
    in_another_thread(asked._changed)
    assert fake.record("compile")["disabled"] == said


def test_a_limit_that_the_user_has_set_outlives_the_heartbeat_which_cannot_see_it(fake: FakeRank, asked: Asked) -> None:
    asked._configured._utils.config.recompile_limit = 64
    in_file("/home/u/train.py", asked.wrap(lambda **kwargs: None))()
    in_another_thread(asked._changed)
    assert fake.record("compile")["limit"] == 64


def one_step(fake: FakeRank) -> None:
    for stepped in fake.rank.on_step:
        stepped(time.monotonic_ns() + 2_000_000_000)


def in_another_thread(call: Any) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_new_stance_is_seen_at_the_next_beat(fake: FakeRank, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    stance = SimpleNamespace(stance="default", backend=None)
    monkeypatch.setitem(__import__("sys").modules, "torch._dynamo.eval_frame", SimpleNamespace(_stance=stance))
    asked.look()
    assert fake.record("compile") == {}
    stance.stance = "force_eager"
    asked.look()
    assert fake.record("compile")["stance"] == "force_eager"
    stance.stance, stance.backend = "default", "eager"
    assert asked.stance() == "force_backend=eager"


# -- kernels and choices


class Bar:
    def __init__(self, total: int | None = None, **_options: Any) -> None:
        self.done = 0

    def update(self, n: int) -> int:
        self.done += n
        return self.done


@pytest.fixture
def work(fake: FakeRank) -> Work:
    return Work(fake.rank.probes["compile"], fake.rank.threads, [0] * len(PHASES))


def detail(fake: FakeRank) -> str:
    return str(fake.threads()[0]["detail"])


def test_kernels_are_counted_while_a_compile_waits_for_them(fake: FakeRank, torch: Torch) -> None:
    module = SimpleNamespace(tqdm=Bar)
    assert torch.compiles.work.hook(module, "torch._inductor.async_compile") == []
    torch._compile(CODE)
    bar = module.tqdm(total=2, desc="Inductor Compilation", disable=True, delay=0)
    assert isinstance(bar, Bar)
    assert detail(fake) == "kernels 0/2"
    assert bar.update(1) == 1
    assert detail(fake) == "kernels 1/2"
    assert bar.update(1) == 2
    assert detail(fake) == ""
    torch.compiles.finished(metrics())
    assert end_of(fake)["kernels"] == 2
    assert fake.record("compile")["kernels_done"] == 2


def selector() -> Any:
    class AlgorithmSelectorCache:
        seen: list[Any] = []

        @classmethod
        def benchmark_choices(cls, choices: Any, autotune_args: Any) -> list[Any]:
            return [cls.benchmark_choice(choice, autotune_args) for choice in choices]

        @classmethod
        def benchmark_choice(cls, choice: Any, autotune_args: Any) -> Any:
            cls.seen.append(choice())
            return choice

    return SimpleNamespace(AlgorithmSelectorCache=AlgorithmSelectorCache, as_completed=lambda futures, timeout=None: iter(futures))


def test_autotuning_choices_are_counted_while_they_are_benchmarked(fake: FakeRank, torch: Torch) -> None:
    module = selector()
    assert torch.compiles.work.hook(module, "torch._inductor.select_algorithm") == []
    torch._compile(CODE)
    choices = [lambda: detail(fake)] * 3
    assert module.AlgorithmSelectorCache.benchmark_choices(choices, None) == choices
    assert module.AlgorithmSelectorCache.seen == ["autotune 0/3", "autotune 1/3", "autotune 2/3"]
    assert detail(fake) == ""


def test_a_choice_that_fails_fails_as_without_us(fake: FakeRank, work: Work) -> None:
    module = selector()
    work.hook(module, "torch._inductor.select_algorithm")
    with pytest.raises(ZeroDivisionError):
        module.AlgorithmSelectorCache.benchmark_choices([lambda: 1 / 0], None)
    assert fake.rank.threads.here().choices is None


def test_a_class_that_benchmarks_otherwise_is_left_alone_and_said(work: Work) -> None:
    assert work.hook(SimpleNamespace(), "torch._inductor.async_compile") == ["torch._inductor.async_compile.tqdm is absent in torch ?"]
    other = SimpleNamespace(CachingAutotuner=type("CachingAutotuner", (), {"bench": lambda self, launcher: None}))
    _precompile, reason = work.hook(other, "torch._inductor.runtime.triton_heuristics")
    assert reason == "torch._inductor.runtime.triton_heuristics.CachingAutotuner.benchmark_all_configs is absent in torch ?"


def test_triton_configurations_are_counted_at_the_first_run(fake: FakeRank, work: Work) -> None:
    class CachingAutotuner:
        launchers = ("a", "b")

        def bench(self, launcher: str, *args: Any, with_profiler: bool = False) -> str:
            return fake.rank.threads.here().detail

        def benchmark_all_configs(self, *args: Any) -> list[str]:
            return [self.bench(launcher, *args) for launcher in self.launchers]

    work.hook(SimpleNamespace(CachingAutotuner=CachingAutotuner), "torch._inductor.runtime.triton_heuristics")
    assert CachingAutotuner().benchmark_all_configs(1) == ["autotune 0/2", "autotune 1/2"]
    assert CachingAutotuner().bench("a") == ""


def test_hooks_do_nothing_in_a_fork_child(fake: FakeRank, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(tqdm=Bar)
    torch.compiles.work.hook(module, "torch._inductor.async_compile")
    optimize = torch.compiles.asked.wrap(lambda **kwargs: kwargs)
    monkeypatch.setattr(here, "pid", 0)
    assert module.tqdm(total=2).update(1) == 1
    assert optimize(backend="eager") == {"backend": "eager"}
    assert torch.compiles.asked.requested["count"] == 0
    assert torch.compiles.work.kernels_done == 0


def test_modules_that_come_before_dynamo_are_left_alone(fake: FakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_compiles", None)
    module = ModuleType("torch._inductor.async_compile")
    module.tqdm = Bar  # type: ignore[attr-defined]
    probe_module.arm(fake.rank, fake.rank.probes["compile"], module)
    assert module.tqdm is Bar
    assert fake.rank.probes["compile"].on


# -- totals that wait for the heartbeat


def test_totals_of_many_compiles_are_written_with_the_heartbeat(fake: FakeRank, clock: Clock, torch: Torch) -> None:
    """The compile's own event is not late."""
    torch.compiles.beat()
    torch.compiles.finished(metrics())
    torch.compiles.finished(metrics(compile_id="1/0"))
    assert (fake.record("compile")["frames"], len(fake.events("compile_end"))) == (1, 2)
    torch.compiles.beat()
    assert fake.record("compile")["frames"] == 2


def test_totals_are_written_at_once_where_no_heartbeat_comes(fake: FakeRank, clock: Clock, torch: Torch) -> None:
    torch.compiles.beat()
    clock.now += 2
    for n in range(3):
        torch.compiles.finished(metrics(compile_id=f"{n}/0"))
        assert fake.record("compile")["frames"] == n + 1


@pytest.mark.parametrize(
    "fields", [{"fail_type": "BackendCompilerFailed", "fail_reason": "boom"}, {"fail_type": "Unsupported", "fail_reason": "Dynamo recompile limit exceeded"}]
)
def test_a_failure_and_the_recompile_limit_wait_for_nothing(fake: FakeRank, clock: Clock, torch: Torch, fields: dict[str, Any]) -> None:
    torch.compiles.beat()
    torch.compiles.finished(metrics())
    torch.compiles.finished(metrics(**fields))
    totals = fake.record("compile")
    assert totals["failures"] + totals["limit_hits"] == 1


def test_totals_that_wait_are_written_at_the_end_of_the_process(fake: FakeRank, clock: Clock, torch: Torch) -> None:
    torch.compiles.beat()
    for n in range(2):
        torch.compiles.finished(metrics(compile_id=f"{n}/0"))
    torch.compiles.last_words()
    assert fake.record("compile")["frames"] == 2


def test_totals_that_change_while_they_are_written_are_written_again(fake: FakeRank, torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that write, the one with the older copy may come last."""
    fields, changed = torch.compiles.asked.fields, [False]

    def changing() -> dict[str, Any]:
        if not changed[0]:
            changed[0] = True
            torch.compiles._changes += 1
        return fields()

    monkeypatch.setattr(torch.compiles.asked, "fields", changing)
    before = next(fake.rank.slot.cursors["compile"].next_seq)
    torch.compiles.write()
    assert next(fake.rank.slot.cursors["compile"].next_seq) == before + 3


def test_records_of_a_class_with_slots_are_read_too() -> None:
    @dataclass(slots=True)
    class Metrics:
        compile_id: str = "0/0"
        duration_us: int = 5

    assert fields_of(Metrics()) == {"compile_id": "0/0", "duration_us": 5}


@pytest.mark.parametrize(
    ("times", "own"),
    [
        ({}, {"dynamo": 9.0}),
        (
            {"dynamo": 8.0, "aot": 5.0, "inductor": 4.0, "triton": 1.0, "autotune": 2.0},
            {"dynamo": 3.0, "aot": 1.0, "inductor": 3.0, "triton": 1.0, "autotune": 2.0},
        ),
        ({"inductor": 4.0}, {"inductor": 4.0}),
        ({"aot": 5.0, "dynamo": 4.0}, {"aot": 5.0}),
    ],
)
def test_seconds_that_contain_each_other_are_told_without_what_is_inside(times: dict[str, float], own: dict[str, float]) -> None:
    assert own_seconds(times, 9.0) == own
