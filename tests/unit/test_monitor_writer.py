"""The writer never blocks, never leaves half a file, and finds another place when the first takes nothing."""

import errno
import os
import shutil
import socket
import stat
import threading
import time

import pytest

from rankwatch.monitor import writer as module
from rankwatch.monitor.writer import Writer
from rankwatch.report import moved


@pytest.fixture
def said():
    return []


def until(condition, deadline_s=10.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.01)


def test_files_are_written_privately_in_new_directories(tmp_path, said):
    os.chmod(tmp_path, 0o700)
    writer = Writer(str(tmp_path), said.append)
    writer.write("incidents/1/incident.json", b"{}")
    writer.write("late.txt", lambda: b"rendered in the writer")
    assert writer.flush(10)
    assert (tmp_path / "incidents/1/incident.json").read_bytes() == b"{}"
    assert (tmp_path / "late.txt").read_bytes() == b"rendered in the writer"
    assert stat.S_IMODE(os.stat(tmp_path / "late.txt").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "incidents").st_mode) == 0o700
    assert said == []


def test_a_run_directory_that_the_group_may_read_has_files_that_it_may_read(tmp_path, said):
    os.chmod(tmp_path, 0o750)
    writer = Writer(str(tmp_path), said.append)
    writer.write("incidents/a", b"")
    assert writer.flush(10)
    assert [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("incidents", "incidents/a")] == [0o750, 0o640]


def test_a_rewrite_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path, said):
    writer = Writer(str(tmp_path), said.append)
    writer.write("a", b"long first version")
    writer.write("a", b"second")
    assert writer.flush(10)
    assert (tmp_path / "a").read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["a"]


def test_appended_files_rotate(tmp_path, said, monkeypatch):
    monkeypatch.setattr(module, "ROTATE_BYTES", 100)
    writer = Writer(str(tmp_path), said.append)
    for number in range(10):
        writer.append("events.jsonl", b"%d" % number * 60)
    assert writer.flush(10)
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1", "events.jsonl.2", "events.jsonl.3"]
    assert (tmp_path / "events.jsonl").read_bytes() == b"9" * 60
    assert (tmp_path / "events.jsonl.1").read_bytes() == b"8" * 60


def test_an_unwritable_root_moves_everything_to_the_temp_dir_with_one_line(tmp_path, said):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "temp").mkdir()
    writer = Writer(str(tmp_path / "file"), said.append, fallback_parent=str(tmp_path / "temp"))
    writer.write("incidents/1/incident.json", b"{}")
    writer.write("incidents/1/report.txt", b"text")
    assert writer.flush(10)
    assert len(said) == 1
    assert said[0].startswith(f"cannot write {tmp_path}/file/incidents/1/incident.json: File exists; files go to {tmp_path}/temp/rankwatch-")
    assert sorted(os.listdir(os.path.join(writer.root, "incidents/1"))) == ["incident.json", "report.txt"]
    assert writer.dropped == 0


def test_a_root_that_is_removed_is_made_again_once(tmp_path, said):
    root, fallback = tmp_path / "runs" / "run", tmp_path / "fallback"
    root.mkdir(parents=True)
    root.chmod(0o750)
    fallback.mkdir()
    writer = Writer(str(root), said.append, str(fallback))
    assert writer.write("a", b"1")
    assert writer.flush(10)
    shutil.rmtree(root.parent)
    writer.write("deep/b", b"2")
    assert writer.flush(10)
    assert (root / "deep" / "b").read_bytes() == b"2"
    assert root.stat().st_mode & 0o777 == 0o750
    assert said == [f"{root} was removed while the job runs; it was made again, what it held is lost"]
    shutil.rmtree(root)
    writer.write("c", b"3")
    assert writer.flush(10)
    assert not root.exists()
    assert [path.read_bytes() for path in fallback.glob("*/c")] == [b"3"]
    assert writer.dropped == 0


def test_with_no_place_at_all_losses_are_counted_and_the_thread_lives(tmp_path, said):
    (tmp_path / "file").write_bytes(b"")
    writer = Writer(str(tmp_path / "file"), said.append, fallback_parent=str(tmp_path / "none"))
    writer.write("a", b"1")
    writer.write("b", b"2")
    assert writer.flush(10)
    assert writer.dropped == 2
    assert len(said) == 1
    assert "the temp dir takes nothing either" in said[0]


def test_a_document_that_does_not_render_is_counted_and_said_once(tmp_path, said):
    writer = Writer(str(tmp_path), said.append)
    writer.write("a", lambda: 1 / 0)
    writer.write("b", b"fine")
    assert writer.flush(10)
    assert (writer.dropped, len(said)) == (1, 1)
    assert (tmp_path / "b").exists()


def test_a_full_queue_drops_and_returns_at_once(tmp_path, said, monkeypatch):
    monkeypatch.setattr(module, "QUEUE_BYTES", 1000)
    writer = Writer(str(tmp_path), said.append)
    gate = threading.Event()
    writer.write("blocks", lambda: b"x" if gate.wait(10) else b"")
    accepted = [writer.write(f"f{n}", b"y" * 400) for n in range(4)]
    assert accepted == [True, True, False, False]
    assert writer.dropped == 2
    assert writer.flush(0.02) is False
    gate.set()
    assert writer.flush(10)


