"""Gaps, steps of the wall clock, suspended machines and suspended jobs: nothing is judged by a clock that lied."""

from dataclasses import replace

import pytest
from build_jobs import MONO, WALL, Job, coll, init, nap, stepped

from rankwatch.model import Collective, Group, JobSnapshot, NodeReport, Process, RankState, Verdict
from rankwatch.monitor.diagnose import State, clocks, diagnose, ledger
from rankwatch.monitor.incidents import Book, fold
from rankwatch.monitor.policy import Limits


def steps(rank):
    yield init(600)
    for _ in range(2000):
        yield nap(0.05)
        yield coll()
        yield stepped()


def waiting(t, since=0.0, letters=("S", "S"), read=True):
    """Rank 0 waits in number 6 since `since`, rank 1 sleeps elsewhere."""
    groups = (Group("0", "default_pg", "gloo", (0, 1), 600.0),)
    entry = Collective("0", 0, 6, "all_reduce", ((4,),), ((4,),), ("Float",), WALL + since, 600.0)
    inside = t >= since
    return (
        RankState(0, process=Process(1, True, letters[0]), groups=groups, heartbeat_at=MONO + t, enqueued={"0": 6 if inside else 5}, completed={"0": 5},
                  collectives=(entry,) if inside and read else ()),
        RankState(1, process=Process(2, True, letters[1]), groups=groups, heartbeat_at=MONO + t, enqueued={"0": 5}, completed={"0": 5}),
    )  # fmt: skip


class Play:
    def __init__(self):
        self.state, self.told, self.last, self.book = State(), [], None, Book()

    def look(self, t, ranks, wall=None, world=2):
        now = MONO + t
        gap = now - self.last if self.last is not None else 0.0
        self.last = now
        snapshot = JobSnapshot(now, WALL + t if wall is None else wall, world, 0, (NodeReport("node05", tuple(ranks)),), gap_s=gap, started_at=MONO - 60)
        self.state, verdicts, _ = diagnose(self.state, snapshot, now, Limits())
        self.told += [(t, verdict) for verdict in verdicts]
        self.book, _ = fold(self.book, verdicts, snapshot, now, Limits())
        return verdicts

    def run(self, start, end, make, wall=lambda t: WALL + t, poll=0.5):
        t = start
        while t <= end:
            self.look(t, make(t), wall(t))
            t += poll


@pytest.mark.parametrize("step_s", [300.0, -300.0, 86400.0])
def test_a_step_of_the_wall_clock_moves_no_age(step_s):
    """The operation was issued before the step and is read after it."""
    play = Play()
    play.run(-3.0, 2.0, lambda t: waiting(t, read=False))
    play.run(2.5, 12.0, waiting, wall=lambda t: WALL + t + step_s)
    first = play.told[0]
    assert (first[0], first[1].verdict) == (5.0, "slow")
    assert {verdict.verdict for _, verdict in play.told} == {"slow"}
    assert play.told[-1][1].since == pytest.approx(MONO)
    assert play.told[-1][1].timeout_left_s == pytest.approx(588)


def test_a_suspended_machine_whose_monotonic_clock_stood_still_is_not_paged():
    """One hour passes on the wall between two looks half a second apart."""
    play = Play()
    play.run(-3.0, 3.0, lambda t: waiting(t, read=False))
    play.run(3.5, 60.0, waiting, wall=lambda t: WALL + t + 3600)
    assert {verdict.verdict for _, verdict in play.told} == {"slow"}
    assert play.told[-1][1].since == pytest.approx(MONO)


def test_an_operation_issued_after_a_step_is_as_old_as_it_is():
    play = Play()
    play.run(-3.0, 0.5, lambda t: waiting(t, since=4.0))
    stepped_wall = 100.0

    def make(t):
        ranks = waiting(t, since=4.0)
        entry = Collective("0", 0, 6, "all_reduce", ((4,),), ((4,),), ("Float",), WALL + 4.0 + stepped_wall, 600.0)
        return [RankState(**{**{name: getattr(ranks[0], name) for name in RankState.__slots__}, "collectives": (entry,) if t >= 4 else ()}), ranks[1]]

    play.run(1.0, 12.0, make, wall=lambda t: WALL + t + stepped_wall)
    assert play.told[0][0] == 9.0
    assert play.told[-1][1].since == pytest.approx(MONO + 4)


