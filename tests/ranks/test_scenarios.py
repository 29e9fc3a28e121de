"""Real torchrun jobs on gloo with one trouble each: the rank and the cause are named, and healthy jobs are left alone."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from jobs import Job, children_of, wait_for

pytestmark = pytest.mark.ranks
PAGING = {"stuck", "failed", "timeout_imminent", "diverged"}

# kind, ranks, group timeout, accepted (verdict, cause) and culprits
FAULTS = [
    pytest.param("asleep", 3, 40, ("stuck", "not_entered"), [1], id="a rank sleeps in Python", marks=pytest.mark.slow_ranks),
    pytest.param("gil_held", 2, 40, ("stuck", "gil_held"), [1], id="a rank holds the GIL in C code"),
    pytest.param("killed", 3, 600, ("failed", "killed"), [1], id="a rank is killed", marks=pytest.mark.slow_ranks),
    pytest.param("crashed", 3, 600, ("failed", "crashed"), [2], id="a rank raises"),
    pytest.param("aborted", 3, 600, ("failed", "crashed"), [2], id="a rank aborts", marks=pytest.mark.slow_ranks),
    pytest.param("exited", 3, 600, ("failed", "exited"), [1], id="a rank exits 0 while others need it"),
    pytest.param("stopped", 3, 600, ("stuck", "stopped"), [1], id="a rank is stopped"),
    pytest.param("mismatch", 3, 600, ("stuck", "mismatch"), [2], id="a rank calls another operation"),
    pytest.param(
        "larger_tensor", 3, 600, ("failed", "mismatch"), [1], id="a rank brings a larger tensor and gloo aborts another", marks=pytest.mark.slow_ranks
    ),
    pytest.param("handler_that_waits", 3, 600, ("stuck", "mismatch"), [1], id="a rank hangs in its own error handler", marks=pytest.mark.slow_ranks),
    pytest.param("groups_in_other_order", 3, 600, ("stuck", "mismatch"), [0], id="a rank makes groups in another order", marks=pytest.mark.slow_ranks),
    pytest.param("absent_from_barrier", 3, 600, ("stuck", "not_entered"), [1], id="a rank is absent from a monitored barrier", marks=pytest.mark.slow_ranks),
    pytest.param("order_deadlock", 2, 600, ("stuck", "group_order_deadlock"), [0, 1], id="two groups in different orders"),
    pytest.param("data_loading", 2, 40, ("stuck", "data_loading"), [1], id="a data-loader worker never answers", marks=pytest.mark.slow_ranks),
    pytest.param("never_joins", 2, 600, ("slow", "store_wait"), [1], id="a rank never joins", marks=pytest.mark.slow_ranks),
    pytest.param("compile_hung", 2, 600, ("stuck", "compiling"), [1], id="a compile makes no progress for a minute", marks=pytest.mark.slow_ranks),
]


@pytest.mark.parametrize(("kind", "nproc", "timeout", "expected", "culprits"), FAULTS)
def test_a_fault_is_named(tmp_path: Path, kind: str, nproc: int, timeout: int, expected: tuple[str, str], culprits: list[int]) -> None:
    """Rank and cause are right, the evidence is on disk, and a line on stderr says the same."""
    with Job(tmp_path, "trouble.py", kind, "--timeout", str(timeout), nproc=nproc) as job:
        doc = job.incident(150, verdict=expected[0], cause=expected[1], culprit_ranks=culprits)
        assert not [d for d in job.incidents() if d["verdict"] in PAGING and d["culprit_ranks"] != culprits]
        folder = job.run_dir / "incidents" / doc["id"]
        wait_for(lambda: (folder / "index.html").exists() and (folder / "report.txt").exists(), 10, "report files")
        wait_for(
            lambda: any(f"{expected[0].upper()} rank={culprits[0]}" in line or f"{expected[0].upper()} rank=0-1" in line for line in job.lines()), 10, "line"
        )


HEALTHY = [
    pytest.param("trained", 2, set(), id="plain training"),
    pytest.param("lone_recompile", 3, {("slow", "compiling")}, id="one rank recompiles alone", marks=pytest.mark.slow_ranks),
    pytest.param("busy_rank0", 2, {("slow", "not_entered")}, id="rank 0 evaluates while the others wait", marks=pytest.mark.slow_ranks),
    pytest.param("checkpoint", 2, {("slow", "checkpointing"), ("slow", "not_entered")}, id="rank 0 saves a checkpoint", marks=pytest.mark.slow_ranks),
    pytest.param("staggered_exit", 3, set(), id="ranks end at different times", marks=pytest.mark.slow_ranks),
    pytest.param("fork_children", 2, set(), id="children end in every way"),
    pytest.param("sigint_storm", 2, set(), id="a storm of SIGINT that the script handles"),
    pytest.param("ddp", 2, {("slow", "compiling")}, id="compiled DDP", marks=pytest.mark.slow_ranks),
    pytest.param("late_at_start", 2, {("slow", "store_wait"), ("slow", "not_entered")}, id="a rank comes late", marks=pytest.mark.slow_ranks),
]


@pytest.mark.parametrize(("kind", "nproc", "allowed"), HEALTHY)
def test_a_healthy_job_is_left_alone(tmp_path: Path, kind: str, nproc: int, allowed: set[tuple[str, str]]) -> None:
    """Exit code 0, no paging verdict ever, no notice beyond the allowed ones, nothing of ours left."""
    with Job(tmp_path, "trouble.py", kind, nproc=nproc, env={"TROUBLE_COMPILE_S": "8"}) as job:
        assert job.end(150) == 0, job.text
        history = [(change["verdict"], change["cause"]) for doc in job.incidents() for change in doc["history"]]
        assert {h for h in history if h[0] != "recovered"} <= allowed, job.text
        run = json.loads((job.run_dir / "run.json").read_text())
        assert run["exit_code"] == 0
        if kind == "lone_recompile":
            doc = job.incident(1, cause="compiling")
            assert doc["culprit_ranks"] == [1]
            assert "block" in doc["summary"]
            assert any("SLOW rank=1" in line and "cause=compiling" in line for line in job.lines())
        if kind == "trained":
            assert [line.split()[1] for line in job.lines() if "is taken by" not in line] == ["0.1.0", "both", "done"], job.lines()


def test_a_sleeping_rank_is_named_within_ten_seconds_under_a_long_timeout(tmp_path: Path) -> None:
    """Group timeout 30 minutes: the notice comes first, names rank and line, and does not page."""
    with Job(tmp_path, "trouble.py", "asleep", "--timeout", "1800", nproc=2) as job:
        doc = job.incident(60, verdict="slow", culprit_ranks=[1])
        assert doc["opened_at"] - doc["since"] < 10
        doc = wait_for(
            lambda: next((d for d in job.incidents() if "load_batch_that_never_comes" in d["summary"]), None), 15, "the culprit's line in the summary"
        )
        assert doc["waiting_ranks"] == [0]
        assert 1700 < doc["timeout_left_s"] < 1800


def test_the_last_state_of_a_killed_rank_is_in_the_incident(tmp_path: Path) -> None:
    """kill -9 leaves the slot readable: the incident tells the last collective and the signal."""
    with Job(tmp_path, "trouble.py", "long", nproc=2) as job:
        job.training()
        os.kill(job.rank_pids()[1], signal.SIGKILL)
        doc = job.incident(20, cause="killed")
        assert doc["culprit_ranks"] == [1]
        assert "SIGKILL" in doc["summary"] or "signal 9" in doc["summary"]
        assert job.end(60) == 1
        assert "rank 1" in job.text[job.text.index("Root Cause") :], "the culprit-first block stands below torchrun's summary"


def test_ranks_go_on_when_the_launcher_is_killed_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """As under torchrun the ranks are orphans and go on; the last to exit removes the slot directory."""
    with Job(tmp_path, "trouble.py", "trained", nproc=2) as job:
        job.training()
        ranks = job.rank_pids()
        slots = {Path(f"/proc/{pid}/environ").read_bytes().split(b"RANKWATCH_SLOT_DIR=")[1].split(b"\0")[0].decode() for pid in ranks}
        job.process.kill()
        job.process.wait(10)
        assert all(Path(f"/proc/{pid}").exists() for pid in ranks)
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks), 60, "ranks end by themselves")
        assert not [slot for slot in slots if Path(slot).exists() and any(Path(slot).iterdir())]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_planned_end_is_no_incident(tmp_path: Path, number: signal.Signals) -> None:
    """The launcher ends the job as torchrun does; evidence is on disk; no incident is made of the victims."""
    with Job(tmp_path, "trouble.py", "long", nproc=2) as job:
        job.training()
        ranks = job.rank_pids()
        job.process.send_signal(number)
        assert job.end(60) == 1  # torchrun's own code after a SignalException
        assert job.incidents() == []
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
        assert json.loads((job.run_dir / "run.json").read_text())["exit_code"] == 1
        assert job.lines()[-1].startswith("[rankwatch] done") or "finishing" in job.lines()[-1]


def test_two_runs_on_one_node_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The second takes the next port and says who holds the first."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with Job(tmp_path / "a", "trouble.py", "long", nproc=2) as first:
        first.training()
        with Job(tmp_path / "b", "trouble.py", "trained", nproc=2) as second:
            assert second.end(90) == 0
            status = [line for line in second.lines() if "status http" in line]
            assert status
            assert status[0].split("status ")[1].split()[0] not in "".join(first.lines())


@pytest.mark.slow_ranks
def test_a_rank_whose_agent_did_not_load_is_reported(tmp_path: Path) -> None:
    """`python -I` ignores PYTHONPATH: the job runs, the rank is BLIND and a line says so."""
    import sys

    job_file = str(Path(__file__).parent / "jobs" / "trouble.py")
    options = ("--limit", "blind_after_s=6")
    with Job(tmp_path, sys.executable, "-I", job_file, "long", nproc=2, torchrun=("--no-python",), options=options) as job:
        wait_for(lambda: [line for line in job.lines() if "BLIND rank=0" in line], 60, "BLIND line")


@pytest.mark.slow_ranks
def test_stacks_never_leave_a_rank_stopped(tmp_path: Path) -> None:
    """After the incident's stacks every rank is in a state that it was in before."""
    with Job(tmp_path, "trouble.py", "asleep", "--timeout", "40", nproc=2) as job:
        doc = job.incident(60, verdict="stuck")
        wait_for(lambda: any(job.incident(5, id=doc["id"])["stacks"].values()), 15, "stacks in the incident")
        for pid in job.rank_pids():
            assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt"
            assert all(Path(f"/proc/{child}").exists() for child in children_of(pid))
