"""`rankwatch targets`: what it lists, leaves out, removes, and how it refuses."""

import json
import os
import time

import pytest

from rankwatch.cli import main
from rankwatch.commands import targets
from rankwatch.commands.targets import Targets
from rankwatch.export import discovery_files as files
from rankwatch.serve.http import Request


def put(folder, name="a", age_s=0.0, text=None):
    path = folder / files.file_name("1", name, 27435)
    path.write_text(text if text is not None else files.document(f"{name}:27435", "http", "1", name, {}).decode())
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def listed(found):
    return [group["targets"] for group in found]


def test_living_launchers_are_listed_and_dead_ones_removed(tmp_path):
    alive, dead = put(tmp_path, "alive", 60), put(tmp_path, "dead", 80)
    assert listed(Targets(str(tmp_path)).look()) == [["alive:27435"]]
    assert alive.exists()
    assert not dead.exists()


def test_a_dead_one_that_may_not_be_removed_is_left_out(tmp_path, monkeypatch):
    dead = put(tmp_path, "dead", 80)
    monkeypatch.setattr(files, "remove", lambda _path: False)
    assert Targets(str(tmp_path)).look() == []
    assert dead.exists()


def test_a_folder_that_may_not_be_written_is_judged_by_our_own_clock(tmp_path, monkeypatch):
    put(tmp_path, "alive", 10)
    put(tmp_path, "dead", 80)

    def denied(path):
        raise PermissionError(path)

    monkeypatch.setattr(files, "renew", denied)
    assert listed(Targets(str(tmp_path)).look()) == [["alive:27435"]]


def test_ages_are_the_file_servers_whatever_our_clock_says(tmp_path):
    put(tmp_path, "alive", 60)
    assert listed(Targets(str(tmp_path), wall=lambda: time.time() + 3600).look()) == [["alive:27435"]]


def test_several_questions_within_a_second_are_one_look(tmp_path):
    now = [0.0]
    found = Targets(str(tmp_path), clock=lambda: now[0])
    assert found.look() == []
    put(tmp_path)
    assert found.look() == []
    now[0] += targets.LOOK_S
    assert listed(found.look()) == [["a:27435"]]


def test_a_file_that_is_none_of_ours_is_said_once(tmp_path):
    now, said = [0.0], []
    put(tmp_path, text="\x1b[2J no json")
    found = Targets(str(tmp_path), tell=said.append, clock=lambda: now[0])
    for _ in range(3):
        assert found.look() == []
        now[0] += targets.LOOK_S
    assert len(said) == 1
    assert "rankwatch_1_a_27435.json is left out: no target file of rankwatch" in said[0]


def test_the_own_file_that_tells_the_time_is_removed_and_never_listed(tmp_path):
    found = Targets(str(tmp_path))
    found.look()
    assert len(os.listdir(tmp_path)) == 1
    assert files.listing(str(tmp_path)) == {}
    found.close()
    assert os.listdir(tmp_path) == []


def test_an_unreadable_folder_is_an_error_for_prometheus_not_an_empty_list(tmp_path):
    found = Targets(str(tmp_path / "gone"))
    answer = targets._answer(found, Request("/targets"))
    assert answer.status == 503
    answer = targets._answer(Targets(str(tmp_path)), Request("/targets"))
    assert (answer.status, answer.content_type, json.loads(answer.payload)) == (200, "application/json", [])


def test_without_listen_they_are_printed(tmp_path, capsys):
    put(tmp_path)
    assert main(["targets", str(tmp_path)]) == 0
    assert listed(json.loads(capsys.readouterr().out)) == [["a:27435"]]
    assert main(["--sd-dir", str(tmp_path), "targets"]) == 0


def test_none_is_exit_code_3_and_an_empty_list(tmp_path, capsys):
    assert main(["targets", str(tmp_path)]) == 3
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "needs DIR, the folder that the jobs have as --sd-dir"),
        (("/nonexistent",), "/nonexistent is no directory"),
        (("--stale-after", "soon", "."), "--stale-after 'soon' is not accepted; it takes"),
        (("--listen", "0.0.0.0:0", "."), "is reached from other machines and needs --token-file FILE"),
        (("--listen", "nonsense", "."), "--listen 'nonsense'"),
        (("--listen", "127.0.0.1:0", "--token-file", "/nonexistent", "."), "--token-file /nonexistent cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_listens(words, text, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["targets", *words]) == 2
    assert text in capfd.readouterr().err