def test_slewing_is_no_step():
    play = Play()
    play.run(0.0, 3000.0, lambda t: waiting(t, since=1e6), wall=lambda t: WALL + t * 1.0005, poll=2.0)
    assert len(play.state.eras) == 1
    assert play.state.pauses == ()


def test_readings_that_fit_nowhere_are_never_older_than_they_must_be():
    snapshot = JobSnapshot(MONO + 500, WALL + 200, 1, 0, ())
    state = State(eras=((float("-inf"), WALL - MONO), (MONO + 100, WALL - MONO - 300)))
    assert clocks.mono(state, snapshot, WALL + 90) == MONO + 390, "of two readings the younger one"
    assert clocks.mono(state, snapshot, WALL + 700) == MONO + 500, "the future is now"
    assert clocks.mono(State(), snapshot, WALL + 100) == MONO + 400


def test_a_monitor_that_is_always_slow_judges_all_the_same():
    """Every look comes 4 s after the one before: after a few that is its pace and no pause."""
    play = Play()
    play.run(-3.0, -1.0, waiting)
    play.run(4.0, 400.0, waiting, poll=4.0)
    assert play.told[0][1].verdict == "slow"
    assert play.told[-1][1].verdict == "stuck"


def test_one_slow_poll_of_twenty_seconds_starts_the_age_anew():
    play = Play()
    play.run(-3.0, 1.0, waiting)
    play.look(21.0, waiting(21.0))
    assert play.told == []
    play.run(21.5, 40.0, waiting)
    assert play.told[0][0] == pytest.approx(26.0, abs=0.6)
    assert {verdict.verdict for _, verdict in play.told} == {"slow"}


@pytest.mark.parametrize("pause_s", [3.0, 14.0, 22.0, 200.0])
@pytest.mark.parametrize("poll", [0.25, 0.5, 1.0])
def test_what_was_told_before_the_monitor_was_stopped_stays_told_while_its_wait_lasts(pause_s, poll):
    play = Play()
    play.run(-3.0, 6.0, waiting)
    key = play.told[-1][1].key
    play.told.clear()
    looks, t = 0, 6.0 + pause_s
    while t <= pause_s + 20.0:
        assert [verdict.key for verdict in play.look(t, waiting(t))] == [key]
        looks, t = looks + 1, t + poll
    assert play.book.closed == ()
    assert [incident.verdict.since for incident in play.book.open] == [pytest.approx(MONO)]
    assert {verdict.verdict for t, verdict in play.told if t < 6.0 + pause_s + 12.0} == {"slow"}, "ages start anew"


def test_a_wait_that_ended_while_the_monitor_was_stopped_has_recovered():
    play = Play()
    play.run(-3.0, 6.0, waiting)
    play.run(20.0, 23.0, lambda t: [replace(rank, enqueued={"0": 7}, completed={"0": 7}, collectives=()) for rank in waiting(t)])
    assert play.book.open == ()
    assert [incident.verdict.verdict for incident in play.book.closed] == ["recovered"]


def test_a_job_that_was_told_to_stand_still_stands_still_after_a_pause_of_the_monitor():
    idle = Verdict("a0-idle", "slow", "unknown", "unknown", (), (0, 1), MONO, "")
    ranks = waiting(0.0, since=1e6)
    play = Play()
    play.run(-3.0, 0.0, lambda t: ranks)
    play.state = replace(play.state, last=(idle,))
    for t in range(20, 75):
        assert [verdict.key for verdict in play.look(float(t), ranks)] == ["a0-idle"]
    stepping = [replace(rank, steps=1) for rank in ranks]
    assert play.look(75.0, stepping) == ()


