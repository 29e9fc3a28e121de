"""The life of incidents: one per key, updated, escalated, closed after two looks, re-armed, bounded."""

from dataclasses import replace

from build_jobs import MONO, WALL, frames

from rankwatch import shown
from rankwatch.model import CompileActivity, JobSnapshot, NodeReport, Process, RankState, Stack, Thread, Verdict
from rankwatch.monitor.incidents import MAX_CLOSED, Book, fold, paged, worst
from rankwatch.monitor.policy import Limits


def verdict(name="slow", cause="not_entered", culprits=(1,), key="hang-1", since=0.0, **more):
    return Verdict(key, name, cause, "user_code", culprits, (0, 2), MONO + since, f"{name} {cause}", **more)


def stack(line, at, native=False):
    return Stack(101, MONO + at, (Thread("MainThread", 1, frames(f"train.py:{line}:step")),), text=f"line {line}", native=native)


def snap(t, final=False, **rank1):
    ranks = tuple(RankState(rank=n, node="node05", process=Process(100 + n, True), **(rank1 if n == 1 else {})) for n in range(3))
    return JobSnapshot(MONO + t, WALL + t, 3, 0, (NodeReport("node05", ranks),), final=final)


class Play:
    def __init__(self):
        self.book, self.t, self.changes = Book(), 0.0, []

    def look(self, *verdicts, final=False, dt=0.5, **rank1):
        self.t += dt
        snapshot = snap(self.t, final, **rank1)
        self.book, changes = fold(self.book, verdicts, snapshot, snapshot.now, Limits())
        self.changes += [change.kind for change in changes]
        return changes


def test_a_verdict_opens_one_incident_with_id_times_hosts_and_pids():
    play = Play()
    (change,) = play.look(verdict(), dt=5.0)
    incident = change.incident
    assert change.kind == "opened"
    assert incident.id == "20261130T005325Z-1"
    assert (incident.opened_at, incident.opened_wall_at, incident.since_wall_at) == (MONO + 5, WALL + 5, WALL)
    assert incident.hosts == {0: "node05", 1: "node05", 2: "node05"}
    assert incident.pids == {0: 100, 1: 101, 2: 102}
    assert [(c.verdict, c.cause, c.culprit_ranks, c.at_wall) for c in incident.history] == [("slow", "not_entered", (1,), WALL + 5)]
    assert incident.lost_rank_s == 10.0


def test_a_countdown_alone_is_no_change_but_the_incident_is_kept_up_to_date():
    play = Play()
    play.look(verdict(timeout_left_s=170.0))
    assert play.look(verdict(timeout_left_s=169.5)) == ()
    assert play.book.open[0].verdict.timeout_left_s == 169.5


def test_a_sharper_cause_updates_and_a_worse_verdict_escalates_the_same_incident():
    play = Play()
    play.look(verdict())
    play.look(verdict(cause="data_loading"))
    play.look(verdict("stuck", "data_loading"))
    assert play.changes == ["opened", "updated", "escalated"]
    (incident,) = play.book.open
    assert [(c.verdict, c.cause) for c in incident.history] == [("slow", "not_entered"), ("slow", "data_loading"), ("stuck", "data_loading")]
    assert (worst(incident), paged(incident)) == ("stuck", True)


def test_one_look_without_the_verdict_closes_nothing_two_do():
    play = Play()
    play.look(verdict())
    assert play.look() == ()
    play.look(verdict())
    play.look()
    (change,) = play.look()
    assert change.kind == "closed"
    assert play.book.open == ()
    closed = play.book.closed[0]
    assert closed.verdict.verdict == "recovered"
    assert closed.verdict.cause == "not_entered"
    assert (closed.closed_at, closed.closed_wall_at) == (MONO + 2.5, WALL + 2.5)
    assert [c.verdict for c in closed.history] == ["slow", "recovered"]
    assert closed.lost_rank_s == 4.0
    assert closed.verdict.summary.startswith("recovered after 2 s (2 waiting ranks lost 4 rank-s): slow not_entered")


def test_the_same_key_after_closing_is_a_new_incident():
    play = Play()
    play.look(verdict())
    play.look()
    play.look()
    play.look(verdict())
    assert play.changes == ["opened", "closed", "opened"]
    assert [incident.id[-2:] for incident in (*play.book.closed, *play.book.open)] == ["-1", "-2"]


def test_two_keys_are_two_incidents():
    play = Play()
    play.look(verdict(), verdict(key="hang-2", culprits=(2,)))
    assert [incident.verdict.culprit_ranks for incident in play.book.open] == [(1,), (2,)]


def test_at_the_end_open_incidents_are_marked_and_those_without_verdict_closed():
    play = Play()
    play.look(verdict("failed", "killed"), verdict(key="hang-2"))
    play.look(verdict("failed", "killed"), final=True)
    (left,) = play.book.open
    assert left.final
    assert left.verdict.verdict == "failed"
    assert [incident.verdict.key for incident in play.book.closed] == ["hang-2"]


