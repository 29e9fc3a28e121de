"""The live screen of `rankwatch top`: full screen by rich, keys read without an echo, everything put back at the end."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rankwatch.commands.live.styled import Line

STYLES = {"bad": "red", "warn": "yellow", "good": "green", "dim": "dim", "bold": "bold"}
LOOK_S = 0.25
"""How soon a key or a new size of the window is seen."""
Draw = Callable[[int, int], Sequence[Line]]


def console() -> Console:
    """The terminal as rich sees it; honours NO_COLOR, COLUMNS, TERM."""
    return Console(highlight=False, markup=False, emoji=False)


def usable() -> bool:
    """Whether stdout and stdin are a terminal that can be drawn on."""
    found = console()
    return found.is_terminal and not found.is_dumb_terminal and sys.stdin.isatty() and sys.stdout.isatty()


def show(draw: Draw, take: Callable[[], bool], every_s: float) -> bool:
    """Draw until a key says enough (True) or `take` says that nothing more will come (False). Ctrl-C ends it too.

    take: fetches the next picture; may block for some seconds. draw: the newest one at (width, height).
    """
    found = console()
    with _keys() as pressed, Live(console=found, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        due_at, size = 0.0, (0, 0)
        more = True
        try:
            while True:
                now = time.monotonic()
                fresh = now >= due_at
                if fresh:
                    more = take()
                    due_at = time.monotonic() + every_s
                width, height = found.size
                if fresh or (width, height) != size:
                    size = (width, height)
                    live.update(_text(draw(width, height)), refresh=True)
                if not more:
                    return False
                if pressed(LOOK_S):
                    return True
        except KeyboardInterrupt:
            return True


def _text(lines: Sequence[Line]) -> Text:
    text = Text(no_wrap=True, overflow="crop", end="")
    for place, parts in enumerate(lines):
        if place:
            text.append("\n")
        for words, style in parts:
            text.append(words, style=" ".join(STYLES[name] for name in style.split()))
    return text


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Gives a function that waits so long for a key and tells whether it was one that ends the screen: q, Q or Escape."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(wait_s: float) -> bool:
        ready, _, _ = select.select([fd], [], [], wait_s)
        if not ready:
            return False
        got = os.read(fd, 64)
        return not got or got[:1] in (b"q", b"Q") or got == b"\x1b"

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
