"""Waiters that a watchdog of the job's own ends: who kept them waiting is named, not they."""

from dataclasses import replace

import pytest
from build_jobs import MONO, WALL

from rankwatch.model import Collective, Crash, Group, JobSnapshot, NodeReport, Process, RankState, Verdict, WaitedOn
from rankwatch.monitor.diagnose import State, diagnose, gave_up
from rankwatch.monitor.diagnose.state import Death
from rankwatch.monitor.incidents import Book, fold
from rankwatch.monitor.policy import Limits

GROUP = Group("0", "default_pg", "gloo", (0, 1, 2), 60.0)
ENDING = "torchrun stops the workers after rank 0 failed"


def told(name="slow", culprits=(1,), confidence="likely"):
    return Verdict(
        "a0-hang-1", name, "not_entered", "user_code", culprits, (0, 2), MONO - 9, "rank 1 waits", at="train.py:17:read_shard_index",
        group=WaitedOn("0", "default_pg", (0, 1, 2), "all_reduce", 41), confidence=confidence,
    )  # fmt: skip


def rank(number, code=42, done=40, **more):
    state = RankState(
        rank=number, node="node05", process=Process(100 + number, code is None, "S", exit_code=code, exited_at=MONO), stage="joined", groups=(GROUP,),
        enqueued={"0": 41}, completed={"0": done},
    )  # fmt: skip
    return replace(state, **more)


def given_up(*ranks, verdict=None):
    deaths = {each.rank: Death(each.rank, each.process.exit_code, MONO, MONO, False, False) for each in ranks if each.process.exit_code is not None}
    return set(gave_up.on(State(last=(verdict or told(),)), {each.rank: each for each in ranks}, deaths))


def test_a_waiter_that_ends_in_its_wait_by_no_exception_has_given_up():
    assert given_up(rank(0), rank(1, None), rank(2)) == {0, 2}
    assert given_up(rank(0, -14), rank(1, None), rank(2, None)) == {0}, "an alarm of its own"


@pytest.mark.parametrize(
    "end",
    [rank(0, done=41), rank(0, crash=Crash("ValueError", "bad batch")), rank(0, stage="exiting"), rank(0, -9), rank(0, -11), rank(0, 0), rank(0, agent="off")],
    ids=["got through", "raised", "left by sys.exit", "was killed", "segfault", "ended well", "nobody watched it"],
)
def test_another_end_says_nothing_about_the_wait(end):
    assert given_up(end, rank(1, None), rank(2, None)) == set()


def test_who_was_told_to_keep_others_waiting_has_not_given_up():
    assert given_up(rank(0, None), rank(1), rank(2, None)) == set()
    assert given_up(rank(0), rank(1, None), rank(2), verdict=told(culprits=())) == set(), "nobody was named"


def judged(verdict, *ranks):
    ends = {each.rank: verdict for each in ranks if each.process.exit_code is not None}
    bad = {number: Death(number, 42, MONO, MONO, False, False) for number in ends}
    snapshot = JobSnapshot(MONO, WALL, 3, 0, (NodeReport("node05", tuple(ranks)),), gap_s=0.5)
    return gave_up.judge(snapshot, {each.rank: each for each in ranks}, ends, bad, "a0-death").verdict


def test_the_culprit_of_a_slow_wait_is_named_with_what_was_said_of_it():
    found = judged(told(), rank(0), rank(1, None), rank(2))
    assert (found.verdict, found.cause, found.culprit_ranks, found.confidence, found.at) == ("failed", "not_entered", (1,), "likely", told().at)
    assert found.summary == "rank 1 kept ranks 0,2 waiting for 9 s at train.py:17:read_shard_index, until they gave up (exit code 42)"
    assert "rank 0 is a consequence: exit code 42" in found.evidence
    assert judged(told(confidence="partial"), rank(0), rank(1, None), rank(2)).confidence == "partial"


@pytest.mark.parametrize("name", ["stuck", "timeout_imminent"])
def test_a_wait_that_was_told_as_stuck_keeps_its_own_verdict(name):
    assert judged(told(name), rank(0), rank(1, None), rank(2)) is None


def a_hang_that_others_end(patience_s):
    """All incidents of a job whose rank 1 stays away from #41; rank 0 ends itself after patience_s, rank 2 half a second later, torchrun the rest."""
    entry = Collective("0", 0, 41, "all_reduce", ((4,),), ((4,),), ("Float",), WALL, 60.0)
    state, book = State(), Book()
    for step in range(int(2 * patience_s) + 4):
        t = step / 2
        late, ending = t - patience_s, ENDING if t - patience_s >= 1.0 else ""
        ranks = []
        for number in range(3):
            code = {0: 42 if late >= 0 else None, 1: -15 if ending else None, 2: 42 if late >= 0.5 else None}[number]
            seen = rank(number, code, heartbeat_at=MONO + t, collectives_at=MONO + t, collectives=() if number == 1 else (entry,))
            ranks.append(replace(seen, enqueued={"0": 40}) if number == 1 else seen)
        snapshot = JobSnapshot(MONO + t, WALL + t, 3, 0, (NodeReport("node05", tuple(ranks)),), ending=ending, gap_s=0.5, final=late >= 1.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
        book = fold(book, verdicts, snapshot, snapshot.now, Limits())[0]
    return [*book.closed, *book.open]


@pytest.mark.parametrize(("patience_s", "history"), [(9.0, ["slow", "failed"]), (22.0, ["slow", "stuck"])])
def test_the_hang_stays_one_incident_of_the_rank_that_all_waited_for(patience_s, history):
    (incident,) = a_hang_that_others_end(patience_s)
    assert [change.verdict for change in incident.history] == history
    assert {change.culprit_ranks for change in incident.history} == {(1,)}
    assert incident.verdict.verdict == history[-1]
