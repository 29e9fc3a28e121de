"""`rankwatch stacks`: groups on stdout, whole stacks in files, and why some are missing."""

import json
import shutil
import stat
import tempfile

import pytest
from build_pictures import stuck
from control_fakes import FakeLauncher

from rankwatch import cli
from rankwatch.commands import stacks as command
from rankwatch.commands.live import running

LIBRARY = "/venv/lib/python3.11/site-packages/torch/autograd/graph.py"
ANSWER = {
    "run": {"world_size": 4},
    "native": False,
    "left_out": False,
    "ranks": [
        {"rank": 0, "node": "n", "pid": 10, "native": False, "text": "Process 10\n    wait\n", "error": ""},
        {"rank": 1, "node": "n", "pid": 11, "native": False, "text": "Process 11\n    load\x1b[2J\n", "error": ""},
        {"rank": 2, "node": "n", "pid": 12, "native": False, "text": "Process 12\n    wait\n", "error": ""},
        {"rank": 3, "node": "n", "pid": None, "native": False, "text": None, "error": "its process is gone"},
    ],
    "groups": [
        {"ranks": "1", "role": "culprit", "frames": ["load_batch (/home/a/train.py:31)", "main (/home/a/train.py:9)"]},
        {"ranks": "0,2", "role": "waiting", "frames": [f"backward ({LIBRARY}:1)", f"run ({LIBRARY}:2)", f"go ({LIBRARY}:3)", "main (/home/a/train.py:12)"]},
    ],
}


@pytest.fixture
def launcher(monkeypatch, tmp_path):
    place = tempfile.mkdtemp(prefix="rw-", dir="/tmp")
    monkeypatch.setattr(running, "_places", lambda: (place,))
    with FakeLauncher(tmp_path / "run", stuck(4, 1, 1), place) as one:
        one.stacks = json.loads(json.dumps(ANSWER))
        yield one
    shutil.rmtree(place)


def test_equal_stacks_are_shown_once_and_a_missing_one_with_its_reason(launcher, capsys):
    assert cli.main(["stacks"]) == 3
    assert capsys.readouterr().out.splitlines() == [
        "rank 1 (culprit)",
        "    load_batch (/home/a/train.py:31)",
        "    main (/home/a/train.py:9)",
        "",
        "ranks 0,2 (waiting)",
        "    backward (torch/autograd/graph.py:1)",
        "    ... 2 library frames",
        "    main (/home/a/train.py:12)",
        "",
        "rank 3: no stack: its process is gone",
    ]
    assert launcher.asked[-1] == {"do": "stacks", "ranks": "", "native": False, "deadline_s": 20.0}


def test_all_stacks_are_0(launcher):
    launcher.stacks["ranks"] = launcher.stacks["ranks"][:3]
    assert cli.main(["stacks", "--ranks", "0-2", "--native", "--timeout", "5"]) == 0
    assert launcher.asked[-1] == {"do": "stacks", "ranks": "0-2", "native": True, "deadline_s": 5.0}


def test_whole_stacks_are_files_of_their_user_alone(launcher, tmp_path):
    out = tmp_path / "out"
    cli.main(["stacks", "--out", str(out)])
    assert sorted(path.name for path in out.iterdir()) == [f"rank_{rank}.txt" for rank in range(4)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    assert (out / "rank_1.txt").read_text() == "Process 11\n    load\\x1b[2J\n"
    assert (out / "rank_3.txt").read_text() == "no stack: its process is gone\n"


def test_a_place_that_takes_no_files_is_told(launcher, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["stacks", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_a_link_that_lies_in_the_way_is_not_followed(launcher, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "precious").write_text("precious")
    (out / "rank_0.txt").symlink_to(tmp_path / "precious")
    assert cli.main(["stacks", "--out", str(out)]) == 2
    assert (tmp_path / "precious").read_text() == "precious"


def test_json_is_the_whole_answer(launcher, capsys):
    cli.main(["stacks", "--json"])
    out = capsys.readouterr().out
    assert json.loads(out)["groups"] == ANSWER["groups"]
    assert "\x1b" not in out


def test_a_dump_that_is_under_way_is_told(launcher, capsys):
    launcher.stacks = {}
    assert cli.main(["stacks"]) == 3
    assert "another dump is under way" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--ranks", "a"], ["--ranks", "0-999"], ["--timeout", "0"], ["--timeout", "1000"], ["http://127.0.0.1:27435"]])
def test_what_cannot_be_is_wrong_usage_before_anybody_is_asked(launcher, words, capsys):
    assert cli.main(["stacks", *words]) == 2
    assert launcher.asked == []


def test_a_run_that_was_started_elsewhere_names_the_node(launcher, capsys):
    launcher._control.stop()
    launcher.write_run(node="node05")
    assert cli.main(["stacks", str(launcher.run_dir)]) == 3
    assert "the job was started on node05; run this there" in capsys.readouterr().err


def test_frames_move_no_cursor():
    text = command.render({"groups": [{"ranks": "\x1b", "frames": ["f\x1b[2J (a.py:1)", 5]}], "ranks": [{"rank": 0, "error": "\x07"}]})
    assert all(letter.isprintable() or letter == "\n" for letter in text)
