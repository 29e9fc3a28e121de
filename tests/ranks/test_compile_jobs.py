"""Real ranks, one trouble with torch.compile each: what people read on stderr, in compile.json and from `rankwatch compile`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from jobs import JOBS, Job, wait_for

from rankwatch import cli

pytestmark = pytest.mark.ranks
slow = pytest.mark.slow_ranks
dynamo_and_inductor = pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=slow)])

SOURCE = (JOBS / "compile_cases.py").read_text().splitlines()


def place(code: str) -> str:
    """`compile_cases.py:66` of the only line that holds `code`."""
    (number,) = [number for number, line in enumerate(SOURCE, 1) if code in line]
    return f"compile_cases.py:{number}"


FORWARD = f"forward@{place('# the whole model')}"


class Seen:
    """A job that has ended. news: its COMPILE lines; text: what `rankwatch compile RUN` prints, with every run of blanks as one."""

    def __init__(self, job: Job, text: str) -> None:
        self.lines = job.lines()
        self.news = [line.partition(" COMPILE ")[2].partition(" see=")[0] for line in self.lines if " COMPILE " in line]
        self.doc: dict[str, Any] = json.loads((job.run_dir / "compile.json").read_text())
        self.text = " ".join(text.split())
        self.incidents = job.incidents()
        self.verdicts = {(told["verdict"], told["cause"]) for doc in self.incidents for told in (doc, *doc["history"])}

    @property
    def regime(self) -> tuple[str, str]:
        return self.doc["regime"]["name"], self.doc["regime"]["words"]

    @property
    def advice(self) -> dict[str, dict[str, Any]]:
        return {one["key"]: one for one in self.doc["advice"]}

    @property
    def differences(self) -> dict[str, str]:
        return {one["kind"]: one["words"] for one in self.doc["divergence"]}

    def frame(self, name: str = FORWARD) -> dict[str, Any]:
        return next(row for row in self.doc["frames"] if row["frame"] == name)


@pytest.fixture
def see(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """see(CASE, BACKEND, STEPS): runs the case and returns what is Seen of it. Inductor finds an empty cache on each rank, unless CACHES says otherwise."""

    def run(
        case: str, backend: str = "eager", steps: int = 6, nproc: int = 2, code: int = 0, deadline_s: float = 500, env: dict[str, str] | None = None
    ) -> Seen:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        env = {"CACHES": ",".join(f"{tmp_path}/cache_{rank}" for rank in range(nproc)), **(env or {})}
        with Job(tmp_path, "compile_cases.py", case, backend, str(steps), nproc=nproc, env=env) as job:
            assert job.end(deadline_s) == code, job.text[-3000:]
            capsys.readouterr()
            assert cli.main(["compile", str(job.run_dir)]) == 0
            return Seen(job, capsys.readouterr().out)

    return run


@dynamo_and_inductor
def test_a_recompile_storm_compiles_for_ever_and_the_line_that_changes_is_named(see, backend: str) -> None:
    seen = see("storm", backend, steps=14)
    line = place("x = x * (self.round + 1)")
    assert seen.regime == ("compiles_for_ever", f"{FORWARD} was recompiled 13 times in 14 steps, the last time in the newest step: self.round == 12")
    (told,) = seen.news
    ago = "(?:in the newest step|[2-4] steps ago)"
    assert re.fullmatch(rf'what=compiles_for_ever why="{FORWARD} was recompiled \d+ times in \d+ steps, the last time {ago}: self.round == \d+"', told)
    (advice,) = seen.doc["advice"]
    assert (advice["key"], advice["at"], advice["ranks"]) == (f"guard {FORWARD} value", line, "0-1")
    assert advice["setting"] == "torch._dynamo.config.allow_unspec_int_on_nn_module = True (an int attribute of a module)"
    assert f"{FORWARD}, ranks 0-1: value: self.round == 12, before that 11, 10, 9, 8, 7 ({line}) (26 times over 2 ranks)" in seen.text
    assert "a Python number or string that the graph has built in changes: hand it over as a tensor" in seen.text
    assert "14 of 64" in seen.text
    assert seen.doc["divergence"] == []


@dynamo_and_inductor
def test_a_recompile_limit_makes_the_frame_eager_for_ever(see, backend: str) -> None:
    seen = see("limit", backend)
    why = f'frame={FORWARD} why="compiled 4 times, now it runs eagerly for ever; the last guard: self.round == 3"'
    assert [told.partition(" rank=")[0] for told in seen.news] == ["what=recompile_limit"]
    assert seen.news[0].endswith(why)
    assert seen.regime == ("fell_back", f"{FORWARD} has reached the recompile limit of 4 on ranks 0-1 and runs eagerly there for ever")
    assert list(seen.advice) == [f"guard {FORWARD} value"]
    assert "4 of 4" in seen.text
    assert "eager for ever on ranks 0-1" in seen.text


@dynamo_and_inductor
def test_a_graph_break_in_the_block_loop_leaves_the_forward_to_python_and_its_cause_is_named(see, backend: str) -> None:
    seen = see("breaks", backend)
    at = f"{place('print(')}:forward"
    cause = "Failed to trace builtin operator: Dynamo does not know how to trace builtin operator `print` with argument types ['str'] (has_kwargs True)"
    words = f"{FORWARD} runs in Python because of a graph break at {at} ({cause}); only what it calls is compiled, piece by piece"
    assert seen.regime == ("fell_back", words)
    (told,) = seen.news
    assert told.startswith(f'what=fell_back why="{FORWARD} runs in Python because of a graph break at {at} (Failed to trace builtin operator: Dynamo does not')
    (advice,) = seen.doc["advice"]
    assert (advice["key"], advice["at"]) == (f"break {at}", at)
    assert advice["words"] == f"{at}: something is printed or logged: move it out of the compiled function"
    assert advice["evidence"] == [f"graph break at {at}: {cause} (gb0059); {FORWARD} runs in Python as a whole because of it"]
    assert f"{at} in {FORWARD}, ranks 0-1: {cause} gb0059" in seen.text
    assert "runs in Python: graph break" in seen.text
    assert backend != "eager" or "- left to Python # compiles" in seen.text  # beside the minutes of Inductor it has no column of its own
    assert "! fails" not in seen.text


def test_zero_graphs_of_a_wrapped_sequential_are_told_with_the_order_that_compiles(see) -> None:
    seen = see("zero", "aot_eager")
    words = f"torch.compile was asked for at {place('else torch.compile(model')} and not one graph was compiled in 6 steps: everything runs eagerly"
    assert seen.regime == ("compiled_nothing", words)
    assert [re.sub(r"in \d+ steps", "in 6 steps", told) for told in seen.news] == [f'what=compiled_nothing why="{words}"']
    (advice,) = seen.doc["advice"]
    assert advice["words"] == (
        "compile the model before DistributedDataParallel wraps it: DDP(torch.compile(model)); a bare nn.Sequential has no frame of its own: "
        "a module with a forward of its own around it has one"
    )
    assert "no step has compiled anything" in seen.text


def test_a_backend_that_fails_on_one_rank_only_is_told_of_that_rank(see) -> None:
    seen = see("failing_backend", code=1)
    why = "BackendCompilerFailed: backend='compile_fn' raised: ValueError: no kernel for this graph on this node"
    assert seen.regime == ("failing", f"compiling {FORWARD} fails on rank 1: {why}")
    assert seen.differences == {"failed_alone": f"rank 1 failed to compile {FORWARD}: {why}; rank 0 compiled it"}
    assert list(seen.advice) == [f"failed_alone {FORWARD}", f"failed {FORWARD}"]
    assert "only rank 1 fails to compile" in seen.text
    assert f"{FORWARD}, rank 1: {why}" in seen.text
    assert seen.news == []  # the line of the crash says it
    assert any(" FAILED rank=1 " in line and f"at={place('raise ValueError')}:broken" in line for line in seen.lines)


def test_other_bucket_caps_on_one_rank_are_an_alarm_with_both_splits(see) -> None:
    seen = see("splits=1.5,4", steps=3)
    words = f"DDPOptimizer has split {FORWARD} differently: rank 0: 4 buckets: 0.0041, 4.21, 3.15, 1.05 MB; rank 1: 3 buckets: 3.16, 4.21, 1.05 MB"
    assert seen.differences == {"different_split": words}
    assert seen.news == [f'what=different_split rank=0,1 frame={FORWARD} why="{words}"']
    (advice,) = seen.doc["advice"]
    assert (advice["words"], advice["setting"]) == (
        "DistributedDataParallel has other bucket caps on some ranks (1.5 on rank 0, 4 on rank 1): give the same on every rank",
        "bucket_cap_mb",
    )
    assert "rank 0: split, 4 buckets: 0.0041, 4.21, 3.15, 1.05 MB, cap 1.57 MB (bucket_cap_mb=1.5)" in seen.text
    assert "rank 1: split, 3 buckets: 3.16, 4.21, 1.05 MB, cap 4.19 MB (bucket_cap_mb=4)" in seen.text


@slow
@pytest.mark.parametrize(
    ("cap", "words"),
    [
        ("1.5", "ranks 0-1: split, 4 buckets: 0.0041, 4.21, 3.15, 1.05 MB, cap 1.57 MB (bucket_cap_mb=1.5)"),
        ("4", "ranks 0-1: split, 3 buckets: 3.16, 4.21, 1.05 MB, cap 4.19 MB (bucket_cap_mb=4)"),
        ("12", "ranks 0-1: split, 2 buckets: 7.36, 1.05 MB, cap 12.58 MB (bucket_cap_mb=12)"),  # the last one is cut at 1 MiB, whatever the cap
    ],
)
def test_the_splits_of_three_bucket_caps_are_shown_with_their_bytes(see, cap: str, words: str) -> None:
    seen = see(f"splits={cap}", "inductor", steps=3)
    assert words in seen.text
    assert (seen.doc["advice"], seen.news, seen.differences) == ([], [], {})
    (group,) = seen.doc["ddp"]["groups"]
    assert (group["buckets"][-1]["first_param"], group["buckets"][-1]["last_param"]) == ("blocks_1_out_weight", "blocks_1_out_bias")


@slow
def test_a_bucket_cap_below_the_first_bucket_is_told_with_the_setting_to_raise(see) -> None:
    seen = see("splits=0.5", "aot_eager", steps=3, code=1)
    assert "init failed, cap 0.52 MB (bucket_cap_mb=0.5); AssertionError: First bucket should be smaller/equal to other buckets" in seen.text
    assert seen.advice["ddp_init"]["words"] == "DDPOptimizer wants buckets of at least its first one of 1 MiB: raise bucket_cap_mb of DistributedDataParallel"
    assert seen.advice["ddp_init"]["setting"] == "bucket_cap_mb=25"


@slow
def test_the_order_that_is_advised_for_a_sequential_compiles_it(see) -> None:
    assert see("zero_cured", "aot_eager").regime == ("compiled", "1 graph compiled, steady: no compile for 6 steps")


@slow
@pytest.mark.parametrize(
    ("case", "env", "why", "advice"),
    [
        ("plain", {"TORCHDYNAMO_DISABLE": "1"}, "TORCHDYNAMO_DISABLE=1", "take TORCHDYNAMO_DISABLE=1 away if compiled code is wanted"),
        ("stance", {}, 'torch.compiler.set_stance("force_eager")', "take the stance 'force_eager' away if compiled code is wanted"),
    ],
    ids=["environment", "stance"],
)
def test_a_compile_that_is_switched_off_is_told_with_what_switches_it_off(see, case: str, env: dict[str, str], why: str, advice: str) -> None:
    seen = see(case, "aot_eager", env=env)
    words = f"torch.compile is asked for at {place('else torch.compile(model')}, but it is switched off by {why}: everything runs eagerly"
    assert seen.regime == ("fell_back", words)
    assert [told.replace("\\", "") for told in seen.news] == [f'what=fell_back why="{words}"']
    assert [(one["key"], one["words"]) for one in seen.doc["advice"]] == [("switched_off", advice)]
    assert f"because ranks 0-1: {why}; no graph was compiled" in seen.text


@slow
def test_a_branch_on_each_ranks_data_gives_different_graphs(see) -> None:
    seen = see("branch", "inductor")
    (difference,) = seen.doc["divergence"]
    assert (difference["kind"], [group["ranks"] for group in difference["groups"]]) == ("different_graph", ["0", "1"])
    words = rf"compiled different graphs of {FORWARD}: rank 0: 10 operations, \d+ inputs, \d+ guards; rank 1: 12 operations, \d+ inputs, \d+ guards"
    assert re.fullmatch(words, difference["words"])
    (advice,) = seen.doc["advice"]
    assert advice["words"] == f"{FORWARD}: let all ranks take the same branch: broadcast what it depends on, or write it as torch.where or torch.cond"
    assert advice["evidence"] == [difference["words"]]
    assert f"* different graphs: {difference['words']}" in seen.text
    assert seen.news == []


@slow
def test_a_lowering_error_on_one_rank_only_is_told_of_that_rank(see, tmp_path: Path) -> None:
    seen = see("small_failing", "inductor", code=1, deadline_s=300, env={"CACHES": f"{tmp_path}/a,{tmp_path}/b"})
    why = "InductorError: LoweringException: NotImplementedError: erf has no lowering here"
    assert seen.regime == ("failing", f"compiling {FORWARD} fails on rank 1: {why}")
    assert seen.differences["failed_alone"] == f"rank 1 failed to compile {FORWARD}: {why}; rank 0 compiled it"
    assert list(seen.advice)[:2] == [f"failed_alone {FORWARD}", f"failed {FORWARD}"]
    assert f"{FORWARD}, rank 1: {why}" in seen.text


@slow
def test_caches_that_are_cold_on_one_rank_only_are_told_and_the_wait_is_blamed_on_them(see, tmp_path: Path) -> None:
    env = {"CACHES": f"{tmp_path}/a,{tmp_path}/b"}
    assert "cache" not in see("small", "inductor", steps=12, deadline_s=400, env=env).differences
    shutil.rmtree(tmp_path / "b")
    seen = see("small", "inductor", steps=12, deadline_s=400, env=env)
    assert seen.differences == {"cache": f"rank 1 missed the AOTAutograd cache for {FORWARD}, rank 0 hit it"}
    assert seen.advice["cold_cache"]["ranks"] == "1"
    assert seen.advice["cold_cache"]["setting"] == "TORCHINDUCTOR_CACHE_DIR, or torch.compiler.save_cache_artifacts()"
    assert "some ranks compile what others load from the cache" in seen.text
    assert seen.verdicts <= {("slow", "compiling"), ("recovered", "compiling")}
    assert seen.doc["totals"]["waited_rank_s"] > 0


@slow
def test_ranks_that_wait_for_the_cache_lock_of_a_compiling_rank_are_never_stuck(see, tmp_path: Path) -> None:
    """Ranks 0 and 1 share a cache: rank 1 needs the kernel whose lock rank 0 holds for more than a minute. Rank 2 waits for both."""
    compiler = tmp_path / "slow-c++"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    env = {"CACHES": f"{tmp_path}/a,{tmp_path}/a,{tmp_path}/b", "CXX": str(compiler), "LOCK_IS_HELD": str(tmp_path / "held")}

    def told(job: Job) -> list[str]:
        return [line for doc in job.incidents() for line in doc["evidence"] if "it waits for a lock file that another process holds" in line]

    with Job(tmp_path, "compile_cases.py", "small_lock", "inductor", "8", nproc=3, env=env) as job:
        (line,) = wait_for(lambda: told(job), 300, "the wait for the lock is told")
        assert line.startswith(f"rank 1: torch.compile of {FORWARD} [")
        assert job.end(400) == 0
        seen = Seen(job, "")
    assert (tmp_path / "held").exists()
    assert seen.verdicts <= {("slow", "compiling"), ("recovered", "compiling")}
    assert all(set(incident["culprit_ranks"]) <= {0, 1} for incident in seen.incidents)
    assert seen.frame()["seconds_max"] > 75
    assert seen.regime[0] == "compiled"


SLOW_COMPILER = """#!/bin/sh
# The C++ compiler. The first kernel of rank 0 takes 75 s longer, and a few hundredths of a core.
case "$RANK $*" in
0*.main.cpp*)
    if mkdir "$LOCK_IS_HELD" 2>/dev/null; then
        n=0
        while [ $n -lt 75 ]; do n=$((n + 1)); sleep 0.9; i=0; while [ $i -lt 80000 ]; do i=$((i + 1)); done; done
    fi ;;
esac
exec g++ "$@"
"""


@slow
def test_a_healthy_compiled_transformer_prints_three_lines_and_is_advised_nothing(see, tmp_path: Path) -> None:
    seen = see("healthy", "inductor", steps=20, deadline_s=500, env={"CACHES": f"{tmp_path}/a,{tmp_path}/a"})
    assert seen.regime == ("compiled", "1 graph compiled, steady: no compile for 20 steps")
    assert (seen.doc["advice"], seen.differences, seen.news, seen.incidents) == ([], {}, [], [])
    assert [line.split()[1] for line in seen.lines if "is taken by" not in line] == ["0.1.0", "both", "done"]
    frame = seen.frame()
    assert (frame["compiles"], frame["recompiles"], frame["graphs"]) == (1, 0, 1)
    assert seen.doc["totals"]["phases"]["kernel_compile"] > 0
