"""The block at the end of a failed job, where no incident is open any more."""

import dataclasses

import build_status

from rankwatch.model import Change
from rankwatch.notify.failed import failed_block, first_cause


def just_closed(seconds_ago, waiting):
    incident = build_status.stuck_incident()
    summary = "recovered after 3 s (2 waiting ranks lost 5 rank-s): rank 1 ended before the barrier"
    verdict = dataclasses.replace(incident.verdict, verdict="recovered", cause="exited", culprit_ranks=(1,), waiting_ranks=waiting, summary=summary)
    now = build_status.crashed_status().snapshot.now
    history = (*incident.history, Change(build_status.WALL, "recovered", "exited", (1,)))
    return dataclasses.replace(incident, verdict=verdict, history=history, closed_at=now - seconds_ago, closed_wall_at=build_status.WALL)


def ended(incident):
    return dataclasses.replace(build_status.crashed_status(), open_incidents=(), closed_incidents=(incident,))


def test_an_incident_that_was_closed_just_before_its_waiters_ended_badly_names_its_culprit():
    block = failed_block(ended(just_closed(4.0, (2, 3))))
    assert "STUCK: rank 1 ended before the barrier" in block
    assert "culprit: rank 1" in block
    assert "went first" not in block


def test_what_was_said_a_moment_ago_and_a_traceback_on_the_screen_are_not_said_again():
    status = build_status.crashed_status()
    whole = failed_block(status)
    advice = status.open_incidents[0].verdict.advice
    assert f"to do: {advice[0]}" in whole
    assert 'raise ValueError("bad shard 17")' in whole
    short = failed_block(status, said={status.open_incidents[0].id: advice[0]}, on_screen=(2,))
    assert f"to do: {advice[0]}" not in short
    assert 'raise ValueError("bad shard 17")' not in short
    assert "exception of rank 2: its traceback is above\n" in short
    assert "bad shard 17" in short.splitlines()[1]
    assert short.splitlines()[1] == whole.splitlines()[1]


def test_one_that_was_over_long_before_or_is_about_other_ranks_does_not():
    assert first_cause(ended(just_closed(30.0, (2, 3)))) is None
    assert first_cause(ended(just_closed(4.0, (7,)))) is None
    assert "rank 2 went first" in failed_block(ended(just_closed(30.0, (2, 3))))
