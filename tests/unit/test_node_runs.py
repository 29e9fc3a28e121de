"""A run directory of a node other than the first, on a disk of its own."""

import json
import os

import pytest
from build_status import stuck_status

from rankwatch import cli
from rankwatch.commands.live import running
from rankwatch.report import incident as incident_report
from rankwatch.report import run as run_report


@pytest.fixture(autouse=True)
def nobody_runs(monkeypatch):
    monkeypatch.setattr(running, "launchers", lambda places=None: [])


def node(run_dir, name, age_s=0):
    home = run_dir / "nodes" / name
    home.mkdir(parents=True)
    status = stuck_status()
    (home / "run.json").write_text(json.dumps(run_report.to_json(status)))
    os.utime(home / "run.json", (1e9 - age_s, 1e9 - age_s))
    (incident,) = status.open_incidents
    folder = home / "incidents" / incident.id
    folder.mkdir(parents=True)
    (folder / "incident.json").write_text(json.dumps(incident_report.to_json(incident, status)))
    (home / "compile.json").write_text(json.dumps({"schema": 1, "frames": [], "ranks": []}))
    return home


@pytest.mark.parametrize("command", ["report", "status", "stacks", "open", "compile"])
def test_what_the_one_launcher_has_seen_is_shown_and_said(tmp_path, capsys, command):
    home = node(tmp_path, "worker-1-a1b2c3")
    cli.main([command, str(tmp_path)])
    told = capsys.readouterr()
    assert f"shown is {home}: what this node saw" in told.err
    assert "no run:" not in told.err
    assert "no run directory" not in told.err
    if command == "report":
        assert "STUCK" in told.out


@pytest.mark.parametrize("command", ["report", "status", "stacks", "open", "compile"])
def test_of_several_launchers_one_has_to_be_named(tmp_path, capsys, command):
    older, newer = node(tmp_path, "worker-1-a1b2c3", age_s=60), node(tmp_path, "worker-1-d4e5f6")
    assert cli.main([command, str(tmp_path)]) == 2
    assert f"holds what 2 launchers have seen, and no run of the whole job; name one: {newer}, {older}" in capsys.readouterr().err


def test_a_run_of_the_whole_job_is_shown_as_it_is(tmp_path, capsys):
    home = node(tmp_path, "worker-1-a1b2c3")
    (tmp_path / "run.json").write_text((home / "run.json").read_text())
    cli.main(["status", str(tmp_path)])
    assert "what this node saw" not in capsys.readouterr().err


def test_such_runs_are_listed(tmp_path, capsys):
    node(tmp_path / "20260101T000000Z-job", "worker-1-a1b2c3")
    assert cli.main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("20260101T000000Z-job/nodes/worker-1-a1b2c3 ")
    assert cli.main(["ls", str(tmp_path / "20260101T000000Z-job")]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("nodes/worker-1-a1b2c3 ")
