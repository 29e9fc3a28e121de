"""Real torchrun jobs under TORCH_DISTRIBUTED_DEBUG=DETAIL: gloo's recorder has no names then, and no entry of who waits in a check."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job

pytestmark = pytest.mark.ranks


def test_a_rank_that_sleeps_while_the_others_stand_in_a_check_is_named(tmp_path: Path) -> None:
    with Job(tmp_path, "checked.py", "asleep", nproc=3) as job:
        doc = job.incident(60, cause="not_entered", culprit_ranks=[1])
        assert doc["verdict"] in ("slow", "stuck")
        assert (doc["waiting_ranks"], doc["confidence"]) == ([0, 2], "likely")
        assert "load_batch_that_never_comes" in doc["summary"]
        assert (doc["group"]["op"], doc["group"]["seq"]) in (("all_reduce", 11), ("all_reduce", 2)), "numbers of the job's calls, not of the checks'"


@pytest.mark.slow_ranks
def test_what_torchs_check_raises_names_the_odd_rank(tmp_path: Path) -> None:
    with Job(tmp_path, "checked.py", "other_call", nproc=3) as job:
        doc = job.incident(60, verdict="failed", cause="mismatch")
        assert (doc["culprit_ranks"], doc["confidence"]) == ([2], "certain")
        assert "barrier" in doc["summary"]


@pytest.mark.slow_ranks
def test_a_healthy_job_under_checks_is_left_alone(tmp_path: Path) -> None:
    with Job(tmp_path, "checked.py", "healthy", nproc=3) as job:
        assert job.end(90) == 0, job.text
        assert job.incidents() == []
