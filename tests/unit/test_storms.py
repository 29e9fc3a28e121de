"""Very many hangs alike at once: few incidents, one of which stands for the rest and names all its ranks."""

import json
from dataclasses import replace
from random import Random

from build_jobs import MONO, WALL
from build_status import job
from build_world import LargeJob

from rankwatch.model import JobSnapshot, NodeReport, RankState, Status, Verdict, WaitedOn
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.incidents import Book, fold
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.storms import OWN, gather
from rankwatch.notify import lines
from rankwatch.report import incident as incident_report
from rankwatch.report import page, text

SIZE = 8


def hang(number, verdict="slow", cause="not_entered", since=0.0, **more):
    """Group `number` of 8 ranks waits for its fourth."""
    first = number * SIZE
    waiting = tuple(rank for rank in range(first, first + SIZE) if rank != first + 3)
    return Verdict(
        f"a0-hang-{number + 1}", verdict, cause, "user_code", (first + 3,), waiting, MONO + since, f"rank {first + 3} is away", at="train.py:31:load_batch",
        group=WaitedOn("tp", f"tp{number}", tuple(range(first, first + SIZE)), "all_reduce", 7), timeout_s=600.0, timeout_left_s=590.0 - number % 7,
    )  # fmt: skip


def snap(t, groups=4, final=False):
    ranks = tuple(RankState(rank=number, node=f"node{number // SIZE}") for number in range(groups * SIZE))
    return JobSnapshot(MONO + t, WALL + t, len(ranks), 0, (NodeReport("node0", ranks),), final=final)


class Play:
    def __init__(self):
        self.book, self.t = Book(), 5.0

    def look(self, *verdicts, dt=0.5):
        self.t += dt
        snapshot = snap(self.t)
        self.book, changes = fold(self.book, verdicts, snapshot, snapshot.now, Limits())
        return changes

    @property
    def storm(self):
        (found,) = [incident for incident in self.book.open if "many" in incident.verdict.key]
        return found


def test_up_to_the_bound_each_hang_is_an_incident_of_its_own():
    play = Play()
    changes = play.look(*map(hang, range(OWN)))
    assert [change.incident.verdict.key for change in changes] == [f"a0-hang-{number + 1}" for number in range(OWN)]
    assert play.book.storms == ()


def test_what_comes_on_top_is_one_incident_that_names_all_ranks():
    play = Play()
    changes = play.look(*map(hang, range(2048)))
    assert [change.kind for change in changes] == ["opened"] * (OWN + 1)
    verdict = play.storm.verdict
    assert verdict.key == "a0-hang-many-1"
    assert verdict.culprit_ranks == tuple(range(OWN * SIZE + 3, 2048 * SIZE, SIZE))
    assert len(verdict.waiting_ranks) == (2048 - OWN) * (SIZE - 1)
    assert verdict.summary.startswith("2,033 more groups hang alike, begun within 1 s: they probably have one cause that they share; culprits: ranks 123,131,")
    assert len(verdict.summary) < 600
    assert "(2,033 of them)" in verdict.summary
    assert verdict.evidence[:2] == ("verdicts: 2,033 slow", "causes: 2,033 not_entered")
    assert verdict.advice[0].startswith("Look first at what these groups share")
    assert (verdict.at, verdict.places, verdict.timeout_left_s) == ("train.py:31:load_batch", (), 584.0)


def test_the_same_is_told_in_whatever_order_the_hangs_are_found():
    verdicts = [hang(number, since=number % 5) for number in range(60)]
    told = gather((), verdicts, ())
    for seed in range(5):
        mixed = Random(seed).sample(verdicts, len(verdicts))
        storms, again = gather((), mixed, ())
        assert storms == told[0]
        assert set(again) == set(told[1])


def test_the_storm_keeps_its_incident_while_its_verdict_gets_worse_and_its_groups_come_and_go():
    play = Play()
    play.look(*map(hang, range(40)))
    first = play.storm.id
    assert [change.kind for change in play.look(*map(hang, range(41)))] == ["updated"]
    (change,) = play.look(*map(hang, range(40)), replace(hang(40), verdict="stuck"))
    assert (change.kind, change.incident.id, change.incident.verdict.verdict) == ("escalated", first, "stuck")
    assert change.incident.verdict.evidence[0] == "verdicts: 25 slow, 1 stuck"
    play.look(*map(hang, range(30)))
    assert play.storm.verdict.culprit_ranks == tuple(range(OWN * SIZE + 3, 30 * SIZE, SIZE))
    play.look()
    assert {change.kind for change in play.look()} == {"closed"}
    assert play.book.open == ()


