"""Live compile state of each thread: the `thread_N` records. Shared by the compile probe (phases) and the ddp probe (splits).

Written in the hook itself, on the thread that compiles: a rank that hangs with the GIL held still shows what it was in.
"""

from __future__ import annotations

import sys
import threading
from threading import get_ident

from rankwatch.agent.clock import clock
from rankwatch.wire import layout
from rankwatch.wire.phases import PHASES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType

    from rankwatch.agent.slot import Cursor, RankSlot

LIBRARY = "library frame"
"""`detail` while a frame of torch's or of the standard library is looked at; most give no graph, those that do lose it."""

FRAME_BYTES, REASON_BYTES, DETAIL_BYTES, PHASE_BYTES, ID_BYTES = 240, 480, 240, 200, 48
_KNOWN_NAMES = 2048

_names: dict[str, bytes] = {}  # raw region name -> as it is shown


def clean(text: str, limit: int) -> str:
    """First line of `text` without NUL, cut to `limit` bytes of UTF-8."""
    if len(text) <= limit and text.isascii() and text.isprintable():
        return text.strip()
    line = text.lstrip().split("\n", 1)[0].replace("\0", " ").strip()
    data = line.encode("utf-8", "replace")
    return line if len(data) <= limit else data[: limit - 3].decode("utf-8", "ignore") + "..."


def shown_name(name: str) -> bytes:
    """A region's name as `thread_N` records show it; found in _names from then on."""
    if len(_names) >= _KNOWN_NAMES:
        _names.clear()
    shown = _names[name] = clean(name, PHASE_BYTES).encode("utf-8", "replace")
    return shown


class LiveThread:
    """What one thread compiles now: (name, start, place in PHASES) of its regions from the outermost to the innermost, and the texts of the root.

    own_ns: time of this root so far in each of PHASES, without the regions inside; since_ns: up to when. cache, bypass_reason, kernels and
    one_graph are the root's until the next one begins; ended: (compile id, start, own_ns) of the root before, until it is asked for.
    A KeyboardInterrupt may fall between any two lines that work on this. So a region is one list item, and the thread keeps its record.
    """

    __slots__ = (
        "around",
        "bypass_reason",
        "cache",
        "choices",
        "code",
        "compile_id",
        "cursor",
        "detail",
        "ended",
        "frame",
        "is_main",
        "kernels",
        "kind",
        "native_id",
        "one_graph",
        "own_ns",
        "reason",
        "reason_looks",
        "reason_place",
        "regions",
        "shown",
        "since_ns",
        "split",
        "splits",
        "started_ns",
        "texts",
    )

    def __init__(self) -> None:
        self.is_main = get_ident() == threading.main_thread().ident
        self.cursor: Cursor | None = None
        self.regions: list[tuple[str, int, int]] = []
        self.own_ns = [0] * len(PHASES)
        self.since_ns = self.started_ns = 0
        self.choices: tuple[int, int] | None = None  # (done, total) of the autotuning choices that are benchmarked now
        self.shown = False  # the record is not empty
        self.begin()
        self.clear()

    def begin(self) -> None:
        """A root region begins: forget what the one before has left to be asked for."""
        self.native_id = threading.get_native_id()  # the ident that this is known by may be a thread's of which another is long gone
        self.started_ns = clock.now_ns()
        self.cache: dict[str, str] = {}  # layer -> hit|miss|bypass|disabled
        self.bypass_reason = ""
        self.kernels = 0
        self.one_graph = False
        self.ended: tuple[str, int, list[int]] | None = None

    def clear(self) -> None:
        """Forget the compile that has ended."""
        self.regions.clear()
        self.compile_id = self.kind = self.frame = self.reason = self.detail = ""
        self.split = self.splits = 0
        self.code: CodeType | None = None
        self.reason_place = 0
        self.reason_looks = 0
        self.retext()

    def retext(self) -> None:
        """One of the texts has changed: what was encoded is stale."""
        self.texts: dict[str, bytes] = {}
        self.around: tuple[bytes, bytes] | None = None  # layout.THREAD_TEXTS before and behind the phase

    def encode(self, name: str) -> bytes:
        """layout.THREAD_TEXTS while region `name` is the innermost one."""
        if self.detail is LIBRARY and name == "backend_compile":
            self.detail = ""  # it gives a graph: a compile like the user's own
            self.retext()
        if self.around is None:
            behind = (clean(self.frame, FRAME_BYTES), clean(self.reason, REASON_BYTES), clean(self.detail, DETAIL_BYTES))
            before = f"{clean(self.compile_id, ID_BYTES)}\0{self.kind}\0"
            self.around = before.encode("utf-8", "replace"), "\0".join(("", *behind)).encode("utf-8", "replace")
        text = self.texts[name] = self.around[0] + (_names.get(name) or shown_name(name)) + self.around[1]
        return text


class LiveThreads:
    """All threads that compile. At most layout.THREADS of them at once have a record; the others are followed without one."""

    def __init__(self, slot: RankSlot) -> None:
        self.slot = slot
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
            region = regions[-1]
            name = region[0]
            text = live.texts.get(name) or live.encode(name)
            live.shown = True
            self.slot.put_thread(cursor, now_ns, live.native_id, regions[0][1], region[1], len(regions), live.split, live.splits, text)

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
            self.slot.put(live.cursor, b"", clock.now_ns())
            live.shown = False
        live.clear()

    def sweep(self) -> None:
        """Empty records of threads that compile no more: a KeyboardInterrupt inside a hook may have come before it was done. Any thread."""
        for live in list(self._by_ident.values()):
            if live.shown and not live.regions and live.cursor is not None:
                self.slot.put(live.cursor, b"", clock.now_ns())
                live.shown = False
                if live.regions:  # it has begun to compile meanwhile
                    self.show(live, clock.now_ns())

    def split(self, number: int, of: int) -> None:
        """DDPOptimizer compiles split `number` (from 1) of `of` on the calling thread; 0 of 0: it is done."""
        live = self.here()
        live.split, live.splits = min(number, 65535), min(of, 65535)
        if live.regions:
            self.show(live, clock.now_ns())

    def progress(self, detail: str) -> str:
        """Show `detail` for the calling thread while it compiles; gives what was shown before."""
        live = self.here()
        before, live.detail = live.detail, detail
        live.retext()
        if live.regions:
            self.show(live, clock.now_ns())
        return before

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
