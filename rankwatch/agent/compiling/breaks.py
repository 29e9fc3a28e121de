"""Graph breaks in the user's code: the `graph_break` event, and the newest one in a line.

torch lists those at which it compiled what came before (graph_break_reasons). One inside a loop or a with block is in no list: there the
whole frame is left to Python, and its record of a failed compile tells where.
"""

from __future__ import annotations

import os
import re

from rankwatch.agent.compiling.names import digest, users_line
from rankwatch.agent.sources import is_torch_or_stdlib
from rankwatch.agent.threads import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.compiling.texts import Texts
    from rankwatch.agent.slot import RankSlot

REASON_BYTES = 300
_A_COMPILE = 10
_KNOWN_PLACES = 1024
_ID = re.compile(r"\bgb\d{4}\b", re.ASCII)
_EXPLANATION = re.compile(r"^\s*Explanation: (.+)", re.MULTILINE)
_LOOP_PLACE = re.compile(r"<FrameSummary file (.+?), line (\d+) in (.+?)>")  # torch 2.9 and 2.10 name the place of a break in a loop in the text alone


class Breaks:
    """Counts graph breaks; `count` is the total, `last` the newest as `model.py:31: reason`."""

    def __init__(self, slot: RankSlot, texts: Texts, utils: Any) -> None:
        self._slot, self._texts, self._utils = slot, texts, utils
        self._read = 0
        self._times: dict[str, int] = {}
        self.count = 0
        self.last = ""

    def read(self, frame: str, compile_id: str) -> None:
        """New entries of torch's list that are in the user's code; the list starts again at torch._dynamo.reset().

        The others are breaks inside library frames, and those that DDPOptimizer makes on purpose.
        """
        breaks = getattr(self._utils, "graph_break_reasons", ())
        if len(breaks) == self._read:
            return
        if len(breaks) < self._read:
            self._read = 0
        new = [(found, users_line(found.user_stack, True)) for found in breaks[self._read :] if getattr(found, "graph_break", True)]
        new = [(found, at) for found, at in new if at]
        self._read = len(breaks)
        for found, at in new[:-_A_COMPILE]:
            self._count(at, str(getattr(found, "reason", "")))
        for found, at in new[-_A_COMPILE:]:
            self._add(str(getattr(found, "reason", "")), at, frame, compile_id, skipped=False)

    def skipped(self, metrics: Any, frame: str, compile_id: str) -> None:
        """A frame that Dynamo leaves to Python. If something in the user's code broke it, that is a graph break."""
        reason = getattr(metrics, "fail_reason", None) or ""
        file, line = getattr(metrics, "fail_user_frame_filename", None), getattr(metrics, "fail_user_frame_lineno", None)
        function = frame.partition("@")[0]
        if not file and (place := _LOOP_PLACE.search(reason)):
            file, line, function = place.groups()
        if reason and file and not is_torch_or_stdlib(str(file)):
            self._add(reason, f"{os.path.basename(str(file))}:{line}:{function}", frame, compile_id, skipped=True)

    def _add(self, reason: str, at: str, frame: str, compile_id: str, skipped: bool) -> None:
        shown = clean(_explained(reason), REASON_BYTES)
        times = self._count(at, reason)
        self.last = f"{at.rpartition(':')[0] if at.count(':') > 1 else at}: {shown}"[:200]
        if times & (times - 1) == 0:  # the 1st, 2nd, 4th, ... time at this place
            found = _ID.search(reason)
            key = self._texts.add("graph_break", reason, shown, compile_id, frame)
            self._slot.event(
                "graph_break",
                compile_id=compile_id,
                reason=shown,
                at=at,
                gb=found.group() if found else "",
                frame=frame,
                count=self.count,
                times=times,
                skipped=skipped,
                key=key,
            )

    def _count(self, at: str, reason: str) -> int:
        self.count += 1
        place = digest(f"{at} {reason}")
        if place not in self._times and len(self._times) >= _KNOWN_PLACES:
            self._times.clear()
        times = self._times[place] = self._times.get(place, 0) + 1
        return times


def _explained(reason: str) -> str:
    """torch's first line, which is the same for all breaks of a kind, with its explanation, which names the call: "...: `print` with ...".

    A break inside a loop is told after the one that caused it: the first is the cause.
    """
    first = reason.lstrip().partition("\n")[0].rstrip(" .:")
    found = _EXPLANATION.search(reason)
    return f"{first}: {found.group(1)}" if found else reason
