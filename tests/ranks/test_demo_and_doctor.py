"""The two commands that a newcomer types first, run for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankwatch.commands.faults.table import FAULTS

pytestmark = pytest.mark.ranks


def rankwatch(*words: str, timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankwatch", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **env})


def test_the_demo_names_the_recompiling_rank_without_a_page_and_the_missing_one_with_it(tmp_path: Path) -> None:
    """Two incidents, in this order, and the command says where to look."""
    done = rankwatch("--run-dir", str(tmp_path / "demo"), "demo", timeout_s=330)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    documents = [json.loads(path.read_text()) for path in sorted((tmp_path / "demo").glob("incidents/*/incident.json"))]
    lone, missing = (next(doc for doc in documents if doc["culprit_ranks"] == [rank]) for rank in (1, 2))
    assert [change["verdict"] for change in lone["history"] if change["verdict"] != "recovered"] == ["slow"]
    assert lone["cause"] == "compiling"
    assert (missing["verdict"], missing["waiting_ranks"]) == ("stuck", [0, 1, 3])
    assert "load_batch" in missing["summary"]
    assert missing["id"] in done.stdout


DRILLS = [pytest.param(fault.name, marks=[] if fault.name in ("killed", "mismatch") else pytest.mark.slow_ranks) for fault in FAULTS]


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_is_named_as_it_was_planted(tmp_path: Path, name: str) -> None:
    """The demo compares rank, verdict and cause itself, and finds no page for another rank; 4 where the machine cannot enact it."""
    done = rankwatch("--run-dir", str(tmp_path / "drill"), "--listen", "off", "demo", "--fault", name, timeout_s=240)
    if done.returncode == 4:
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "that is right:  rank and cause" in done.stdout


def test_doctor_finds_full_supervision_here() -> None:
    """Exit 0, every hook armed, a missing GPU is n/a and no complaint."""
    done = rankwatch("doctor", "--json", timeout_s=150)
    assert done.returncode == 0, done.stdout
    answer = json.loads(done.stdout)
    assert answer["supervision"] == "full"
    assert {check["status"] for check in answer["checks"]} <= {"ok", "n/a"}


def test_doctor_lists_what_is_lost() -> None:
    """A probe that is off is degraded supervision: exit 3, with the verdicts that cannot be given and what to do."""
    done = rankwatch("--no-probe", "compile", "doctor", "--quiet", timeout_s=150)
    assert done.returncode == 3
    assert done.stdout.splitlines()[0].split()[:3] == ["probe", "compile", "degraded"]
    assert "lost: slow/stuck compiling" in done.stdout
    assert "do: leave --no-probe away" in done.stdout


def test_doctor_without_torch_says_that_nothing_is_supervised(tmp_path: Path) -> None:
    """A torch that does not import: exit 4 and the interpreter to install it for."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    done = rankwatch("doctor", timeout_s=60, PYTHONPATH=str(tmp_path))
    assert done.returncode == 4
    assert "libcudart.so.13" in done.stdout
    assert done.stdout.rstrip().endswith("no supervision: jobs run as under torchrun")