def test_what_is_seen_while_a_job_is_torn_down_replaces_no_graver_word():
    """The rank is let go just before anybody says that the job ends: it ends as it was."""
    play = Play()
    stuck = verdict("stuck", "uninterruptible", at="a.py:3:read", evidence=("state D",), advice=("see dmesg",))
    play.look(verdict())
    play.look(stuck)
    play.look(verdict("slow", "not_entered"))
    assert play.book.open[0].verdict.verdict == "slow"
    play.look(verdict("slow", "not_entered"), final=True)
    (incident,) = play.book.open
    assert (incident.verdict, incident.final) == (stuck, True)
    assert [(change.verdict, change.cause) for change in incident.history] == [("slow", "not_entered"), ("stuck", "uninterruptible")]


def test_nor_does_an_equal_word_that_says_less_of_the_cause():
    play = Play()
    stuck = verdict("stuck", "stopped")
    play.look(stuck)
    play.look(verdict("stuck", "not_entered"))
    play.look(verdict("stuck", "not_entered"), final=True)
    assert play.book.open[0].verdict == stuck


def test_a_rank_that_has_been_better_for_long_is_told_as_it_is_at_the_end():
    play = Play()
    play.look(verdict("stuck", "stopped"))
    play.look(verdict("slow", "compiling"))
    play.look(verdict("slow", "compiling"), final=True, dt=20.0)
    assert (play.book.open[0].verdict.verdict, play.book.open[0].verdict.cause) == ("slow", "compiling")


def test_one_clock_counts_over_all_verdicts_of_an_incident():
    play = Play()
    play.look(verdict(since=0.0), dt=5.0)
    play.look(verdict("failed", "killed", since=9.0), dt=5.0)
    incident = play.book.open[0]
    assert incident.since_wall_at == WALL
    assert shown.since(incident) == MONO
    play.look(verdict("failed", "killed", since=-2.0))
    assert shown.since(play.book.open[0]) == MONO - 2.0


def test_an_incident_that_is_over_advises_nothing_that_was_to_be_done_while_it_lasted():
    play = Play()
    told = (
        "Nothing is broken while it moves. Near the timeout: raise it.", "It recompiles because of the guard `x`: y.",
        "The process was stopped by a signal. `kill -CONT 7` continues it.", "Look.",
    )  # fmt: skip
    play.look(verdict(advice=told))
    play.look()
    play.look()
    assert play.book.closed[0].verdict.advice == (
        "It was no error. Should such a compile come near the timeout: raise it.", "It was compiled anew because of the guard `x`: y.", "Look.",
    )  # fmt: skip


def test_at_most_50_closed_incidents_are_kept():
    play = Play()
    for number in range(60):
        play.look(verdict(key=f"hang-{number}", culprits=(number,)))
        play.look()
        play.look()
    assert len(play.book.closed) == MAX_CLOSED == 50
    assert play.book.closed[-1].verdict.key == "hang-59"


def test_stacks_of_this_wait_are_kept_and_grouped_older_ones_are_not():
    play = Play()
    play.look(verdict(since=0.2), stack=stack(10, 0.1))
    assert play.book.open[0].stacks == {}
    play.look(verdict(since=0.2), stack=stack(31, 0.9))
    (incident,) = play.book.open
    assert incident.stacks[1].text == "line 31"
    assert [(group.ranks, group.role) for group in incident.stack_groups] == [((1,), "culprit")]
    play.look(verdict(since=0.2), stack=Stack(101, MONO + 1.4, error="process gone"))
    assert play.book.open[0].stacks[1].text == "line 31"


def test_evidence_is_added_by_id_to_open_and_closed_incidents():
    play = Play()
    play.look(verdict())
    name = play.book.open[0].id
    book = play.book.with_evidence(name, stacks={0: stack(50, 1.0), 2: stack(50, 1.0), 1: stack(31, 1.0, native=True)}, recorder_files=("fr/rank_0.json",))
    (incident,) = book.open
    assert incident.recorder_files == ("fr/rank_0.json",)
    assert [(group.ranks, group.role) for group in incident.stack_groups] == [((1,), "culprit"), ((0, 2), "waiting")]
    again = book.with_evidence(name, stacks={1: stack(32, 2.0)}, recorder_files=("fr/rank_0.json", "fr/rank_1.json"))
    assert again.open[0].stacks[1].native
    assert again.open[0].recorder_files == ("fr/rank_0.json", "fr/rank_1.json")
    assert play.book.with_evidence("no such id", stacks={0: stack(1, 1.0)}) == play.book


def test_what_the_culprit_compiled_is_kept():
    play = Play()
    activity = CompileActivity("0/1", "forward", "forward@model.py:31", "inductor", "Scheduler", MONO, MONO)
    play.look(verdict(cause="compiling"), compiling=(activity,))
    play.look(verdict(cause="compiling"))
    assert play.book.open[0].compiling == {1: activity}


def test_lost_time_grows_with_the_waiting_ranks():
    play = Play()
    play.look(verdict(), dt=10.0)
    play.look(replace(verdict(), waiting_ranks=(0,)), dt=5.0)
    play.look(replace(verdict(), waiting_ranks=(0,)), dt=5.0)
    assert play.book.open[0].lost_rank_s == 20 + 10 + 5
