"""What an incident keeps once it is over: the picture from while it was open."""

import dataclasses

import build_status

from rankwatch.monitor.cases import Cases
from rankwatch.monitor.incidents import Book, _Life
from rankwatch.monitor.policy import Limits
from rankwatch.report import incident as incident_report

LIMITS = Limits.from_options(None, {})


class Quiet:
    """Stands for files, announcer, command and evidence."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: {} if name == "latest" else "" if name == "path_of" else False


def cases_with(incident):
    cases = Cases(Quiet(), Quiet(), Quiet(), Quiet(), Quiet())
    cases.book = Book(open=(incident,), opened=1, lives={incident.id: _Life(0, build_status.NOW, len(incident.verdict.waiting_ranks))})
    return cases


def later(picture, seconds, ranks=None, **changes):
    """The snapshot some seconds on."""
    base = build_status.snapshot(ranks) if ranks else picture.snapshot
    return dataclasses.replace(base, now=build_status.NOW + seconds, wall_at=build_status.WALL + seconds, **changes)


def look(cases, picture, snapshot, verdicts):
    changes = cases.judge(verdicts, snapshot, LIMITS)
    status = dataclasses.replace(picture, snapshot=snapshot, verdicts=verdicts, open_incidents=cases.book.open, closed_incidents=cases.book.closed)
    cases.tell(changes, status)
    return status


def test_a_recovered_incident_shows_the_compile_that_made_the_others_wait():
    picture = build_status.compiling_status()
    incident = picture.open_incidents[0]
    cases = cases_with(incident)
    look(cases, picture, picture.snapshot, (incident.verdict,))
    brief = build_status.compiling_activity(frame="other@model.py:9", started_at=build_status.NOW + 1.9, phase="dynamo", recompile_reason="")
    ranks = tuple(build_status.rank_state(3, compiling=(brief,)) if state.rank == 3 else state for state in picture.snapshot.nodes[0].ranks)
    look(cases, picture, later(picture, 2, ranks), (dataclasses.replace(incident.verdict, timeout_left_s=560.0),))
    calm = build_status.healthy_status().snapshot.nodes[0].ranks
    for seconds in (3, 4):
        status = look(cases, picture, later(picture, seconds, calm), ())
    (closed,) = cases.book.closed
    document = incident_report.to_json(closed, status)
    row = document["compile"]["3"]
    assert (row["frame"], row["phase"], row["elapsed_s"], row["split"], row["splits"]) == ("forward@model.py:31", "inductor", 41.0, 2, 4)
    assert row["reason"].startswith("tensor 'x' size mismatch")
    assert document["ranks"]["0"]["label"] == "waiting"
    assert document["ranks"]["3"]["label"] == "culprit: compiling"
    assert document["groups"][0]["waited_on"] is True
    assert document["at"] == "model.py:31:forward"
    assert document["summary"].startswith("recovered after 41 s")
    assert "are left" not in document["summary"]
    assert document["timeout_at"] == build_status.WALL + 2 + 560


def test_ranks_that_leave_before_anybody_says_why_do_not_spoil_the_picture():
    picture = build_status.stuck_status()
    incident = picture.open_incidents[0]
    cases = cases_with(incident)
    look(cases, picture, picture.snapshot, (incident.verdict,))
    leaving = tuple(build_status.rank_state(rank, stage="exiting") for rank in range(8))
    look(cases, picture, later(picture, 1, leaving), (incident.verdict,))
    status = look(cases, picture, later(picture, 2, leaving, ending="SIGINT to the launcher", final=True), (incident.verdict,))
    document = incident_report.to_json(cases.book.open[0], dataclasses.replace(status, state="failed", exit_code=1))
    assert {row["label"] for row in document["ranks"].values()} == {"waiting", "culprit: not_entered"}
    assert document["seen_at"] == build_status.WALL
    assert document["stacks"]["1"] == incident_report.stack_text(incident.stacks[1])


class Called(Quiet):
    """Stands for the command and the direct path."""

    def __init__(self):
        self.calls = []

    def run(self, kind, *_rest):
        self.calls.append(kind)

    def changed(self, kind, *_rest):
        self.calls.append(kind)

    def finish(self, *_rest):
        pass


def judged(cases, picture, seconds, verdict):
    """One look some seconds after the first; verdict None: all is well."""
    ranks = None if verdict is not None else build_status.healthy_status().snapshot.nodes[0].ranks
    look(cases, picture, later(picture, seconds, ranks), () if verdict is None else (verdict,))


def opened_in_silence(called, direct):
    cases = Cases(Quiet(), Quiet(), called, Quiet(), direct)
    cases.speaks = False
    picture = build_status.stuck_status()
    for seconds in (0, 1, 2):
        judged(cases, picture, seconds, picture.open_incidents[0].verdict)
    assert cases.book.open
    assert called.calls == direct.calls == []
    return cases, picture


def test_whoever_takes_over_calls_for_what_was_opened_in_silence_and_for_its_end():
    command, direct = Called(), Called()
    cases, picture = opened_in_silence(command, direct)
    cases.speaks = True
    for _ in range(2):
        cases.take_over(picture)
    assert command.calls == direct.calls == ["opened"]
    for seconds in range(3, 40):
        judged(cases, picture, seconds, None)
    assert command.calls == direct.calls == ["opened", "closed"]


def test_the_end_is_told_too_where_another_launcher_speaks_again_by_then():
    command, direct = Called(), Called()
    cases, picture = opened_in_silence(command, direct)
    cases.speaks = True
    cases.take_over(picture)
    cases.speaks = False
    for seconds in range(3, 40):
        judged(cases, picture, seconds, None)
    assert command.calls == direct.calls == ["opened", "closed"]


def test_what_opens_and_closes_while_another_launcher_speaks_calls_nobody():
    command, direct = Called(), Called()
    cases, picture = opened_in_silence(command, direct)
    for seconds in range(3, 40):
        judged(cases, picture, seconds, None)
    cases.speaks = True
    cases.take_over(picture)
    assert command.calls == direct.calls == []
