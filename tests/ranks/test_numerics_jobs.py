"""`--probe numerics` on real DDP jobs: whose parameters differ, who had the first non-finite number, and silence where nothing is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jobs import Job

pytestmark = pytest.mark.ranks
DIFFER = "parameters differ between replicas since step 25: 3.weight, equal at step 20; "


def said(tmp_path: Path, kind: str, ranks: int) -> list[tuple[str, str, str, str]]:
    """(rank, what, step, why) of every NUMERICS line of a job in which something happens at step 22; looked at every 5th step."""
    with Job(tmp_path, "numerics_job.py", kind, "22", nproc=ranks, options=("--probe", "numerics=5", "--listen", "off")) as job:
        assert job.end(150) == 0, job.text
        lines = [line for line in job.lines() if " NUMERICS " in line]
        assert not job.incidents()
    events = [json.loads(line) for line in (job.run_dir / "events.jsonl").read_text().splitlines()]
    assert len([event for event in events if event["event"] == "numerics"]) == len(lines)
    return [re.search(r'NUMERICS rank=(\S+) what=(\S+) step=(\S+) why="(.*)"', line).groups() for line in lines]  # type: ignore[union-attr, misc]


def test_of_three_replicas_the_odd_one_is_named_with_the_parameter_and_the_step(tmp_path: Path) -> None:
    [(rank, what, step, why)] = said(tmp_path, "perturbed", 3)
    assert (rank, what, step) == ("1", "replicas", "25")
    assert why.startswith(DIFFER + "rank 1 differs from the other 2; norms from ")


@pytest.mark.slow_ranks
def test_two_replicas_that_differ_are_both_named(tmp_path: Path) -> None:
    [(rank, what, step, why)] = said(tmp_path, "perturbed", 2)
    assert (rank, what, step) == ("0-1", "replicas", "25")
    assert why.startswith(DIFFER + "no majority among ranks 0-1; norms from ")


@pytest.mark.slow_ranks
def test_a_logged_loss_tells_whose_was_first_and_the_gradients_say_that_they_cannot(tmp_path: Path) -> None:
    loss, gradient = said(tmp_path, "nan_loss", 2)
    assert loss[:3] == ("1", "loss", "22")
    assert loss[3].startswith("first non-finite loss at step 22 (nan; ")
    assert loss[3].endswith(" at step 21); rank 0 was finite then")
    assert gradient[:3] == ("0-1", "gradient", "22")
    assert gradient[3].endswith(" on all of them at once, after the non-finite loss of rank 1 at step 22")


@pytest.mark.slow_ranks
def test_without_losses_the_line_says_how_to_learn_who_was_first(tmp_path: Path) -> None:
    [(rank, what, step, why)] = said(tmp_path, "nan_input", 2)
    assert (rank, what, step) == ("0-1", "gradient", "22")
    assert why.endswith("gradients are reduced before they are seen; rankwatch.log_loss(loss) tells whose loss was first")


def test_a_healthy_job_with_differing_buffers_is_silent(tmp_path: Path) -> None:
    assert said(tmp_path, "healthy", 2) == []
