"""The exception that the main thread handles just now, as seen by another thread.

An error handler or a `finally` that waits for its peers prints nothing: a traceback is printed when the exception has passed through the
top. Until then it is in no log, and the rank only seems to have taken another branch. Python keeps what a thread handles at hand
(sys._current_exceptions, from Python 3.10 on; a tuple up to 3.11), so that nothing need be traced.
"""

from __future__ import annotations

import sys

from rankwatch.agent.clock import clock
from rankwatch.agent.crash import named, plain_message, where

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MESSAGE_CHARACTERS = 200
_CONTROL_FLOW = (StopIteration, StopAsyncIteration, GeneratorExit)


class Handling:
    """What thread `ident` handles at each look. One that is the same at two looks is told; shorter ones are how Python programs work."""

    def __init__(self, ident: int) -> None:
        self._ident = ident
        self._read: Callable[[], Any] | None = getattr(sys, "_current_exceptions", None)
        self._id = 0
        self._since_wall_ns = 0
        self._told: dict[str, Any] | None = None

    def look(self) -> dict[str, Any] | None:
        """{type, message, where, wall_ns: first seen}, or None. Keeps no reference to the exception, runs no code of its class."""
        found = self._read().get(self._ident) if self._read is not None else None
        error = found[1] if isinstance(found, tuple) else found
        kind = type(error)
        if error is None or not issubclass(kind, BaseException) or issubclass(kind, _CONTROL_FLOW):  # isinstance may ask the object for its __class__
            self._id, self._told = 0, None
        elif id(error) != self._id:
            self._id, self._since_wall_ns, self._told = id(error), clock.wall_ns(), None
        elif self._told is None:
            self._told = {
                "type": named(error),
                "message": plain_message(error, MESSAGE_CHARACTERS),
                "where": where(error.__traceback__),
                "wall_ns": self._since_wall_ns,
            }
        return self._told
