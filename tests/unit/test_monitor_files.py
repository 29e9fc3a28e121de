"""What a run leaves on disk, and its caps; and what of it the status server gives out."""

import json
import os
import threading
import time

import pytest

from rankwatch.config import Options
from rankwatch.model import Change, Incident, JobInfo, JobSnapshot, NodeReport, RankState, Stack, Status, Verdict
from rankwatch.monitor import files as module
from rankwatch.monitor import web as web_module
from rankwatch.monitor.files import RunFiles
from rankwatch.monitor.web import Web
from rankwatch.monitor.writer import Writer
from rankwatch.serve.server import Request


def job(run_dir, world_size=2):
    return JobInfo("j", run_dir, ("rankwatch",), "host", world_size, 1, 0, {}, {}, 1000.0)


def incident(number, verdict="slow", stacks=None, culprits=(1,)):
    judged = Verdict(f"k{number}", verdict, "not_entered", "user_code", culprits, (0,), 90.0, "rank 1 is late")
    return Incident(f"20261130T031244Z-{number}", judged, 100.0, 1100.0, 1100.0, (Change(1100.0, verdict, "not_entered", culprits),), stacks=stacks or {})


@pytest.fixture
def run(tmp_path):
    said = []
    writer = Writer(str(tmp_path), said.append)
    made = RunFiles(writer)
    made.writer, made.said, made.place_on_disk = writer, said, tmp_path
    made.status = Status(job(str(tmp_path)), JobSnapshot(100.0, 1100.0, 2, 0, (NodeReport("host", (RankState(0), RankState(1))),)))
    return made


def on_disk(run):
    assert run.writer.flush(20)
    assert run.said == []
    place = run.place_on_disk / "incidents"
    return sorted(os.listdir(place)) if place.exists() else []


def test_an_incident_has_its_json_text_page_stacks_and_recorders(run):
    one = incident(1, stacks={0: Stack(5, 99.0, text="Process 5\n"), 1: Stack(6, 99.0, error="py-spy is not installed")})
    run.incident(one, run.status)
    names = run.recorders(one, run.status, {1: {"fr_trace_json": b'{"entries":[1]}', "dump_nccl_trace_json": b"{}"}})
    assert names == ("fr/rank_1.json",)
    assert on_disk(run) == [one.id]
    place = run.place_on_disk / "incidents" / one.id
    assert sorted(os.listdir(place)) == ["fr", "incident.json", "index.html", "report.txt", "stacks"]
    assert json.loads((place / "incident.json").read_text())["id"] == one.id
    assert (place / "stacks/rank_0.txt").read_text() == "Process 5\n"
    assert (place / "stacks/rank_1.txt").read_text() == "no stack: py-spy is not installed\n"
    assert (place / "fr/rank_1.json").read_bytes() == b'{"entries":[1]}'


def test_two_recorders_with_entries_are_both_kept_nccl_first(run):
    one = incident(1)
    run.incident(one, run.status)
    both = {"fr_trace_json": b'{"entries":[1]}', "dump_nccl_trace_json": b'{"entries":[2]}'}
    assert run.recorders(one, run.status, {0: both}) == ("fr/rank_0.json", "fr/rank_0.fr_trace_json.json")
    on_disk(run)
    assert (run.place_on_disk / "incidents" / one.id / "fr/rank_0.json").read_bytes() == b'{"entries":[2]}'


def test_of_many_ranks_only_culprits_and_representatives_get_files(run):
    stacks = {rank: Stack(rank, 99.0, text="t") for rank in range(100)}
    status = Status(job(str(run.place_on_disk), 100), run.status.snapshot)
    one = incident(1, stacks=stacks, culprits=(77,))
    run.incident(one, status)
    on_disk(run)
    names = os.listdir(run.place_on_disk / "incidents" / one.id / "stacks")
    assert sorted(names) == sorted(f"rank_{rank}.txt" for rank in (77, 0, 1, 2, 3, 4, 5, 6, 7))


def test_past_the_cap_the_oldest_that_did_not_page_goes(run, monkeypatch):
    monkeypatch.setattr(module, "MAX_INCIDENTS", 3)
    for number, verdict in ((1, "stuck"), (2, "slow"), (3, "slow"), (4, "failed")):
        run.incident(incident(number, verdict), run.status)
    assert [name[-1] for name in on_disk(run)] == ["1", "3", "4"]
    assert not run.known(incident(2).id)


def test_pages_are_never_pruned_and_a_new_slow_one_is_refused_for_good(run, monkeypatch):
    monkeypatch.setattr(module, "MAX_INCIDENTS", 2)
    for number in (1, 2, 3):
        run.incident(incident(number, "stuck"), run.status)
    run.incident(incident(4), run.status)
    run.incident(incident(4), run.status)
    assert [name[-1] for name in on_disk(run)] == ["1", "2", "3"]
    run.incident(incident(4, "stuck"), run.status)
    assert [name[-1] for name in on_disk(run)] == ["1", "2", "3", "4"]


