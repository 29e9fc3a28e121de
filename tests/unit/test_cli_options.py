"""The command line before any command runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rankwatch import cli
from rankwatch.commands.config import EXAMPLE
from rankwatch.config import OPTIONS, Options, load
from rankwatch.launcher import usable
from rankwatch.monitor.policy import Limits


def error_of(capsys, *argv):
    assert cli.main(argv) == 2
    return capsys.readouterr().err


def test_the_readme_lists_the_options_that_exist_and_no_other():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    section = text[text.index("\n## Options\n") : text.index("\n## Metrics\n")]
    listed = {flag for row in re.findall(r"^\| (`--.*?) \| ", section, re.MULTILINE) for flag in re.findall(r"`(--[a-z-]+)", row)}
    assert listed == {option.flag for option in OPTIONS}


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
    words = "--owner needs a value: it took the word 'torchrun' as one; rankwatch --help shows which"
    for rest in (("t.py",), ("--nproc-per-node", "2", "t.py"), ()):
        assert words in error_of(capsys, "--owner", "torchrun", *rest)


@pytest.mark.parametrize("command", ["report", "demo", "ls", "config", "doctor"])
def test_an_option_behind_the_command_is_told_where_it_goes(capsys, command):
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--on-incident", "x", "--run-dir=y"])
    assert end.value.code == 2
    assert f"--on-incident, --run-dir is rankwatch's: it goes before the word {command}" in capsys.readouterr().err


def test_a_switch_takes_no_value_and_a_value_only_after_the_equals_sign():
    assert cli.split(["--torch-trace", "torchrun", "t.py"]) == (["--torch-trace"], "torchrun", ["t.py"])
    assert cli._given(["--torch-trace", "--owner", "ada"]) == [("torch-trace", "true"), ("owner", "ada")]
    assert cli._given(["--torch-trace=false"]) == [("torch-trace", "false")]


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


@pytest.mark.parametrize("command", ["torchrun", "config", "ls", "report"])
def test_an_unknown_limit_is_refused_by_every_command_before_torch_is_loaded(capsys, monkeypatch, command):
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # another test of this process may have needed it
    assert "there is no limit notce_s (did you mean notice_s?)" in error_of(capsys, "--limit", "notce_s=3", command)
    assert "torch" not in sys.modules


@pytest.mark.parametrize("command", ["torchrun", "demo", "ablate"])
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--token-file", "/nope/token", "--token-file: /nope/token cannot be read (No such file or directory); make it"),
        ("--archive-dir", "/nope/pages", "--archive-dir: /nope/pages is no folder here; make it, mount it, or correct the path"),
        ("--on-incident", "/nope/page --loud", "--on-incident: /nope/page does not exist; correct the path"),
        ("--on-incident", "no-such-pager 'x'", "--on-incident: there is no command 'no-such-pager' here; give its path, or install it"),
        ("--on-incident", "page 'x", "(No closing quotation); correct the quotes"),
        ("--peers", "/nope/nodes", "--peers: /nope/nodes cannot be read (No such file or directory); write HOST:PORT of each node into it"),
        ("--peers", "a:1,b", "--peers: line 1: 'b' is not accepted; it takes HOST:PORT: a port of its own"),
        ("--peers", "a:1,b:1", "--peers: it needs --token-file FILE, with the same text on every node"),
    ],
)
def test_what_an_option_names_has_to_be_there_before_a_job_starts(capsys, command, option, value, words):
    assert words in error_of(capsys, option, value, command, "t.py")


def test_a_mistake_of_a_file_or_a_variable_stops_no_job_and_opens_no_unguarded_page():
    options = load((), {"RANKWATCH_TOKEN_FILE": "/nope", "RANKWATCH_ON_INCIDENT": "/nope/page"}, ())
    settled = usable.settled(options)
    assert (settled.listen, settled.on_incident) == ("off", "/nope/page")
    assert settled.warnings == (
        "RANKWATCH_TOKEN_FILE: /nope cannot be read (No such file or directory); make it, with a token in it, such as: openssl rand -hex 16;"
        " lost until then: the status page and /metrics: nothing is served without the token",
        "RANKWATCH_ON_INCIDENT: /nope/page does not exist; correct the path; lost until then: every call of the command: nobody is paged",
    )


def test_an_archive_that_is_not_there_and_is_named_by_a_file_is_a_warning_and_stays_one_since_it_may_be_mounted_later():
    settled = usable.settled(load((), {"RANKWATCH_ARCHIVE_DIR": "/nope/pages"}, ()))
    assert settled.archive_dir == "/nope/pages"
    assert settled.warnings[0].startswith("RANKWATCH_ARCHIVE_DIR: /nope/pages is no folder here; make it, mount it, or correct the path; lost until then: ")


def test_a_list_of_nodes_in_a_file_names_its_line_and_gives_way_to_the_store(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("# the big job\nnode0:27480\nnode1:port\n")
    options = usable.settled(load((), {"RANKWATCH_PEERS": str(nodes)}, ()))
    assert options.peers == ""
    assert options.warnings == (
        f"RANKWATCH_PEERS: {nodes}: line 3: 'node1:port' is not accepted; it takes HOST or HOST:PORT with a port from 1 to 65535, such as 10.0.0.5:27480"
        " or [fd00::5]:27480; correct it; lost until then: the list: the launchers look for each other in torchrun's store instead",
    )


def test_a_list_with_a_token_file_is_no_problem(tmp_path):
    (tmp_path / "token").write_text("t")
    (tmp_path / "nodes").write_text("node0:1\nnode1:1\n")
    for given in (str(tmp_path / "nodes"), "node0:1,[fd00::1]:1"):
        options = Options(peers=given, token_file=str(tmp_path / "token"))
        assert list(usable.problems(options)) == []
        assert usable.settled(options).peers == given


@pytest.mark.parametrize("command", ["true", "test -e x", "cat > /dev/null", "X=1 page", "$PAGER x", "{ echo; }", "if true; then :; fi", sys.executable])
def test_a_command_that_the_shell_knows_or_only_the_shell_can_judge_is_no_problem(command):
    assert list(usable.problems(Options(on_incident=command))) == []


def test_an_address_beyond_loopback_needs_no_token_file_since_one_is_drawn(tmp_path):
    assert list(usable.problems(Options(listen="0.0.0.0:9000"))) == []


@pytest.mark.parametrize(
    ("environ", "words", "code"),
    [
        ({}, [], 0),
        ({"RANKWATCH_LISTEN": "x"}, [], 2),
        ({"RANKWATCH_TOKEN_FILE": "/nope"}, [], 2),
        ({"RANKWATCH_LIMIT": "notce_s=1"}, ["--limits"], 2),
    ],
)
def test_config_shows_the_table_and_ends_with_2_for_what_is_ignored_or_will_not_work(monkeypatch, tmp_path, capsys, environ, words, code):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["config", *words]) == code
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) > 10
    assert all(name in shown.err for name in environ)


def test_config_limits_says_value_origin_and_meaning(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--limit", "notice_s=7", "--stuck-after", "90", "config", "--limits"]) == 0
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines() if line}
    assert rows["notice_s"] == "7 (usually 5) command line a wait this long is named (slow); shorter ones are everyday skew"
    assert rows["stuck_min_s"] == "90 (usually 5) stuck-after, command line floor of what stuck_ratio gives"
    assert rows["stuck_ratio"] == "0.2 default of the group's timeout without any progress: stuck"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in 3.11")
def test_the_file_that_config_shows_as_an_example_is_accepted(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("\n".join(EXAMPLE.splitlines()[1:]))
    options = load((), {}, (str(path),), limits=Limits)
    assert options.warnings == ()
    assert (options.stuck_after_s, options.no_probe, options.labels, options.limits) == (90.0, ("ddp",), {"team": "vision"}, {"notice_s": 10.0})


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
    assert ["owner", "ada", "command", "line"] in [line.split() for line in capsys.readouterr().out.splitlines()]
