"""`rankwatch torchrun ...`: torchrun, supervised. Every argument belongs to torch's own parser."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rankwatch.cli import EXIT_USAGE, fail, say
from rankwatch.config import OPTIONS, Options
from rankwatch.monitor.policy import Limits


def main(argv: Sequence[str], options: Options) -> int:
    """The job's own exit code. A limit that the policy does not know is refused before torch is loaded."""
    try:
        limits = Limits.from_options(options.stuck_after_s, options.limits)
    except ValueError as error:
        return fail(str(error))
    from rankwatch.launcher.torchrun import run

    try:
        return run(list(argv), options, limits, ("rankwatch", *sys.argv[1:]), say)
    except SystemExit as end:
        misplaced = {option.flag for option in OPTIONS} & {word.partition("=")[0] for word in argv}
        if end.code == EXIT_USAGE and misplaced:
            say(f"{', '.join(sorted(misplaced))} is rankwatch's: it goes before the word torchrun")
        raise
