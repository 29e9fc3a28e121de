"""The command line: `rankwatch [options] COMMAND ...`. Options come before the command; what follows belongs to the command alone.

So nothing can collide with torchrun's flags. No command is imported before it runs: `--help` and `--version` load no torch.
"""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

from rankwatch import __version__, stderr
from rankwatch.config import OPTIONS, ConfigError, load, nearest
from rankwatch.monitor.policy import Limits
from rankwatch.shown import TAG, clean

COMMANDS = {
    "torchrun": "run torchrun, supervised; every torchrun argument follows",
    "demo": "a job of four ranks on this machine in which one recompiles alone and one goes missing",
    "doctor": "what works here, and what to do about what does not; --peers: whether the nodes of a job reach each other",
    "report": "show the incidents of a run",
    "top": "a running job, live: verdict, map of all ranks, compiles with the time that is left, late ranks",
    "status": "the same once, as a table or as JSON; the exit code says whether somebody should look",
    "stacks": "the ranks' Python stacks, taken now from a job that runs on this machine, grouped by equal stack",
    "open": "the link to a running job's status page, and the ssh line that forwards it",
    "ls": "list the runs of a directory, and yours that run on this machine",
    "ablate": "run the same command once per torch.compile backend, and name the layer or the frame that is to blame",
    "compile": "what every rank compiled, where they differ, what to change; of a running job or a run",
    "metrics": "every metric of /metrics: name, type, unit, labels, level, meaning, source; as text, Markdown or JSON",
    "rules": "alert rules for Prometheus, as a rule file or a Kubernetes PrometheusRule",
    "dashboards": "Grafana dashboards as files: Job, Rank, Fleet, Compile",
    "targets": "the scrape targets of all jobs of a --sd-dir, for Prometheus: printed, or served as http_sd",
    "config": "show every option, its value and where it comes from",
}
"""name -> help. A command is the module rankwatch.commands.<name> with `main(argv, options) -> int`; one without its module is not offered.

FLAGS of such a module: its own flags that rankwatch's options have too.
"""

STARTS_JOBS = ("torchrun", "demo", "ablate")
EXIT_USAGE = 2
_FLAGS = ("-h", "--help", "--version")


class UsageError(Exception):
    """The user's mistake on the command line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. torchrun's own exceptions and SystemExit pass through unchanged."""
    stderr.current()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        before, command, rest = split(words)
        if any(flag in before for flag in _FLAGS):
            return _printing(lambda: _tell([flag for flag in _FLAGS if flag in before]))
        if command is None and (took := _swallowed(before)):
            raise UsageError(took)
        if command is None:
            stderr.current().offer(_parser().format_help())
            return EXIT_USAGE
        if command not in available():
            took = _swallowed(before)
            raise UsageError(took or f"unknown command {command!r}{nearest(command, available())}; rankwatch --help lists the commands")
        options = load(_given(before), limits=Limits)
        if command in STARTS_JOBS:
            from rankwatch.launcher.usable import settled

            options = settled(options)
    except (UsageError, ConfigError) as error:
        return fail(str(error))
    for warning in options.warnings:
        say(warning)
    module = import_module(f"rankwatch.commands.{command}")
    run = module.main
    try:
        return int(run(rest, options)) if command == "torchrun" else _printing(lambda: int(run(rest, options)))
    except SystemExit as end:
        misplaced = {option.flag for option in OPTIONS} & {word.partition("=")[0] for word in rest} - set(getattr(module, "FLAGS", ()))
        if end.code == EXIT_USAGE and misplaced:
            say(f"{', '.join(sorted(misplaced))} is rankwatch's: it goes before the word {command}")
        raise


def split(words: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """(words of our options, command or None, words of the command). UsageError for an option that does not exist or lacks its value."""
    flags = {option.flag for option in OPTIONS}
    switches = {option.flag for option in OPTIONS if option.shape == "switch"}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, _ = words[at].partition("=")
        if name in _FLAGS and not equals:
            at += 1
        elif name not in flags:
            unknown = f"unknown option {name}{nearest(name, (*sorted(flags), *_FLAGS))}; torchrun's own flags go after the word torchrun"
            raise UsageError(_swallowed(words[:at]) or unknown)
        elif name in switches and not equals:
            at += 1
        elif not equals and at + 1 >= len(words):
            raise UsageError(f"{name} needs a value; rankwatch --help shows which")
        else:
            at += 1 if equals else 2
    return list(words[:at]), words[at] if at < len(words) else None, list(words[at + 1 :])


def available() -> tuple[str, ...]:
    """The commands whose module is installed, in the order of COMMANDS."""
    return tuple(name for name in COMMANDS if find_spec(f"rankwatch.commands.{name}") is not None)


def say(text: str) -> None:
    """One line on stderr after the fixed tag, control characters as escapes; a stderr that is closed or takes nothing is nobody's news."""
    line = clean(text).replace("\n", "\\n")
    stderr.current().offer(f"{TAG} {line}\n")


def fail(text: str) -> int:
    """Say a usage error; its exit code."""
    say(f"error: {text}")
    return EXIT_USAGE


def _tell(flags: Sequence[str]) -> int:
    _parser().parse_args(flags)  # prints and exits
    return 0


def _printing(command: Callable[[], int]) -> int:
    """The exit code of what prints on stdout. A reader that has seen enough, as in `| head`, is no failure."""
    code = 0
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name or a summary may hold what a C locale's encoding has not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            code = command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more
    return code


def _reader_is_gone() -> bool:
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return False


def _parser() -> argparse.ArgumentParser:
    names = available()
    width = max(map(len, names), default=0)
    parser = argparse.ArgumentParser(
        prog="rankwatch",
        usage="rankwatch [options] COMMAND ...\n       rankwatch [options] torchrun <torchrun arguments>",
        description="torchrun with eyes: names the rank that holds a distributed PyTorch job up, and says why.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {COMMANDS[name]}" for name in names)
        + "\n\nOptions may also stand in /etc/rankwatch/config.toml, ~/.config/rankwatch/config.toml, ./rankwatch.toml, the file named by"
        + "\nRANKWATCH_CONFIG, and in variables such as RANKWATCH_RUN_DIR; a mistake there is said and ignored. `rankwatch config` shows what holds,"
        + "\n`rankwatch config --help` a file."
        + "\nExit codes: the job's own for torchrun; otherwise 0 fine, 2 wrong usage, 3 degraded or nothing found, 4 not enough.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rankwatch {__version__}")
    for option in OPTIONS:
        text = option.help.replace("%", "%%")
        if option.shape == "switch":
            parser.add_argument(option.flag, action="store_true", help=text)
        else:
            parser.add_argument(option.flag, metavar=option.metavar, help=text)
    return parser


def _given(words: Sequence[str]) -> list[tuple[str, str]]:
    """(option name, raw value) in order; config.load reads the values, so that flags, files and variables are refused in the same words."""
    given, rest = [], iter(words)
    switches = {option.flag for option in OPTIONS if option.shape == "switch"}
    for word in rest:
        name, equals, value = word.partition("=")
        given.append((name.removeprefix("--"), value if equals else "true" if name in switches else next(rest)))
    return given


def _swallowed(before: Sequence[str]) -> str:
    """Names the likely slip in `--run-dir torchrun train.py`: an option without its value took the command. "" where there is none."""
    if len(before) >= 2 and before[-1] in COMMANDS and before[-2].startswith("-"):
        return f"{before[-2]} needs a value: it took the word {before[-1]!r} as one; rankwatch --help shows which"
    return ""
