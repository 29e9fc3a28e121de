"""What all ranks of one attempt have compiled, out of their events and records. Bounded; no I/O, no clock, no torch.

A rank of this node sends an event for each finished compile; of ranks elsewhere, and where events were overwritten before they were read, only
the totals of the rank's `compile` record are known (agent/probes/compile.py). The document is made in document.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from rankwatch import shown
from rankwatch.monitor.compiles import rank_sets
from rankwatch.monitor.compiles.frame import FrameBook
from rankwatch.monitor.compiles.splits import Splits
from rankwatch.monitor.compiles.stepping import Stepping
from rankwatch.monitor.compiles.texts import Texts
from rankwatch.monitor.compiles.told import Told, number, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rankwatch.model import CompileActivity, Group, RankState

MAX_FRAMES = 4096
MAX_FRAMES_A_RANK = 1024
MAX_PARTS = 400_000  # pairs of rank and frame
MAX_TIMELINE = 2000
LIBRARY = "library frame"


@dataclass(slots=True)
class RankBook:
    """What is kept of one rank beside its frames."""

    stepping: Stepping
    frames: int = 0
    lost: int = 0
    idle_since: float | None = None  # monotonic, of its newest finished compile
    groups: tuple[Group, ...] = ()  # process groups, the last that it has told of: at the end it leaves them
    record: Mapping[str, Any] | None = None  # as it was read last, and what it tells
    told: Told | None = None
    ddp: Mapping[str, Any] | None = None


@dataclass(slots=True)
class Skew:
    """Ranks that compile while others do not. seconds: for how long the first of those others has had nothing to compile."""

    seconds: float = 0.0
    compiling: int = 0
    others: int = 0
    worst_s: float = 0.0
    worst_frame: str = ""
    worst_mask: int = 0
    worst_wall: float = 0.0


class Book:
    """`look` at the ranks, and hand their events to events.take; then make the document."""

    def __init__(self, attempt: int = 0) -> None:
        self.attempt = attempt
        self.frames: dict[str, FrameBook] = {}
        self.ranks: dict[int, RankBook] = {}
        self.splits = Splits()
        self.texts = Texts()
        self.skew = Skew()
        self.timeline: deque[dict[str, Any]] = deque(maxlen=MAX_TIMELINE)
        self.with_events = 0  # ranks whose events come here
        self.lost = 0  # ranks of which events were lost
        self.compiling: dict[int, tuple[CompileActivity, ...]] = {}
        self.compiling_mask = 0
        self.cut_off: dict[int, tuple[CompileActivity, ...]] = {}  # what a rank compiled when its process ended
        self.seen: dict[tuple[object, ...], float] = {}  # divergence -> wall time of its first sight
        self.version = 0  # grows with everything that changes the document
        self.parts = 0
        self.refused = 0

    # -- looks -------------------------------------------------------------------------------------------------------------

    def look(self, ranks: Mapping[int, RankState], with_events: Collection[int], now: float, wall_at: float) -> None:
        """Every rank as it is now. with_events: those whose events are handed to `take`. now: monotonic, as the events' `mono_ns`."""
        events = set(with_events)
        self.with_events = rank_sets.bits(rank for rank in events if rank in ranks)
        compiling: dict[int, tuple[CompileActivity, ...]] = {}
        for rank, state in ranks.items():
            book = self.rank(rank)
            if state.steps != book.stepping.count:
                book.stepping.look(state.steps, state.last_step_at, state.step_s)
            if state.groups:
                book.groups = state.groups
            if state.events_lost != book.lost:
                book.lost = state.events_lost
                self.lost |= 1 << rank
                self.version += 1
            if state.compile_totals is not book.record:
                book.record = state.compile_totals
                book.told = Told(state.compile_totals) if state.compile_totals else None
                self._record(rank, state.compile_totals, rank not in events)
                self.version += 1
            if state.ddp is not book.ddp:
                book.ddp = state.ddp
                self._ddp_record(rank, state.ddp, wall_at)
            if state.compiling:
                own = tuple(activity for activity in state.compiling if activity.detail != LIBRARY)
                if own:
                    compiling[rank] = own
        if compiling or self.compiling:
            self.version += 1
        for rank, own in self.compiling.items():
            process = ranks[rank].process if rank in ranks else None
            ended_at = self.ranks[rank].idle_since
            if process is not None and not process.alive and rank not in compiling:
                self.cut_off[rank] = tuple(activity for activity in own if ended_at is None or activity.started_at > ended_at)
        self.compiling = compiling
        self.compiling_mask = rank_sets.bits(compiling)
        self._skew(ranks, now, wall_at)

    def _record(self, rank: int, record: Mapping[str, Any], alone: bool) -> None:
        """A rank's totals. alone: nothing else is known of the rank."""
        frames = record.get("by_frame")
        for name, entry in frames.items() if isinstance(frames, dict) else ():
            if not isinstance(entry, list) or len(entry) < 3:
                continue
            frame = self.frame(self.name_of(name), rank)
            if frame is None:
                continue
            own = frame.of(rank)
            own.recorded, own.rolling = whole(entry[0]), str(entry[2])[:16]
            own.cache_size = max(own.cache_size, whole(entry[3]) if len(entry) > 3 else 0)
            if alone or self.lost >> rank & 1:
                own.compiles = max(own.compiles, own.recorded)
                own.recompiles = max(own.recompiles, own.compiles - 1)
                own.graphs = max(own.graphs, 1 if own.rolling else 0)
                own.seconds = max(own.seconds, number(entry[1]))
                frame.mask |= 1 << rank if own.compiles else 0
        limit = whole(record.get("limit"))
        limited = record.get("limited")
        for name in limited if isinstance(limited, list) else ():
            frame = self.frame(self.name_of(name), rank)
            if frame is not None:
                frame.limited |= 1 << rank
                frame.limit = frame.limit or limit

    def _ddp_record(self, rank: int, record: Mapping[str, Any], wall_at: float) -> None:
        if not record:
            return
        name, compile_id = self.name_of(record.get("frame")), str(record.get("compile_id") or "")
        frame = self.frames.get(name)
        key = (frame or FrameBook("")).key_of(rank, compile_id)
        # Events tell the same of every split; the record is for ranks of which none come. It is written when a forward was not split, too.
        self.splits.add(rank, record, name, key if not self.with_events >> rank & 1 else None, wall_at, event=False)

    def _skew(self, ranks: Mapping[int, RankState], now: float, wall_at: float) -> None:
        skew = self.skew
        skew.seconds, skew.compiling, skew.others = 0.0, self.compiling_mask, 0
        if not self.compiling:
            return
        idle: dict[int, float | None] = {}
        for rank, state in ranks.items():
            alive = state.process is None or state.process.alive
            if rank not in self.compiling and alive and state.stage == "joined":
                since = self.ranks[rank].idle_since
                if since is not None or state.steps:
                    idle[rank] = since
        skew.others = rank_sets.bits(idle)
        if not idle:
            return
        first = min((since for since in idle.values() if since is not None), default=0.0)
        for rank, activities in self.compiling.items():
            oldest = min(activities, key=lambda activity: activity.started_at)
            seconds = now - max(oldest.started_at, first)
            skew.seconds = max(skew.seconds, seconds)
            if seconds > skew.worst_s:
                skew.worst_s, skew.worst_frame, skew.worst_mask, skew.worst_wall = seconds, oldest.frame, 1 << rank, wall_at

    # -- places ------------------------------------------------------------------------------------------------------------

    def frame(self, name: str, rank: int) -> FrameBook | None:
        """The frame of this name, with a part for `rank`; None for no name and beyond the bounds."""
        if not name:
            return None
        frame = self.frames.get(name)
        if frame is not None and rank in frame.own:
            return frame
        book = self.rank(rank)
        if book.frames >= MAX_FRAMES_A_RANK or self.parts >= MAX_PARTS or (frame is None and len(self.frames) >= MAX_FRAMES):
            self.refused += 1
            return None
        if frame is None:
            frame = self.frames[name] = FrameBook(name)
        frame.of(rank)
        book.frames += 1
        self.parts += 1
        return frame

    def name_of(self, value: object) -> str:
        """A frame's name as it is shown, "forward@model.py:31"."""
        if isinstance(value, str) and value in self.frames:
            return value
        return shown.one_line(value)[:160] if value else ""

    def rank(self, rank: int) -> RankBook:
        book = self.ranks.get(rank)
        if book is None:
            book = self.ranks[rank] = RankBook(Stepping())
        return book