def test_a_hung_root_is_given_up_and_the_write_in_flight_goes_elsewhere(tmp_path, said, monkeypatch):
    (tmp_path / "temp").mkdir()
    gate = threading.Event()
    real = module.replace_file
    hung = threading.Event()

    def write(path, data, mode):
        if path.startswith(str(tmp_path / "run")):
            hung.set()
            gate.wait(20)
        real(path, data, mode)

    monkeypatch.setattr(module, "replace_file", write)
    clock = [0.0]
    (tmp_path / "run").mkdir()
    writer = Writer(str(tmp_path / "run"), said.append, fallback_parent=str(tmp_path / "temp"), clock=lambda: clock[0])
    writer.write("incident.json", b"{}")
    writer.write("report.txt", b"text")
    assert hung.wait(10)
    writer.check()
    assert said == []
    for now in range(2, 17, 2):
        assert said == []
        clock[0] = float(now)
        writer.check()
    until(lambda: writer.root != str(tmp_path / "run") and sorted(os.listdir(writer.root)) == ["incident.json", "report.txt"])
    assert len(said) == 1
    assert "has hung for 15 s" in said[0]
    assert moved.of(str(tmp_path / "run")) is None
    gate.set()
    until(lambda: moved.of(str(tmp_path / "run")) == moved.Moved(writer.root, socket.gethostname(), True))


def test_a_root_that_was_full_is_told_of_the_move_once_there_is_room(tmp_path, said, monkeypatch):
    full = [True]
    real = module.replace_file

    def write(path, data, mode):
        if full and path.startswith(str(tmp_path / "run")):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data, mode)

    monkeypatch.setattr(module, "replace_file", write)
    monkeypatch.setattr(module, "WORD_EVERY_S", 0.01)
    (tmp_path / "run").mkdir()
    (tmp_path / "temp").mkdir()
    writer = Writer(str(tmp_path / "run"), said.append, fallback_parent=str(tmp_path / "temp"))
    writer.write("run.json", b"{}")
    assert writer.flush(10)
    assert os.listdir(tmp_path / "run") == []
    full.clear()
    until(lambda: moved.newest(str(tmp_path / "run"), "run.json") == writer.path_of("run.json"))


def test_a_launcher_that_shares_the_run_directory_speaks_of_its_own_folder_only(tmp_path, said):
    own = tmp_path / "run" / "nodes" / "b-1"
    own.mkdir(parents=True)
    (tmp_path / "temp").mkdir()
    (own / "run.json").mkdir()
    writer = Writer(str(tmp_path / "run"), said.append, fallback_parent=str(tmp_path / "temp"))
    writer.write("nodes/b-1/run.json", b"{}")
    until(lambda: (found := moved.of(str(own))) is not None and found.path == f"{writer.root}/nodes/b-1")
    assert moved.of(str(tmp_path / "run")) is None


def test_a_write_that_was_under_way_while_we_were_stopped_has_not_hung(tmp_path, said, monkeypatch):
    gate, under_way = threading.Event(), threading.Event()

    def write(path, data, mode):
        under_way.set()
        gate.wait(20)

    monkeypatch.setattr(module, "replace_file", write)
    clock = [0.0]
    writer = Writer(str(tmp_path), said.append, clock=lambda: clock[0])
    writer.check()
    writer.write("state.json", b"{}")
    assert under_way.wait(10)
    for now in (0.5, 40.0, 40.5, 41.0):
        clock[0] = now
        writer.check()
    assert said == []
    assert writer.root == str(tmp_path)
    gate.set()
    assert writer.flush(10)


def test_a_pipe_in_the_place_of_a_file_is_a_trouble_and_holds_nothing_up(tmp_path, said):
    (tmp_path / "run").mkdir()
    (tmp_path / "temp").mkdir()
    os.mkfifo(tmp_path / "run" / "events.jsonl")
    reader = os.open(tmp_path / "run" / "events.jsonl", os.O_RDONLY | os.O_NONBLOCK)  # with a reader it would take the line and lose it
    writer = Writer(str(tmp_path / "run"), said.append, fallback_parent=str(tmp_path / "temp"))
    writer.append("events.jsonl", b"1\n")
    assert writer.flush(10)
    os.close(reader)
    assert "events.jsonl: it is no regular file; files go to" in said[0]
    with open(writer.path_of("events.jsonl"), "rb") as file:
        assert file.read() == b"1\n"


def test_a_write_that_hangs_is_known_by_its_age(tmp_path, said, monkeypatch):
    gate, hung = threading.Event(), threading.Event()
    monkeypatch.setattr(module, "replace_file", lambda *_: (hung.set(), gate.wait(20)))
    clock = [0.0]
    writer = Writer(str(tmp_path), said.append, clock=lambda: clock[0])
    assert not writer.hangs(1.0)
    writer.write("a", b"")
    assert hung.wait(10)
    assert not writer.hangs(1.0)
    clock[0] = 2.0
    assert writer.hangs(1.0)
    gate.set()
