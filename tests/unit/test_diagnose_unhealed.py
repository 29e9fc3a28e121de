"""A wait that is over has recovered only if somebody got through it: the dead do not come back, and their waiters' ends are no recovery."""

from dataclasses import replace

import pytest
from build_jobs import MONO, WALL

from rankwatch.model import Collective, Crash, Group, JobSnapshot, NodeReport, Process, RankState, Verdict, WaitedOn
from rankwatch.monitor.diagnose import State, diagnose, unhealed
from rankwatch.monitor.incidents import Book, fold
from rankwatch.monitor.policy import Limits

LOST = Crash("RuntimeError", "[pair.cc:553] Connection closed by peer [127.0.0.1]:5031.", where="train.py:50:step", traceback="torch/distributed/")
GROUP = Group("0", "default_pg", "gloo", (0, 1, 2), 1800.0)
BARRIER = WaitedOn("0", "default_pg", (0, 1, 2), "barrier", 31)


def rank(number, stage="joined", code=None, crash=None, at=0.0, done=30, entered=31):
    return RankState(
        rank=number, node="node05", process=Process(100 + number, code is None, "S", exit_code=code, exited_at=None if code is None else MONO + at),
        stage=stage, stage_since=MONO + at, heartbeat_at=MONO + at, groups=(GROUP,), enqueued={"0": entered}, completed={"0": done}, crash=crash,
    )  # fmt: skip


def told(cause="exited", name="stuck"):
    return Verdict("a0-hang-1", name, cause, "user_code", (2,), (0, 1), MONO, "rank 2 ended", group=BARRIER)


def lasting(verdict, *ranks):
    return unhealed.of((verdict,), (), {each.rank: each for each in ranks}) == [verdict]


GONE = rank(2, "exiting", 0, entered=30)


def test_a_rank_that_is_gone_does_not_come_back_when_its_waiters_leave_their_wait():
    assert lasting(told(), rank(0, "exiting"), rank(1, "exiting"), GONE)
    assert lasting(told(name="slow"), rank(0, entered=30), rank(1, entered=30), GONE)


@pytest.mark.parametrize("cause", ["exited", "not_entered", "compiling"])
def test_a_waiter_that_has_completed_what_it_waited_in_has_recovered(cause):
    assert not lasting(told(cause), rank(0, done=31), rank(1), GONE)


def test_a_waiter_that_ends_well_has_got_through():
    assert not lasting(told("not_entered"), rank(0, "exiting", 0), rank(1, "exiting", 0), rank(2))


@pytest.mark.parametrize("waiter", [rank(0, "exiting", crash=LOST), rank(0, code=-15), rank(0, "exiting", 1, LOST)], ids=["raises", "is ended", "has raised"])
def test_waiters_that_end_of_it_have_not_recovered_whatever_the_cause(waiter):
    assert lasting(told("not_entered"), waiter, replace(waiter, rank=1), rank(2))
    assert not lasting(told("not_entered"), waiter, rank(1), rank(2)), "one is left to tell"


def test_at_the_end_of_a_job_a_wait_of_which_somebody_died_has_not_recovered():
    def died(verdict, *ranks):
        return unhealed.died_waiting(verdict, {each.rank: each for each in ranks})

    assert died(told("compiling", "slow"), rank(0, code=-11), rank(1), rank(2))
    assert not died(told("compiling", "slow"), rank(0), rank(1), rank(2, code=-11)), "who is waited for"
    assert not died(told("compiling", "slow"), rank(0, code=-11), rank(1, done=31), rank(2)), "one has got through"
    assert not died(replace(told(), verdict="straggler"), rank(0, code=-11), rank(1), rank(2))


def test_a_straggler_that_is_told_no_more_is_none():
    assert not lasting(replace(told("not_entered"), verdict="straggler", group=None), rank(0, "exiting", crash=LOST), rank(1, code=1), rank(2))


def look(state, book, ranks, t, ending="", final=False):
    snapshot = JobSnapshot(MONO + t, WALL + t, 3, 0, (NodeReport("node05", tuple(ranks)),), ending=ending, gap_s=0.5, final=final)
    state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    return state, fold(book, verdicts, snapshot, snapshot.now, Limits())[0]


def test_a_rank_that_ended_well_too_early_stays_the_cause_until_the_job_has_failed():
    """Its peers wait, then raise one after the other, and torchrun ends what is left."""
    waiting, raising, over = [rank(0), rank(1), GONE], [], []
    for number in (0, 1):
        raising.append(rank(number, "exiting", crash=LOST, at=5.0))
        over.append(rank(number, "exiting", 1, LOST, at=7.8))
    state, book = State(), Book()
    for step in range(10):
        state, book = look(state, book, waiting, step * 0.5)
    assert [(each.verdict.verdict, each.verdict.cause) for each in book.open] == [("stuck", "exited")]
    for step in range(10, 16):
        state, book = look(state, book, [*raising, GONE], step * 0.5)
    state, book = look(state, book, [*over, GONE], 8.0, "torchrun stops the workers after rank 0 failed")
    state, book = look(state, book, [*over, GONE], 8.5, "torchrun stops the workers after rank 0 failed", final=True)
    assert book.closed == ()
    (incident,) = book.open
    assert (incident.verdict.verdict, incident.verdict.cause, incident.verdict.culprit_ranks) == ("failed", "exited", (2,))
    assert [change.verdict for change in incident.history] == ["stuck", "failed"]


def test_who_called_something_else_stays_the_cause_when_all_run_into_the_timeout():
    """The culprit of a mismatch ends of the timeout like those that wait for it: that is no recovery, and no other cause."""
    timed_out = Crash("RuntimeError", "[unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete", where="train.py:50:step")
    group = Group("0", "default_pg", "gloo", (0, 1, 2), 20.0)

    def inside(number, at, crash=None, code=None):
        entry = Collective("0", 0, 31, "barrier" if number == 2 else "all_reduce", ((4,),), ((4,),), ("Float",), WALL, 20.0)
        state = rank(number, "exiting" if crash else "joined", code, crash, at)
        return replace(state, groups=(group,), collectives=(entry,), collectives_at=MONO + at, completed={"0": 31 if crash else 30}, heartbeat_at=MONO + at)

    state, book, t = State(), Book(), 0.0
    while t < 20.0:
        state, book = look(state, book, [inside(number, t) for number in range(3)], t)
        t += 0.5
    while t < 22.0:
        state, book = look(state, book, [inside(number, t, timed_out) for number in range(3)], t)
        t += 0.5
    state, book = look(state, book, [inside(number, t, timed_out, 1) for number in range(3)], t, "torchrun stops the workers after rank 1 failed", final=True)
    (incident,) = (*book.open, *book.closed)
    assert (incident.verdict.verdict, incident.verdict.cause, incident.verdict.culprit_ranks) == ("stuck", "mismatch", (2,))
