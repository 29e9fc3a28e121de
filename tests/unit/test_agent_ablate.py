"""The rank side of `rankwatch ablate`, fed by hand: which backend a compile gets, what is recorded, how a rank ends. No torch."""

from __future__ import annotations

import json
import os
import sys
import types

import pytest
from agent_fakes import Strict

from rankwatch.agent import ablate, boot, public
from rankwatch.agent.ablate import Ablation, described
from rankwatch.agent.ablate_steps import Steps, handler_of, watch_what_scripts_say
from rankwatch.agent.guard import here
from rankwatch.agent.record_file import RecordFile
from rankwatch.wire import env


@pytest.fixture(autouse=True)
def _this_process(monkeypatch):
    monkeypatch.setattr(here, "pid", os.getpid())
    monkeypatch.setattr(public, "_on_step", None)
    monkeypatch.setattr(public, "_on_loss", None)


def plan(tmp_path, rung, **more):
    return {"rung": rung, "steps": 3, "seed": None, "eager": [], "skip": [], "records": str(tmp_path), **more}


def records(tmp_path, rank=0):
    path = tmp_path / f"rank_{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def lookup(name):
    def backend(graph, inputs, **kwargs):
        return f"{name} compiled"

    return backend if isinstance(name, str) else name


def graph_of(*operations):
    nodes = [Strict(op="call_function", meta={"example_value": Strict(dtype=Strict(is_floating_point=False))}) for _ in operations]
    return Strict(graph=Strict(nodes=nodes))


class Wrapper:
    """Like torch._TorchCompileInductorWrapper."""

    compiler_name = "inductor"

    def __init__(self, **config):
        self.config = config

    def __call__(self, graph, inputs, **kwargs):
        return f"inductor with {self.config}"


def mine(graph, inputs, **kwargs):
    return "mine compiled"


def compiled(ablation, given, caller_exports=False):
    """What torch would get for `given`: the compiled graph, or `given` itself where it is left."""
    export = caller_exports  # noqa: F841 - read from this frame by the hook
    resolved = ablation.wrap_resolve(lambda backend: backend, lookup)(given)
    return resolved(graph_of("add"), ()) if isinstance(resolved, ablate.Backend) else resolved


@pytest.mark.parametrize(
    ("rung", "given", "wanted"),
    [
        ("eager", Wrapper(), "eager compiled"),
        ("aot_eager", Wrapper(), "aot_eager compiled"),
        ("inductor", Wrapper(), "inductor with {}"),
        ("inductor", Wrapper(mode="max-autotune"), "inductor compiled"),
        ("given", Wrapper(mode="max-autotune"), "inductor with {'mode': 'max-autotune'}"),
        ("aot_eager_decomp_partition", mine, "aot_eager_decomp_partition compiled"),
        ("given", mine, "mine compiled"),
        ("off", "inductor", "eager compiled"),
        ("inductor", "eager", "eager compiled"),
        ("inductor", "aot_eager", "aot_eager compiled"),
    ],
)
def test_a_backend_is_lowered_to_the_rung_and_never_raised(tmp_path, rung, given, wanted):
    assert compiled(Ablation(plan(tmp_path, rung), 0, 1), given) == wanted


def test_torchs_own_captures_are_left_alone(tmp_path):
    def capture(graph, inputs): ...

    capture.__module__ = "torch._dynamo.eval_frame"
    ablation = Ablation(plan(tmp_path, "eager"), 0, 1)
    assert compiled(ablation, capture) is capture
    assert compiled(ablation, mine, caller_exports=True) is mine
    assert compiled(ablation, None) is None


def test_graphs_are_counted_by_frame_and_switched_by_name(tmp_path):
    ablation = Ablation(plan(tmp_path, "given", eager=["?#1"]), 0, 1)
    assert [compiled(ablation, mine) for _ in range(3)] == ["mine compiled", "eager compiled", "mine compiled"]
    assert [(line["key"], line["backend"], line["ops"]) for line in records(tmp_path) if line["kind"] == "graph"] == [
        ("?#0", "mine", 1), ("?#1", "eager", 1), ("?#2", "mine", 1),
    ]  # fmt: skip


