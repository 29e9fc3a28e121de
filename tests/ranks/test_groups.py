"""Real torchrun jobs over many process groups: the odd rank or the root is named, once, and healthy jobs are left alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jobs import Job

pytestmark = pytest.mark.ranks
PAGING = {"stuck", "failed", "timeout_imminent", "diverged"}
slow = pytest.mark.slow_ranks

# kind, ranks, accepted (verdict, cause), culprits, confidence
FAULTS = [
    pytest.param("extra", 3, ("stuck", "mismatch"), [[2]], "certain", id="a call too many", marks=slow),
    pytest.param("skipped", 3, ("stuck", "mismatch"), [[1]], "certain", id="a call that a swallowed exception has left out", marks=slow),
    pytest.param("swapped", 3, ("stuck", "mismatch"), [[2]], "certain", id="two calls in another order", marks=slow),
    pytest.param("finally_barrier", 3, ("stuck", "mismatch"), [[1]], "certain", id="a barrier in a finally branch", marks=slow),
    pytest.param("mesh", 4, ("slow", "not_entered"), [[3]], "likely", id="a rank of a mesh sleeps", marks=slow),
    pytest.param("chain", 4, ("stuck", "not_entered"), [[3]], "likely", id="a chain of groups ends at a sleeping rank", marks=slow),
    pytest.param("two_hangs", 4, ("stuck", "not_entered"), [[1], [3]], "likely", id="two hangs beside each other", marks=slow),
    pytest.param("ring_deadlock", 3, ("stuck", "group_order_deadlock"), [[0, 1, 2]], "certain", id="a cycle over three groups", marks=slow),
    pytest.param("pipeline", 3, ("stuck", "not_entered"), [[0]], "partial", id="a sleeping rank behind a message", marks=slow),
    pytest.param("message_that_nobody_sends", 3, ("stuck", "not_entered"), [[1]], "partial", id="a message that nobody can send", marks=slow),
]


@pytest.mark.parametrize(("kind", "nproc", "expected", "culprits", "confidence"), FAULTS)
def test_a_fault_between_groups_is_named(tmp_path: Path, kind: str, nproc: int, expected: tuple[str, str], culprits: list[list[int]], confidence: str) -> None:
    with Job(tmp_path, "groups.py", kind, "--timeout", "40", nproc=nproc) as job:
        for ranks in culprits:
            doc = job.incident(150, verdict=expected[0], cause=expected[1], culprit_ranks=ranks)
            assert doc["confidence"] == confidence
        told = job.incidents()
        assert len(told) == len(culprits), [doc["summary"] for doc in told]
        assert {tuple(change["culprit_ranks"]) for doc in told for change in doc["history"]} <= {(), *map(tuple, culprits)}
        if expected[1] == "mismatch":
            assert sum("calls it from groups.py" in line for line in job.incident(10, cause="mismatch")["evidence"]) == 2, "call sites of both sides"


DIVERGING = [
    pytest.param("transposed", "all_reduce of [8, 4] Float", id="another shape"),
    pytest.param("other_dtype", "all_reduce of [100] Int", id="another element type", marks=slow),
    pytest.param("larger_buffer_once", "broadcast of [64] Float", id="one larger buffer", marks=slow),
]


@pytest.mark.parametrize(("kind", "call"), DIVERGING)
def test_ranks_that_pair_different_calls_and_train_on_have_diverged(tmp_path: Path, kind: str, call: str) -> None:
    """gloo completes the pair in silence: the alarm comes within ten seconds, names the odd rank and what it called."""
    with Job(tmp_path, "groups.py", kind, nproc=3) as job:
        doc = job.incident(120, verdict="diverged", cause="mismatch")
        assert (doc["culprit_ranks"], doc["waiting_ranks"], doc["confidence"]) == ([2], [], "certain")
        assert f"rank 2: {call}" in doc["summary"]
        at = max(float(text) for text in re.findall(r"fault (\d+\.\d+)", job.text))
        assert doc["opened_at"] - at < 10
        assert [d["verdict"] for d in job.incidents()] == ["diverged"]


@pytest.mark.parametrize(
    ("kind", "nproc"),
    [pytest.param("many", 4, id="groups of every kind", marks=slow), pytest.param("sharded", 2, id="sharded and replicated models", marks=slow)],
)
def test_a_healthy_job_over_many_groups_is_left_alone(tmp_path: Path, kind: str, nproc: int) -> None:
    with Job(tmp_path, "groups.py", kind, nproc=nproc) as job:
        assert job.end(180) == 0, job.text
        assert not [(doc["verdict"], doc["summary"]) for doc in job.incidents() for change in doc["history"] if change["verdict"] in PAGING]
        assert "monitor error" not in job.text
