"""`rankwatch demo` before a job starts, and what it makes of the incidents afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rankwatch.commands import demo
from rankwatch.commands.faults import drill, launch
from rankwatch.commands.faults.table import FAULTS, find
from rankwatch.config import load
from rankwatch.model import Cause


def incident(verdict: str, cause: str, culprits: list[int], *before: str) -> dict[str, Any]:
    history = [{"verdict": each, "cause": cause, "culprit_ranks": culprits} for each in (*before, verdict)]
    return {"verdict": verdict, "cause": cause, "culprit_ranks": culprits, "history": history}


def test_help_lists_every_fault_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """--help holds each name at the start of a line, followed by what it is."""
    with pytest.raises(SystemExit):
        demo.main(["--help"], load([], {}, []))
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.split()[:1] == [fault.name] and fault.help in line for line in lines) for fault in FAULTS)


def test_every_cause_but_unknown_can_be_planted() -> None:
    """The table covers the causes of the model."""
    planted = {cause for fault in FAULTS for cause in fault.causes}
    assert set(Cause.__args__) - planted == set()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "page"),
    [
        ("crashed", "FAILED rank=1 cause=crashed (a ticket, nobody is paged)"),
        ("exited", "FAILED or STUCK rank=1 cause=exited (failed is a ticket, stuck pages)"),
        ("killed", "FAILED rank=1 cause=killed (this one pages)"),
        ("compiling", "SLOW rank=1 cause=compiling (nobody is paged, and it recovers)"),
    ],
)
def test_what_is_expected_says_whom_it_wakes(fault: str, page: str) -> None:
    found = find(fault)
    assert found is not None
    assert drill.expected(found) == page


def test_an_unknown_fault_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and every name that there is."""
    assert demo.main(["--fault", "gremlins"], load([], {}, [])) == 2
    told = capsys.readouterr().err
    assert "there is no fault 'gremlins'" in told
    assert all(fault.name in told for fault in FAULTS)


def test_a_name_may_be_written_with_hyphens() -> None:
    """group-order-deadlock is group_order_deadlock."""
    assert find("group-order-deadlock") is find("group_order_deadlock") is not None


def test_without_torch_the_demo_says_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 4; the interpreter to install it for is named."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert demo.main(["--fault", "killed"], load([], {}, [])) == 4
    assert f"there is no torch in {sys.executable}" in capsys.readouterr().err


def test_options_of_the_command_line_reach_the_job() -> None:
    """--run-dir is the demo's own; what files and variables say, the job reads itself."""
    given = [
        ("run-dir", "/x"),
        ("stuck-after", "30s"),
        ("limit", "notice_s=3"),
        ("no-probe", "ddp,steps"),
        ("run-dir-mode", "0750"),
        ("on-incident", "page me"),
    ]
    options = load(given, {"RANKWATCH_OWNER": "me"}, [])
    words = launch.forwarded(options)
    assert words == [
        "--run-dir-mode", "0750", "--stuck-after", "30.0", "--limit", "notice_s=3.0", "--no-probe", "ddp,steps", "--on-incident", "page me",
    ]  # fmt: skip


def test_the_script_runs_from_the_run_directory(tmp_path: Path) -> None:
    """There its frames are the job's own, wherever rankwatch is installed."""
    script = launch.copied(Path(drill.__file__).with_name("jobs") / "ended.py", tmp_path)
    assert script == tmp_path / "job" / "ended.py"
    assert "def crashed" in script.read_text()


LONE = {**incident("recovered", "compiling", [1], "slow"), "id": "one", "summary": "rank 1 recompiled"}
GONE = {**incident("stuck", "not_entered", [2], "slow"), "id": "two", "summary": "rank 2 is missing"}


def test_the_show_says_whether_rankwatch_was_right_and_where_to_look() -> None:
    """Both named and one page: 0; the columns are in line."""
    code, text = demo.judgement([LONE, GONE], "two", Path("/runs/d"))
    assert code == 0
    assert text.splitlines() == [
        "",
        "rankwatch said: slow -> recovered, cause compiling: rank 1 recompiled",
        "rankwatch said: slow -> stuck, cause not_entered: rank 2 is missing",
        "that is right:  rank 1 was told while it recompiled and paged nobody, rank 2 was paged",
        "",
        "Where to look:",
        "  /runs/d/incidents/two/index.html  the page for whoever is on call",
        "  /runs/d/incidents/two/report.txt  the same as text",
        "  /runs/d/incidents/two/stacks      py-spy stacks of the ranks that matter",
        "  /runs/d/events.jsonl              everything that was seen",
        "  rankwatch report /runs/d          every incident of the run, as text",
    ]


@pytest.mark.parametrize(
    ("found", "stuck", "words"),
    [
        ([GONE], "two", "that is WRONG:  the lone recompile was not named within 240 s"),
        ([], "", "that is WRONG:  the lone recompile and the missing rank was not named within 240 s"),
        ([{**LONE, "history": GONE["history"]}, GONE], "two", "that is WRONG:  it paged for 1 that it should not have"),
    ],
)
def test_the_show_that_was_not_named_rightly_says_so(found: list[dict[str, Any]], stuck: str, words: str) -> None:
    """Exit code 3."""
    code, text = demo.judgement(found, stuck, Path("/runs/d"))
    assert code == 3
    assert words in text


@pytest.mark.parametrize(
    ("name", "doc", "right"),
    [
        ("killed", incident("failed", "killed", [1]), True),
        ("killed", incident("failed", "crashed", [1]), False),
        ("killed", incident("failed", "killed", [0]), False),
        ("not_entered", incident("slow", "not_entered", [1]), False),
        ("not_entered", incident("stuck", "not_entered", [1], "slow"), True),
        ("evaluation", incident("recovered", "not_entered", [0], "slow"), True),
        ("all_entered", incident("stuck", "all_entered", []), True),
        ("all_entered", incident("stuck", "all_entered", [2]), False),
    ],
)
def test_right_is_verdict_cause_and_rank(name: str, doc: dict[str, Any], right: bool) -> None:
    """All three have to be what was planted; one that recovers may have been told before."""
    fault = find(name)
    assert fault is not None
    assert drill.matches(fault, doc) is right


@pytest.mark.parametrize(
    ("name", "doc", "wrong"),
    [
        ("killed", incident("failed", "crashed", [0]), True),
        ("killed", incident("slow", "not_entered", [0]), False),
        ("not_entered", incident("stuck", "not_entered", [1], "slow"), False),
        ("evaluation", incident("stuck", "not_entered", [0], "slow"), True),
        ("debugger", incident("slow", "debugger", [1]), False),
    ],
)
def test_a_page_for_another_rank_or_for_no_trouble_is_wrong(name: str, doc: dict[str, Any], wrong: bool) -> None:
    """A notice is no page; a fault that recovers must not be paged at all."""
    fault = find(name)
    assert fault is not None
    assert drill.misnamed(fault, doc) is wrong
