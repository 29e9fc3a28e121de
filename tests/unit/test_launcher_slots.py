"""The life of the slot directory."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rankwatch.launcher import slots
from rankwatch.launcher.slots import SlotDirectory, start_ticks, sweep
from rankwatch.wire import layout


@pytest.fixture
def place(tmp_path_factory):
    """A short folder: the tmp_path of pytest is too long for a socket."""
    folder = tempfile.mkdtemp(prefix="t", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def only(place):
    (name,) = os.listdir(place)
    return os.path.join(place, name)


def test_slots_are_whole_private_and_carry_their_header(place):
    directory = SlotDirectory([place])
    made = directory.make(0, [4, 5])
    assert made.path == os.path.join(only(place), "a0")
    assert stat.S_IMODE(os.stat(only(place)).st_mode) == 0o700
    assert sorted(os.listdir(made.path)) == ["rank_4.slot", "rank_5.slot"]
    for rank in (4, 5):
        path = os.path.join(made.path, f"rank_{rank}.slot")
        data = Path(path).read_bytes()
        assert layout.check_header(data) == (rank, 0)
        assert os.stat(path).st_blocks * 512 >= layout.SLOT_BYTES
    directory.remove()
    assert os.listdir(place) == []


def test_an_attempt_gets_fresh_slots_and_the_one_before_stays_readable(place):
    directory = SlotDirectory([place])
    paths = [directory.make(attempt, [0]).path for attempt in range(3)]
    assert len(set(paths)) == 3
    assert [os.path.exists(path) for path in paths] == [False, True, True]
    assert layout.check_header(Path(paths[2], "rank_0.slot").read_bytes()) == (0, 2)
    directory.remove()


def test_a_full_place_gives_way_to_the_next(place, monkeypatch):
    """posix_fallocate fails on a full tmpfs; a sparse slot would be SIGBUS in the rank."""
    full, free = os.path.join(place, "full"), os.path.join(place, "free")
    os.mkdir(full)
    os.mkdir(free)
    real = os.posix_fallocate

    def fallocate(fd, offset, length):
        if os.readlink(f"/proc/self/fd/{fd}").startswith(full):
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    made = SlotDirectory([full, free]).make(0, [0, 1])
    assert made.path.startswith(free)
    assert os.listdir(full) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_really_full_tmpfs_gives_way_to_the_next(place):
    full, free = os.path.join(place, "full"), os.path.join(place, "free")
    os.mkdir(full)
    os.mkdir(free)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", full], capture_output=True).returncode:
        pytest.skip("no mount in this container")
    try:
        assert SlotDirectory([full, free]).make(0, [0, 1]).path.startswith(free)
        assert os.listdir(full) == []
    finally:
        subprocess.run(["umount", full], check=True)


def test_no_place_at_all_is_an_answer_with_reasons(place):
    made = SlotDirectory([os.path.join(place, "absent"), "/proc"]).make(0, [0])
    assert made.path is None
    assert f"{place}/absent: No such file or directory" in made.reason
    assert "/proc: " in made.reason


def test_a_place_whose_path_is_too_long_for_a_socket_is_not_taken(place):
    deep = os.path.join(place, "d" * 80)
    os.mkdir(deep)
    made = SlotDirectory([deep]).make(0, [0])
    assert made.path is None
    assert "too long for a socket (107 bytes)" in made.reason


def test_the_longest_socket_path_fits(place):
    made = SlotDirectory([place]).make(0, [0])
    assert len(os.path.join(made.path, "rank_16383.sock")) <= 107


def test_a_directory_that_vanished_between_attempts_is_made_again(place):
    directory = SlotDirectory([place])
    directory.make(0, [0])
    shutil.rmtree(only(place))
    assert os.path.isfile(os.path.join(directory.make(1, [0]).path, "rank_0.slot"))
    directory.remove()
    assert os.listdir(place) == []


def test_places_are_absolute_and_tried_once():
    found = slots.standard_places({"XDG_RUNTIME_DIR": "/run/user/7/"})
    assert found[:3] == ("/run/user/7", "/dev/shm", "/tmp")
    assert len(set(found)) == len(found)
    assert slots.standard_places({"XDG_RUNTIME_DIR": "relative"})[0] == "/dev/shm"


# -- sweeping


def owner(place, **changes):
    """Rewrite owner.json of the one directory in `place`."""
    path = Path(only(place), "owner.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def dead():
    """(pid, start ticks) of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(process.pid)
    process.communicate(b"\n", timeout=20)
    return process.pid, ticks


def test_a_living_launchers_directory_stays(place):
    SlotDirectory([place]).make(0, [0])
    assert sweep([place]) == []


def test_a_dead_launchers_directory_goes(place, dead):
    SlotDirectory([place]).make(0, [0])
    path = only(place)
    owner(place, pid=dead[0], start_ticks=dead[1])
    assert sweep([place]) == [path]
    assert os.listdir(place) == []


def test_a_reused_pid_is_not_the_launcher(place):
    SlotDirectory([place]).make(0, [0])
    owner(place, start_ticks=1)
    assert len(sweep([place])) == 1


def test_ranks_that_outlived_their_launcher_keep_it(place, dead):
    directory = SlotDirectory([place])
    directory.make(0, [0])
    directory.record_workers([os.getpid()])
    owner(place, pid=dead[0], start_ticks=dead[1])
    assert sweep([place]) == []


def test_a_rank_that_only_its_slot_names_keeps_it(place, dead):
    directory = SlotDirectory([place])
    made = directory.make(0, [0])
    owner(place, pid=dead[0], start_ticks=dead[1])
    claim = json.dumps({"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}).encode()
    with open(os.path.join(made.path, "rank_0.slot"), "r+b") as file:
        file.seek(layout.RECORDS["owner"].offset)
        file.write(layout.pack(1, 1, claim))
    assert sweep([place]) == []


def test_another_pid_namespace_of_this_boot_is_left_alone(place, dead):
    SlotDirectory([place]).make(0, [0])
    owner(place, pid=dead[0], start_ticks=dead[1], pid_namespace="pid:[1]")
    assert sweep([place]) == []
    owner(place, boot="an earlier one")
    assert len(sweep([place])) == 1


def test_links_foreign_folders_and_half_made_ones_are_left_alone(place, dead):
    victim = os.path.join(place, "victim")
    os.mkdir(victim)
    Path(victim, "precious").touch()
    os.symlink(victim, os.path.join(place, slots.PREFIX + "link"))
    os.mkdir(os.path.join(place, slots.PREFIX + "halfmade"))
    os.mkdir(os.path.join(place, slots.PREFIX + "foreign"))
    Path(place, slots.PREFIX + "foreign", "owner.json").write_text('{"pid": "what"}')
    assert sweep([place]) == []
    assert sorted(os.listdir(place)) == ["rankwatch.foreign", "rankwatch.halfmade", "rankwatch.link", "victim"]
    assert os.listdir(victim) == ["precious"]
