"""`--on-stuck exit` on real ranks: a job that cannot go on is ended for torchrun to restart or to give up; any other is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import Job

pytestmark = pytest.mark.ranks
EXIT = ("--on-stuck", "exit", "--listen", "off")
# A restart with torchrun's shared store is a race in torch 2.13: a restarted rank may join through the store of the attempt before.
RESTARTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def actions(job: Job) -> list[tuple[str, str, list[int]]]:
    return [(doc["cause"], doc["action"]["taken"], doc["culprit_ranks"]) for doc in job.incidents() if doc["action"]]


def test_a_mismatch_costs_one_restart(tmp_path: Path) -> None:
    """The second attempt trains to its end: exit code 0, one incident with what was done, its evidence kept."""
    with Job(tmp_path, "unhealable.py", "mismatch", nproc=3, options=EXIT, env=RESTARTS, torchrun=("--max-restarts", "1")) as job:
        assert job.end(120) == 0, job.text
        assert actions(job) == [("mismatch", "exit", [1])]
        (doc,) = job.incidents()
        assert [change["verdict"] for change in doc["history"]] == ["stuck", "recovered"]
        assert all(doc["stacks"][rank] for rank in "012")
        events = [json.loads(line)["event"] for line in (job.run_dir / "events.jsonl").read_text().splitlines()]
        assert events.index("action") < events.index("ending") < events.index("restarting")
        assert sum(" ACTION taken=exit rank=1 cause=mismatch" in line for line in job.lines()) == 1
        assert job.text.count("is done") == 3


@pytest.mark.slow_ranks
@pytest.mark.parametrize(("kind", "culprits", "limits"), [("order_deadlock", "0-1", ()), ("stopped", "1", ("--limit", "exit_stopped_s=3"))])
def test_without_restarts_the_job_fails_soon_and_torchrun_names_the_culprit(tmp_path: Path, kind: str, culprits: str, limits: tuple[str, ...]) -> None:
    """Long before the group's timeout of 30 minutes. A stopped rank dies by torchrun's SIGKILL, 30 s after its SIGTERM."""
    with Job(tmp_path, "unhealable.py", kind, nproc=2, options=(*EXIT, *limits)) as job:
        assert job.end(150) == 1, job.text
        assert len(actions(job)) == 1
        cause = job.text[job.text.index("Root Cause") :]
        assert "rankwatch ended the workers (--on-stuck exit): " in cause
        assert f"rank      : {culprits[-1] if culprits == '1' else 0} " in cause
        assert any(f" ACTION taken=exit rank={culprits} " in line for line in job.lines())
        assert "STUCK: " in cause


@pytest.mark.slow_ranks
def test_a_rank_that_is_merely_absent_is_waited_for(tmp_path: Path) -> None:
    """It may come back, and does."""
    with Job(tmp_path, "unhealable.py", "asleep", nproc=2, options=(*EXIT, "--stuck-after", "10")) as job:
        job.incident(60, verdict="stuck", cause="not_entered")
        assert job.end(150) == 0, job.text
        assert actions(job) == []


@pytest.mark.slow_ranks
def test_by_default_nothing_is_done(tmp_path: Path) -> None:
    with Job(tmp_path, "unhealable.py", "mismatch", nproc=2, options=("--listen", "off", "--limit", "exit_hold_s=0.1")) as job:
        doc = job.incident(60, verdict="stuck", cause="mismatch")
        with pytest.raises(AssertionError, match="still running"):
            job.end(12)
        assert doc["action"] is None
        assert actions(job) == []
