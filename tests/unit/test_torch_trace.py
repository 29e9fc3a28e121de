"""torch's traces: a folder a rank while they are written, the rank in every name afterwards, and tlparse over them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from rankwatch.agent import boot
from rankwatch.commands import tlparse
from rankwatch.launcher import torch_trace

FAKE = """#!{python}
import os, sys
folder, out = sys.argv[1], sys.argv[sys.argv.index("-o") + 1]
assert sys.argv[2:5] == ["--all-ranks-html", "--no-browser", "--overwrite"], sys.argv
os.makedirs(out, exist_ok=True)
open(out + "/index.html", "w").write("<p>Diverging Compilation IDs detected across ranks. This may ...</p>")
for name in os.listdir(folder):
    rank = name.split("_")[5]
    os.makedirs(f"{{out}}/rank_{{rank}}", exist_ok=True)
    open(f"{{out}}/rank_{{rank}}/failures_and_restarts.html", "w").write(name)
    open(f"{{out}}/rank_{{rank}}/compile_directory.json", "w").write('{directory}')
"""
DIRECTORY = json.dumps({"[0/1]": {"artifacts": [{"name": "recompile_reasons_25.json", "url": "-_0_1_0/recompile_reasons_25.json"}, {"name": "other"}]}})


def written(run_dir: Path, *, attempt: int = 0, rank: int, name: str, size: int = 10) -> Path:
    folder = Path(torch_trace.make_attempt(str(run_dir), attempt)) / f"rank_{rank}"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("x" * size)
    return folder


def test_every_file_gets_the_rank_into_its_name_whether_torch_knew_it_or_not(tmp_path: Path) -> None:
    written(tmp_path, rank=0, name="dedicated_log_torch_trace_abc.log")
    written(tmp_path, rank=1, name="dedicated_log_torch_trace_rank_1_def.log")
    folder = written(tmp_path, rank=1, name="of_the_user.txt")
    torch_trace.finish(str(tmp_path))
    attempt = tmp_path / "torch_trace" / "attempt_0"
    assert sorted(path.name for path in attempt.iterdir()) == [
        "dedicated_log_torch_trace_rank_0_abc.log",
        "dedicated_log_torch_trace_rank_1_def.log",
        "rank_1",
    ]
    assert [path.name for path in folder.iterdir()] == ["of_the_user.txt"]


def test_folders_stay_while_ranks_run(tmp_path: Path) -> None:
    """torch makes the folder, then the file in it: in between nobody may take it away."""
    folder = written(tmp_path, rank=0, name="dedicated_log_torch_trace_abc.log")
    assert list(torch_trace.name_by_rank(str(folder.parent))) == [0]
    assert list(folder.iterdir()) == []


def test_a_rank_sets_a_folder_of_its_own_and_never_over_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWATCH_TRACE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_TRACE", "/mine")
    boot._trace(3)
    assert os.environ["TORCH_TRACE"] == "/mine"
    monkeypatch.delenv("TORCH_TRACE")
    boot._trace(3)
    assert os.environ["TORCH_TRACE"] == str(tmp_path / "rank_3")
    assert (tmp_path / "rank_3").is_dir()


def test_a_place_that_cannot_be_written_means_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANKWATCH_TRACE_DIR", str(tmp_path / "file"))
    monkeypatch.delenv("TORCH_TRACE", raising=False)
    boot._trace(3)
    assert "TORCH_TRACE" not in os.environ


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tlparse"
    path.write_text(FAKE.format(python=sys.executable, directory=DIRECTORY))
    path.chmod(0o755)
    monkeypatch.setattr(tlparse, "executable", lambda: str(path))
    return path


@pytest.mark.usefixtures("program")
def test_the_newest_attempt_is_parsed_and_the_pages_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    written(run, attempt=0, rank=0, name="dedicated_log_torch_trace_old.log")
    written(run, attempt=1, rank=0, name="dedicated_log_torch_trace_helper.log", size=5)
    written(run, attempt=1, rank=0, name="dedicated_log_torch_trace_main.log", size=50)
    assert tlparse.run(str(run), None, None) == 0
    place = run / "tlparse_attempt_1"
    assert capsys.readouterr().out.splitlines() == [
        f"open {place}/index.html",
        "  it says: Diverging Compilation IDs detected across ranks",
        f"rank 0: {place}/rank_0/index.html (of its longest trace; 1 shorter left out)",
        f"  failures and restarts: {place}/rank_0/failures_and_restarts.html",
        f"  recompile (1): {place}/rank_0/-_0_1_0/recompile_reasons_25.json",
    ]
    assert (place / "rank_0" / "failures_and_restarts.html").read_text() == "dedicated_log_torch_trace_rank_0_main.log"
    assert tlparse.run(str(run), 1, None) == 0  # its own pages are made anew


@pytest.mark.usefixtures("program")
def test_traces_of_an_earlier_run_in_the_same_directory_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "run", rank=0, name="dedicated_log_torch_trace_old.log")
    os.utime(folder / "dedicated_log_torch_trace_old.log", (1000, 1000))
    (tmp_path / "run" / "run.json").write_text('{"started_at": 2000.0}')
    assert tlparse.run(str(tmp_path / "run"), None, None) == 3
    assert "rankwatch --torch-trace torchrun" in capsys.readouterr().err


@pytest.mark.usefixtures("program")
def test_a_directory_that_is_not_ours_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "run", rank=0, name="dedicated_log_torch_trace_a.log")
    assert tlparse.run(str(tmp_path / "run"), None, str(tmp_path)) == 2
    assert "name another directory with --out" in capsys.readouterr().err


def test_what_is_missing_is_named_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tlparse, "executable", lambda: None)
    assert tlparse.run(str(tmp_path / "nowhere"), None, None) == 2
    assert tlparse.run(str(tmp_path), None, None) == 3
    written(tmp_path, rank=0, name="dedicated_log_torch_trace_a.log")
    assert tlparse.run(str(tmp_path), 4, None) == 2
    assert tlparse.run(str(tmp_path), None, None) == 4
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("nowhere is no run directory")
    assert said[1].endswith("start the job with rankwatch --torch-trace torchrun ...")
    assert said[2].endswith("has no trace of attempt 4; it has 0")
    assert said[3] == "[rankwatch] tlparse is not installed: pip install 'rankwatch[trace]'"


def test_a_tlparse_that_fails_is_quoted(tmp_path: Path, program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text("#!/bin/sh\necho 'Error: no such log' >&2\nexit 1\n")
    written(tmp_path / "run", rank=0, name="dedicated_log_torch_trace_a.log")
    assert tlparse.run(str(tmp_path / "run"), None, None) == 3
    assert "tlparse failed: exit code 1: Error: no such log" in capsys.readouterr().err
