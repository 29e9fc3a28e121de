"""`rankwatch config`: every option, its value and where the value comes from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rankwatch.config import Options, config_files, describe


def main(argv: Sequence[str], options: Options) -> int:
    """Print the table; 0."""
    argparse.ArgumentParser(
        prog="rankwatch config",
        description="Show every option, its value and where the value comes from. Options before the word config take part.",
        epilog="Files, weakest first: " + ", ".join(config_files()) + ", $RANKWATCH_CONFIG; then RANKWATCH_<NAME>; then the command line.",
    ).parse_args(argv)
    rows = describe(options)
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, origin in rows:
        print(f"{name:{names}}  {value:{values}}  {origin}")
    return 0
