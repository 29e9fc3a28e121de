"""`rankwatch top` on real terminals: tmux draws it at 80x24 and 200x50, resizes it, presses keys."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from build_pictures import compiling, stuck
from control_fakes import FakeLauncher
from jobs import wait_for

pytestmark = pytest.mark.stack
DRAWN_S = 30


class Terminal:
    """A tmux server of its own with one window, in which a shell runs a command and then says `rc=` and the terminal's settings."""

    def __init__(self, folder: str, command: list[str], width: int, height: int, env: dict[str, str] | None = None) -> None:
        self._socket = os.path.join(folder, "tmux.sock")
        settings = " ".join(f"{name}={shlex.quote(text)}" for name, text in (env or {}).items())
        script = f"trap : INT; env {settings} {shlex.join(command)}; echo rc=$?; stty -a | tr ' ;' '\\n\\n' | grep -x -e icanon -e echo; exec cat"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), "sh", "-c", script)

    def _tmux(self, *words: str) -> str:
        env = {name: text for name, text in os.environ.items() if name not in ("TMUX", "NO_COLOR", "COLUMNS", "LINES")}
        done = subprocess.run(["tmux", "-S", self._socket, *words], capture_output=True, text=True, timeout=30, env={**env, "LC_ALL": "C.UTF-8"})
        assert done.returncode == 0, done.stderr
        return done.stdout

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exc: object) -> None:
        self._tmux("kill-server")

    def rows(self, colours: bool = False) -> list[str]:
        """What the window shows now."""
        return self._tmux("capture-pane", "-p", *(["-e"] if colours else [])).splitlines()

    def shows(self, words: str) -> list[str]:
        """The rows once they hold these words."""

        def found() -> list[str]:
            rows = self.rows()
            return rows if words in "\n".join(rows) else []

        try:
            rows: list[str] = wait_for(found, DRAWN_S, f"the screen shows {words!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(self.rows())) from None
        return rows

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)


@pytest.fixture
def folder() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="rw-", dir="/tmp")
    yield made
    shutil.rmtree(made)


def top(launcher: FakeLauncher, *words: str) -> list[str]:
    return [sys.executable, "-m", "rankwatch", "top", *words, str(launcher.run_dir)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
@pytest.mark.parametrize(("world", "nodes", "rank"), [(4, 1, 1), (16384, 2048, 16379)])
def test_the_whole_picture_fits_and_names_the_culprit(folder: str, tmp_path: Path, width: int, height: int, world: int, nodes: int, rank: int) -> None:
    with FakeLauncher(tmp_path / "run", stuck(world, nodes, rank)) as launcher, Terminal(folder, top(launcher), width, height) as terminal:
        rows = terminal.shows("q quits")
        assert len(rows) <= height
        assert rows[0].startswith("STUCK  job 48213")
        assert rows[0].rstrip().endswith("03:12:44Z")
        assert f"rank {rank} has not entered all_reduce" in rows[1]
        grid = [row.split("  ", 1)[1] for row in rows if row.lstrip()[:1].isdigit() and set(row.split("  ", 1)[-1].strip()) <= set("!w ")]
        assert "".join(grid).count("!") == 1, rows
        assert any(row.split()[:3] == [str(rank), f"node{rank // (world // nodes):04}", "culprit:"] for row in rows)
        assert any("20261130T031149Z-1" in row and "9m00s" in row for row in rows)


def test_it_follows_the_job_and_the_window_and_leaves_the_terminal_as_it_was(folder: str, tmp_path: Path) -> None:
    with FakeLauncher(tmp_path / "run", stuck(8, 1, 3)) as launcher, Terminal(folder, top(launcher, "--every", "0.2"), 80, 24) as terminal:
        terminal.shows("STUCK  job 48213")
        run = launcher.state["run"]
        launcher.state, launcher.compiles = compiling(8, "5", (5,))
        launcher.state["run"] = run
        terminal.shows("[#######   ] about 14 s left  forward@model.py:31")
        terminal.resize(200, 50)
        wait_for(lambda: terminal.rows()[0].rstrip().endswith("03:12:44Z") and len(terminal.rows()[0]) > 150, DRAWN_S, "it is drawn 200 wide")
        terminal.press("x")
        terminal.press("q")
        rows = terminal.shows("rc=0")
        assert any(row.startswith("RUNNING  job 48213") for row in rows), "the last picture stays on the screen that was there before"
        after = "\n".join(terminal.shows("echo"))
        assert "icanon" in after


def test_ctrl_c_ends_it_without_a_traceback(folder: str, tmp_path: Path) -> None:
    with FakeLauncher(tmp_path / "run", stuck(4, 1, 1)) as launcher, Terminal(folder, top(launcher), 80, 40) as terminal:
        terminal.shows("q quits")
        terminal.press("C-c")
        assert "Traceback" not in "\n".join(terminal.shows("rc=0"))


def test_it_ends_with_the_job_and_its_exit_code_says_how(folder: str, tmp_path: Path) -> None:
    with FakeLauncher(tmp_path / "run", stuck(4, 1, 1)) as launcher, Terminal(folder, top(launcher, "--every", "0.2"), 80, 40) as terminal:
        terminal.shows("q quits")
        launcher.end(1)
        assert "The job has ended with exit code 1." in "\n".join(terminal.shows("rc=3"))


def test_colours_are_left_out_where_no_color_asks_for_it(folder: str, tmp_path: Path) -> None:
    seen = {}
    for name, env in (("colours", {}), ("none", {"NO_COLOR": "1"})):
        place = os.path.join(folder, name)
        os.mkdir(place)
        with FakeLauncher(tmp_path / name, stuck(4, 1, 1)) as launcher, Terminal(place, top(launcher), 80, 24, env) as terminal:
            terminal.shows("q quits")
            seen[name] = "\n".join(terminal.rows(colours=True))
    assert "\x1b[31m" in seen["colours"]
    assert not {f"\x1b[{colour}m" for colour in range(30, 38)} & {part + "m" for part in seen["none"].split("m") if part.startswith("\x1b")}
    assert "\x1b[31m" not in seen["none"]


def test_what_a_rank_says_does_nothing_to_the_terminal(folder: str, tmp_path: Path) -> None:
    state = stuck(4, 1, 1)
    state["headline"] = "rank 1 \x1b[2J\x1b[H\x1b]0;owned\x07 is stuck"
    state["ranks"][0]["detail"] = "\x1bcgone [bold]markup[/bold]"
    with FakeLauncher(tmp_path / "run", state) as launcher, Terminal(folder, top(launcher), 120, 40) as terminal:
        rows = terminal.shows("q quits")
        assert "\\x1b[2J\\x1b[H\\x1b]0;owned\\x07" in rows[1]
        assert any("\\x1bcgone [bold]markup[/bold]" in row for row in rows)


def test_without_rich_plain_tables_are_printed_and_a_line_says_what_is_missing(folder: str, tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError('no rich here')\n")
    env = {"PYTHONPATH": str(tmp_path)}
    with FakeLauncher(tmp_path / "run", stuck(4, 1, 1)) as launcher, Terminal(folder, top(launcher, "--every", "600"), 100, 40, env) as terminal:
        rows = "\n".join(terminal.shows("page  http://127.0.0.1:27435"))
        assert "pip install 'rankwatch[top]'" in rows
        assert "q quits" not in rows
        terminal.press("C-c")
        terminal.shows("rc=0")
