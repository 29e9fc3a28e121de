"""What a main thread waits for that waits for another thread, by the library's frames above the job's code."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Literal

from rankwatch.model import Frame
from rankwatch.monitor.diagnose import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_ENDS = re.compile(  # file and function of what returns once a thread has done its work
    r"(^|/)(threading\.py:(join|_shutdown|_wait_for_tstate_lock)|queue\.py:join|(concurrent/futures|asyncio|multiprocessing/(pool|dummy))/\w+\.py:\w+|selectors\.py:\w+)$"
    r"|(site|dist)-packages/"
)
_QUEUE = re.compile(r"(^|/)queue\.py:(get|put)$")


def waits_for(main: Sequence[Frame]) -> Literal["", "work", "queue", "signal"]:
    """How it waits. "work": for the end of a thread, a pool's result, an event loop; "queue": for what a thread puts or takes.

    "signal": for a lock, an event or a condition, which do not tell whose; "": for no thread, as far as its Python frames tell.
    """
    if frames.waits_for_thread(main) is None:
        return ""
    above = [f"{frame.file}:{frames.function(frame)}" for frame in takewhile(lambda frame: not frames.is_user(frame), main)]
    return "work" if any(map(_ENDS.search, above)) else "queue" if any(map(_QUEUE.search, above)) else "signal"
