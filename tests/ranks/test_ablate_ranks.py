"""`rankwatch ablate` on real ranks: planted faults of torch.compile are named by layer, and by frame with --bisect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

JOB = Path(__file__).with_name("jobs") / "ablate_jobs.py"
TRANSFORMER = Path(__file__).with_name("jobs") / "ablate_transformer.py"


def ablate(tmp_path: Path, *words: str, ranks: int, job: Path, kind: str, timeout_s: float = 600) -> tuple[int, dict, str]:
    """(exit code, ablate.json, report.txt)."""
    out = tmp_path / "ablation"
    command = [sys.executable, "-m", "rankwatch", "ablate", "--out", str(out), *words]
    command += ["--", "torchrun", "--standalone", "--nproc-per-node", str(ranks), str(job), kind]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}  # of another kind's run: its code is right
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environ)
    assert (out / "ablate.json").exists(), done.stdout + done.stderr[-3000:]
    return done.returncode, json.loads((out / "ablate.json").read_text()), (out / "report.txt").read_text()


def outcomes(document: dict) -> list[tuple[str, str]]:
    return [(run["rung"], run["outcome"]) for run in document["runs"]]


def test_a_backend_that_crashes_in_one_frame_is_named_with_error_and_frame(tmp_path: Path) -> None:
    """Two runs of the lowest rung, the failing one, and its repeat; the blame is the job's own backend."""
    code, document, report = ablate(tmp_path, "--ladder", "aot_eager_decomp_partition,given", "--steps", "3", ranks=1, job=JOB, kind="crash")
    assert outcomes(document) == [("aot_eager_decomp_partition", "ok")] * 2 + [("given", "fails")] * 2, report
    assert (code, document["layer"]) == (3, "the backend crashes")
    assert document["runs"][2]["error"] == "NotImplementedError: no lowering for aten.sin on this device"
    assert document["runs"][2]["frame"] == "third@ablate_jobs.py:29"
    assert "TORCHDYNAMO_REPRO_AFTER=dynamo TORCHDYNAMO_REPRO_LEVEL=2" in report


@pytest.mark.slow_ranks
def test_a_backend_that_gives_wrong_results_is_found_and_its_frame_by_bisection(tmp_path: Path) -> None:
    """Every lower rung runs the same job rightly; of three frames the miscompiled one is switched to eager and the numbers are right."""
    code, document, report = ablate(tmp_path, "--bisect", "--steps", "4", ranks=2, job=JOB, kind="wrong")
    rungs = ["off", "off", "eager", "aot_eager", "aot_eager_decomp_partition", "given", "given"]
    assert outcomes(document) == [(rung, "wrong numbers" if rung == "given" else "ok") for rung in rungs], report
    assert (code, document["layer"]) == (3, "the backend miscompiles")
    assert document["bisection"]["culprits"] == ["second@ablate_jobs.py:25"], report
    assert {(one["rank"], one["step"], one["where"]) for one in document["runs"][5]["differences"]} == {(0, 1, "loss"), (1, 1, "loss")}
    cleaned = [line for line in (Path(document["runs"][2]["folder"]) / "output.log").read_text().splitlines() if "cleans up" in line]
    assert sorted(cleaned) == ["rank 0 cleans up", "rank 1 cleans up"]  # SystemExit ran the script's `finally`
    assert [run["steps"] for run in document["runs"]] == [4] * 7


@pytest.mark.slow_ranks
def test_nan_of_one_rank_only_is_told_with_rank_and_step(tmp_path: Path) -> None:
    code, document, report = ablate(tmp_path, "--ladder", "eager,given", "--steps", "5", ranks=2, job=JOB, kind="nan")
    assert (code, document["runs"][2]["outcome"]) == (3, "not finite"), report
    assert [(one["rank"], one["step"], one["actual"]) for one in document["runs"][2]["differences"]] == [(1, 3, "nan")]
    assert document["runs"][2]["nonfinite"] == {"1": 3}


@pytest.mark.slow_ranks
def test_a_healthy_job_shows_no_difference(tmp_path: Path) -> None:
    code, document, report = ablate(tmp_path, "--ladder", "off,eager,aot_eager", "--steps", "4", ranks=2, job=JOB, kind="healthy")
    assert (code, document["conclusion"]) == (0, "no difference up to aot_eager"), report


@pytest.mark.slow_ranks
def test_an_unseeded_job_is_inconclusive_until_it_is_seeded(tmp_path: Path) -> None:
    """--seed makes the same script comparable."""
    code, document, _report = ablate(tmp_path / "a", "--ladder", "off,given", "--steps", "3", ranks=1, job=JOB, kind="unseeded")
    assert code == 4
    assert "seed the job" in document["conclusion"]
    code, document, report = ablate(tmp_path / "b", "--ladder", "off,given", "--steps", "3", "--seed", "5", ranks=1, job=JOB, kind="unseeded")
    assert (code, document["conclusion"]) == (0, "no difference up to given"), report


@pytest.mark.slow_ranks
@pytest.mark.parametrize(
    ("kind", "code", "rung", "layer"),
    [
        ("healthy", 0, "", ""),
        ("decomposition", 3, "aot_eager_decomp_partition", "the decompositions or the partitioner"),
        ("lowering", 3, "inductor", "Inductor"),
        ("tracing", 3, "eager", "Dynamo"),
    ],
)
def test_each_layer_of_real_inductor_is_blamed_for_its_own_fault(tmp_path: Path, kind: str, code: int, rung: str, layer: str) -> None:
    """A small transformer with dropout, DDP, C++ code: the whole ladder. The faults are planted in torch's own tables by the job."""
    found, document, report = ablate(tmp_path, "--steps", "5", ranks=2, job=TRANSFORMER, kind=kind, timeout_s=1200)
    assert (found, document["rung"], document["layer"]) == (code, rung, layer), report
