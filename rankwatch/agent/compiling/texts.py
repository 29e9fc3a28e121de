"""Full texts of guards, graph breaks and failures, which are longer than an event's field: `text` events in parts.

Each text goes out once a process, at most TEXTS of them, TEXT_BYTES each. Parts leave a few at a time, so that they never push the events
of compiles out of the ring (64 places): with each finished compile, with each heartbeat, and at the end.
"""

from __future__ import annotations

import json
from collections import deque

from rankwatch.agent.clock import clock
from rankwatch.agent.compiling.names import digest
from rankwatch.agent.threads import clean
from rankwatch.wire import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.slot import RankSlot

TEXTS = 200
TEXT_BYTES = 8192
PARTS_AT_ONCE = 4
_PARTS_A_SECOND = 8
_PARTS_AT_THE_END = 24
_PARTS_WAITING = 96
_FRAME_BYTES = 200
_PART_BYTES = layout.EVENT_BYTES - layout.RECORD_HEADER.size - _FRAME_BYTES - 260  # of JSON; the rest is the other fields of the event


class Texts:
    """What waits to be sent. Parts are taken by the thread that compiles and by the heartbeat's; deque's methods are whole under the GIL."""

    def __init__(self, slot: RankSlot) -> None:
        self._slot = slot
        self._known: set[str] = set()
        self._waiting: deque[dict[str, Any]] = deque()
        self._second_ns = self._sent = 0
        self.dropped = 0

    def add(self, what: str, text: str, shown: str, compile_id: str, frame: str) -> str:
        """Queue `text` unless `shown`, an event's own field, holds it whole. Gives its key; "" when there is none to be found."""
        text = text.strip()
        if not text or text == shown:
            return ""
        key = digest(text)
        if key in self._known:
            return key
        parts = _parts(text)
        if len(self._known) >= TEXTS or len(self._waiting) + len(parts) > _PARTS_WAITING:
            self.dropped += 1
            return ""
        self._known.add(key)
        head = {"what": what, "compile_id": clean(compile_id, 48), "frame": clean(frame, _FRAME_BYTES), "key": key, "parts": len(parts)}
        self._waiting.extend({**head, "part": number, "text": part} for number, part in enumerate(parts, 1))
        return key

    def send(self, at_the_end: bool = False) -> None:
        """Send some of what waits: a few at a time, and not many a second."""
        if not self._waiting:
            return
        now_ns = clock.now_ns()
        if now_ns - self._second_ns >= 1_000_000_000:
            self._second_ns, self._sent = now_ns, 0
        number = _PARTS_AT_THE_END if at_the_end else min(PARTS_AT_ONCE, _PARTS_A_SECOND - self._sent)
        for _ in range(number):
            try:
                part = self._waiting.popleft()
            except IndexError:
                return
            self._sent += 1
            self._slot.event("text", **part)


def _parts(text: str) -> list[str]:
    """`text`, cut to TEXT_BYTES of UTF-8, in pieces that each fit an event."""
    data = text.encode("utf-8", "replace")
    if len(data) > TEXT_BYTES:
        text = data[: TEXT_BYTES - 3].decode("utf-8", "ignore") + "..."
    parts, at = [], 0
    while at < len(text):
        size = _PART_BYTES
        while len(json.dumps(text[at : at + size], ensure_ascii=False).encode("utf-8", "replace")) > _PART_BYTES and size > 16:
            size = size * 3 // 4
        parts.append(text[at : at + size])
        at += size
    return parts