def test_the_size_of_a_run_is_bounded(run, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 50_000)
    for number in range(1, 6):
        run.incident(incident(number), run.status)
        run.recorders(incident(number), run.status, {0: {"fr_trace_json": b"x" * 20_000}})
        on_disk(run)
    assert [name[-1] for name in on_disk(run)][-1] == "5"
    assert len(on_disk(run)) < 5


def test_an_event_is_one_line_of_json(run):
    run.event(1100.1234, "ending", {"reason": "line\nbreak", "odd": {1, 2}.__class__})
    on_disk(run)
    lines = (run.place_on_disk / "events.jsonl").read_text().splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["reason"] == "line\nbreak"


# -- the status server's routes ------------------------------------------------------------------------------------------


@pytest.fixture
def web(run):
    one = incident(1, stacks={1: Stack(6, 99.0, text="Process 6\n")})
    run.incident(one, run.status)
    on_disk(run)
    (run.place_on_disk / "secret.txt").write_text("secret")
    status = Status(run.status.job, run.status.snapshot, open_incidents=(one,), state="running")
    made = Web(Options(listen="off"), run, lambda: status, run.said.append, clock=lambda: 101.0)
    made.id = one.id
    return made


def get(web, path):
    routes = web.routes()
    route = routes.get(path) or routes["/incidents/"]
    return route(Request(path))


def test_every_page_of_an_incident_is_served(web):
    for name, kind in (
        ("", "text/html; charset=utf-8"),
        ("index.html", "text/html; charset=utf-8"),
        ("report.txt", "text/plain; charset=utf-8"),
        ("incident.json", "application/json"),
    ):
        response = get(web, f"/incidents/{web.id}/{name}")
        assert (response.status, response.content_type) == (200, kind)
    assert get(web, f"/incidents/{web.id}/stacks/rank_1.txt").payload == b"Process 6\n"


def test_nothing_else_is_served(web):
    for path in (
        "../secret.txt",
        "..%2fsecret.txt",
        "stacks/../../../secret.txt",
        "stacks/rank_7.txt",
        "secret.txt",
        "stacks/",
        "fr/rank_1.json/../../secret.txt",
    ):
        assert get(web, f"/incidents/{web.id}/{path}").status == 404
    assert get(web, "/incidents/20261130T031244Z-9/").status == 404
    assert get(web, "/incidents/../secret.txt").status == 404


def test_a_link_in_an_incidents_directory_is_not_followed(web, run):
    os.symlink(run.place_on_disk / "secret.txt", run.place_on_disk / "incidents" / web.id / "stacks" / "rank_9.txt")
    assert get(web, f"/incidents/{web.id}/stacks/rank_9.txt").status == 404


def test_state_and_incidents_are_json_and_health_is_true_while_looks_are_recent(web):
    assert json.loads(get(web, "/api/v1/incidents").payload)["incidents"][0]["id"] == web.id
    assert isinstance(json.loads(get(web, "/api/v1/state").payload), dict)
    assert (get(web, "/healthz").status, json.loads(get(web, "/healthz").payload)["ok"]) == (200, True)
    web._clock = lambda: 200.0
    assert (get(web, "/healthz").status, json.loads(get(web, "/healthz").payload)["ok"]) == (503, False)
    assert get(web, "/").status == 200


def test_an_empty_or_missing_token_file_is_a_reason_not_to_listen(tmp_path, run):
    web = Web(Options(listen="127.0.0.1:0", token_file=str(tmp_path / "none")), run, lambda: run.status, run.said.append)
    web.start()
    assert web.url == ""
    assert "none cannot be read" in run.said[0]
    run.said.clear()


def test_a_token_file_that_is_a_pipe_is_a_reason_not_to_listen(tmp_path, run):
    os.mkfifo(tmp_path / "pipe")
    web = Web(Options(listen="127.0.0.1:0", token_file=str(tmp_path / "pipe")), run, lambda: run.status, run.said.append)
    web.start()
    assert web.url == ""
    assert "pipe cannot be read (it is no regular file)" in run.said[0]


def test_a_file_server_that_does_not_answer_delays_the_page_and_no_look(tmp_path, run, monkeypatch):
    """The page is there once it answers; what answers only after the end listens no more."""
    monkeypatch.setattr(web_module, "START_WAIT_S", 0.05)
    (tmp_path / "token").write_text("t\n")
    for stopped in (False, True):
        gate = threading.Event()
        web = Web(Options(listen="127.0.0.1:0", token_file=str(tmp_path / "token")), run, lambda: run.status, run.said.append)
        monkeypatch.setattr(web, "_token", lambda gate=gate: gate.wait(20) and "t")
        run.said.clear()
        began = time.monotonic()
        web.start()
        assert time.monotonic() - began < 5
        assert run.said[0].startswith("no status page yet: --token-file ")
        assert web.url == ""
        if stopped:
            web.stop()
        gate.set()
        starting = next(thread for thread in threading.enumerate() if thread.name == "rankwatch-web")
        starting.join(20)
        assert (web.url == "") is stopped
        web.stop()
