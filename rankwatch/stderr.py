"""Our lines on the launcher's stderr, written so that a pipe nobody reads or a stopped terminal can hold up neither the job nor its end.

Not through sys.stderr: a thread that waits in its write holds its lock, and the interpreter, which flushes it at exit, would wait for ever.
Whole lines go to a descriptor of our own, only when the kernel says that it takes them; what does not go out in time is dropped and counted.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from typing import TextIO

PATIENCE_S = 60.0
"""How long a line waits in a thread of its own: a terminal that was stopped with Ctrl-S may go on."""
OFFER_S = 0.1
"""The same in the launcher's main thread."""
_ATOMIC_BYTES = select.PIPE_BUF


class Stderr:
    """Where lines go: a descriptor; a stream that somebody has put in stderr's place; or, when stderr is closed, nowhere.

    `write` and `flush` are for a thread that may wait, `offer` for the main thread. `dropped`: texts that did not go out whole.
    """

    def __init__(self, fd: int | None, stream: TextIO | None = None) -> None:
        self.stream = stream
        self.dropped = 0
        self._fd = fd
        self._torn = False  # the last line has lost its end
        self._stuck = False

    def write(self, text: str) -> int:
        """All of `text` within PATIENCE_S; BlockingIOError or another OSError, ValueError of a closed stream, when it does not go out."""
        if not self._write(text, PATIENCE_S):
            raise BlockingIOError(0, "stderr takes nothing")
        return len(text)

    def flush(self) -> None:
        """What is written is out already, except in somebody else's stream."""
        if self._fd is None and self.stream is not None:
            self.stream.flush()

    def offer(self, text: str) -> bool:
        """Whether `text` went out; waits OFFER_S, once: after a text that was dropped the next ones go at once or not at all."""
        try:
            return self._write(text, 0.0 if self._stuck else OFFER_S)
        except (OSError, ValueError):
            self.dropped += 1
            return False

    def _write(self, text: str, wait_s: float) -> bool:
        if self._fd is None:
            if self.stream is not None:
                self.stream.write(text)
                self.stream.flush()
            return True
        until = time.monotonic() + wait_s
        data = text.encode("utf-8", "backslashreplace")
        self._stuck = not all(self._put(self._fd, piece, until) for piece in _pieces(b"\n" + data if self._torn else data))
        self.dropped += self._stuck
        return not self._stuck

    def _put(self, fd: int, piece: bytes, until: float) -> bool:
        left = memoryview(piece)
        blocking = os.get_blocking(fd)
        while left:
            if blocking and not _takes(fd, until - time.monotonic()):
                break
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                if not _takes(fd, until - time.monotonic()) or time.monotonic() >= until:
                    break
                time.sleep(0.01)  # another writer may be faster again
        if len(left) < len(piece):
            self._torn = piece[len(piece) - len(left) - 1] != ord("\n")
        return not left


def current() -> Stderr:
    """The one for sys.stderr as it is now. The first call, at the start of the command, takes the descriptor."""
    global _current
    if _current is None or _current.stream is not sys.stderr:
        _current = _open(sys.stderr)
    return _current


_current: Stderr | None = None


def _open(stream: TextIO | None) -> Stderr:
    """stream: None means that descriptor 2 was closed when the interpreter started; by now it may be any file."""
    if stream is None:
        return Stderr(None)
    try:
        if stream is not sys.__stderr__ and stream.fileno() != 2:
            return Stderr(None, stream)
        return Stderr(_own_descriptor(stream.fileno()), stream)
    except (OSError, ValueError, AttributeError):
        return Stderr(None, stream if stream is not sys.__stderr__ else None)


def _own_descriptor(fd: int) -> int:
    """A pipe or terminal opened once more, so that ours alone does not block; else, or where that is refused, a duplicate."""
    if stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd):
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:  # a terminal of another user after su, a pipe without a reader
            pass
    return os.dup(fd)


def _takes(fd: int, wait_s: float) -> bool:
    """Whether a write of up to PIPE_BUF bytes would not wait. True also when it would fail: the write says why."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(max(0.0, wait_s) * 1000))


def _pieces(data: bytes) -> list[bytes]:
    """`data` in pieces of at most PIPE_BUF bytes, which a pipe takes whole, cut between lines where that is possible."""
    pieces: list[bytes] = []
    while len(data) > _ATOMIC_BYTES:
        end = data.rfind(b"\n", 0, _ATOMIC_BYTES) + 1 or _ATOMIC_BYTES
        pieces.append(data[:end])
        data = data[end:]
    return [*pieces, data] if data else pieces
