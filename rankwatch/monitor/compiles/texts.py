"""Full texts of guards, graph breaks and failures, which ranks send in parts: put together, each told once whichever ranks send it. Pure, bounded."""

from __future__ import annotations

from typing import Any

from rankwatch import redact, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_OPEN = 256  # texts of which parts are missing
MAX_TEXTS = 4096
MAX_TEXT_BYTES = 16 << 10
MAX_PARTS = 64
MAX_BYTES = 10 << 20


class Texts:
    """`add` gives a whole text the first time that it is whole; `take` the lines for the file."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, str], dict[int, str]] = {}
        self._known: set[str] = set()
        self._lines: list[dict[str, Any]] = []
        self._bytes = 0
        self.refused = 0

    def add(self, event: Mapping[str, Any], rank: int, wall_at: float) -> dict[str, Any] | None:
        """A `text` event of a rank."""
        key, parts = str(event.get("key") or ""), event.get("parts")
        if not key or key in self._known or not isinstance(parts, int) or not 0 < parts <= MAX_PARTS or not isinstance(event.get("part"), int):
            return None
        if (rank, key) not in self._parts and len(self._parts) >= MAX_OPEN:
            self._parts.pop(next(iter(self._parts)))
        found = self._parts.setdefault((rank, key), {})
        found[event["part"]] = str(event.get("text") or "")
        if len(found) < parts:
            return None
        del self._parts[rank, key]
        text = redact.text(shown.clean("".join(found[number] for number in sorted(found))))[:MAX_TEXT_BYTES]
        if len(self._known) >= MAX_TEXTS or self._bytes + len(text) > MAX_BYTES - 4096:
            self.refused += 1
            return None
        self._known.add(key)
        line = {
            "key": key,
            "what": str(event.get("what") or ""),
            "rank": rank,
            "frame": shown.one_line(event.get("frame") or ""),
            "compile_id": str(event.get("compile_id") or "")[:48],
            "at": round(wall_at, 3),
            "text": text,
        }
        self._bytes += len(text.encode("utf-8", "replace")) + 256
        self._lines.append(line)
        return line

    def take(self) -> list[dict[str, Any]]:
        """What became whole since the call before, a line of texts.jsonl each."""
        lines, self._lines = self._lines, []
        return lines
