"""Real gloo ranks that begin or end in every way: store waits, deaths, planned ends, restarts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from jobs import Job, wait_for

pytestmark = pytest.mark.ranks
slow = pytest.mark.slow_ranks
PAGING = {"stuck", "failed", "timeout_imminent", "diverged"}
QUICK = ("--limit", "startup_notice_s=5", "--limit", "startup_stuck_s=12")  # a start that hangs is stuck after two minutes otherwise

# kind, ranks, group timeout, verdict, cause, domain, culprits, words of the summary
FAULTS = [
    pytest.param(
        "finally_waits", 2, 40, "stuck", "not_entered", "user_code", [1], "handles ValueError: sample 17 has no label", id="a finally that waits", marks=slow
    ),
    pytest.param("handler_broadcasts", 3, 600, "stuck", "mismatch", "user_code", [1], "rank 1 handles ValueError: sample 17", id="a handler", marks=slow),
    pytest.param("import_slowly", 2, 600, "stuck", "store_wait", "user_code", [1], "has not called init_process_group (it is in", id="an import", marks=slow),
    pytest.param("leaves_before_join", 2, 600, "stuck", "exited", "user_code", [1], "has not called init_process_group (it ended", id="gone", marks=slow),
    pytest.param("raises_before_join", 2, 600, "failed", "crashed", "user_code", [1], "raised FileNotFoundError", id="raises before", marks=slow),
    pytest.param("world_too_large", 2, 600, "stuck", "store_wait", "user_code", [0, 1], "for a world of 3 ranks", id="WORLD_SIZE is too large", marks=slow),
    pytest.param("world_too_large_by_argument", 2, 600, "stuck", "store_wait", "user_code", [0, 1], "a world of 3", id="so is world_size=", marks=slow),
    pytest.param("wrong_address", 2, 600, "stuck", "store_wait", "user_code", [1], "does not reach the store at localhost:1", id="a wrong port", marks=slow),
    pytest.param("same_rank_twice", 2, 600, "stuck", "store_wait", "user_code", [1], "as rank 0 of 2", id="the rank of another", marks=slow),
    pytest.param("key_while_others_reduce", 2, 60, "stuck", "store_wait", "user_code", [1], "waits in get() of the store", id="a key of nobody", marks=slow),
    pytest.param("store_barrier", 2, 600, "slow", "store_wait", "user_code", [], "", id="a barrier in the store", marks=slow),
    pytest.param("exits_in_thread", 2, 40, "stuck", "not_entered", "user_code", [1], "exits_in_thread", id="sys.exit in a thread", marks=slow),
    pytest.param("exited_3", 2, 600, "failed", "exited", "user_code", [1], "ended with exit code 3", id="sys.exit(3)", marks=slow),
    pytest.param("exits_well", 2, 600, "failed", "exited", "user_code", [1], "exit code 0", id="sys.exit(0) too early", marks=slow),
    pytest.param("own_store", 2, 60, "stuck", "store_wait", "user_code", [1], "waits in wait() of the store", id="a store of the job's own", marks=slow),
    pytest.param("group_of_some", 3, 60, "stuck", "mismatch", "user_code", [0, 1], "rank 0 waits in new_group", id="new_group of some", marks=slow),
    pytest.param("thread_dies", 2, 40, "stuck", "not_entered", "user_code", [1], "next_batch", id="a thread that dies", marks=slow),
    pytest.param("handler_reduces", 3, 600, "failed", "mismatch", "user_code", [1], "gloo aborted rank 1", id="a handler that reduces", marks=slow),
    pytest.param("ends_by_limit", 2, 600, "failed", "exited", "user_code", [0, 1], "ended with exit code 85", id="a code for another go", marks=slow),
    pytest.param("raised_on_all", 3, 600, "failed", "crashed", "user_code", [1], "raised KeyError: 'learning_rate'", id="the first of equals", marks=slow),
]


@pytest.mark.parametrize(("kind", "nproc", "timeout", "verdict", "cause", "domain", "culprits", "words"), FAULTS)
def test_how_it_began_or_ended_is_named(
    tmp_path: Path, kind: str, nproc: int, timeout: int, verdict: str, cause: str, domain: str, culprits: list[int], words: str
) -> None:
    options = (*QUICK, "--limit", "idle_min_s=12")
    with Job(tmp_path, "ends.py", kind, "--timeout", str(timeout), nproc=nproc, options=options) as job:
        doc = job.incident(150, verdict=verdict, cause=cause, culprit_ranks=culprits)
        assert (doc["domain"], words in doc["summary"]) == (domain, True), doc["summary"]
        assert not [d for d in job.incidents() if d["verdict"] in PAGING and d["culprit_ranks"] != culprits]


@slow
def test_a_fatal_signal_is_told_with_the_line_from_the_ranks_log(tmp_path: Path) -> None:
    torchrun = ("--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    with Job(tmp_path, "ends.py", "segfault", nproc=2, torchrun=torchrun) as job:
        doc = job.incident(60, verdict="failed", cause="crashed", culprit_ranks=[1])
        assert job.end(60) == 1
        doc = job.incident(1, id=doc["id"])
        assert "died of SIGSEGV" in doc["summary"]
        assert "decode_image" in job.text[job.text.index("FAILED:") :]


# kind, who gets which signal (None: nobody), exit code
PLANNED = [
    pytest.param("saves_on_sigterm", "ranks", signal.SIGTERM, 0, id="SIGTERM to all ranks, and rank 0 saves", marks=slow),
    pytest.param("saves_on_sigterm", "everybody", signal.SIGTERM, 1, id="scancel", marks=slow),
    pytest.param("requeues_on_sigusr1", "ranks", signal.SIGUSR1, 0, id="SIGUSR1 for a requeue", marks=slow),
    pytest.param("long", "launcher", signal.SIGHUP, 1, id="SIGHUP to the launcher", marks=slow),
    pytest.param("long", "ranks", signal.SIGTERM, 1, id="SIGTERM to all ranks", marks=slow),
    pytest.param("long", "everybody", signal.SIGINT, 1, id="Ctrl-C in a terminal", marks=slow),
    pytest.param("staggered", "", None, 0, id="ranks that leave one by one", marks=slow),
    pytest.param("interrupted", "", None, 1, id="KeyboardInterrupt in all ranks", marks=slow),
]


@pytest.mark.parametrize(("kind", "to", "number", "code"), PLANNED)
def test_a_planned_end_of_any_kind_is_no_incident(tmp_path: Path, kind: str, to: str, number: signal.Signals | None, code: int) -> None:
    with Job(tmp_path, "ends.py", kind, nproc=3, env={"SAVE_S": "8"}) as job:
        job.training()
        ranks = job.rank_pids()
        for pid in {"ranks": ranks, "launcher": [job.process.pid], "everybody": [job.process.pid, *ranks]}.get(to, []):
            assert number is not None
            os.kill(pid, number)
        assert job.end(90) == code, job.text
        assert job.incidents() == [], job.text


@slow
def test_two_signals_to_a_launcher_whose_ranks_do_not_end_are_a_planned_end(tmp_path: Path) -> None:
    with Job(tmp_path, "ends.py", "refuses_sigterm", nproc=2) as job:
        job.training()
        job.process.send_signal(signal.SIGINT)
        wait_for(lambda: "SIGINT" in job.text, 20, "torchrun has heard the first one")
        job.process.send_signal(signal.SIGINT)
        assert job.end(90) != 0
        assert job.incidents() == []


@slow
def test_a_rank_that_alone_is_told_to_end_is_named_without_certainty(tmp_path: Path) -> None:
    with Job(tmp_path, "ends.py", "long", nproc=3) as job:
        job.training()
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        assert job.end(60) == 1
        doc = job.incident(1, verdict="failed", cause="killed", culprit_ranks=[1])
        assert (doc["domain"], doc["confidence"]) == ("scheduler", "likely")


# -- restarts ---------------------------------------------------------------------------------------------------------

UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@slow
def test_attempts_that_end_alike_are_one_incident_each_and_say_so(tmp_path: Path) -> None:
    with Job(tmp_path, "ends.py", "crashes_always", nproc=2, torchrun=("--max-restarts", "2"), env=UNSHARED) as job:
        assert job.end(150) == 1
        docs = job.incidents()
        assert [(d["cause"], d["culprit_ranks"]) for d in docs] == [("crashed", [1])] * 3
        assert [d["verdict"] for d in docs] == ["recovered", "recovered", "failed"]
        assert "the 2 attempts before ended of the same" in docs[2]["summary"]
        assert [line for line in job.lines() if "RECOVERED" in line and "by=restart attempt=2" in line]


@slow
def test_a_hang_after_a_restart_is_an_incident_of_its_own(tmp_path: Path) -> None:
    with Job(tmp_path, "ends.py", "hangs_in_every_attempt", "--timeout", "60", nproc=2, torchrun=("--max-restarts", "1"), env=UNSHARED) as job:
        first = job.incident(90, verdict="recovered", cause="crashed", culprit_ranks=[0])
        second = job.incident(90, verdict="stuck", culprit_ranks=[1])
        assert first["id"] != second["id"]
        assert second["timeout_left_s"] > 0


@slow
def test_torchruns_stale_store_after_a_restart_is_told_with_its_setting(tmp_path: Path) -> None:
    """Whether the race is lost is luck: a restart that succeeds shows nothing beyond the first failure."""
    with Job(tmp_path, "ends.py", "crashes_once", nproc=2, torchrun=("--max-restarts", "1"), options=QUICK) as job:

        def told() -> list[str] | None:
            docs = [d for d in job.incidents() if d["cause"] == "store_wait" and d["verdict"] in PAGING]
            return [f"{d['culprit_ranks']} {d['summary']} {' '.join(d['advice'])}" for d in docs] or ([] if job.process.poll() == 0 else None)

        wait_for(lambda: told() is not None, 120, "a verdict, or success")
        for text in told() or []:
            assert text.startswith("[] ")
            assert "stale store of the attempt before" in text
            assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text


@slow
def test_what_torchrun_waits_for_before_any_rank_runs_is_said(tmp_path: Path) -> None:
    torchrun = ("--nnodes", "2", "--node-rank", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "seven")
    with Job(tmp_path, "ends.py", "long", nproc=1, torchrun=torchrun) as job:
        wait_for(lambda: [line for line in job.lines() if "no rank runs yet" in line], 90, "the line about the rendezvous")
        assert "has waited for 60 s for other nodes: 1 of 2 is here (c10d rendezvous, id seven); it gives up after 600 s" in job.text
        assert not job.incidents()
