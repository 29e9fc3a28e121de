"""`rankwatch top` into a pipe and `rankwatch status`: which job is meant, what is printed, what the exit code says."""

import json
import shutil
import tempfile

import pytest
from build_pictures import stuck
from control_fakes import FakeLauncher

from rankwatch import cli
from rankwatch.commands import top
from rankwatch.commands.live import running, source


@pytest.fixture
def place(monkeypatch, tmp_path):
    """The only folder that launchers are looked for in; the working directory is empty."""
    made = tempfile.mkdtemp(prefix="rw-", dir="/tmp")
    monkeypatch.setattr(running, "_places", lambda: (made,))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    yield made
    shutil.rmtree(made)


@pytest.fixture
def launcher(place, tmp_path):
    with FakeLauncher(tmp_path / "run", stuck(4, 1, 1), place) as one:
        yield one


def healthy():
    return stuck(4, 1, 1) | {"state": "running", "odd": "", "incidents": {"open": [], "closed": []}}


class TestWhichJob:
    def test_without_a_name_it_is_the_one_that_runs_here(self, launcher, capsys):
        assert cli.main(["status"]) == 3
        assert capsys.readouterr().out.startswith("STUCK  job 48213  4 ranks on 1 node")

    def test_it_is_named_by_its_run_directory(self, launcher, capsys):
        assert cli.main(["status", str(launcher.run_dir)]) == 3
        assert cli.main(["--run-dir", str(launcher.run_dir), "status"]) == 3

    def test_where_control_json_is_missing_the_launchers_say_whose_directory_it_is(self, launcher):
        (launcher.run_dir / "control.json").unlink()
        assert cli.main(["status", str(launcher.run_dir)]) == 3

    def test_of_several_one_must_be_named_unless_one_is_the_latest_of_this_folder(self, place, launcher, tmp_path, capsys):
        with FakeLauncher(tmp_path / "rankwatch-runs" / "other", healthy(), place):
            assert cli.main(["status"]) == 2
            assert "2 jobs of yours run on this machine; name one: " in capsys.readouterr().err
            (tmp_path / "rankwatch-runs" / "latest").symlink_to("other")
            assert cli.main(["status"]) == 0

    def test_where_none_runs_and_none_ran_it_is_3(self, place, capsys):
        assert cli.main(["status"]) == 3
        assert cli.main(["top"]) == 3
        assert "no job of yours runs on this machine" in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["status", "top", "stacks", "open"])
    def test_a_path_that_does_not_exist_is_wrong_usage(self, place, capsys, command):
        assert cli.main([command, "nowhere"]) == 2
        assert "nowhere is no directory" in capsys.readouterr().err

    def test_a_folder_that_is_no_run_is_3(self, place, tmp_path, capsys):
        assert cli.main(["status", str(tmp_path)]) == 3
        assert "is no run: run.json cannot be read" in capsys.readouterr().err

    def test_another_users_directory_is_not_looked_into(self, launcher, monkeypatch):
        monkeypatch.setattr("os.geteuid", lambda: 4242)
        assert running.sockets((launcher.place,)) == []

    def test_a_run_of_another_node_is_asked_at_its_address_unless_that_is_loopback(self, place, tmp_path, monkeypatch):
        launcher = FakeLauncher(tmp_path / "run", healthy(), place)  # does not listen
        launcher.write_run(node="node05", status_url="http://node05:27435")
        assert isinstance(source.find(str(launcher.run_dir), cli.load([], environ={}, files=())), source.There)
        launcher.write_run(node="node05", status_url="http://127.0.0.1:27435")
        assert isinstance(source.find(str(launcher.run_dir), cli.load([], environ={}, files=())), source.Files)


class TestStatus:
    def test_a_healthy_job_is_0_and_one_that_pages_3(self, launcher):
        assert cli.main(["status"]) == 3
        launcher.state = healthy() | {"run": launcher.state["run"]}
        assert cli.main(["status"]) == 0

    def test_json_is_the_state_document(self, launcher, capsys):
        assert cli.main(["status", "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["phases"] == {"collective_wait": "0,2-3", "running": "1"}

    @pytest.mark.parametrize(("code", "rc"), [(0, 0), (1, 3), (-9, 3)])
    def test_of_a_run_that_is_over_its_files_tell_the_end(self, launcher, capsys, code, rc):
        launcher.end(code)
        assert cli.main(["status", str(launcher.run_dir)]) == rc
        words = {0: "exit code 0", 1: "exit code 1", -9: "killed by SIGKILL"}[code]
        assert f"The job has ended with {words}." in capsys.readouterr().out

    def test_a_launcher_that_was_killed_leaves_no_end(self, launcher, capsys):
        launcher._control.stop()
        assert cli.main(["status", str(launcher.run_dir)]) == 3
        assert "No launcher answers and no end is recorded" in capsys.readouterr().out

    def test_a_document_that_cannot_be_drawn_is_an_error_in_words(self, launcher, capsys):
        launcher.state["phases"] = {"running": "0-"}
        launcher.state["odd"] = "7-x"
        assert cli.main(["status"]) == 2
        assert "cannot be shown: ValueError" in capsys.readouterr().err

    def test_a_status_address_where_nobody_is_is_3(self, place, capsys):
        assert cli.main(["status", "http://127.0.0.1:1"]) == 3
        assert "nobody answers: " in capsys.readouterr().err


class TestTopIntoAPipe:
    def test_so_many_tables_come_as_were_asked_for(self, launcher, capsys):
        assert cli.main(["top", "--count", "2", "--every", "0.1"]) == 3
        out = capsys.readouterr().out
        assert out.count("STUCK  job 48213") == 2
        assert "\x1b" not in out

    def test_it_ends_with_the_job_and_shows_how_that_ended(self, launcher, capsys, monkeypatch):
        monkeypatch.setattr(top.time, "sleep", lambda _s: launcher.end(0))
        assert cli.main(["top"]) == 0
        out = capsys.readouterr().out
        assert out.index("STUCK  job") < out.index("The job has ended with exit code 0.")

    def test_the_compile_document_is_not_fetched_at_every_picture(self, launcher, capsys):
        assert cli.main(["top", "--count", "3", "--every", "0.1"]) == 3
        assert [request["do"] for request in launcher.asked].count("compile") == 1

    @pytest.mark.parametrize("words", [["--every", "0"], ["--count", "0"], ["--every", "x"]])
    def test_numbers_that_cannot_be_are_wrong_usage(self, place, words):
        with pytest.raises(SystemExit) as end:
            cli.main(["top", *words])
        assert end.value.code == 2


class Silent:
    name = "http://node05:27435"

    def __init__(self, pictures):
        self.pictures = pictures

    def take(self, compiles=True):
        found = self.pictures.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def test_a_job_that_does_not_answer_keeps_its_last_picture_with_the_reason_and_is_given_up_after_half_a_minute():
    watched = top.Watched(Silent([source.Picture(healthy()), *[source.Lost("timed out") for _ in range(3)], source.Picture(healthy())]))
    assert watched.take(100.0)
    assert watched.note == ""
    assert watched.take(101.0)
    assert watched.draw(80, None)[-1] == (("http://node05:27435: timed out", "warn"),)
    assert watched.code == 3
    assert watched.take(130.9)
    assert not watched.take(131.0)
    assert watched.take(132.0)
    assert (watched.note, watched.code) == ("", 0)


def test_a_launcher_that_has_gone_is_not_waited_for():
    watched = top.Watched(Silent([source.Lost("no launcher listens", gone=True)]))
    assert not watched.take(100.0)
    assert watched.code == 3
