"""Files that people or full disks have changed: every command says which one, shows the rest, and never ends in a traceback."""

from __future__ import annotations

import copy
import io
import json
import os
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwatch import cli
from rankwatch.config import load
from rankwatch.monitor.policy import Limits
from rankwatch.report.documents import INCIDENT, RUN
from rankwatch.report.documents import load as load_document

GOOD = {
    "schema": 1, "id": "20260101T000100Z-1", "verdict": "stuck", "cause": "not_entered", "domain": "user_code", "culprit_ranks": [1], "waiting_ranks": [0],
    "unknown_ranks": [], "since": 90.0, "opened_at": 100.0, "updated_at": 110.0, "closed_at": None, "closed_by": None, "summary": "rank 1 is elsewhere",
    "advice": ["look"], "group": {"name": "0", "desc": "d", "ranks": "0-1", "op": "all_reduce", "seq": 3, "sizes": ["[4]"], "dtypes": ["Float"]},
    "timeout_s": 600.0, "timeout_left_s": 500.0, "compile": {"1": {"frame": "f", "compile_id": "0/0", "phase": "inductor", "elapsed_s": 4.0, "splits": 0}},
    "stacks": {"1": "f (t.py:1)"}, "stack_groups": [{"ranks": "1", "frames": ["f (t.py:1)"], "role": "culprit"}], "confidence": "certain", "evidence": ["e"],
    "missing_evidence": ["m"], "history": [{"at": 100.0, "verdict": "slow", "cause": "not_entered", "culprit_ranks": [1]}],
    "action": {"taken": "exit", "at": 111.0, "why": "w"}, "straggling": None, "at": "t.py:1:f", "places": {"1": "t.py:1:f"}, "child_stacks": {}, "as_of": 110.0,
    "lost_rank_s": 9.0, "times": 1, "was_ranks": [], "into": "", "timeout_known": True, "final": False, "hosts": {"1": "host"}, "pids": {"1": 7},
    "crash": {"1": {"type": "E", "message": "m", "where": "w", "traceback": "t", "source": "s", "at": 99.0}}, "ranks": [],
    "groups": [{"name": "0", "ranks": "0-1"}],
    "job": {"state": "running", "ended_at": None, "exit_code": None, "attempt": 0, "ending": ""}, "seen_at": 110.0, "timeout_at": 610.0,
    "recorder_files": ["fr/rank_1.json"], "run": {"run_dir": "/r/x", "world_size": 2, "nnodes": 1, "command": ["torchrun", "t.py"], "labels": {"owner": "a"}},
}  # fmt: skip
RUN_DOC = {"started_at": 5.0, "ended_at": 9.0, "exit_code": 0, "command": ["rankwatch", "torchrun", "t.py"], "state": "done"}
RUBBISH = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([5, -1, 10**30, 1e300, "x", "", "0-99999999", "\ud800\x1b[31m", [], {}, [[1]], [None], {"1": None}, {"x": 5}, "\u2603"]),
    st.recursive(st.integers(-9, 9) | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)),
)


def places(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(doc, path, rubbish):
    if not path:
        return rubbish
    holder = doc = copy.deepcopy(doc)
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = rubbish
    return doc


def write(folder, name, text):
    place = folder / "runs" / name / "incidents" / "i"
    place.mkdir(parents=True, exist_ok=True)
    (place / "incident.json").write_text(text, errors="surrogatepass")
    (folder / "runs" / name / "run.json").write_text(json.dumps(RUN_DOC))
    return folder / "runs" / name


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(places(GOOD))), RUBBISH, st.sampled_from(["text", "markdown", "html", "json"]))
def test_an_incident_with_anything_at_one_place_is_shown_or_named(home, path, rubbish, form):
    run = write(home, "r", json.dumps(changed(GOOD, path, rubbish)))
    assert cli.main(["report", "--format", form, "--output", str(home / "out"), str(run)]) in (0, 2)
    assert cli.main(["ls", "runs"]) == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(places(RUN_DOC))), RUBBISH)
