"""Other users of the machine: links and folders that they put into shared temp, before us and between two of our steps, and what they may reach of ours."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rankwatch.launcher import rundir, slots
from rankwatch.launcher.slots import SlotDirectory, place_problem, sweep
from rankwatch.serve.token import drawn_token
from rankwatch.wire import layout

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture
def shared():
    """A folder like /tmp: everybody writes, and the sticky bit keeps each one's own. Short, for sockets."""
    folder = tempfile.mkdtemp(prefix="t", dir="/tmp")
    os.chmod(folder, 0o1777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def stranger(code, *arguments):
    """Run Python code in a process that has become another user; what it prints. The interpreter itself may lie where only root reads."""
    become = f"import os, socket, sys; os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})\n"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", become + code, *arguments], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


TRY = """
def attempt(name, do):
    try:
        do()
    except PermissionError:
        return
    except OSError as error:
        print(name, type(error).__name__, error)
    else:
        print(name, "worked")
base, attempt_dir = sys.argv[1:]
slot, sock = attempt_dir + "/rank_0.slot", attempt_dir + "/rank_0.sock"
attempt("list", lambda: os.listdir(base))
attempt("read", lambda: open(slot, "rb").read())
attempt("write", lambda: open(slot, "r+b"))
attempt("replace", lambda: os.rename(slot, slot + ".old"))
attempt("plant a slot", lambda: open(attempt_dir + "/rank_1.slot", "wb"))
attempt("plant a socket", lambda: socket.socket(socket.AF_UNIX).bind(attempt_dir + "/rank_1.sock"))
attempt("connect", lambda: socket.socket(socket.AF_UNIX).connect(sock))
attempt("rename", lambda: os.rename(base, base + "x"))
attempt("remove", lambda: os.rmdir(base))
"""


class TestSlots:
    def test_directories_are_0700_and_slots_0600_whatever_the_umask(self, shared):
        old = os.umask(0)
        try:
            directory = SlotDirectory([shared])
            made = directory.make(0, [0]).path
        finally:
            os.umask(old)
        for path, mode in ((made, 0o700), (os.path.dirname(made), 0o700), (f"{made}/rank_0.slot", 0o600), (f"{made}/../owner.json", 0o600)):
            assert stat.S_IMODE(os.stat(path).st_mode) == mode
        directory.remove()

    @as_root
    def test_another_user_reaches_neither_slots_nor_sockets_and_can_plant_none(self, shared):
        directory = SlotDirectory([shared])
        made = directory.make(0, [0]).path
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{made}/rank_0.sock")
            os.chmod(f"{made}/rank_0.sock", 0o777)
            server.listen()
            assert stranger(TRY, os.path.dirname(made), made) == ""
        directory.remove()

    @as_root
    def test_a_directory_of_our_name_that_has_become_another_users_is_not_used_again(self, shared):
        """As after a cleaner of /tmp: names that were listed there are known."""
        directory = SlotDirectory([shared])
        base = os.path.dirname(directory.make(0, [0]).path)
        shutil.rmtree(base)
        stranger("os.mkdir(sys.argv[1]); os.chmod(sys.argv[1], 0o777)", base)
        again = directory.make(1, [0]).path
        assert os.path.dirname(again) != base
        assert os.stat(again).st_uid == os.geteuid()
        directory.record_workers([os.getpid()])
        assert os.listdir(base) == []
        directory.remove()
        assert os.listdir(shared) == [os.path.basename(base)]

    def test_a_link_in_place_of_our_directory_leads_nothing_of_ours_elsewhere(self, shared, tmp_path):
        victim = tmp_path / "victim"
        (victim / "a0").mkdir(parents=True)
        (victim / "a0" / "precious").touch()
        directory = SlotDirectory([shared])
        base = os.path.dirname(directory.make(0, [0]).path)
        shutil.rmtree(base)
        os.symlink(victim, base)
        for attempt in (1, 2, 3):
            assert directory.make(attempt, [0]).path is not None
        directory.record_workers([os.getpid()])
        directory.remove()
        assert sorted(str(path.relative_to(victim)) for path in victim.rglob("*")) == ["a0", "a0/precious"]

    def test_a_slot_that_is_there_already_is_not_opened_even_behind_a_link(self, shared, tmp_path, monkeypatch):
        """The directory is ours alone; should a name be taken all the same, that place is given up and nothing is written through it."""
        real = os.mkdir
        (tmp_path / "victim").write_text("precious")

        def mkdir(path, mode=0o777):
            real(path, mode)
            if os.path.basename(path) == "a0":
                os.symlink(tmp_path / "victim", os.path.join(path, "rank_0.slot"))

        monkeypatch.setattr(os, "mkdir", mkdir)
        made = SlotDirectory([shared]).make(0, [0])
        assert made.path is None
        assert "File exists" in made.reason
        assert (tmp_path / "victim").read_text() == "precious"

    @pytest.mark.parametrize(
        ("mode", "problem"), [(0o1777, ""), (0o755, ""), (0o700, ""), (0o777, "others may rename"), (0o775, "others may rename"), (0o1775, "")]
    )
    def test_a_place_where_others_may_rename_what_is_ours_is_not_taken(self, shared, mode, problem):
        os.chmod(shared, mode)
        assert place_problem(shared).startswith(problem)
        assert (place_problem(shared) == "") is (problem == "")
        assert (SlotDirectory([shared]).make(0, [0]).path is None) is (problem != "")

    @as_root
    def test_a_place_of_another_user_is_not_taken(self, shared):
        os.chown(shared, STRANGER, STRANGER)
        os.chmod(shared, 0o700)  # as XDG_RUNTIME_DIR is after `sudo -E`
        assert SlotDirectory([shared]).make(0, [0]).reason == f"{shared}: it belongs to another user (uid {STRANGER})"

    def test_the_hosts_root_as_a_user_namespace_shows_it_is_no_other_user(self, monkeypatch):
        texts = {"/proc/self/uid_map": b"1000 1000 1\n", "/proc/sys/kernel/overflowuid": b"65534\n"}
        monkeypatch.setattr(slots, "_read", lambda path, limit: texts[path])
        assert slots._unmapped_uid() == 65534
        texts["/proc/self/uid_map"] = b"         0          0 4294967295\n"
        assert slots._unmapped_uid() == -1

    def test_a_place_that_knows_no_permissions_is_not_taken(self, shared, monkeypatch):
        real = tempfile.mkdtemp

        def mkdtemp(**where):
            folder = real(**where)
            os.chmod(folder, 0o777)
            return folder

        monkeypatch.setattr(slots.tempfile, "mkdtemp", mkdtemp)
        assert "permissions do not hold there" in SlotDirectory([shared]).make(0, [0]).reason
        assert os.listdir(shared) == []

    @as_root
    def test_the_sweep_removes_nothing_of_another_user_and_believes_none(self, shared):
        plant = "os.mkdir(sys.argv[1]); open(sys.argv[1] + '/owner.json', 'w').write(sys.argv[2])"
        stranger(plant, f"{shared}/{slots.PREFIX}abcdefgh", json.dumps({"boot": "an earlier one", "pid": 1, "start_ticks": 1, "workers": []}))
        assert sweep([shared]) == []
        assert os.path.exists(f"{shared}/{slots.PREFIX}abcdefgh/owner.json")

    @pytest.mark.parametrize(
        "claim",
        ['{"pid": Infinity, "start_ticks": 1}', '{"pid": "x"}', "[]", "5", '"x"', '{"pid": null}', "\x00", '{"pid": 1e400}'],
    )
    def test_the_sweep_outlives_anything_that_a_rank_has_written(self, shared, claim):
        made = SlotDirectory([shared]).make(0, [0]).path
        owner = Path(made).parent / "owner.json"
        owner.write_text(json.dumps({**json.loads(owner.read_text()), "pid": 2_000_000_100}))
        with open(f"{made}/rank_0.slot", "r+b") as file:
            file.seek(layout.RECORDS["owner"].offset)
            file.write(layout.pack(1, 1, claim.encode()))
        sweep([shared])

    @pytest.mark.parametrize("owner", ["[]", "5", "null", '{"boot": 5}', "[" * 90_000, '{"boot": "x", "pid_namespace": []}', '{"boot": {}}'])
    def test_the_sweep_outlives_any_owner_file(self, shared, owner):
        folder = Path(shared, slots.PREFIX + "abcdefgh")
        folder.mkdir(mode=0o700)
        (folder / "owner.json").write_text(owner)
        sweep([shared])


class TestRunDirectory:
    @pytest.fixture(autouse=True)
    def in_shared(self, shared, monkeypatch, tmp_path):
        monkeypatch.chdir(shared)
        (tmp_path / "temp").mkdir()
        monkeypatch.setattr(rundir.tempfile, "tempdir", str(tmp_path / "temp"))

    def test_it_is_0700_whatever_the_umask(self):
        old = os.umask(0)
        try:
            made = rundir.make(None, "job")
        finally:
            os.umask(old)
        assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o700

    @as_root
    @pytest.mark.parametrize("given", [None, "rankwatch-runs/mine"])
    @pytest.mark.parametrize("plant", ["os.mkdir(p); os.chmod(p, 0o777)", "os.symlink(d, p)"])
    def test_what_another_user_has_put_in_the_way_is_not_followed(self, shared, tmp_path, plant, given):
        target = tempfile.mkdtemp(dir="/tmp")
        os.chmod(target, 0o777)
        try:
            stranger(f"p, d = sys.argv[1:]; {plant}", f"{shared}/rankwatch-runs", target)
            made = rundir.make(given, "job")
            assert os.path.dirname(made.path) == str(tmp_path / "temp")
            assert f"rankwatch-runs belongs to another user (uid {STRANGER}) in a folder that everybody writes" in made.notes[0]
            assert os.listdir(target) == []
            assert os.listdir(f"{shared}/rankwatch-runs") == []
        finally:
            os.rmdir(target)

    @as_root
    def test_a_link_of_another_user_further_up_is_not_followed_either(self, shared, tmp_path):
        (tmp_path / "home").mkdir()
        stranger("os.symlink(*sys.argv[1:])", str(tmp_path / "home"), f"{shared}/up")
        made = rundir.make(f"{shared}/up/below/run", "job")
        assert os.path.dirname(made.path) == str(tmp_path / "temp")
        assert os.listdir(tmp_path / "home") == []

    @as_root
    def test_a_link_that_comes_between_the_look_and_the_making_is_not_used(self, shared, tmp_path, monkeypatch):
        real, evil = os.makedirs, tmp_path / "evil"
        evil.mkdir()

        def makedirs(path, *rest, **more):
            if os.path.basename(path) == "rankwatch-runs" and not os.path.lexists(path):
                os.symlink(evil, path)  # the other user is faster
                os.lchown(path, STRANGER, STRANGER)
            return real(path, *rest, **more)

        monkeypatch.setattr(os, "makedirs", makedirs)
        made = rundir.make(None, "job")
        assert os.path.dirname(made.path) == str(tmp_path / "temp")
        assert os.listdir(evil) == []

    def test_links_of_our_own_are_followed(self, shared, tmp_path):
        (tmp_path / "scratch").mkdir()
        os.symlink(tmp_path / "scratch", f"{shared}/rankwatch-runs")
        made = rundir.make(None, "job")
        assert made.notes == ()
        assert os.path.realpath(made.path).startswith(str(tmp_path / "scratch"))

    @as_root
    def test_another_users_latest_stays_and_ends_nothing(self, shared):
        os.mkdir("rankwatch-runs")
        os.chmod("rankwatch-runs", 0o1777)
        stranger("os.symlink('/etc', sys.argv[1])", f"{shared}/rankwatch-runs/latest")
        made = rundir.make(None, "job")
        assert made.notes == ()
        assert os.stat(made.path).st_uid == os.geteuid()

    @as_root
    def test_another_user_reads_nothing_of_a_run(self):
        made = rundir.make(None, "job").path
        Path(made, "run.json").write_text("{}")
        Path(made, "run.json").chmod(0o666)
        look = "try:\n    open(sys.argv[1]).read()\nexcept PermissionError:\n    print('refused')"
        assert stranger(look, f"{made}/run.json") == "refused\n"


class TestTokenFile:
    def test_it_is_0600_whatever_the_umask_and_long_and_new_for_each_run(self, tmp_path):
        old = os.umask(0)
        try:
            drawn = [drawn_token(str(tmp_path / name)) for name in "ab"]
        finally:
            os.umask(old)
        assert drawn[0] != drawn[1]
        assert all(len(token) >= 43 for token in drawn)  # 256 bits
        assert [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in "ab"] == [0o600, 0o600]
        assert sorted(os.listdir(tmp_path)) == ["a", "b"]

    def test_launchers_that_share_a_run_directory_share_the_token(self, tmp_path):
        assert drawn_token(str(tmp_path / "token")) == drawn_token(str(tmp_path / "token"))

    def test_a_launcher_that_is_faster_between_our_steps_wins_and_nothing_is_overwritten(self, tmp_path, monkeypatch):
        real, path = os.link, str(tmp_path / "token")
        others = "o" * 43

        def link(*arguments, **more):
            with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(others)
            return real(*arguments, **more)

        monkeypatch.setattr(os, "link", link)
        assert drawn_token(path) == others
        assert os.listdir(tmp_path) == ["token"]

    @pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "pipe", "folder"])
    def test_what_lies_in_its_place_is_neither_followed_nor_waited_for_nor_overwritten(self, tmp_path, kind):
        path, victim = tmp_path / "token", tmp_path / "victim"
        victim.write_text("v" * 43)
        victim.chmod(0o600)  # one that would do, were it not behind a link
        {"pipe": os.mkfifo, "folder": os.mkdir}.get(kind, lambda p: os.symlink(victim if kind == "link to a file" else tmp_path / "new", p))(path)
        with pytest.raises(ValueError, match="token"):
            drawn_token(str(path))
        assert victim.read_text() == "v" * 43
        assert not (tmp_path / "new").exists()

    def test_a_file_that_others_may_read_is_not_used(self, tmp_path):
        (tmp_path / "token").write_text("x" * 43)
        (tmp_path / "token").chmod(0o640)
        with pytest.raises(ValueError, match=r"token may be read by others \(mode 0640\)"):
            drawn_token(str(tmp_path / "token"))

    @as_root
    def test_another_users_file_is_not_used(self, tmp_path):
        (tmp_path / "token").write_text("x" * 43)
        (tmp_path / "token").chmod(0o600)
        os.chown(tmp_path / "token", STRANGER, STRANGER)
        with pytest.raises(ValueError, match="belongs to another user"):
            drawn_token(str(tmp_path / "token"))

    @pytest.mark.parametrize("content", ["", "short", "\x00\xff"])
    def test_a_file_with_something_else_in_it_is_not_used(self, tmp_path, content):
        (tmp_path / "token").write_text(content)
        (tmp_path / "token").chmod(0o600)
        with pytest.raises(ValueError, match="holds no token of ours"):
            drawn_token(str(tmp_path / "token"))

    def test_a_folder_that_is_not_there_is_a_reason(self, tmp_path):
        with pytest.raises(ValueError, match=r"cannot be made \(No such file or directory\)"):
            drawn_token(str(tmp_path / "none" / "token"))

    def test_a_file_system_without_hard_links_does(self, tmp_path, monkeypatch):
        def link(*arguments, **more):
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "link", link)
        assert drawn_token(str(tmp_path / "token")) == drawn_token(str(tmp_path / "token"))
        assert os.listdir(tmp_path) == ["token"]
