"""Wrong usage of `rankwatch ablate` is refused before anything runs."""

from __future__ import annotations

import json
import math

import pytest

from rankwatch import cli
from rankwatch.commands import ablate
from rankwatch.commands.ablate import several_nodes
from rankwatch.commands.ablation import runs, text
from rankwatch.commands.ablation.judge import Conclusion
from rankwatch.config import load


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "3"], "the job stands after --"),
        (["--", "python", "train.py"], "the job stands after --"),
        (["--ladder", "eager,nvfuser", "--", "torchrun", "train.py"], "there is no rung 'nvfuser'"),
        (["--ladder", "eager", "--", "torchrun", "train.py"], "a ladder needs two rungs or more"),
        (["--steps", "1", "--", "torchrun", "train.py"], "--steps 2 or more"),
        (["--timeout", "soon", "--", "torchrun", "train.py"], "seconds, or a number with s, m or h"),
        (["--", "torchrun", "--nnodes", "1:4", "train.py"], "all ranks have to be on this machine"),
        (["--rtol", "nan", "--", "torchrun", "train.py"], "--rtol nan: a number above 0 and below 1"),
        (["--rtol", "0", "--", "torchrun", "train.py"], "--rtol 0: a number above 0 and below 1"),
        (["--rtol", "1", "--", "torchrun", "train.py"], "--rtol 1: a number above 0 and below 1"),
        (["--rtol=-inf", "--", "torchrun", "train.py"], "--rtol -inf: a number above 0 and below 1"),
        (["--timeout", "0", "--", "torchrun", "train.py"], "--timeout 5 s or more"),
        (["--slower-than", "-1", "--", "torchrun", "train.py"], "--slower-than -1: a ratio of 1 or more"),
        (["--slower-than", "nan", "--", "torchrun", "train.py"], "--slower-than nan: a ratio of 1 or more"),
        (["--slower-than", "inf", "--", "torchrun", "train.py"], "--slower-than inf: a ratio of 1 or more"),
        (["--bisect-runs", "0", "--", "torchrun", "train.py"], "--bisect-runs 1 or more"),
    ],
)
def test_a_mistake_is_told_and_gives_exit_code_2(capsys, words, said):
    assert cli.main(["ablate", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def no_runs(monkeypatch):
    """What would start a job raises instead."""

    def start(job, rung, folder, **more):
        raise RuntimeError("a run was started")

    monkeypatch.setattr(runs, "run", start)
    monkeypatch.setattr(ablate, "torch_is_missing", lambda: False)


@pytest.mark.parametrize(("inside", "said"), [("file", "File exists"), ("file/below", "Not a directory")])
def test_a_directory_that_cannot_be_made_is_one_line(tmp_path, capsys, no_runs, inside, said):
    (tmp_path / "file").touch()
    assert cli.main(["ablate", "--out", str(tmp_path / inside), "--", "torchrun", "train.py"]) == 2
    assert capsys.readouterr().err == f"[rankwatch] error: ablate: cannot write into {tmp_path / inside} ({said}); name another directory with --out\n"


def test_an_error_in_a_run_leaves_a_report(tmp_path, no_runs):
    with pytest.raises(RuntimeError, match="a run was started"):
        cli.main(["ablate", "--out", str(tmp_path), "--", "torchrun", "train.py"])
    assert json.loads((tmp_path / "ablate.json").read_text())["conclusion"] == "stopped in run 1 by RuntimeError: a run was started"
    assert "stopped in run 1 by RuntimeError: a run was started" in (tmp_path / "report.txt").read_text()


def test_an_error_after_the_conclusion_leaves_it_in_the_report(tmp_path, no_runs, monkeypatch):
    def climb(self):
        self.conclusion = Conclusion(3, "to blame: Inductor")
        raise ValueError("late")

    monkeypatch.setattr(ablate.Ablation, "climb", climb)
    with pytest.raises(ValueError, match="late"):
        cli.main(["ablate", "--out", str(tmp_path), "--", "torchrun", "train.py"])
    assert json.loads((tmp_path / "ablate.json").read_text())["conclusion"] == "to blame: Inductor"


def test_numbers_that_json_has_not_become_null():
    assert text.finite({"a": [math.nan, 1.0, {"b": math.inf}], "c": "nan", "d": None}) == {"a": [None, 1.0, {"b": None}], "c": "nan", "d": None}


def test_a_directory_that_holds_an_ablation_is_not_mixed_with_another(tmp_path, capsys):
    (tmp_path / "rungs").mkdir()
    assert cli.main(["ablate", "--out", str(tmp_path), "--", "torchrun", "train.py"]) == 2
    assert "holds an ablation already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "several"), [(["--nnodes=2", "t.py"], True), (["--nnodes", "1", "t.py"], False), (["--nnodes=1:1"], False), (["t.py"], False)]
)
def test_several_nodes_are_seen_in_both_spellings(words, several):
    assert several_nodes(words) is several


def test_the_help_explains_rungs_tolerance_and_ends(capsys):
    with pytest.raises(SystemExit):
        cli.main(["ablate", "--help"])
    text = capsys.readouterr().out
    for said in ("aot_eager_decomp_partition", "max(rtol x n, 4 x floor up to n)", "SystemExit(0)", "fallback_random", "3 layer found"):
        assert said in text


def test_nobody_is_told_of_a_planned_failure_whatever_the_environment_says():
    told = {"WEBHOOK": "http://chat.example/hook", "ALERTMANAGER": "http://alerts.example:9093", "TEXTFILE_DIR": "/var/lib/metrics", "ON_INCIDENT": "page"}
    options = load(cli._given(list(ablate.QUIET)), {f"RANKWATCH_{name}": value for name, value in told.items()}, ())
    assert (options.webhook, options.alertmanager, options.textfile_dir, options.on_incident) == ((), (), "", "")