def test_a_run_with_anything_at_one_place_is_listed(home, path, rubbish):
    run = home / "runs" / "r"
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text(json.dumps(changed(RUN_DOC, path, rubbish)))
    assert cli.main(["ls", "runs"]) == 0
    assert cli.main(["report", str(run)]) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"verdict":"stuck","opened_at":"x"}', "its 'opened_at' is no number"),
        ('{"verdict":"stuck","culprit_ranks":"abc"}', "its 'culprit_ranks' is no ranks"),
        ('{"verdict":"stuck","history":5}', "its 'history' is no list of objects"),
        ('{"verdict":"stuck","opened_at":NaN}', "its 'opened_at' is no number"),
        ("[" * 100_000, "it is nested too deep"),
        ("[]", "it is no JSON object"),
        ("{", "Expecting property name"),
        ('{"cause":"x"}', "no incident: it has no verdict"),
    ],
)
def test_one_damaged_incident_is_named_and_hides_no_other(home, capsys, text, said):
    run = write(home, "r", text)
    good = run / "incidents" / "good"
    good.mkdir()
    (good / "incident.json").write_text(json.dumps(GOOD))
    assert cli.main(["report", str(run)]) == 0
    out, err = capsys.readouterr()
    assert "rank 1 is elsewhere" in out
    assert f"incidents/i/incident.json cannot be read: {said}" in err
    assert cli.main(["ls", "runs"]) == 0
    assert "1 stuck, 1 unreadable" in capsys.readouterr().out


def test_an_incident_that_is_damaged_deep_inside_is_named_and_hides_no_other(home, capsys):
    run = write(home, "r", json.dumps({**GOOD, "id": "bad", "stack_groups": [{"frames": 5}]}))
    good = run / "incidents" / "good"
    good.mkdir()
    (good / "incident.json").write_text(json.dumps(GOOD))
    assert cli.main(["report", str(run)]) == 0
    out, err = capsys.readouterr()
    assert "rank 1 is elsewhere" in out
    assert "incident bad cannot be shown: its incident.json is damaged (TypeError: " in err


def test_a_document_that_is_a_pipe_or_huge_is_no_document(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):
        load_document(str(tmp_path / "pipe"), RUN)
    monkeypatch.setattr("rankwatch.report.documents.MAX_BYTES", 10)
    (tmp_path / "big").write_text('{"verdict": "stuck"}')
    with pytest.raises(ValueError, match="it is larger than"):
        load_document(str(tmp_path / "big"), INCIDENT)


def test_a_run_without_an_end_says_what_that_means(home, capsys):
    """A launcher that was killed writes nothing more."""
    run = home / "runs" / "r"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({**RUN_DOC, "ended_at": None, "exit_code": None}))
    assert cli.main(["report", str(run)]) == 3
    assert "no end recorded: it still runs, or its launcher was killed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        f"stuck-after = {'9' * 5000}",
        f"stuck-after = {'9' * 400}",
        f'stuck-after = "{"9" * 400}h"',
        f"run-dir-mode = 0o{'7' * 5000}",
        f"run-dir-mode = 0x{'f' * 9000}",
        f"limit = {{notice_s = {'9' * 400}}}",
        f"limit = {{notice_s = -{'9' * 400}}}",
        "limit = {notice_s = inf}",
        f"owner = {'[' * 5000}{']' * 5000}",
        f"owner = {'[1,' * 90}{']' * 90}",
        "owner = 1979-05-27",
    ],
    ids=lambda line: line[:24],
)
def test_no_configuration_file_stops_a_command(tmp_path, line):
    pytest.importorskip("tomllib")
    path = tmp_path / "config.toml"
    path.write_text(f"{line}\n")
    options = load((), {}, [str(path)], Limits)
    assert options.warnings[0].startswith(str(path))
    assert len(options.warnings[0]) < 1000
    assert (options.stuck_after_s, options.run_dir_mode, dict(options.limits), options.owner) == (None, 0o700, {}, "")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_the_terminals_encoding_has_not_comes_as_an_escape(home, monkeypatch, encoding):
    raw = io.BytesIO()
    run = write(home, "r", json.dumps({**GOOD, "summary": "rank 1 \u2603 elsewhere"}))
    (home / "runs" / "\u2603").mkdir()
    (home / "runs" / "\u2603" / "run.json").write_text("{}")
    for argv in (["report", str(run)], ["ls", "runs"], ["--owner", "\u2603", "config"]):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        assert cli.main(argv) == 0
        sys.stdout.flush()
    assert raw.getvalue().count(b"\\u2603") == 3
