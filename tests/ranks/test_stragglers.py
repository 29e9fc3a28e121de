"""DDP with overlapping buckets on real ranks: a rank that is late at every step is told as a ticket, one that now and then is, or in turn, is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import Job

pytestmark = [pytest.mark.ranks, pytest.mark.slow_ranks]


def test_the_late_rank_is_named_with_its_cost(tmp_path: Path) -> None:
    """40 % slower: rank 1 alone, by arrival times, about 0.1 s and as a ticket; the line says so."""
    with Job(tmp_path, "late.py", "fixed", "400", nproc=3) as job:
        doc = job.incident(120, verdict="straggler", culprit_ranks=[1])
        assert doc["straggling"]["measured"]
        assert 0.05 < doc["straggling"]["late_by_s"] < 0.2
        assert doc["confidence"] == "certain"
        assert {d["verdict"] for d in job.incidents() if d["culprit_ranks"] != [1]} <= {"slow", "recovered"}
        assert any("STRAGGLER rank=1" in line and "late_by=" in line for line in job.lines())


@pytest.mark.parametrize("kind", ["rotating", "saves"])
def test_lateness_that_rotates_or_comes_now_and_then_is_no_straggler(tmp_path: Path, kind: str) -> None:
    with Job(tmp_path, "late.py", kind, "150", nproc=3) as job:
        assert job.end(240) == 0
        assert [(d["verdict"], d["culprit_ranks"]) for d in job.incidents() if any(h["verdict"] != "slow" for h in d["history"][:-1])] == []
        assert not any("STRAGGLER" in line for line in job.lines())
