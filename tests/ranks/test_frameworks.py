"""Frameworks between the job and torch: the line that is named is the job's own, and the cause is not the wrapper's.

Needs the packages of `pip install ".[frameworks]"`; one that is missing fails here. What py-spy showed in these jobs is recorded in
tests/support/data/stacks, which unit tests read without any of them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, wait_for

pytestmark = [pytest.mark.ranks, pytest.mark.slow_ranks]
PACKAGES = {"lightning": "lightning", "accelerate": "accelerate", "trainer": "transformers", "deepspeed": "deepspeed", "fsdp2": "torch"}

# culprit, cause, domain, function of the job that `at` has to name
PLANNED = {
    "step": (1, "not_entered", "user_code", "compute_loss_that_never_ends"),
    "worker": (1, "data_loading", "user_code", ""),
    "own_data": (1, "data_loading", "user_code", "read_shard_that_never_comes"),
    "save": (0, "checkpointing", "storage", "write"),
    "evaluate": (0, "not_entered", "user_code", "score_that_takes_long"),
    "download": (0, "external_io", "network", "fetch_weights"),
}


@pytest.mark.parametrize("framework", PACKAGES)
@pytest.mark.parametrize("fault", PLANNED)
def test_a_fault_below_a_framework_is_named_by_the_jobs_own_line(tmp_path: Path, framework: str, fault: str) -> None:
    """Rank, cause, domain and `at` are right, and no page names anything else."""
    package = PACKAGES[framework]
    assert importlib.util.find_spec(package), f'{package} is not installed; run: pip install ".[frameworks]" (tests/run --matrix does)'
    rank, cause, domain, function = PLANNED[fault]
    with Job(tmp_path, f"frameworks/{framework}_job.py", fault, nproc=2) as job:

        def told() -> dict[str, Any] | None:
            assert job.process.poll() is None, job.text[-3000:]
            return next((doc for doc in job.incidents() if doc["cause"] == cause and doc["culprit_ranks"] == [rank]), None)

        doc = wait_for(told, 120, f"{cause} on rank {rank}: {[doc['summary'] for doc in job.incidents()]} {job.text[-2000:]}")
        assert doc["domain"] == domain, doc["summary"]
        assert doc["waiting_ranks"] == [1 - rank]
        assert function in doc["summary"], doc["summary"]
        assert ("while it evaluates" in doc["summary"]) == (fault == "evaluate")
        named = [line for line in job.lines() if " at=" in line and " cause=" in line]
        assert all("site-packages" not in line and f"{function} " in line for line in named), named
        assert not [d for d in job.incidents() if d["verdict"] in ("stuck", "failed", "diverged") and d["culprit_ranks"] != [rank]]
