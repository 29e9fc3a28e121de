"""`rankwatch top` into a pipe and `rankwatch status`: which job is meant, what is printed, what the exit code says."""

import json
import os
import shutil
import socket
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from build_pictures import stuck
from control_fakes import FakeLauncher

from rankwatch import cli
from rankwatch.commands import status, top
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

    def test_of_very_many_some_are_named_and_the_rest_is_counted(self, tmp_path):
        many = [running.Launcher(f"/s/{n}", {"run": {"run_dir": f"/r/{n}"}}) for n in range(10)]
        with pytest.raises(source.Misused, match=r"10 jobs of yours run on this machine; name one: /r/0, .*, /r/7 and 2 more: rankwatch ls"):
            source.only(many, str(tmp_path / "latest"))

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

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({}, 0),
            ({"state": "failed"}, 3),
            ({"state": [1]}, 3),
            ({"state": float("nan")}, 3),
            ({"state": "fine"}, 3),
            ({"state": None}, 3),
            ({"incidents": {"open": [{"verdict": "slow"}], "closed": []}}, 0),
            ({"incidents": {"open": [{"verdict": [1]}], "closed": []}}, 3),
            ({"incidents": {"open": [7], "closed": []}}, 3),
            ({"incidents": {"open": 7, "closed": []}}, 3),
            ({"incidents": [1]}, 3),
        ],
    )
    def test_what_it_does_not_know_is_not_fine(self, changes, code):
        assert status.verdict_code(healthy() | changes) == code


@pytest.fixture
def server(place, monkeypatch):
    """A status address: gives `body`, after a 401 where `token` is not what came; `asked` holds what was."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            http.asked.append(self.headers.get("Authorization"))
            refused = http.token and http.asked[-1] != f"Bearer {http.token}"
            self.send_response(401 if refused else 200)
            self.end_headers()
            self.wfile.write(b"" if refused else http.body)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        http.asked, http.token, http.body = [], "", json.dumps(healthy()).encode()
        http.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


class TestAStatusAddress:
    @pytest.mark.parametrize(
        ("body", "why"),
        [
            (b"<html>", "it answers something that is no JSON; is this the status address of a launcher?"),
            (b"\xff\xfe\xfd", "it answers something that is no JSON"),
            (b"{}", "what answers there is no rankwatch"),
            (b'{"run": {}, "state": "running", "step_s": NaN}', "what answers there is no rankwatch: its state has numbers that JSON does not have"),
        ],
    )
    def test_what_is_no_state_is_named_with_its_address(self, server, capsys, body, why):
        server.body = body
        assert cli.main(["status", server.url]) == 3
        assert f"[rankwatch] {server.url}: {why}" in capsys.readouterr().err

    def test_one_that_was_typed_gets_the_token(self, server, tmp_path):
        (tmp_path / "token").write_text("s3cret")
        server.token = "s3cret"
        assert cli.main(["--token-file", str(tmp_path / "token"), "status", "--json", server.url]) == 0
        assert server.asked == ["Bearer s3cret"]


class TestAnAddressThatNobodyTyped:
    """run.json of another node's run names it; whoever may write there could have named any."""

    @pytest.fixture
    def asked(self, server, tmp_path, monkeypatch):
        """The run of node05, whose name leads to the server here; (exit code, what is said, what was sent) of `rankwatch status RUN_DIR`."""
        real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **how: real("127.0.0.1", *more, **how))
        monkeypatch.setattr(source, "_loopback", lambda _url: False)
        (tmp_path / "token").write_text("s3cret")
        server.token = "s3cret"
        run = tmp_path / "run"
        run.mkdir(mode=0o700)

        def ask(capsys, host="node05", change=lambda _run: None):
            doc = {"status_url": f"http://{host}:{server.server_port}", "node": "node05", "ended_at": None, "state": "running"}
            (run / "run.json").write_text(json.dumps(doc))
            (run / "run.json").chmod(0o600)
            change(run)
            code = cli.main(["--token-file", str(tmp_path / "token"), "status", "--json", str(run)])
            return code, capsys.readouterr().err, server.asked

        return ask

    def test_the_runs_own_node_gets_the_token_where_only_this_user_writes_the_run(self, asked, capsys):
        assert asked(capsys) == (0, "", ["Bearer s3cret"])

    @pytest.mark.parametrize("host", ["evil.example", "node05.evil.example", "127.0.0.1"])
    def test_another_host_is_asked_without_it(self, asked, capsys, host):
        code, said, sent = asked(capsys, host)
        assert (code, sent) == (3, [None])
        assert f"run.json names {host}, and the run is of node05; if it is right, ask it by name: rankwatch --token-file " in said
        assert f"/token status http://{host}:" in said

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda run: run.chmod(0o770), "which others may write (mode 0770)"),
            (lambda run: run.chmod(0o1777), "which others may write (mode 1777)"),
            (lambda run: (run / "run.json").chmod(0o660), "run.json, which others may write (mode 0660)"),
        ],
    )
    def test_a_run_that_others_may_write_gives_nobody_the_token(self, asked, capsys, change, why):
        code, said, sent = asked(capsys, change=change)
        assert (code, sent) == (3, [None])
        assert "it asks for a token; none is sent there, since the address comes from /" in said
        assert why in said

    def test_a_run_of_another_user_gives_nobody_the_token(self, asked, capsys, monkeypatch):
        real = os.stat

        def of_another(path, **how):
            found = real(path, **how)
            return os.stat_result((*found[:4], 4242, *found[5:])) if str(path).endswith("/run.json") else found

        code, said, sent = asked(capsys, change=lambda _run: monkeypatch.setattr(source.os, "stat", of_another))
        assert (code, sent) == (3, [None])
        assert "run.json, which is another user's (uid 4242)" in said

    def test_an_address_is_said_as_one_word_of_a_shell(self):
        options = cli.load([], environ={}, files=())
        assert source._with_token("http://a/$(rm x)\n;b", options).endswith("--token-file FILE status 'http://a/$(rm x) ;b'")


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
