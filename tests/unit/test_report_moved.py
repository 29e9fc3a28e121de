"""A run whose directory took no more writes: every command that is given the directory goes on where the later files are."""

import json
import os
import shutil
import tempfile

import pytest
from build_pictures import stuck
from control_fakes import FakeLauncher

from rankwatch import cli
from rankwatch.commands.live import running
from rankwatch.launcher import rundir
from rankwatch.report import moved


@pytest.fixture
def given(tmp_path, monkeypatch):
    """The directory that was given; the run's later files are in tmp_path/later."""
    place = tempfile.mkdtemp(prefix="rw-", dir="/tmp")
    monkeypatch.setattr(running, "_places", lambda: (place,))
    monkeypatch.chdir(tmp_path)
    later, folder = tmp_path / "later", tmp_path / "runs" / "given"
    later.mkdir()
    folder.mkdir(parents=True)
    run = {"state": "running", "job_id": "7", "started_at": 100.0, "ended_at": None, "exit_code": None, "incidents": []}
    (folder / "run.json").write_text(json.dumps(run))
    (later / "run.json").write_text(json.dumps({**run, "state": "done", "ended_at": 200.0, "exit_code": 0}))
    incident(folder, "before")
    incident(later, "after")
    (folder / moved.NAME).write_bytes(moved.document(str(later)))
    yield folder
    shutil.rmtree(place)


def incident(run, name):
    (run / "incidents" / name).mkdir(parents=True)
    doc = {"id": name, "verdict": "stuck", "cause": "not_entered", "domain": "user_code", "opened_at": 1.0, "closed_at": None, "summary": name}
    (run / "incidents" / name / "incident.json").write_text(json.dumps(doc))


def test_report_shows_the_incidents_of_both_places_and_says_where_the_later_ones_are(given, capsys):
    assert cli.main(["report", str(given), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert {doc["id"] for doc in json.loads(out)} == {"before", "after"}
    assert err == f"[rankwatch] {given} took no writes for a while: the later files of this run are in {given.parents[1] / 'later'}, and are shown from there\n"


@pytest.mark.parametrize("named", ["incidents/{}", "incidents/{}/", "incidents/{}/incident.json"])
def test_an_incident_that_is_named_by_its_place_in_the_given_directory_is_read_where_the_newest_word_on_it_is(given, tmp_path, named, capsys):
    incident(tmp_path / "later", "before")
    newer = tmp_path / "later" / "incidents" / "before" / "incident.json"
    newer.write_text(newer.read_text().replace('"summary": "before"', '"summary": "how it went on"'))
    for name, summary in (("before", "how it went on"), ("after", "after")):
        assert cli.main(["report", f"{given}/{named.format(name)}", "--format", "json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["summary"] == summary
        assert err.count("the later files of this run are in") == 1


def test_an_incident_is_read_where_it_was_named_if_nothing_newer_is_known(given, monkeypatch, capsys):
    monkeypatch.chdir(given / "incidents" / "before")
    assert cli.main(["report", ".", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "before"
    (given / moved.NAME).unlink()
    assert cli.main(["report", ".", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out)["id"], err) == ("before", "")


def test_on_another_node_an_incident_that_is_not_here_is_said_to_be_there(given, monkeypatch, capsys):
    monkeypatch.setattr(moved.socket, "gethostname", lambda: "login")
    assert cli.main(["report", str(given / "incidents" / "after")]) == 2
    err = capsys.readouterr().err
    assert "the later files of this run are in" in err
    assert "does not exist" in err


def test_status_and_open_know_how_the_run_has_ended(given, capsys):
    assert cli.main(["status", str(given)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("DONE  job 7")
    assert "the later files of this run are in" in err
    assert cli.main(["open", str(given)]) == 3
    assert "the job has ended with exit code 0" in capsys.readouterr().err


def test_ls_has_one_row_that_tells_the_end(given, capsys):
    assert cli.main(["ls", str(given.parent), "--json"]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)
    assert (row["state"], row["exit_code"], row["incidents"]) == ("ended", 0.0, {"stuck": 2})
    assert "the later files of this run are in" in err


def test_a_job_that_still_runs_is_found_by_the_directory_that_was_given(given, tmp_path, capsys):
    with FakeLauncher(tmp_path / "later", stuck(4, 1, 1), running._places()[0]):
        (tmp_path / "later" / "control.json").unlink()
        assert cli.main(["status", str(given)]) == 3
        assert capsys.readouterr().out.startswith("STUCK  job 48213")
        assert cli.main(["ls", str(given.parent), "--json"]) == 0
        assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["stuck"]


def test_compile_reads_the_later_document_else_the_earlier_one(given, tmp_path, capsys):
    (given / "compile.json").write_text('{"run": {"job_id": "earlier"}}')
    assert cli.main(["compile", "--json", str(given)]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["job_id"] == "earlier"
    (tmp_path / "later" / "compile.json").write_text('{"run": {"job_id": "later"}}')
    assert cli.main(["compile", "--json", str(given)]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["job_id"] == "later"


@pytest.mark.parametrize("text", ["", "[]", '{"path": "relative"}', '{"path": 7}', '{"path": "/a\\u0000b"}'])
def test_what_is_no_word_of_ours_is_not_followed(given, text):
    (given / moved.NAME).write_text(text)
    assert moved.of(str(given)) is None
    assert moved.newest(str(given), "run.json") == str(given / "run.json")


def test_the_word_of_another_user_a_link_and_a_folder_of_another_user_are_not_followed(given, monkeypatch):
    us = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: us + 1)
    assert moved.of(str(given)) is None
    monkeypatch.undo()
    os.rename(given / moved.NAME, given / "elsewhere")
    os.symlink("elsewhere", given / moved.NAME)
    assert moved.of(str(given)) is None
    (given / moved.NAME).unlink()
    (given / moved.NAME).write_bytes(moved.document("/"))
    found = moved.of(str(given))
    assert found is not None
    assert found.here == (us == 0)


def test_on_another_node_it_says_where_to_look_and_shows_what_is_here(given, monkeypatch, capsys):
    monkeypatch.setattr(moved.socket, "gethostname", lambda: "login")
    assert cli.main(["report", str(given), "--format", "json"]) == 0
    out, err = capsys.readouterr()
    assert [doc["id"] for doc in json.loads(out)] == ["before"]
    assert "what is known here is older" in err


def test_the_next_run_in_the_same_directory_forgets_it(given):
    rundir.make(str(given), "8")
    assert moved.of(str(given)) is None
