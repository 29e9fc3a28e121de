"""`rankwatch open`: the link, the token's file, the ssh line."""

import json
import shutil
import tempfile

import pytest
from build_pictures import stuck
from control_fakes import FakeLauncher

from rankwatch import cli
from rankwatch.commands import open as command
from rankwatch.commands.live import running


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    place = tempfile.mkdtemp(prefix="rw-", dir="/tmp")
    monkeypatch.setattr(running, "_places", lambda: (place,))
    monkeypatch.setattr(command, "_user", lambda: "alice")
    with FakeLauncher(tmp_path / "run", stuck(4, 1, 1), place, token_file="/home/alice/token") as one:
        yield one
    shutil.rmtree(place)


def test_the_ssh_line_forwards_the_port_of_the_node(launcher, capsys):
    assert cli.main(["open"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "page   http://127.0.0.1:27435",
        "token  in /home/alice/token: as the password of any user",
        "from your machine: ssh -N -L 27435:127.0.0.1:27435 alice@node0000",
        "                   then open http://127.0.0.1:27435",
    ]


def test_as_json(launcher, capsys):
    assert cli.main(["open", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["host"], found["user"], found["port"], found["link"]) == ("node0000", "alice", 27435, "http://127.0.0.1:27435")


def test_a_page_that_is_served_to_others_needs_no_ssh(launcher, capsys):
    launcher.state["run"]["status_url"] = "https://grafana.example/jobs/7"
    assert cli.main(["open"]) == 0
    assert "ssh" not in capsys.readouterr().out


def test_where_people_are_told_another_address_the_real_one_is_printed_with_its_ssh_line(launcher, capsys):
    launcher.state["run"]["status_url"] = "https://pages.example/rankwatch/777-out/"
    launcher.info["served_at"] = "http://127.0.0.1:27436"
    assert cli.main(["open"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "page   https://pages.example/rankwatch/777-out/",
        "live   http://127.0.0.1:27436 on node0000",
        "token  in /home/alice/token: as the password of any user",
        "from your machine: ssh -N -L 27436:127.0.0.1:27436 alice@node0000",
        "                   then open http://127.0.0.1:27436",
    ]
    assert cli.main(["open", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["link"], found["served_at"], found["port"]) == ("https://pages.example/rankwatch/777-out/", "http://127.0.0.1:27436", 27436)


def test_the_state_of_a_job_of_this_machine_is_asked_of_its_launcher_whatever_address_people_are_told(launcher, capsys):
    launcher.state["run"]["status_url"] = "https://pages.example/rankwatch/777-out/"
    launcher.write_run()
    cli.main(["status", str(launcher.run_dir)])
    assert {"do": "state"} in launcher.asked


def test_a_member_names_where_the_whole_job_is_judged(launcher, capsys):
    launcher.info["judge"] = "http://node0000:27435"
    assert cli.main(["open"]) == 0
    assert "this node's ranks only; the whole job: http://node0000:27435" in capsys.readouterr().out


def test_the_page_of_the_whole_job_on_another_machine_comes_with_its_own_ssh_line(launcher, capsys):
    launcher.info["judge"] = "worker-0 (http://127.0.0.1:27436 there)"
    assert cli.main(["open"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "this node's ranks only; the whole job: worker-0 (http://127.0.0.1:27436 there)",
        "                   from your machine: ssh -N -L 27436:127.0.0.1:27436 alice@worker-0",
    ]


def test_a_job_without_a_page_is_3(launcher, capsys):
    launcher.state["run"]["status_url"] = ""
    assert cli.main(["open"]) == 3
    assert "--listen off" in capsys.readouterr().err


def test_a_job_that_is_over_is_3(launcher, capsys):
    launcher.end(1)
    assert cli.main(["open", str(launcher.run_dir)]) == 3
    assert "the job has ended with exit code 1" in capsys.readouterr().err


@pytest.mark.parametrize(("url", "there"), [("http://[::1]:8080", "[::1]"), ("http://localhost:8080", "localhost")])
def test_the_forward_goes_to_where_the_page_listens(url, there):
    info = {"run": {"status_url": url, "node": "n"}}
    assert command.links(info, "u")["ssh"] == f"ssh -N -L 8080:{there}:8080 u@n"


def test_what_a_launcher_says_moves_no_cursor():
    text = command.render(command.links({"run": {"status_url": "http://x\x1b[2J", "node": "n\x1b"}, "judge": "\x07"}, "u"))
    assert all(letter.isprintable() or letter == "\n" for letter in text)
