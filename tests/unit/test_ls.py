"""`rankwatch ls`: runs of a folder and those that run on this machine."""

import json
import shutil
import tempfile

import pytest
from build_pictures import stuck
from control_fakes import FakeLauncher

from rankwatch import cli
from rankwatch.commands import ls
from rankwatch.commands.live import running

NOW = 5000.0


@pytest.fixture
def place(monkeypatch, tmp_path):
    made = tempfile.mkdtemp(prefix="rw-", dir="/tmp")
    monkeypatch.setattr(running, "_places", lambda: (made,))
    monkeypatch.setattr(ls.time, "time", lambda: NOW)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rankwatch-runs").mkdir()
    yield made
    shutil.rmtree(made)


def run(tmp_path, name, **doc):
    folder = tmp_path / "rankwatch-runs" / name
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(doc))
    return folder


def incident(folder, name, verdict, history=()):
    place = folder / "incidents" / name
    place.mkdir(parents=True)
    changes = [{"at": 1.0, "verdict": each, "cause": "unknown", "culprit_ranks": [1]} for each in history]
    (place / "incident.json").write_text(json.dumps({"id": name, "verdict": verdict, "history": changes}))


def test_runs_are_listed_with_their_end_age_and_incidents(place, tmp_path, capsys):
    command = ["rankwatch", "--owner", "a", "torchrun", "--nproc-per-node", "2", "/a/b/train.py", "--lr", "1"]
    ended = run(tmp_path, "20260101T000000Z-job", exit_code=1, started_at=1000.0, ended_at=1125.0, command=command)
    incident(ended, "a", "slow")
    incident(ended, "b", "stuck")
    run(tmp_path, "20260102T000000Z-other", exit_code=None)
    (tmp_path / "rankwatch-runs" / "latest").symlink_to("20260101T000000Z-job")
    assert cli.main(["ls"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "RUN                     STATE            AGE    LASTED  INCIDENTS        COMMAND",
        "20260102T000000Z-other  no end recorded  -      -       none",
        "20260101T000000Z-job    exit 1           1h06m  2m05s   1 slow, 1 stuck  torchrun --nproc-per-node 2 train.py --lr 1",
    ]


def test_the_newest_start_comes_first_whatever_the_name(place, tmp_path, capsys):
    for name, started in (("a", 300.0), ("b", 100.0), ("c", 200.0)):
        run(tmp_path, name, started_at=started)
    assert cli.main(["ls"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["a", "c", "b"]


def test_an_incident_counts_by_the_worst_verdict_that_it_reached(place, tmp_path, capsys):
    incident(run(tmp_path, "a", started_at=1.0), "i", "recovered", ("slow", "stuck", "recovered"))
    assert cli.main(["ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["incidents"] == {"stuck": 1}


def test_a_job_that_runs_says_its_state_and_how_long_it_runs(place, tmp_path, capsys):
    state = stuck(4, 1, 1)
    state["run"] |= {"started_at": NOW - 70, "command": ["rankwatch", "torchrun", "train.py"]}
    with FakeLauncher(tmp_path / "rankwatch-runs" / "live", state, place):
        assert cli.main(["ls"]) == 0
        assert capsys.readouterr().out.splitlines()[1].split() == ["live", "stuck", "70", "s", "70", "s", "none", "torchrun", "train.py"]


def test_without_a_folder_jobs_that_run_elsewhere_are_listed_too_with_one_only_its_own(place, tmp_path, capsys):
    with FakeLauncher(tmp_path / "scratch" / "run7", stuck(4, 1, 1), place):
        assert cli.main(["ls", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["name"], row["state"], row["running"]) == (str(tmp_path / "scratch" / "run7"), "stuck", True)
        assert cli.main(["ls", "rankwatch-runs"]) == 3


def test_a_run_without_a_readable_record_is_listed(place, tmp_path, capsys):
    run(tmp_path, "a")
    (tmp_path / "rankwatch-runs" / "a" / "run.json").write_text("{")
    assert cli.main(["ls"]) == 0
    assert "unreadable" in capsys.readouterr().out


def test_without_runs_it_is_3(place, capsys):
    assert cli.main(["ls"]) == 3
    assert "no run in rankwatch-runs, and no job of yours runs on this machine" in capsys.readouterr().err


def test_a_folder_that_does_not_exist_is_wrong_usage(place, capsys):
    assert cli.main(["ls", "nowhere"]) == 2
