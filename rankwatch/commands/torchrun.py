"""`rankwatch torchrun ...`: torchrun, supervised. Every argument belongs to torch's own parser."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rankwatch.cli import fail, say
from rankwatch.config import Options, hidden
from rankwatch.monitor.policy import Limits


def main(argv: Sequence[str], options: Options) -> int:
    """The job's own exit code."""
    try:
        limits = Limits.from_options(options.stuck_after_s, options.limits)
    except ValueError as error:
        return fail(str(error))
    from rankwatch.launcher import leaving

    leaving.watch()
    from rankwatch.launcher.torchrun import run

    try:
        code = run(list(argv), options, limits, ("rankwatch", *hidden.words(sys.argv[1:])), say)
        leaving.returns(code)
        return code
    except SystemExit as end:
        leaving.returns(end.code)
        raise
    finally:
        if argv and argv[0] in ("-h", "--help"):
            say("rankwatch's own options go before the word torchrun: rankwatch --help")
