"""Real ranks: what each has compiled becomes one document on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job

from rankwatch import cli

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow_ranks)])
def test_a_rank_that_recompiles_alone_is_told_with_the_two_values_of_its_guard(tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str) -> None:
    with Job(tmp_path, "compile_alone.py", backend, str(tmp_path / "cache"), nproc=2) as job:
        assert job.end(300) == 0
        news = [line for line in job.lines() if " COMPILE " in line]
    doc = json.loads((job.run_dir / "compile.json").read_text())
    frame = next(row for row in doc["frames"] if row["frame"].startswith("forward@compile_alone.py:"))
    assert [(one["kind"], one["ordinal"], one["groups"]) for one in doc["divergence"]] == [
        ("lone_recompile", 1, [{"ranks": "0", "what": "no recompile"}, {"ranks": "1", "what": "guard x.size()[0]: expected 4, actual 5"}])
    ]
    assert doc["divergence"][0]["words"] == f"rank 1 alone recompiled {frame['frame']}: x.size()[0]: expected 4, actual 5; rank 0 did not"
    assert (doc["over"], frame["ranks"], frame["compiles"], frame["recompiles"], frame["limit"]) == (True, "0-1", 2, 1, 8)
    assert [(guard["class"], guard["expected"], guard["actual"], guard["ranks"]) for guard in frame["guards"]] == [("tensor_size", "4", "5", "1")]
    assert doc["ranks"]["requested"]["0-1"]["backends"] == [backend]
    assert (doc["steps"]["last_compile_step"], doc["steps"]["since_compile"]) == (10, 10)
    assert {(row["rank"], row["step"]) for row in doc["timeline"]} == {(0, 0), (1, 0), (1, 10)}
    assert (doc["regime"]["name"], doc["regime"]["words"]) == ("compiled", "2 graphs compiled, steady: no compile for 10 steps")
    (advice,) = doc["advice"]
    cure = "a size changes from call to call: mark it dynamic on every rank, or pad batches to a few sizes (drop_last=True for the last one)"
    assert advice["words"] == f"the other ranks wait while some recompile {frame['frame']}: {cure}; or compile all shapes before the loop"
    assert (advice["evidence"], advice["ranks"]) == ([doc["divergence"][0]["words"]], "1")
    assert advice["setting"] == "torch._dynamo.mark_dynamic(tensor, dim)"
    assert news == []  # one recompile slows one step
    capsys.readouterr()
    assert cli.main(["compile", str(job.run_dir)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"* recompiled alone: rank 1 alone recompiled {frame['frame']}: x.size()[0]: expected 4, actual 5; rank 0 did not" in text
    assert f"{frame['frame']}, rank 1: tensor_size: tensor 'x' size mismatch at index 0. expected 4, actual 5" in text
