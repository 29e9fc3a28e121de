"""`rankwatch top`: a running job, live: verdict, map of all ranks, compiles with the time that is left, late ranks, incidents."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rankwatch.cli import fail, say
from rankwatch.commands.live import picture, source
from rankwatch.commands.live.styled import Line
from rankwatch.commands.status import EXIT_NOTHING_FOUND, verdict_code
from rankwatch.config import RUNS, Options
from rankwatch.launcher.rundir import LATEST

EVERY_S = 1.0
GIVE_UP_S = 30.0
"""A job that has not answered for so long is not waited for any more."""


def main(argv: Sequence[str], options: Options) -> int:
    """0: shown, the job is fine or was left by a key; 2: wrong usage; 3: no such job, or it has failed or needs a look when it ends."""
    parser = argparse.ArgumentParser(
        prog="rankwatch top",
        description="A running job, live: the verdict, what every rank does, compiles with the time that is left, late ranks, incidents. q quits.",
        epilog="On a terminal this is a full screen (pip install 'rankwatch[top]'; NO_COLOR is honoured). Into a pipe, or without rich, a plain table "
        "each --every seconds, --count times.\nExit codes: 0 shown, 2 wrong usage, 3 no such job, or it ended badly.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", nargs="?", metavar="RUN_DIR|URL", help=f"run directory or status address (default: the job that runs here, else {RUNS}/{LATEST})"
    )
    parser.add_argument("--every", type=_seconds, default=EVERY_S, metavar="SECONDS", help="between pictures (default: 1)")
    parser.add_argument("--count", type=_count, metavar="N", help="plain tables: so many, then end (default: until the job has ended)")
    parser.add_argument("--plain", action="store_true", help="plain tables on a terminal too")
    arguments = parser.parse_args(argv)
    try:
        watched = Watched(source.find(arguments.source, options))
    except source.Misused as error:
        return fail(str(error))
    except source.Nothing as error:
        say(str(error))
        return EXIT_NOTHING_FOUND
    if not arguments.plain and arguments.count is None and sys.stdout.isatty():
        drawn = _screen(watched, arguments.every)
        if drawn is not None:
            return drawn
    return _tables(watched, arguments.every, arguments.count)


class Watched:
    """One job over time: the newest picture, and since when it has not answered."""

    def __init__(self, found: source.Source) -> None:
        self.picture: source.Picture | None = None
        self._source = found
        self._lost_at: float | None = None
        self._lost = ""

    def take(self, now: float) -> bool:
        """Fetch the next picture; False when no other one will come: the job is over, or has not answered for GIVE_UP_S."""
        try:
            self.picture = self._source.take()
        except source.Lost as error:
            self._lost_at = now if self._lost_at is None else self._lost_at
            self._lost = str(error)
            return not error.gone and now - self._lost_at < GIVE_UP_S
        self._lost_at, self._lost = None, ""
        return not self.picture.over

    @property
    def note(self) -> str:
        """Why the picture is not the newest, "" where it is."""
        return f"{self._source.name}: {self._lost}" if self._lost else ""

    def draw(self, width: int, height: int | None, note: str = "") -> list[Line]:
        """The newest picture. ValueError says what cannot be drawn."""
        state: Mapping[str, Any] = self.picture.state if self.picture is not None else {}
        compiles: Mapping[str, Any] = self.picture.compiles if self.picture is not None else {}
        try:
            return picture.draw(state, compiles, width, height, self.note or note)
        except Exception as error:  # another program's document, or one of a later release
            raise ValueError(f"this state cannot be drawn: {type(error).__name__}: {error}; rankwatch status --json shows it as it is") from None

    @property
    def code(self) -> int:
        """The exit code for the newest picture; that of nothing found where it was lost."""
        return EXIT_NOTHING_FOUND if self.picture is None or self._lost else verdict_code(self.picture.state)


def _screen(watched: Watched, every_s: float) -> int | None:
    """The live screen; None where there is none: no rich, or a terminal that cannot be drawn on."""
    try:
        from rankwatch.commands.live import screen
    except ImportError:
        say("plain tables: the live screen needs rich; pip install 'rankwatch[top]'")
        return None
    if not screen.usable():
        return None
    try:
        left = screen.show(lambda width, height: watched.draw(width, height, "q quits"), lambda: watched.take(time.monotonic()), every_s)
    except ValueError as error:
        return fail(str(error))
    if watched.picture is not None:
        sys.stdout.write(picture.plain(watched.draw(shutil.get_terminal_size((picture.PLAIN_WIDTH, 24)).columns, None)))
    elif watched.note:
        say(watched.note)
    return 0 if left and watched.picture is not None else watched.code


def _tables(watched: Watched, every_s: float, count: int | None) -> int:
    """Plain tables on stdout, a blank line between them."""
    width = shutil.get_terminal_size((picture.PLAIN_WIDTH, 24)).columns
    number = 0
    try:
        while True:
            more = watched.take(time.monotonic())
            number += 1
            if watched.picture is None:
                say(watched.note)
            else:
                sys.stdout.write(("\n" if number > 1 else "") + picture.plain(watched.draw(width, None)))
                sys.stdout.flush()
            if not more or (count is not None and number >= count):
                return watched.code
            time.sleep(every_s)
    except ValueError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("from 0.1 to 3600 seconds")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return value
