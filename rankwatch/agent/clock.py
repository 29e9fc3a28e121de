"""The clocks as they were when the agent was loaded: a job may set or freeze those of the module time (freezegun, a test double).

The heartbeat would stand still then, which looks like a held GIL. They are attributes of an object, not of a module: such tools look
through all modules for the functions that they replace.
"""

from __future__ import annotations

import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """now_ns: CLOCK_MONOTONIC; wall_ns: unix time. Both are C functions: a call costs what that of the module's costs."""

    __slots__ = ("now_ns", "wall_ns")
    now_ns: Callable[[], int]
    wall_ns: Callable[[], int]

    def __init__(self) -> None:
        self.now_ns, self.wall_ns = time.monotonic_ns, time.time_ns


clock = Clock()
