"""The command line before any command runs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from rankwatch import cli
from rankwatch.config import OPTIONS


def error_of(capsys, *argv):
    assert cli.main(argv) == 2
    return capsys.readouterr().err


def test_the_options_are_exactly_those_that_work():
    assert [option.flag for option in OPTIONS] == [
        "--run-dir",
        "--run-dir-mode",
        "--listen",
        "--external-url",
        "--token-file",
        "--stuck-after",
        "--on-stuck",
        "--limit",
        "--no-probe",
        "--label",
        "--owner",
        "--metrics-level",
        "--log-format",
        "--on-incident",
    ]


def test_words_after_the_command_are_its_own():
    words = ["--run-dir", "d", "--listen=off", "torchrun", "--run-dir", "theirs", "--version", "x.py", "--help"]
    assert cli.split(words) == (["--run-dir", "d", "--listen=off"], "torchrun", ["--run-dir", "theirs", "--version", "x.py", "--help"])


def test_an_unknown_option_names_itself_and_the_nearest(capsys):
    text = error_of(capsys, "--run-dri", "x", "torchrun", "t.py")
    assert "unknown option --run-dri (did you mean --run-dir?)" in text


def test_a_flag_of_torchrun_before_the_word_torchrun_is_explained(capsys):
    assert "torchrun's own flags go after the word torchrun" in error_of(capsys, "--nproc-per-node", "2", "torchrun", "t.py")


def test_an_abbreviation_is_no_option(capsys):
    assert "unknown option --run" in error_of(capsys, "--run", "x", "torchrun")


def test_an_unknown_command_names_the_nearest(capsys):
    assert "unknown command 'torchrn' (did you mean torchrun?)" in error_of(capsys, "torchrn", "t.py")


def test_an_option_that_took_the_command_as_its_value_is_explained(capsys):
    assert "--owner took 'torchrun' as its value" in error_of(capsys, "--owner", "torchrun", "t.py")


def test_an_option_without_value_is_refused(capsys):
    assert "--owner needs a value" in error_of(capsys, "--owner")


def test_a_bad_value_is_refused_before_the_command_is_imported(capsys):
    assert "error: --listen: 'x' is not accepted" in error_of(capsys, "--listen", "x", "torchrun", "t.py")


def test_no_command_shows_the_help(capsys):
    assert "usage: rankwatch [options] COMMAND" in error_of(capsys)


def test_a_command_without_its_module_is_not_offered(monkeypatch, capsys):
    monkeypatch.setitem(cli.COMMANDS, "no_such_command_yet", "never")
    assert "no_such_command_yet" not in cli.available()
    with pytest.raises(SystemExit) as end:
        cli.main(["--help"])
    assert end.value.code == 0
    assert "no_such_command_yet" not in capsys.readouterr().out


def test_an_unknown_limit_is_refused_before_torch_is_loaded(capsys):
    assert "no_such_number" in error_of(capsys, "--limit", "no_such_number=3", "torchrun", "t.py")
    assert "torch" not in sys.modules


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["config"], ["report", "--help"], ["ls", "--help"]])
def test_commands_about_rankwatch_itself_load_no_torch(words):
    program = (
        "import sys\nfrom rankwatch.cli import main\n"
        f"try:\n    code = main({words!r})\nexcept SystemExit as end:\n    code = end.code\n"
        "print('torch' in sys.modules, 'prometheus_client' in sys.modules, 'jinja2' in sys.modules, code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines()[-1] == "False False False 0"


def test_control_characters_in_a_line_of_ours_are_escapes(capsys):
    cli.say("run dir /a\x1b[2J\n[rankwatch] done")
    assert capsys.readouterr().err == "[rankwatch] run dir /a\\x1b[2J\\n[rankwatch] done\n"


@pytest.mark.parametrize("words", ["config", "--help", "config --limits", "ls --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_of_stdout_that_has_gone_is_no_failure(words, unbuffered):
    read_end, write_end = os.pipe()
    os.close(read_end)
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    try:
        done = subprocess.run([sys.executable, "-m", "rankwatch", *words.split()], stdout=write_end, stderr=subprocess.PIPE, timeout=60, env=environ)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_broken_pipe_that_is_not_stdout_is_not_hidden(monkeypatch, capfd):
    def broken(argv, options):
        raise BrokenPipeError

    monkeypatch.setattr("rankwatch.commands.config.main", broken)
    with pytest.raises(BrokenPipeError):
        cli.main(["config"])


def test_with_stderr_closed_nothing_of_ours_reaches_stdout():
    program = "exec 2>&-; " + shlex.quote(sys.executable)
    done = subprocess.run(["sh", "-c", f"{program} -m rankwatch --nonsense x; {program} -m rankwatch"], stdout=subprocess.PIPE, timeout=60)
    assert done.stdout == b""
    assert done.returncode == 2


def test_config_prints_value_and_origin(capsys):
    assert cli.main(["--owner", "ada", "config"]) == 0
    assert "owner          ada              command line" in capsys.readouterr().out
