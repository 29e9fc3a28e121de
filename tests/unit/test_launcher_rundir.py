"""Where a run's files go."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from rankwatch.launcher import rundir


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rundir.tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "temp").mkdir()


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize(
    ("name", "job"), [("20261130T031149Z-ab12cd34", "ab12cd34"), ("20261130T031149Z-48213_7", "48213_7"), ("mine", ""), ("20261130T031149Z-", ""), ("", "")]
)
def test_the_name_of_a_default_directory_tells_the_job(name, job):
    assert rundir.job_in(name) == job


def test_the_default_is_private_and_latest_points_to_it(tmp_path):
    made = rundir.make(None, "job", wall_at=0.0)
    assert made == rundir.RunDir(str(tmp_path / "rankwatch-runs" / "19700101T000000Z-job"))
    assert mode(made.path) == 0o700
    assert os.readlink("rankwatch-runs/latest") == "19700101T000000Z-job"
    again = rundir.make(None, "job", wall_at=0.0)
    assert again.path.endswith("19700101T000000Z-job-2")
    assert os.readlink("rankwatch-runs/latest") == "19700101T000000Z-job-2"


def test_only_the_first_node_moves_latest():
    rundir.make(None, "job", first_node=False)
    assert not os.path.lexists("rankwatch-runs/latest")


def test_another_node_takes_over_the_name_of_the_first_ones_directory(tmp_path):
    first = rundir.make(None, "job", wall_at=0.0)
    other = rundir.make(None, "other", first_node=False, wall_at=9.0, name="19700101T000000Z-job")
    assert other == first
    (tmp_path / "elsewhere").mkdir()
    os.chdir(tmp_path / "elsewhere")
    own = rundir.make(None, "other", first_node=False, wall_at=9.0, name="19700101T000000Z-job")
    assert own.path == str(tmp_path / "elsewhere" / "rankwatch-runs" / "19700101T000000Z-job")
    assert mode(own.path) == 0o700


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", ".hidden", "x" * 300])
def test_a_name_from_the_network_that_is_no_name_is_not_used(name):
    assert rundir.make(None, "job", first_node=False, wall_at=0.0, name=name).path.endswith("rankwatch-runs/19700101T000000Z-job")


def test_a_real_folder_named_latest_is_left_alone():
    os.makedirs("rankwatch-runs/latest/mine")
    rundir.make(None, "job")
    assert os.path.isdir("rankwatch-runs/latest/mine")


def test_the_mode_holds_against_the_umask(tmp_path):
    old = os.umask(0o077)
    try:
        assert mode(rundir.make(str(tmp_path / "a" / "b"), "job", 0o750).path) == 0o750
    finally:
        os.umask(old)


def test_a_path_of_200_characters_works(tmp_path):
    wanted = str(tmp_path / ("d" * 200))
    assert rundir.make(wanted, "job") == rundir.RunDir(wanted)


@pytest.mark.parametrize("wanted", ["file/below", "/proc/nothing/here", "n" * 300])
def test_an_unusable_place_gives_way_to_the_temp_dir_with_one_line(tmp_path, wanted):
    (tmp_path / "file").write_text("")
    made = rundir.make(wanted, "job")
    assert os.path.dirname(made.path) == str(tmp_path / "temp")
    assert mode(made.path) == 0o700
    (note,) = made.notes
    assert note.startswith(f"run dir {wanted} cannot be used (")
    assert f"this run's files go to {made.path}; check --run-dir" in note


def test_a_full_disk_counts_as_unusable(tmp_path, monkeypatch):
    real = os.write

    def write(fd, data):
        if len(data) == 4096:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    made = rundir.make(str(tmp_path / "full"), "job")
    assert "cannot be used (No space left on device)" in made.notes[0]
    assert os.listdir(tmp_path / "full") == []


def test_a_place_that_does_not_answer_gives_way_after_the_deadline(tmp_path, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(rundir, "_check_writable", lambda path: answer.wait(20))
    try:
        made = rundir.make(str(tmp_path / "dead"), "job", deadline_s=0.05)
    finally:
        answer.set()
    assert os.path.dirname(made.path) == str(tmp_path / "temp")
    assert "no answer within 0.05 s; is its file server up?" in made.notes[0]


def test_an_earlier_run_is_kept_and_said(tmp_path):
    stale = tmp_path / "stale"
    (stale / "incidents" / "20260101T000000Z-1").mkdir(parents=True)
    (stale / "run.json").write_text("old")
    os.utime(stale / "run.json", (0, 0))
    made = rundir.make(str(stale), "job")
    assert made.path == str(stale)
    (note,) = made.notes
    assert note == f"run dir {stale} holds an earlier run; its files are kept as earlier/19700101T000000Z-run.json; incidents of both runs lie side by side"
    new = stale / "run.json.new"
    new.write_text("new")
    os.replace(new, stale / "run.json")
    assert (stale / "earlier" / "19700101T000000Z-run.json").read_text() == "old"
    assert (stale / "incidents" / "20260101T000000Z-1").is_dir()
    assert rundir.make(str(stale), "job", first_node=False).notes == ()


def test_an_existing_empty_directory_keeps_its_permissions(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o755)
    made = rundir.make(str(tmp_path / "mine"), "job", 0o700)
    assert made.notes == ()
    assert mode(made.path) == 0o755
