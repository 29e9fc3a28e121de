"""`rankwatch config`: every option, its value and where the value comes from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields

from rankwatch.cli import fail
from rankwatch.config import Options, config_files, describe
from rankwatch.monitor.policy import Limits


def main(argv: Sequence[str], options: Options) -> int:
    """Print the table; 0."""
    parser = argparse.ArgumentParser(
        prog="rankwatch config",
        description="Show every option, its value and where the value comes from. Options before the word config take part.",
        epilog="Files, weakest first: "
        + ", ".join(config_files())
        + ", $RANKWATCH_CONFIG; then RANKWATCH_<NAME>; then the command line. Exit codes: 0 shown, 2 wrong usage.",
    )
    parser.add_argument("--limits", action="store_true", help="show the numbers of the policy instead: each can be set with --limit NAME=VALUE")
    if parser.parse_args(argv).limits:
        return _limits(options)
    rows = describe(options)
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, origin in rows:
        print(f"{name:{names}}  {value:{values}}  {origin}")
    return 0


def _limits(options: Options) -> int:
    try:
        limits = Limits.from_options(options.stuck_after_s, options.limits)
    except ValueError as error:
        return fail(str(error))
    default = Limits()
    width = max(len(field.name) for field in fields(Limits))
    for field in fields(Limits):
        value, usual = getattr(limits, field.name), getattr(default, field.name)
        print(f"{field.name:{width}}  {value:<8g}{'' if value == usual else f'  default {usual:g}'}".rstrip())
    print("\n_s: seconds, _ratio: a share, _polls: looks. What each decides stands in rankwatch/monitor/policy.py.")
    return 0