@pytest.mark.parametrize("step_s", [3600.0, -315_360_000.0])
@pytest.mark.parametrize("written_at", [4.0, 7.0])
def test_a_step_of_one_nodes_clock_moves_no_age(step_s, written_at):
    """Node 1's clock is set at second 6.5, before or after its rank's call, and back at 12; its recorder is read at 14. Reports come every 2 s."""
    state, told = State(), []
    for tick in range(60):
        t = tick * 0.5
        reported = t - t % 2
        after = step_s if 6.5 <= reported < 12.0 else 0.0
        waiter, absent = waiting(reported, since=written_at)
        entry = Collective("0", 0, 6, "all_reduce", ((4,),), ((4,),), ("Float",), WALL + written_at + (step_s if written_at >= 6.5 else 0.0), 600.0)
        remote = replace(waiter, rank=1, node="node1", collectives=(entry,) if reported >= 14.0 else ())
        local = replace(absent, rank=0, node="node0", heartbeat_at=MONO + t)
        nodes = (NodeReport("node0", (local,)), NodeReport("node1", (remote,), 1, report_age_s=t - reported, clock_offset_s=-after))
        state, verdicts, _ = diagnose(state, JobSnapshot(MONO + t, WALL + t, 2, 0, nodes, gap_s=0.5, started_at=MONO - 60), MONO + t, Limits())
        told += [(t, verdict) for verdict in verdicts]
    assert {verdict.verdict for _, verdict in told} == {"slow"}
    assert told[-1][1].since == pytest.approx(MONO + written_at, abs=2.0)
    assert ledger.rows(state.ledger)[0].rank_s == pytest.approx(29.5 - written_at, abs=3)


# -- suspended jobs --------------------------------------------------------------------------------------------------------


def suspended(play):
    return [verdict for _, verdict in play.told if verdict.key.endswith("-suspended")]


def test_ranks_that_are_all_stopped_are_a_suspended_job_and_nobodys_fault():
    play = Play()
    play.run(-3.0, 1.0, waiting)
    play.run(1.5, 300.0, lambda t: waiting(t, letters=("T", "T")))
    assert {verdict.verdict for _, verdict in play.told} == {"slow"}
    last = suspended(play)[-1]
    assert (last.cause, last.domain, last.culprit_ranks, last.waiting_ranks, last.confidence) == ("stopped", "scheduler", (0, 1), (), "certain")
    assert last.summary == "all 2 ranks are stopped (state T) for 298 s: suspended from outside; the group's timeout comes in 300 s"


def test_after_a_suspended_job_runs_on_ages_start_anew():
    play = Play()
    play.run(-3.0, 3.0, waiting)
    play.run(3.5, 60.0, lambda t: waiting(t, letters=("T", "T")))
    play.told.clear()
    play.run(60.5, 64.0, waiting)
    assert suspended(play) == suspended(play)[:2], "it ends with the quiet looks"
    play.run(64.5, 90.0, waiting)
    assert {verdict.verdict for _, verdict in play.told} == {"slow"}


def test_a_rank_that_is_not_continued_with_the_others_is_stopped():
    play = Play()
    play.run(-3.0, 1.0, waiting)
    play.run(1.5, 30.0, lambda t: waiting(t, letters=("T", "T")))
    play.told.clear()
    play.run(30.5, 45.0, lambda t: waiting(t, letters=("S", "T")))
    stuck = [(t, verdict) for t, verdict in play.told if verdict.verdict == "stuck"]
    assert stuck[0][0] >= 33.5
    assert (stuck[0][1].cause, stuck[0][1].culprit_ranks) == ("stopped", (1,))


def test_one_stopped_rank_is_still_a_page():
    play = Play()
    play.run(-3.0, 10.0, lambda t: waiting(t, letters=("S", "T" if t >= 0 else "S")))
    assert play.told[-1][1].verdict == "stuck"


def test_a_job_that_was_stopped_as_a_whole_for_a_while_is_not_paged():
    """SIGSTOP of ranks and launcher for 15 s: the monitor sees one long gap, and ranks in state T for the first look after it."""
    job = Job(steps, 4)
    job.play(12)
    for rank in job.ranks.values():
        rank.frozen = True
    job.t += 15.0
    job.look(gap=15.0)
    for rank in job.ranks.values():
        rank.frozen = False
    job.play(10)
    assert job.history == []
    assert job.incidents == ()


def test_a_suspension_is_one_incident_that_closes():
    job = Job(steps, 4)
    job.play(6)
    for rank in job.ranks.values():
        rank.frozen = True
    job.play(20)
    for rank in job.ranks.values():
        rank.frozen = False
    job.play(10)
    (incident,) = job.incidents
    assert [change.verdict for change in incident.history] == ["slow", "recovered"]
    assert (incident.verdict.cause, incident.verdict.domain, incident.closed_at is not None) == ("stopped", "scheduler", True)