def test_a_backend_that_raises_is_recorded_and_raises_on(tmp_path):
    def bad(graph, inputs):
        raise NotImplementedError("no lowering")

    with pytest.raises(NotImplementedError, match="no lowering"):
        compiled(Ablation(plan(tmp_path, "given"), 0, 1), bad)
    assert records(tmp_path)[-1] | {"ops": 0} == {
        "kind": "graph", "ok": False, "error": "NotImplementedError", "text": "no lowering",
        "ops": 0, "dtypes": [], "frame": "?", "key": "?#0", "backend": "bad",
    }  # fmt: skip


def test_a_hook_that_fails_leaves_the_users_backend_and_says_so(tmp_path):
    class Odd:
        @property
        def compiler_name(self):
            raise RuntimeError("odd")

    odd = Odd()
    assert Ablation(plan(tmp_path, "eager"), 0, 1).wrap_resolve(lambda backend: backend, lookup)(odd) is odd
    assert records(tmp_path)[-1] == {"kind": "problem", "at": "a hook", "text": "RuntimeError: odd"}


def test_a_module_that_looks_otherwise_is_a_problem_in_the_record(tmp_path):
    module = types.ModuleType("torch._dynamo.eval_frame")
    Ablation(plan(tmp_path, "eager"), 0, 1).arm(module)
    assert [line["kind"] for line in records(tmp_path)] == ["problem"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("inductor", ("inductor", 4)), (mine, ("mine", 5)), (Wrapper(), ("inductor", 4)), (Wrapper(mode="x"), ('inductor {"mode": "x"}', 5)), ("tvm", ("tvm", 5))],
)
def test_a_backend_is_described_as_people_know_it(given, wanted):
    assert described(given) == wanted


def test_frames_of_the_users_are_left_to_python_when_the_plan_says_so(tmp_path):
    skip = Strict(SKIP="skip")
    fakes = Strict(FrameAction=skip, FrameExecStrategy=lambda *both: both, ConvertFrameReturn=lambda frame_exec_strategy: frame_exec_strategy)
    ablation = Ablation(plan(tmp_path, "eager", skip=["*"]), 0, 1)
    convert = ablation.wrap_convert(lambda wrapper, frame, *more: "compiled", fakes)
    users = compile("def train(): ...", "/job/train.py", "exec").co_consts[0]
    assert convert(None, Strict(f_code=users), None, {}) == ("skip", "skip")
    assert convert(None, Strict(f_code=json.dumps.__code__), None, {}) == "compiled"
    assert records(tmp_path) == [{"kind": "frame", "frame": "train@train.py:1"}]


