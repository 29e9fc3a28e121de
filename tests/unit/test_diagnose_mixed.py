"""Groups in which ranks send and receive beside their collectives, on gloo: its numbers run ahead, and no rank may be named over that."""

import pytest
from build_jobs import MONO, WALL, Job, coll, init, mark, nap, recv, send

from rankwatch.model import Collective, Group, JobSnapshot, NodeReport, Process, RankState
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.diagnose.views import build
from rankwatch.monitor.policy import Limits

LOCK = "train.py:15:enqueue"
GROUP = Group("0", "default_pg", "gloo", (0, 1, 2), 600.0)


def pipeline(stop=None, messages=1, late=None, steps=400):
    """Each step 2 sends to 1, `messages` times, and all reduce. stop: what 2 does before the sends of step 20; late: (who, at step, what) before the reduce."""

    def script(rank):
        yield init(180)
        for step in range(steps):
            if rank == 2 and stop is not None and step == 20:
                yield mark("onset")
                yield stop
            for number in range(messages):
                if rank == 2:
                    yield send(f"m{step}.{number}")
                if rank == 1:
                    yield recv(f"m{step}.{number}")
            for who, at, what in late or ():
                if (rank, step) == (who, at):
                    yield what
            yield coll()
            yield nap(0.1)

    return script


def named(job):
    return {seen.verdict.culprit_ranks for seen in job.history}


def test_the_rank_that_waits_for_nobody_is_named_and_not_the_one_whose_numbers_are_lowest():
    job = Job(pipeline(nap(3600, LOCK)), 3).play(90)
    assert named(job) <= {(), (2,)}
    page = job.pages()[0]
    assert (page.verdict.verdict, page.verdict.cause, page.verdict.culprit_ranks, page.verdict.at) == ("stuck", "not_entered", (2,), LOCK)
    assert page.at - job.marks["onset"] <= 45
    assert page.verdict.group.seq == 21


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_rank_is_named_while_the_others_wait_and_nobody_before_or_after(late):
    job = Job(pipeline(messages=3, late=[(late, 20, nap(18, LOCK)), (late, 60, nap(12, LOCK))], steps=100), 3).play(120)
    assert job.pages() == []
    assert set(job.kinds()) == {("slow", "not_entered", (late,))}
    assert not job.book.open


def test_a_pipeline_of_which_all_ranks_wait_for_a_message_is_told_after_half_a_minute_and_blames_nobody():
    def script(rank):
        yield init(1800)
        for step in range(400):
            if rank == 0:
                if step != 30:
                    yield send(f"a{step}")
                else:
                    yield mark("onset")
                yield recv(f"c{step}")
            else:
                yield recv(f"{'ab'[rank - 1]}{step}")
                yield send(f"{'bc'[rank - 1]}{step}")
            if step % 10 == 0:
                yield coll()
            yield nap(0.1)

    job = Job(script, 3).play(120)
    assert {(seen.verdict.verdict, seen.verdict.cause, seen.verdict.culprit_ranks, seen.verdict.confidence) for seen in job.history} == {
        ("slow", "unknown", (), "partial")
    }
    first = job.history[0]
    assert 25 <= first.at - job.marks["onset"] <= 45
    assert first.verdict.waiting_ranks == (0, 1, 2)
    assert "a point-to-point wait is suspected" in first.verdict.summary
    samples = [at for at, want in job.wants if want.kind == "stacks"]
    assert len(samples) <= 10


def entry(seq, done=True, t=0.0):
    return Collective("0", 0, seq, "all_reduce", ((100,),), ((100,),), ("Float",), WALL + t, 600.0, done)


def rank(number, newest, *, t, opened=None, more=None, enqueued=None, completed=None, read=0.0):
    """newest: the last entry that was read, since when it is open where it is. more: RankState.mixed of its group."""
    entries = tuple(entry(seq) for seq in range(1, newest + (opened is None))) + ((entry(newest, False, opened),) if opened is not None else ())
    return RankState(
        number, process=Process(100 + number, True, "S"), heartbeat_at=MONO + t, groups=(GROUP,), collectives=entries, collectives_at=MONO + read,
        enqueued={"0": enqueued or newest}, completed={"0": completed if completed is not None else newest - (opened is not None)},
        mixed={} if more is None else {"0": more},
    )  # fmt: skip


def look(*ranks, t):
    return JobSnapshot(MONO + t, WALL + t, 3, 0, (NodeReport("", ranks),), gap_s=0.5)


def test_a_rank_that_has_called_more_than_was_read_is_neither_missing_nor_waiting():
    ranks = (rank(0, 21, t=8, opened=1.0), rank(1, 12, t=8, more=True, enqueued=13, completed=12), rank(2, 20, t=8, more=False))
    (view,) = build(look(*ranks, t=8), {each.rank: each for each in ranks}).values()
    assert (view.frontier, view.waiters, view.missing, view.unsettled) == (21, (0,), (2,), (1,))


def test_nobody_is_named_until_the_entries_of_such_a_rank_are_read_again():
    state, told, wanted = State(), [], set()
    for step in range(2 * 30):
        t = step / 2
        ranks = (rank(0, 21, t=t, opened=0.0), rank(1, 20, t=t, more=True, enqueued=21, completed=21), rank(2, 21, t=t, opened=0.1, more=False))
        state, verdicts, wants = diagnose(state, look(*ranks, t=t), MONO + t, Limits())
        told += verdicts
        wanted |= {number for want in wants if want.kind == "recorder" for number in want.ranks}
    assert {(verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.confidence) for verdict in told} == {("slow", "unknown", (), "partial")}
    assert "operations of rank 1" in told[-1].missing_evidence[0]
    assert 1 in wanted


def test_a_rank_that_has_ended_is_missing_whatever_was_not_read():
    gone = rank(1, 12, t=8, more=True, enqueued=13, completed=13)
    gone = RankState(1, process=Process(101, False, "", exit_code=0), heartbeat_at=MONO, groups=(GROUP,), collectives=gone.collectives, mixed={"0": True},
                     enqueued={"0": 13}, completed={"0": 13})  # fmt: skip
    ranks = (rank(0, 21, t=8, opened=1.0), gone, rank(2, 21, t=8, opened=1.0))
    (view,) = build(look(*ranks, t=8), {each.rank: each for each in ranks}).values()
    assert (view.frontier, view.waiters, view.missing, view.unsettled) == (21, (0, 2), (1,), ())


def test_a_lead_of_numbers_is_not_looked_for_where_they_are_not_counted_alike():
    state, wanted = State(), []
    for step in range(40):
        t = step / 2
        ranks = tuple(rank(number, 20 + step + 5 * number, t=t, more=False, read=t) for number in range(3))
        state, _, wants = diagnose(state, look(*ranks, t=t), MONO + t, Limits())
        wanted += wants
    assert state.leads == {}
    assert wanted == []
