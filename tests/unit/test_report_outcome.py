"""How a job has ended, in one word: the badge of its page, `status`, `ls`, run.json."""

import dataclasses
import json

import build_status
import pytest

from rankwatch import cli
from rankwatch.commands.live import picture, source
from rankwatch.commands.status import verdict_code
from rankwatch.report import outcome, run, state, status

SIGTERM = "SIGTERM to the launcher"


def ended(build, exit_code=143, ending=SIGTERM, **changes):
    built = build()
    snapshot = dataclasses.replace(built.snapshot, ending=ending)
    return dataclasses.replace(built, snapshot=snapshot, state="failed" if exit_code else "done", exit_code=exit_code, **changes)


def badge(status_now):
    page = status.render(status_now, live=False)
    return page.partition('id="badge">')[2].partition("<")[0]


def told(status_now):
    """(word on the page, word and exit code of `status` by the address, the same by the run's files)."""
    kept = source.state_of_run(json.loads(json.dumps(run.to_json(status_now))))
    lines = [picture.plain(picture.draw(doc, {}, 100)).split("  ")[:3] for doc in (state.to_json(status_now), kept)]
    return badge(status_now), *((" ".join(line[:1]), verdict_code(doc)) for line, doc in zip(lines, (state.to_json(status_now), kept), strict=True))


@pytest.mark.parametrize(
    ("picture_now", "word", "code"),
    [
        (ended(build_status.healthy_status), "ended", 0),
        (ended(build_status.compiling_status), "ended", 0),
        (ended(build_status.stuck_status), "stuck", 3),
        (ended(build_status.stuck_status, 1, "torchrun stops the workers after rank 0 failed"), "stuck", 3),
        (ended(build_status.compiling_status, 1, ""), "failed", 3),
        (ended(build_status.crashed_status, 1, ""), "failed", 3),
        (ended(build_status.healthy_status, 0, ""), "done", 0),
    ],
    ids=["ended while healthy", "ended while slow", "ended while stuck", "hung until its timeout", "failed beside a slow one", "crashed", "done"],
)
def test_a_job_is_called_by_the_gravest_verdict_at_its_end_else_by_the_signal_that_ended_it(picture_now, word, code):
    assert told(picture_now) == (word, (word.upper(), code), (word.upper(), code))


def test_what_ended_it_is_in_run_json_the_headline_and_the_first_line_of_status():
    now = ended(build_status.healthy_status)
    assert run.to_json(now)["ended_by"] == "SIGTERM"
    assert state.to_json(now)["headline"] == "The job was ended by SIGTERM (exit code 143)."
    assert "ENDED  job 48213  by SIGTERM  " in picture.plain(picture.draw(state.to_json(now), {}, 140))
    assert run.to_json(build_status.healthy_status())["ended_by"] == ""


def test_an_incident_that_closed_before_the_end_is_not_its_outcome():
    row = {"verdict": "stuck", "closed_by": "recovered"}
    assert outcome.word({"state": "failed", "ended_by": "SIGTERM", "incidents": [row]}) == "ended"
    assert outcome.word({"state": "failed", "ended_by": "SIGTERM", "incidents": [row | {"closed_by": "job_ended"}]}) == "stuck"


@pytest.mark.parametrize("held", [None, 7, [7, None], {"open": 7, "closed": {"a": 1}}, {"open": [{"verdict": ["stuck"]}]}])
def test_a_document_of_another_program_has_a_word_too(held):
    assert outcome.word({"state": "failed", "ended_by": 7, "incidents": held}) == "failed"
    assert outcome.word({"state": ["done"]}) == "['done']"


def test_ls_says_by_what_signal_a_run_has_ended(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text(json.dumps(run.to_json(ended(build_status.healthy_status))))
    assert cli.main(["ls", str(tmp_path)]) == 0
    assert "  ended by SIGTERM  " in capsys.readouterr().out
