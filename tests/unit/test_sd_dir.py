"""`--sd-dir` in a launcher: the file is there while the launcher lives, whoever removes it, and nothing waits for the folder."""

import io
import json
import os
import stat
import subprocess
import threading
import time

import pytest
from build_status import job

from rankwatch.config import Options
from rankwatch.monitor import target_file
from rankwatch.monitor.target_file import TargetFile

URL = "http://node05:27435"


class Guard:
    """The shell that waits for the launcher's end."""

    made: list["Guard"] = []

    def __init__(self, command, **_how):
        self.command, self.stdin = command, io.BytesIO()
        Guard.made.append(self)

    def wait(self, _timeout):
        assert self.stdin.closed
        return 0


@pytest.fixture(autouse=True)
def guards(monkeypatch):
    Guard.made = []
    monkeypatch.setattr(subprocess, "Popen", Guard)
    return Guard.made


def until(condition):
    end = time.monotonic() + 10
    while not (found := condition()):
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.005)
    return found


def started(folder, *, url=URL, judges=True, **more):
    said = []
    target = TargetFile(str(folder), (lambda: url) if isinstance(url, str) else url, said.append, **more)
    target.start(job(), judges)
    return target, said


def test_the_file_is_there_while_the_launcher_lives(tmp_path, guards):
    target, said = started(tmp_path / "sd" / "new")
    path = tmp_path / "sd" / "new" / "rankwatch_48213_node05_27435.json"
    until(lambda: guards)
    (group,) = json.loads(path.read_text())
    assert group["targets"] == ["node05:27435"]
    assert group["labels"].items() >= {"job_id": "48213", "node": "node05"}.items()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644, "Prometheus is another user"
    assert guards[0].command[-1] == str(path)
    target.stop()
    assert os.listdir(path.parent) == []
    assert guards[0].stdin.closed
    assert said == []


def test_a_file_that_somebody_has_removed_comes_again(tmp_path):
    target, _said = started(tmp_path, refresh_s=0.01)
    path = tmp_path / "rankwatch_48213_node05_27435.json"
    until(path.exists)
    path.unlink()
    until(path.exists)
    target.stop()
    assert not path.exists()


def test_what_an_earlier_launcher_of_the_same_port_has_left_is_written_anew(tmp_path):
    path = tmp_path / "rankwatch_48213_node05_27435.json"
    path.write_text('[{"targets": ["10.9.9.9:27435"], "labels": {}}]')
    target, _said = started(tmp_path)
    until(lambda: Guard.made)
    assert json.loads(path.read_text())[0]["targets"] == ["node05:27435"]
    target.stop()


def test_the_file_is_written_once_and_renewed_afterwards(tmp_path, monkeypatch):
    written, renewed = [], []
    real_replace, real_renew = target_file.replace_file, target_file.files.renew
    monkeypatch.setattr(target_file, "replace_file", lambda path, *rest, **how: written.append(path) or real_replace(path, *rest, **how))
    monkeypatch.setattr(target_file.files, "renew", lambda path: renewed.append(path) or real_renew(path))
    target, _said = started(tmp_path, refresh_s=0.01)
    until(lambda: len(renewed) >= 3)
    target.stop()
    assert len(written) == 1


@pytest.mark.parametrize("judges", [True, False])
def test_only_a_launcher_that_judges_clears_away_what_others_have_left(tmp_path, judges):
    left, young = tmp_path / "rankwatch_1_dead_1.json", tmp_path / "rankwatch_1_young_1.json"
    for path, age_s in ((left, 1000), (young, 10)):
        path.write_text("[]")
        os.utime(path, (time.time() - age_s,) * 2)
    target, _said = started(tmp_path, judges=judges)
    if judges:
        until(lambda: not left.exists())
    until(lambda: Guard.made)
    target.stop()
    assert left.exists() is not judges
    assert young.exists()


def test_the_address_may_come_later(tmp_path, monkeypatch):
    monkeypatch.setattr(target_file, "ADDRESS_LOOK_S", 0.01)
    known = []
    target, _said = started(tmp_path, url=lambda: known[0] if known else "")
    known.append(URL)
    until(lambda: os.listdir(tmp_path))
    target.stop()


def test_a_launcher_without_address_ends_at_once(tmp_path):
    target, said = started(tmp_path, url="")
    target.stop()
    assert (os.listdir(tmp_path), said) == ([], [])


def test_a_folder_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    asked, answer = threading.Event(), threading.Event()

    def hangs(*_):
        asked.set()
        answer.wait(10)
        return 1.0

    monkeypatch.setattr(target_file.files, "renew", hangs)
    monkeypatch.setattr(target_file, "STOP_WAIT_S", 0.01)
    target, _said = started(tmp_path)
    assert asked.wait(10)
    target.stop()
    answer.set()


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    target, said = started(tmp_path / "file" / "sd", refresh_s=0.01)
    until(lambda: said)
    target.stop()
    assert len(said) == 1
    assert "Not a directory: Prometheus is not told of this job there; make the folder writable" in said[0]


@pytest.mark.parametrize(
    ("options", "url", "target", "told"),
    [
        (Options(), "http://node05:27435", "node05:27435", False),
        (Options(peer_address="10.0.0.5"), "http://node05:27435", "10.0.0.5:27435", False),
        (Options(peer_address="[fd00::5]:27500"), "http://node05:27435", "[fd00::5]:27435", False),
        (Options(peer_address="10.0.0.5"), "http://127.0.0.1:27436", "127.0.0.1:27436", True),
        (Options(origins={"listen": "command line"}), "http://127.0.0.1:27436", "127.0.0.1:27436", False),
        (Options(), "http://[::1]:27436", "[::1]:27436", True),
    ],
)
def test_the_target_is_where_others_reach_the_launcher(tmp_path, options, url, target, told):
    """That loopback is of no use elsewhere is said, unless somebody has chosen it."""
    said = []
    file = TargetFile.of(Options(**{name: getattr(options, name) for name in ("peer_address", "origins")}, sd_dir=str(tmp_path)), lambda: url, said.append)
    file.start(job(), judges=True)
    until(lambda: Guard.made)
    (name,) = os.listdir(tmp_path)
    assert json.loads((tmp_path / name).read_text())[0]["targets"] == [target]
    file.stop()
    assert bool(said) is told
    assert not told or "is reached from this machine only" in said[0]


@pytest.mark.parametrize("options", [Options(), Options(sd_dir="/nonexistent/sd", listen="off")])
def test_without_a_folder_or_a_server_nothing_happens(options):
    def never():
        raise AssertionError

    target = TargetFile.of(options, never, lambda _text: never())
    target.start(job(), judges=True)
    target.stop()