def test_of_very_many_culprits_the_history_does_not_keep_every_coming_and_going():
    play = Play()
    for more in range(20):
        play.look(*map(hang, range(200 + more)))
    assert len(play.storm.history) == 1
    assert len(play.storm.verdict.culprit_ranks) == 219 - OWN


def test_an_incident_that_is_open_is_not_drawn_into_a_storm():
    play = Play()
    play.look(*map(hang, range(10)))
    play.look(*map(hang, range(40)))
    assert [incident.verdict.key for incident in play.book.open] == [*(f"a0-hang-{number + 1}" for number in range(OWN)), "a0-hang-many-1"]


def test_a_storm_of_one_group_is_told_as_that_group():
    play = Play()
    play.look(*map(hang, range(OWN + 1)))
    assert play.storm.verdict == replace(hang(OWN), key="a0-hang-many-1")


def test_hangs_of_other_causes_and_other_times_stay_out():
    play = Play()
    early = [hang(number) for number in range(20)]
    late = [hang(number, since=100.0) for number in range(20, 30)]
    other = [hang(number, "stuck", "mismatch") for number in range(30, 40)]
    play.look(*early, *late, *other)
    assert len(play.book.open) == OWN + 1 + 10 + 10
    assert play.storm.verdict.culprit_ranks == tuple(range(OWN * SIZE + 3, 20 * SIZE, SIZE))


def test_a_proven_cause_leaves_the_storm_and_a_sharper_look_does_not():
    play = Play()
    play.look(*map(hang, range(40)))
    sharper = [hang(number, cause="data_loading" if number < 20 else "not_entered") for number in range(39)]
    changes = play.look(*sharper, hang(39, "stuck", "mismatch"))
    assert [change.incident.verdict.key for change in changes if change.kind == "opened"] == ["a0-hang-40"]
    assert play.storm.verdict.cause == "not_entered"
    assert play.storm.verdict.evidence[1] == "causes: 19 not_entered, 5 data_loading"
    play.look(*(hang(number, cause="data_loading") for number in range(39)), hang(39, "stuck", "mismatch"))
    assert play.storm.verdict.cause == "data_loading"
    assert [change.cause for change in play.storm.history] == ["not_entered", "not_entered", "data_loading"]


def test_a_rank_that_dies_in_a_storm_is_told_by_itself():
    play = Play()
    play.look(*map(hang, range(40)))
    changes = play.look(*map(hang, range(39)), hang(39, "failed", "killed"))
    assert [(change.incident.verdict.key, change.incident.verdict.verdict) for change in changes if change.kind == "opened"] == [("a0-hang-40", "failed")]


def test_a_storm_that_turns_out_to_be_a_part_of_one_hang_is_merged_into_it():
    play = Play()
    play.look(*map(hang, range(40)))
    whole = replace(hang(0), waiting_ranks=tuple(range(40 * SIZE)))
    play.look(whole)
    changes = [change for change in play.look(whole) if change.kind == "closed"]
    assert len(changes) == OWN
    assert {change.incident.into for change in changes} == {play.book.open[0].id}


def test_a_storm_of_a_simulated_job_is_told_in_small_documents():
    """64 groups that do not get out of a call that all their ranks are in."""
    world, memory, book, limits = LargeJob(512, "storm", entries=2), State(), Book(), Limits()
    for snapshot in world.looks(2.0, 18.0, 2.0):
        memory, verdicts, wanted = diagnose(memory, snapshot, snapshot.now, limits)
        book, _ = fold(book, verdicts, snapshot, snapshot.now, limits)
        world.want(wanted, snapshot.now - MONO)
    assert len(verdicts) == 64
    assert len(book.open) == OWN + 1
    picture = Status(job(world_size=512, nnodes=64), snapshot, book.told, book.open)
    document = incident_report.to_json(book.open[-1], picture)
    assert len(document["waiting_ranks"]) == (64 - OWN) * SIZE
    assert len(json.dumps(document)) < 200_000
    assert len(page.render(document)) < 200_000
    assert "49 more groups hang alike" in text.render(document)
    assert len(lines.verdict(book.open[-1], picture, "/runs/1")) < 1500
