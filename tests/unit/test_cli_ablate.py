"""Wrong usage of `rankwatch ablate` is refused before anything runs."""

from __future__ import annotations

import pytest

from rankwatch import cli
from rankwatch.commands.ablate import several_nodes


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
    ],
)
def test_a_mistake_is_told_and_gives_exit_code_2(capsys, words, said):
    assert cli.main(["ablate", *words]) == 2
    assert said in capsys.readouterr().err


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
