"""Live compile state of each thread: the `thread_N` records. Shared by the compile probe (phases) and the ddp probe (splits).

Written in the hook itself, on the thread that compiles: a rank that hangs with the GIL held still shows what it was in.
"""

from __future__ import annotations

import sys
import threading
from threading import get_ident
from time import monotonic_ns

from rankwatch.wire import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

    from rankwatch.agent.slot import Cursor, RankSlot

FRAME_BYTES, REASON_BYTES, DETAIL_BYTES, PHASE_BYTES, ID_BYTES = 240, 480, 240, 200, 48


def clean(text: str, limit: int) -> str:
    """First line of `text` without NUL, cut to `limit` bytes of UTF-8."""
    line = text.lstrip().split("\n", 1)[0].replace("\0", " ").strip()
    data = line.encode("utf-8", "replace")
    return line if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."


class LiveThread:
    """What one thread compiles now: (name, start) of its regions from the outermost to the innermost, and the texts of the root.

    A KeyboardInterrupt may fall between any two lines that work on this. So a region is one list item, and the thread keeps its record.
    """

    __slots__ = (
        "code",
        "compile_id",
        "cursor",
        "detail",
        "frame",
        "is_main",
        "kind",
        "native_id",
        "reason",
        "reason_looks",
        "reason_place",
        "regions",
        "shown",
        "split",
        "splits",
        "texts",
    )

    def __init__(self) -> None:
        self.native_id = threading.get_native_id()
        self.is_main = get_ident() == threading.main_thread().ident
        self.cursor: Cursor | None = None
        self.regions: list[tuple[str, int]] = []
        self.shown = False  # the record is not empty
        self.clear()

    def clear(self) -> None:
        """Forget the compile that has ended."""
        self.regions.clear()
        self.compile_id = self.kind = self.frame = self.reason = self.detail = ""
        self.split = self.splits = 0
        self.code: CodeType | None = None
        self.reason_place = 0
        self.reason_looks = 0
        self.texts: dict[str, bytes] = {}

    def retext(self) -> None:
        """One of the texts has changed: what was encoded is stale."""
        self.texts = {}

    def encode(self, name: str) -> bytes:
        """layout.THREAD_TEXTS while region `name` is the innermost one."""
        reason, detail = clean(self.reason, REASON_BYTES), clean(self.detail, DETAIL_BYTES)
        fields = (clean(self.compile_id, ID_BYTES), self.kind, clean(name, PHASE_BYTES), clean(self.frame, FRAME_BYTES), reason, detail)
        text = self.texts[name] = "\0".join(fields).encode("utf-8", "replace")
        return text


class LiveThreads:
    """All threads that compile. At most layout.THREADS of them at once have a record; the others are followed without one."""

    def __init__(self, slot: RankSlot) -> None:
        self._slot = slot
        self._by_ident: dict[int, LiveThread] = {}
        self._free = [slot.cursors[f"thread_{n}"] for n in reversed(range(layout.THREADS))]

    def here(self) -> LiveThread:
        """The calling thread's state."""
        live = self._by_ident.get(get_ident())
        return live if live is not None else self._add()

    def show(self, live: LiveThread, now_ns: int) -> None:
        """Write `live` as it is now; its innermost region is the phase. On the path of every phase event: 2 us."""
        cursor = live.cursor
        if cursor is not None:
            regions = live.regions
            name, phase_ns = regions[-1]
            text = live.texts.get(name) or live.encode(name)
            live.shown = True
            self._slot.put_thread(cursor, now_ns, live.native_id, regions[0][1], phase_ns, len(regions), live.split, live.splits, text)

    def opens(self, live: LiveThread) -> None:
        """The thread starts a compile: it needs a record, which it then keeps."""
        if live.cursor is None:
            if not self._free:
                self._reclaim()
            if self._free:
                live.cursor = self._free.pop()

    def closes(self, live: LiveThread) -> None:
        """The thread's outermost region has ended."""
        if live.cursor is not None:
            self._slot.put(live.cursor, b"", monotonic_ns())
            live.shown = False
        live.clear()

    def sweep(self) -> None:
        """Empty records of threads that compile no more: a KeyboardInterrupt inside a hook may have come before it was done. Any thread."""
        for live in list(self._by_ident.values()):
            if live.shown and not live.regions and live.cursor is not None:
                self._slot.put(live.cursor, b"", monotonic_ns())
                live.shown = False
                if live.regions:  # it has begun to compile meanwhile
                    self.show(live, monotonic_ns())

    def split(self, number: int, of: int) -> None:
        """DDPOptimizer compiles split `number` (from 1) of `of` on the calling thread; 0 of 0: it is done."""
        live = self.here()
        live.split, live.splits = min(number, 65535), min(of, 65535)
        if live.regions:
            self.show(live, monotonic_ns())

    def forget(self) -> None:
        """Drop all state (fork child)."""
        for live in self._by_ident.values():
            if live.cursor is not None:
                self._free.append(live.cursor)
        self._by_ident.clear()

    def _add(self) -> LiveThread:
        if len(self._by_ident) >= 4 * layout.THREADS:
            self._reclaim()
        live = self._by_ident[get_ident()] = LiveThread()
        return live

    def _reclaim(self) -> None:
        """Take back the records of threads that have ended, also in the middle of a compile; without any, those of idle threads."""
        alive = sys._current_frames()
        for ident in [ident for ident in self._by_ident if ident not in alive]:
            self._take_back(self._by_ident.pop(ident))
        if not self._free:
            for live in list(self._by_ident.values()):
                if not live.regions:
                    self._take_back(live)

    def _take_back(self, live: LiveThread) -> None:
        self.closes(live)
        cursor, live.cursor = live.cursor, None
        if cursor is not None:
            self._free.append(cursor)
