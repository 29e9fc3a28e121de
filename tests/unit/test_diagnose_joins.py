"""init_process_group that raises: the rank is named with what it raised, and is not taken for one that has not called it."""

from dataclasses import replace

import pytest
from build_jobs import MONO, WALL, frames

from rankwatch.model import Crash, JobSnapshot, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

REFUSED = Crash(
    "torch.distributed.DistNetworkError",
    "The client socket has failed to connect to any network address of (node07, 29500). Connection refused.",
    where="train.py:12:setup",
    traceback='  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 1777, in init_process_group\n    store = ...\n',
)
UNSET = Crash("ValueError", "Error initializing torch.distributed using env:// rendezvous: environment variable MASTER_ADDR expected, but not set")
LATE = Crash("torch.distributed.DistStoreError", "Timed out after 61 seconds waiting for clients. 1/2 clients joined.")
ENDING = "torchrun stops the workers after rank 1 failed"


def rank(number, stage, crash=None, code=None, stack=None):
    process = Process(pid=100 + number, alive=code is None, state="S" if code is None else "", exit_code=code, exited_at=MONO if code is not None else None)
    return RankState(number, node="node05", agent="claimed", process=process, stage=stage, stage_since=MONO - 1.0, crash=crash, stack=stack)


def snap(*ranks, t=0.0, ending="", final=False, world=2):
    return JobSnapshot(MONO + t, WALL + t, world, 0, (NodeReport("node05", ranks),), ending=ending, gap_s=0.5, final=final)


def judge(*snapshots):
    current, told = State(), []
    for snapshot in snapshots:
        current, verdicts, _ = diagnose(current, snapshot, snapshot.now, Limits())
        told.append(verdicts)
    return told


def test_a_rank_whose_join_failed_and_that_ends_is_failed_with_what_it_raised():
    told = judge(
        snap(rank(0, "joining"), rank(1, "join_failed", REFUSED)),
        snap(rank(0, "joining"), rank(1, "exiting", REFUSED, code=1), t=0.5),
        snap(rank(0, "joining"), rank(1, "exiting", REFUSED, code=1), t=1.5),
    )
    assert told[:2] == [(), ()]  # a peer that was lost first may be seen in this second
    (verdict,) = told[2]
    assert (verdict.verdict, verdict.cause, verdict.domain, verdict.culprit_ranks, verdict.waiting_ranks) == ("failed", "crashed", "network", (1,), (0,))
    assert "failed in init_process_group: torch.distributed.DistNetworkError: The client socket has failed to connect" in verdict.summary
    assert verdict.at == "train.py:12:setup"
    assert verdict.confidence == "likely"


def test_a_join_that_failed_and_ended_the_rank_between_two_looks_is_told_by_its_traceback():
    told = judge(snap(rank(0, "joining"), rank(1, "exiting", REFUSED, code=1)), snap(rank(0, "joining"), rank(1, "exiting", REFUSED, code=1), t=1.0))
    assert "failed in init_process_group: " in told[1][0].summary


def test_a_join_that_failed_of_the_jobs_own_settings_is_named_at_once():
    (verdict,) = judge(snap(rank(0, "joining"), rank(1, "join_failed", UNSET, code=1)))[0]
    assert (verdict.verdict, verdict.cause, verdict.domain, verdict.confidence) == ("failed", "crashed", "user_code", "certain")
    assert "failed in init_process_group: ValueError: Error initializing" in verdict.summary


def test_a_rank_that_was_killed_takes_the_blame_from_a_join_that_lost_it():
    told = judge(
        snap(rank(0, "joining"), rank(1, "join_failed", REFUSED, code=1)),
        snap(rank(0, "joining", code=-11), rank(1, "join_failed", REFUSED, code=1), t=0.5),
    )
    assert [(v.cause, v.culprit_ranks) for v in told[1]] == [("crashed", (0,))]


def test_what_ends_a_rank_later_is_not_called_a_failed_join():
    other = Crash("KeyError", "'lr'", where="train.py:40:main")
    told = judge(snap(rank(0, "joining"), rank(1, "join_failed", REFUSED)), snap(rank(0, "joining"), rank(1, "exiting", other, code=1), t=0.5))
    assert "raised KeyError: 'lr'" in told[1][0].summary
    assert "init_process_group" not in told[1][0].summary


def test_a_join_that_timed_out_blames_the_rank_that_had_not_come():
    late = replace(rank(1, "armed"), agent="armed")
    told = judge(snap(rank(0, "join_failed", LATE, code=1), late), snap(rank(0, "join_failed", LATE, code=1), late, t=1.0))
    (verdict,) = told[1]
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.waiting_ranks) == ("failed", "store_wait", (1,), (0,))
    assert verdict.summary == "rank 1 had not called init_process_group when that of rank 0 timed out"


@pytest.mark.parametrize("stage", ["join_failed", "exiting"])
def test_a_rank_that_lives_on_after_its_join_failed_is_named_with_what_it_raised(stage):
    asleep = Stack(101, MONO + 3.0, (Thread("MainThread", 101, frames("train.py:20:retry", "train.py:70:<module>")),))
    looks = [snap(rank(0, "joining"), rank(1, "join_failed", REFUSED), rank(2, "armed"), world=3)]
    looks += [snap(rank(0, "joining"), rank(1, stage, REFUSED, stack=asleep), rank(2, "armed"), t=t * 0.5, world=3) for t in range(1, 400)]
    told = [verdict for verdicts in judge(*looks) for verdict in verdicts]
    kinds = list(dict.fromkeys((v.verdict, v.cause, v.culprit_ranks, v.waiting_ranks) for v in told))
    assert kinds == [("slow", "store_wait", (1,), (0,)), ("stuck", "store_wait", (1,), (0,))]
    assert told[-1].summary.startswith("rank 1 has not joined (its init_process_group failed with torch.distributed.DistNetworkError: The client socket")
    assert told[-1].at == "train.py:20:retry"
    assert told[-1].confidence == "likely"


def test_a_rank_that_joins_again_has_not_failed():
    told = judge(
        snap(rank(0, "joining"), rank(1, "join_failed", REFUSED)),
        snap(rank(0, "joining"), rank(1, "joining"), t=0.5),
        snap(rank(0, "joining"), rank(1, "joining", code=3), t=1.0),
    )
    assert [(v.cause, v.culprit_ranks) for v in told[2]] == [("exited", (1,))]


def test_ranks_that_join_wait_for_one_that_crashed_before_it_joined():
    crash = Crash("ValueError", "bad config", where="train.py:5:config")
    (verdict,) = judge(snap(rank(0, "joining"), rank(1, "exiting", crash, code=1)))[0]
    assert (verdict.cause, verdict.culprit_ranks, verdict.waiting_ranks) == ("crashed", (1,), (0,))
