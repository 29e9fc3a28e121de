"""`rankwatch config`: every option, its value and where the value comes from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from rankwatch.cli import EXIT_USAGE, fail, say
from rankwatch.config import DEFAULT, Options, config_files, describe
from rankwatch.launcher.usable import problems
from rankwatch.monitor.policy import Limits

EXAMPLE = """\
a configuration file (TOML; a key is an option without its dashes):
  stuck-after = "90s"
  on-incident = "/opt/page.sh"
  no-probe = ["ddp"]
  [label]
  team = "vision"
  [limit]
  notice_s = 10
"""
EPILOG = """\
{example}
Files, weakest first: {files}, $RANKWATCH_CONFIG; then RANKWATCH_<NAME>; then the command line. What is wrong in a file or a
variable is said and ignored, so that it stops no job; on the command line it is an error.
Exit codes: 0 shown, 2 wrong usage, or something is ignored or will not work.
"""
STUCK_AFTER = ("stuck_min_s", "stuck_max_s", "first_stuck_min_s", "pause_min_s")  # what --stuck-after sets


def main(argv: Sequence[str], options: Options) -> int:
    """Print the table. 0, or 2 when a file or a variable holds a mistake (cli.main has said it) or an option will not work here."""
    parser = argparse.ArgumentParser(
        prog="rankwatch config",
        description="Show every option, its value and where the value comes from. Options before the word config take part.",
        epilog=EPILOG.format(example=EXAMPLE, files=", ".join(config_files())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--limits", action="store_true", help="show the numbers of the policy instead: each can be set with --limit NAME=VALUE")
    arguments = parser.parse_args(argv)
    code = EXIT_USAGE if options.warnings else 0
    for problem in problems(options):
        say(f"{problem}; lost until then: {problem.lost}")
        code = EXIT_USAGE
    if not arguments.limits:
        _show(describe(options))
        return code
    try:
        _show(limit_rows(options))
    except ValueError as error:
        return fail(str(error))
    print("\n_s: seconds, _ratio: a share, _polls: looks.")
    return code


def limit_rows(options: Options) -> list[tuple[str, str, str, str]]:
    """(name, value, where it comes from, what it decides) of every number of the policy. ValueError for limits that contradict each other."""
    limits, default, meanings = Limits.from_options(options.stuck_after_s, options.limits), Limits(), Limits.meanings()
    rows = []
    for field in fields(Limits):
        value, usual = getattr(limits, field.name), getattr(default, field.name)
        by_stuck_after = field.name in STUCK_AFTER and options.stuck_after_s is not None
        origin = options.origins.get(f"limits.{field.name}") or (f"stuck-after, {options.origins.get('stuck_after_s')}" if by_stuck_after else DEFAULT)
        rows.append((field.name, f"{value:g}" + ("" if value == usual else f" (usually {usual:g})"), origin, meanings[field.name]))
    return rows


def _show(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
