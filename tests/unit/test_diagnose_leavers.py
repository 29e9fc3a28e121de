"""A rank that leaves its process group while others are in its collectives is named, not those that die of the loss."""

from dataclasses import replace

from build_jobs import MONO, WALL, frames

from rankwatch.model import Collective, Crash, Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

LOST = Crash("RuntimeError", "[pair.cc:553] Connection closed by peer [127.0.0.1]:5031.", where="train.py:50:step", traceback="torch/distributed/")
OPEN = Collective("0", 0, 31, "all_reduce", ((1000,),), dtypes=("Float",))
ENDING = "torchrun stops the workers after rank 1 failed"


def state(rank, stage="joined", code=None, crash=None, at=0.1, since=0.0, **more):
    return RankState(
        rank=rank, node="node05", process=Process(100 + rank, code is None, "S", exit_code=code, exited_at=None if code is None else MONO + at),
        stage=stage, stage_since=MONO + since, heartbeat_at=MONO, groups=(Group("0", "default_pg", "gloo", (0, 1, 2), 180.0),) if stage != "left" else (),
        collectives=(OPEN,) if stage != "left" else (), enqueued={"0": 31}, completed={"0": 30}, crash=crash, **more,
    )  # fmt: skip


def victim(rank, code=1, **more):
    return state(rank, "exiting", code, LOST, since=0.05, **more)


def snap(ranks, t=0.2, ending="", final=False):
    return JobSnapshot(MONO + t, WALL + t, 3, 0, (NodeReport("node05", tuple(ranks)),), ending=ending, gap_s=0.5, final=final)


def judge(*snapshots):
    current, told = State(), []
    for snapshot in snapshots:
        current, verdicts, _ = diagnose(current, snapshot, snapshot.now, Limits())
        told.append(verdicts)
    return told


def test_the_rank_that_left_and_works_on_is_named_at_once():
    (verdict,) = judge(snap([state(0, "left"), victim(1), victim(2)]))[0]
    assert (verdict.verdict, verdict.cause, verdict.domain, verdict.culprit_ranks, verdict.waiting_ranks) == ("failed", "exited", "user_code", (0,), (1, 2))
    assert verdict.summary == "rank 0 left its process group while ranks 1-2 were in all_reduce #31; it is still running"


def test_the_place_where_it_goes_on_is_told_once_its_stack_is_there_and_stays():
    stack = Stack(100, MONO + 0.3, (Thread("MainThread", 100, frames("train.py:7:upload_log")),))
    told = judge(
        snap([state(0, "left"), victim(1), victim(2)]),
        snap([state(0, "left", stack=stack), victim(1), victim(2)], 0.4),
        snap([state(0, "left", -15, at=1.0, stack=stack), victim(1), victim(2)], 1.0, ENDING, final=True),
    )
    assert [(verdicts[0].culprit_ranks, verdicts[0].at) for verdicts in told] == [((0,), ""), ((0,), "train.py:7:upload_log"), ((0,), "train.py:7:upload_log")]
    assert "it is still running in train.py:7:upload_log" in told[1][0].summary
    assert told[2][0].waiting_ranks == (1, 2)
    assert len({verdicts[0].key for verdicts in told}) == 1


def test_a_rank_that_torchrun_ends_before_it_is_looked_at_is_named_all_the_same():
    (verdict,) = judge(snap([state(0, "left", -15, at=0.8), victim(1), victim(2)], 1.0, ENDING, final=True))[0]
    assert (verdict.cause, verdict.culprit_ranks) == ("exited", (0,))


def test_a_victim_that_leaves_as_well_on_its_way_out_is_not_named():
    ranks = [state(0, "left", since=0.01), state(1, "left", since=0.03), victim(2)]
    assert judge(snap(ranks))[0][0].culprit_ranks == (0,)
    follower = replace(ranks[0], handling=LOST)
    assert judge(snap([follower, ranks[1], victim(2)]))[0][0].culprit_ranks == (1,)


def test_what_it_handles_meanwhile_is_told():
    leaver = state(0, "left", handling=Crash("ValueError", "bad sample at step 30"))
    assert "rank 0 left its process group while it handled ValueError: bad sample at step 30" in judge(snap([leaver, victim(1), victim(2)]))[0][0].summary


def test_a_rank_that_leaves_after_its_peers_have_died_is_not_named():
    told = judge(snap([state(0, "left", since=2.0), victim(1), victim(2)], 5.0, final=True))
    assert [(v.verdict, v.cause, v.domain, v.culprit_ranks) for v in told[0]] == [("failed", "unknown", "network", ())]


def test_who_is_not_watched_may_have_left_so_it_is_no_network_trouble():
    told = judge(snap([replace(state(0), agent="silent"), victim(1), victim(2)], 5.0, final=True))
    assert [(v.verdict, v.cause, v.domain, v.culprit_ranks) for v in told[0]] == [("failed", "unknown", "unknown", ())]


def test_ranks_that_leave_and_end_well_are_no_incident():
    told = judge(
        snap([state(0, "left"), state(1, "left", since=1.0), state(2, "left", since=1.1)], 2.0),
        snap([state(0, "left"), state(1, "exiting", 0), state(2, "left", since=1.1)], 2.5),
        snap([state(0, "exiting", 0), state(1, "exiting", 0), state(2, "exiting", 0)], 9.0, final=True),
    )
    assert told == [(), (), ()]


# -- what a log says -------------------------------------------------------------------------------------------------------


def test_an_exception_that_was_caught_and_logged_proves_nothing_of_a_process_that_lives_or_ends_well():
    logged = replace(LOST, source="log /run/1/stderr.log")
    alive = snap([state(n, "exiting", crash=logged) for n in range(3)], 1.0)
    ended = snap([state(n, "exiting", 0, logged) for n in range(3)], 1.5)
    over = snap([state(n, "exiting", 0, logged) for n in range(3)], 2.0, final=True)
    assert judge(alive, ended, over) == [(), (), ()]


def test_a_rank_that_ends_well_after_it_has_logged_an_exception_has_exited_and_not_crashed():
    logged = Crash("ValueError", "retrying", source="log /run/1/stderr.log")
    (verdict,) = judge(snap([state(0, "exiting", 0, logged, at=0.0), victim(1), victim(2)]))[0]
    assert (verdict.cause, verdict.culprit_ranks) == ("exited", (0,))
    assert "ValueError" not in " ".join((verdict.summary, *verdict.evidence))
