"""The scripts of tests/gpu run by hand on GPUs; here their tables, judgements and statistics are looked at without one."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

GPU = Path(__file__).parents[1] / "gpu"
SCRIPTS = ("faults", "controls", "overhead", "cudagraph")


@pytest.fixture(scope="module", autouse=True)
def _on_the_path() -> Any:
    sys.path.append(str(GPU))  # at the end: synthetic/ has a faults.py too
    yield
    sys.path.remove(str(GPU))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"gpu_script_{name}", GPU / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kinds_of(job: str) -> set[str]:
    """The keys of KINDS in a job, which cannot be imported without torch."""
    for node in ast.parse((GPU / "jobs" / job).read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "KINDS":
            assert isinstance(node.value, ast.Dict)
            return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    raise AssertionError(f"{job} has no KINDS")


def state(verdict: str, cause: str, culprits: list[int], at: float) -> Any:
    from gpu_watch import State

    return State("1", at, at, verdict, cause, culprits, "", "certain")


def seen(*states: Any, stacks: dict[int, float] | None = None, **more: Any) -> Any:
    from gpu_watch import Seen

    return Seen(states=list(states), stack_at={rank: [at] for rank, at in (stacks or {}).items()}, **more)


def fault(name: str) -> Any:
    from gpu_cases import FAULTS

    return next(case for case in FAULTS if case.name == name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_needs_no_torch_and_says_how_to_run_it(name: str) -> None:
    """Importing torch in the driver would hold memory on the GPU; the usage names the command."""
    text = (GPU / f"{name}.py").read_text()
    assert f"python tests/gpu/{name}.py OUT_DIR" in text
    assert "import torch" not in text
    assert callable(load(name).main)


def test_every_case_has_its_job_and_every_job_its_case() -> None:
    from gpu_cases import CONTROLS, FAULTS

    assert kinds_of("fault_job.py") == {case.name for case in FAULTS}
    assert kinds_of("control_job.py") == {control.name for control in CONTROLS}


def test_the_tables_use_words_that_rankwatch_says() -> None:
    from typing import get_args

    from gpu_cases import FAULTS, PAGES

    from rankwatch import model

    assert set(PAGES) == set(model.PAGING)
    for case in FAULTS:
        assert set(case.verdicts) <= set(get_args(model.VerdictName)), case.name
        assert {*case.causes, *case.first_causes} <= set(get_args(model.Cause)), case.name
        assert case.limit_s > case.hold_s, case.name


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_arguments_are_the_same_everywhere(name: str) -> None:
    output = importlib.import_module("gpu_output")
    options = output.arguments("", 100.0, getattr(load(name), "add", None), ["/tmp/out", "--gpus", "4", "--limit-s", "60"])
    assert (options.out, options.gpus, options.limit_s, options.dry_run_on_cpu) == (Path("/tmp/out"), 4, 60.0, False)


def test_the_dry_run_leaves_out_what_needs_a_gpu() -> None:
    chosen = load("faults").chosen
    assert "spin" in chosen(SimpleNamespace(only="*", dry_run_on_cpu=False))
    assert set(chosen(SimpleNamespace(only="*asleep,spin", dry_run_on_cpu=True))) == {"asleep"}
    with pytest.raises(SystemExit, match="no case fits nothing"):
        chosen(SimpleNamespace(only="nothing", dry_run_on_cpu=False))


def test_the_right_rank_in_time_is_right() -> None:
    from gpu_judging import judge_fault

    found = judge_fault(
        fault("asleep"),
        seen(state("slow", "not_entered", [1], 105.5), state("stuck", "not_entered", [1], 112.5), stacks={0: 106.0, 1: 104.0}),
        100.0,
        2,
    )
    assert (found.word, found.named_s, found.paged_s, found.stacks_s) == ("right", 5.5, 12.5, 6.0)


def test_a_wrong_name_on_a_page_is_wrong_and_a_slow_one_is_late() -> None:
    from gpu_judging import judge_fault

    stacks = {0: 101.0, 1: 101.0}
    wrong = judge_fault(fault("asleep"), seen(state("stuck", "not_entered", [0], 105.0), stacks=stacks), 100.0, 2)
    assert wrong.problems == ["WRONG PAGE stuck/not_entered[0]", "first named stuck/not_entered[0]", "no stuck not_entered/data_loading"]
    late = judge_fault(fault("killed"), seen(state("failed", "killed", [1], 109.0)), 100.0, 2)
    assert (late.word, late.late) == ("late", ["named after 9.0 s of 5", "paged after 9.0 s of 5"])


def test_a_page_while_a_compile_progresses_is_wrong() -> None:
    from gpu_judging import judge_fault

    states = [state("slow", "compiling", [1], 105.0), state("stuck", "compiling", [1], 130.0)]
    found = judge_fault(fault("compile_alone"), seen(*states, stacks={0: 106.0, 1: 106.0}, compile_looks=[(106.0, "a"), (107.0, "b"), (108.0, "c")]), 100.0, 2)
    assert found.problems == ["page stuck/compiling[1]"]


def test_a_countdown_after_the_page_is_no_mistake() -> None:
    from gpu_judging import judge_fault

    states = [state("stuck", "not_entered", [1], 112.0), state("timeout_imminent", "not_entered", [1], 130.0)]
    assert judge_fault(fault("asleep"), seen(*states, stacks={0: 106.0, 1: 106.0}), 100.0, 2).problems == []


def test_stacks_have_to_come_before_the_abort() -> None:
    from gpu_judging import judge_fault

    states = [state("stuck", "not_entered", [1], 104.0)]
    found = judge_fault(fault("abort"), seen(*states, stacks={0: 105.0, 1: 177.0}, watchdog_at=115.0, abort_at=176.0), 100.0, 2)
    assert found.problems == ["stacks only after the abort"]
    found = judge_fault(fault("abort"), seen(state("stuck", "not_entered", [1], 116.0), stacks={0: 105.0, 1: 105.0}, watchdog_at=115.0), 100.0, 2)
    assert "named only after the watchdog" in found.problems


def test_with_two_ranks_either_side_of_a_mismatch_may_be_named_with_four_only_the_odd_one() -> None:
    assert fault("shapes").culprit_sets(2) == [[1], [0, 1]]
    assert fault("shapes").culprit_sets(4) == [[1]]
    assert fault("group_order").culprit_sets(4) == [[1], [0, 1, 2, 3]]


def test_a_job_is_ended_once_its_evidence_is_on_disk() -> None:
    from gpu_judging import settled

    case, states = fault("asleep"), [state("stuck", "not_entered", [1], 112.0)]
    assert not settled(case, seen(*states, stacks={1: 104.0}), 100.0, 2, 113.0)
    assert settled(case, seen(*states, stacks={0: 104.0, 1: 104.0}), 100.0, 2, 113.0)
    assert not settled(fault("abort"), seen(*states, stacks={0: 104.0, 1: 104.0}), 100.0, 2, 113.0)


def test_what_was_said_before_the_onset_counts_for_nothing() -> None:
    """Ranks that compile at the start are named too, and have their stacks saved."""
    from gpu_judging import judge_fault, settled

    said = seen(state("slow", "compiling", [1], 60.0), stacks={0: 61.0, 1: 61.0}, compile_looks=[(61.0, "a"), (62.0, "b"), (63.0, "c")])
    assert not settled(fault("compile_alone"), said, 100.0, 2, 170.0)
    assert judge_fault(fault("compile_alone"), said, 100.0, 2).problems == [
        "no slow compiling",
        "no stack of rank 0",
        "no stack of rank 1",
        "0 moments of the compile, want 3",
    ]


def test_a_control_may_be_slow_but_never_a_straggler_or_a_page() -> None:
    from gpu_cases import CONTROLS
    from gpu_judging import judge_control

    assert judge_control(CONTROLS[0], seen(state("slow", "compiling", [1], 5.0), state("recovered", "compiling", [1], 9.0)), 0).word == "right"
    found = judge_control(CONTROLS[0], seen(state("straggler", "unknown", [1], 5.0), state("stuck", "unknown", [1], 9.0)), 1)
    assert found.problems == ["FALSE PAGE stuck/unknown[1]", "undue straggler/unknown[1]", "exit code 1"]


def test_the_interval_of_a_median_is_that_of_order_statistics() -> None:
    from gpu_judging import median_interval

    middle, low, high, level = median_interval([float(n) for n in range(1, 11)])
    assert (middle, low, high, round(level, 4)) == (5.5, 2.0, 9.0, 0.9785)
    assert median_interval([1.0, 2.0])[1:] == (1.0, 2.0, 0.5)  # two pairs prove little, and it says so


def test_an_overhead_within_the_bar_says_whether_it_can_be_told_from_nothing() -> None:
    overhead = load("overhead")
    ratio = [1.0 + (n - 5) / 1000 for n in range(11)]
    sets = [{"ratio": {"all on": one + 0.01, "no timing": one}, "plain": [0.02], "all on": [0.02], "no timing": [0.02], "polls": [2]} for one in ratio]
    over, row = overhead.training_rows(sets)
    assert over[5].startswith("bar x 1.005: OVER THE BAR; distinguishable from 0")
    assert row[3:5] == ["x 1.0000", "0.9960-1.0040 (98.8%)"]
    assert row[5] == "bar x 1.005: within the bar; not distinguishable from 0; 2 polls in a watched turn"
    rounds = [{mode: 30.0 + place for place, mode in enumerate(overhead.MODES)} for _ in range(6)]
    assert [row[3] for row in overhead.call_rows(rounds)] == ["x 1.000", "x 1.033", "x 1.067", "x 1.100", "x 1.133"]


def test_tuning_is_compared_with_the_blocks_in_the_log() -> None:
    log = (
        b"[rank0]:AUTOTUNE addmm(3072x1536, 3072x512, 512x1536)\n  triton_mm_1 0.01 ms\n"
        b"SingleProcess AUTOTUNE benchmarking takes 12.4594 seconds and 0.4956 seconds precompiling for 22 choices\n"
        b"AUTOTUNE mm(3072x512, 512x512)\n"
        b"SingleProcess AUTOTUNE benchmarking takes 12.4104 seconds and 0.0014 seconds precompiling for 20 choices\n"
    )
    tuning = load("cudagraph").tuning
    good = tuning({"configs_tried": 3}, {"configs_tried": 45, "tunings": 2}, log, ["autotune: autotune 3/22"])
    assert (good["blocks"], good["choices"], good["problems"]) == (2, [22, 20], [])
    bad = tuning({}, {"configs_tried": 40, "tunings": 1}, log, ["autotune"])
    assert bad["problems"] == ["40 configurations counted, 42 choices in the log", "1 tunings counted, 2 blocks in the log", "no progress was shown"]


def test_a_table_lines_up() -> None:
    output = importlib.import_module("gpu_output")
    assert output.table(("a", "b"), [["long word", 1], ["x", "2 and more"]]) == "a          b\nlong word  1\nx          2 and more"


def test_what_could_not_be_run_is_left_out_and_a_broken_case_costs_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    output = importlib.import_module("gpu_output")

    def run(name: str) -> str:
        if name == "broken":
            raise OSError("no space")
        return name.upper()

    assert output.side_by_side(["one", "broken", "two"], run, 2, output.Deadline(60.0), str) == {"one": "ONE", "two": "TWO"}
    assert "broken: runner failed: OSError('no space')" in capsys.readouterr().out
    assert output.side_by_side(["one"], run, 1, output.Deadline(0.0), str) == {}


def test_the_archive_holds_logs_and_incidents_and_of_a_long_log_its_end(tmp_path: Path) -> None:
    import tarfile

    output = importlib.import_module("gpu_output")
    work = tmp_path / "work"
    work.mkdir()
    (work / "output.log").write_bytes(b"x" * 400_000 + b"the end")
    (work / "incident.json").write_text("{}")
    (work / "kernel.so").write_text("")
    output.archive(work, tmp_path / "all.tar.gz")
    with tarfile.open(tmp_path / "all.tar.gz") as tar:
        assert sorted(tar.getnames()) == ["incident.json", "output.log"]
        log = tar.extractfile("output.log")
        assert log is not None
        assert log.read().endswith(b"the end")