class TestEnd:
    def steps(self, tmp_path, world=1, last=2):
        found = Steps(RecordFile(str(tmp_path / "rank_0.jsonl")), Ablation(plan(tmp_path, "off"), 0, world).probe, last, world)
        found._line = {}
        return found

    def test_a_rank_leaves_by_system_exit_after_its_last_step(self, tmp_path):
        steps = self.steps(tmp_path)
        steps.explicit()
        steps.end_after_last()
        steps.explicit()
        with pytest.raises(SystemExit) as end:
            steps.end_after_last()
        assert end.value.code == 0
        assert [line["kind"] for line in records(tmp_path)] == ["step", "step", "last"]
        assert (tmp_path / "rank_0.jsonl.done").exists()

    def test_it_waits_until_every_rank_is_done(self, tmp_path, monkeypatch):
        steps = self.steps(tmp_path, world=2, last=1)
        slept = []

        def sleep(seconds):
            slept.append(seconds)
            (tmp_path / "rank_1.jsonl.done").touch()

        monkeypatch.setattr("rankwatch.agent.ablate_steps.sleep", sleep)
        steps.explicit()
        with pytest.raises(SystemExit):
            steps.end_after_last()
        assert slept == [0.02, 0.2]

    def test_a_script_that_swallows_the_exit_meets_it_again_and_is_ended_at_last(self, tmp_path, monkeypatch):
        steps = self.steps(tmp_path, last=1)
        codes = []
        monkeypatch.setattr(os, "_exit", codes.append)
        for _ in range(4):
            steps.explicit()
            with pytest.raises(SystemExit):
                steps.end_after_last()
        assert codes == [0]
        assert [line["kind"] for line in records(tmp_path)] == ["step", "last", "caught", "end"]

    def test_where_the_exit_was_caught_is_recorded(self, tmp_path):
        path = tmp_path / "job.py"
        path.write_text("for _ in range(2):\n    try:\n        steps.explicit()\n        steps.end_after_last()\n    except SystemExit:\n        pass\n")
        exec(compile(path.read_text(), str(path), "exec"), {"steps": self.steps(tmp_path, last=1)})
        assert [line.get("where") for line in records(tmp_path) if line["kind"] == "caught"] == ["job.py:5"]

    def test_all_optimizers_of_the_last_round_step_first(self, tmp_path):
        steps = self.steps(tmp_path)
        steps.round, steps._per_round, steps._stepped = 2, 2, [1]
        steps.end_after_last()
        steps._stepped.append(2)
        with pytest.raises(SystemExit):
            steps.end_after_last()

    def test_a_fork_child_neither_records_nor_ends(self, tmp_path, monkeypatch):
        steps = self.steps(tmp_path, last=0)
        monkeypatch.setattr(here, "pid", 0)
        steps.end_after_last()
        assert records(tmp_path) == []

    def test_the_scripts_own_loss_and_steps_are_recorded(self, tmp_path, monkeypatch):
        steps = self.steps(tmp_path)
        before = []
        monkeypatch.setattr(public, "_on_step", lambda: before.append("step"))
        watch_what_scripts_say(steps, steps._probe, lambda function: function)
        public.log_loss(2.0)
        public.log_loss(4.0)
        public.step()
        assert before == ["step"]
        assert [(line["n"], line["loss"], line["grad_norm"]) for line in records(tmp_path)] == [(1, 3.0, None)]


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("try:\n    f()\nexcept SystemExit:\n    pass\n", 3),
        ("try:\n    f()\nexcept (OSError, SystemExit):\n    pass\n", 3),
        ("try:\n    f()\nexcept OSError:\n    pass\nexcept:\n    pass\n", 5),
        ("try:\n    f()\nexcept Exception:\n    pass\n", None),
        ("try:\n    f()\nexcept BaseException:\n    raise\n", None),
        ("f()\nf()\n", None),
        ("try:\n    f(\n", None),
    ],
)
def test_the_handler_that_keeps_an_exit_is_found_in_the_source(tmp_path, source, wanted):
    (tmp_path / "job.py").write_text(source)
    assert handler_of(str(tmp_path / "job.py"), 2) == wanted


def test_a_record_file_that_cannot_be_written_costs_the_job_nothing(tmp_path):
    file = RecordFile(str(tmp_path / "missing" / "rank_0.jsonl"))
    file.write("step", n=1)
    file.write("step", n=2)
    assert not (tmp_path / "missing").exists()


def test_without_a_plan_nothing_of_it_is_imported(monkeypatch):
    awaited = []
    monkeypatch.setattr(boot, "when_imported", lambda name, hook: awaited.append(name))
    monkeypatch.setattr(boot, "_leave_mark", lambda environ: None)
    boot.start({"RANK": "0"})
    assert "torch" not in awaited
    boot.start({"RANK": "0", env.ABLATE_PLAN: "/nowhere/plan.json"})
    assert set(boot.ABLATED) <= set(awaited)


def test_a_plan_that_cannot_be_read_leaves_the_job_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "_ablation", None)
    from rankwatch.agent.when_imported import when_imported

    module = types.ModuleType("rankwatch_test_module")
    monkeypatch.setitem(sys.modules, "rankwatch_test_module", module)
    when_imported("rankwatch_test_module", lambda found: ablate.arm(found, {env.ABLATE_PLAN: str(tmp_path / "none.json"), "RANK": "0"}))
    assert ablate._ablation is None
