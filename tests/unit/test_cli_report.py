"""`rankwatch report` on the files of finished runs."""

from __future__ import annotations

import json

import pytest

from rankwatch import cli


def incident(run, name, verdict="stuck", opened_at=100.0, closed_at=None):
    folder = run / "incidents" / name
    folder.mkdir(parents=True)
    doc = {
        "schema": 1,
        "id": name,
        "verdict": verdict,
        "cause": "not_entered",
        "domain": "user_code",
        "culprit_ranks": [1],
        "waiting_ranks": [0],
        "unknown_ranks": [],
        "since": 90.0,
        "opened_at": opened_at,
        "updated_at": opened_at,
        "closed_at": closed_at,
        "summary": f"rank 1 has not entered all_reduce ({name})",
        "advice": [],
        "group": {"name": "0", "desc": "default_pg", "ranks": [0, 1], "op": "all_reduce", "seq": 3, "sizes": [], "dtypes": []},
        "timeout_s": 600.0,
        "timeout_left_s": 540.0,
        "compile": {},
        "stacks": {"1": "train.py:31:load_batch"},
        "stack_groups": [],
        "confidence": "certain",
        "evidence": [],
        "missing_evidence": [],
        "history": [],
        "action": None,
    }
    (folder / "incident.json").write_text(json.dumps(doc))
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "rankwatch-runs" / "20260101T000000Z-job"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"exit_code": 1}')
    (tmp_path / "rankwatch-runs" / "latest").symlink_to(folder.name)
    return folder


def test_without_argument_the_latest_run_is_shown_gravest_incident_first_under_a_line_that_counts_them(run, capsys):
    incident(run, "20260101T000300Z-3", opened_at=300.0)
    incident(run, "20260101T000200Z-2", opened_at=200.0)
    incident(run, "20260101T000100Z-1", opened_at=100.0, verdict="slow")
    assert cli.main(["report"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run ")
    assert out.splitlines()[0].endswith(": 3 incidents: 2 stuck, 1 slow")
    places = [out.index(f"certain, incident 20260101T000{number}00Z-{number}\n") for number in (2, 3, 1)]
    assert places == sorted(places)


def test_what_is_over_comes_after_what_is_not(run, capsys):
    incident(run, "20260101T000100Z-1", verdict="recovered", opened_at=100.0, closed_at=110.0)
    incident(run, "20260101T000200Z-2", verdict="slow", opened_at=200.0)
    assert cli.main(["report"]) == 0
    out = capsys.readouterr().out
    assert out.index("SLOW (") < out.index("RECOVERED (")


def test_one_incident_by_folder_or_file_is_one_json_object(run, capsys):
    folder = incident(run, "20260101T000100Z-1")
    incident(run, "20260101T000200Z-2")
    for path in (folder, folder / "incident.json", f"{folder}/"):
        assert cli.main(["report", str(path), "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["id"] == "20260101T000100Z-1"


def test_a_run_is_a_json_list(run, capsys):
    incident(run, "20260101T000100Z-1")
    assert cli.main(["report", str(run), "--format=json"]) == 0
    assert [doc["id"] for doc in json.loads(capsys.readouterr().out)] == ["20260101T000100Z-1"]


def test_html_is_the_newest_incident_and_goes_to_a_file(run, tmp_path, capsys):
    incident(run, "20260101T000100Z-1", opened_at=100.0)
    incident(run, "20260101T000200Z-2", opened_at=200.0)
    assert cli.main(["report", "--format", "html", "--output", "page.html"]) == 0
    page = (tmp_path / "page.html").read_text()
    assert (tmp_path / "page.html").stat().st_mode & 0o077 == 0, "it holds what the run directory hides"
    assert page.lstrip().lower().startswith("<!doctype html")
    assert "20260101T000200Z-2" in page
    assert "2 incidents, this is the newest (20260101T000200Z-2)" in capsys.readouterr().err


def test_markdown_is_offered(run, capsys):
    incident(run, "20260101T000100Z-1")
    assert cli.main(["report", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("## STUCK")


def test_a_run_without_incident_is_3_and_is_named_with_its_command_and_end(run, capsys):
    command = ["rankwatch", "--owner", "a", "torchrun", "--nproc-per-node", "2", "/a/b/train.py"]
    (run / "run.json").write_text(json.dumps({"exit_code": 0, "command": command}))
    assert cli.main(["report"]) == 3
    words = "no incident in rankwatch-runs/20260101T000000Z-job (torchrun --nproc-per-node 2 train.py, exit code 0)"
    assert words in capsys.readouterr().err
    (run / "run.json").write_text(json.dumps({"exit_code": None, "command": command}))
    assert cli.main(["report", "rankwatch-runs/latest"]) == 3
    assert "train.py, no end recorded: it still runs, or its launcher was killed)" in capsys.readouterr().err
    (run / "run.json").write_text("{")
    assert cli.main(["report", str(run)]) == 3
    assert capsys.readouterr().err == f"[rankwatch] no incident in {run}\n"


def test_a_folder_of_runs_is_2_and_names_the_newest(run, capsys):
    assert cli.main(["report", "rankwatch-runs"]) == 2
    words = "error: rankwatch-runs holds runs; name one, such as rankwatch-runs/20260101T000000Z-job; rankwatch ls rankwatch-runs lists them"
    assert words in capsys.readouterr().err


def test_a_path_that_does_not_exist_is_2(run, capsys):
    assert cli.main(["report", "nowhere"]) == 2
    assert "error: nowhere does not exist" in capsys.readouterr().err


def test_a_damaged_incident_is_named_and_the_others_are_shown(run, capsys):
    incident(run, "20260101T000100Z-1")
    broken = incident(run, "20260101T000200Z-2") / "incident.json"
    broken.write_text('{"verdict"')
    assert cli.main(["report"]) == 0
    shown = capsys.readouterr()
    assert "20260101T000100Z-1" in shown.out
    assert f"{broken.relative_to(run.parent.parent)}".split("/")[-2] in shown.err
    assert "cannot be read" in shown.err


def test_redacted_it_names_neither_folders_nor_hosts_nor_arguments(run, capsys):
    folder = incident(run, "20260101T000100Z-1")
    doc = json.loads((folder / "incident.json").read_text())
    doc |= {
        "hosts": {"1": "node05"},
        "run": {"run_dir": "/scratch/alice/run", "node": "node05", "command": ["rankwatch", "torchrun", "train.py", "--name", "moonshot"]},
    }
    (folder / "incident.json").write_text(json.dumps(doc))
    for form in ("text", "markdown", "html", "json"):
        assert cli.main(["report", "--redact", "--format", form]) == 0
        out = capsys.readouterr().out
        assert [word for word in ("alice", "node05", "moonshot") if word in out] == []
        assert "host1" in out
        assert "rank 1 has not entered" in out or "rank 1 has not entered".replace("_", "\\_") in out
