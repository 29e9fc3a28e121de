"""The clock of a World: events in order, ranks that get on with their programs, what that costs in CPU and bytes, and their agents' beats."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from heapq import heapify, heappop, heappush
from math import inf
from random import Random
from typing import Any

from activities import Act
from parts import Comm, Entry, Numbers, Rank

WALL = 1_796_000_000.0
BEAT_S = 0.5
BEATING = ("joined", "left")


@cache
def _operations(world: type) -> dict[str, Callable[..., bool]]:
    return {name.removeprefix("_op_"): getattr(world, name) for name in dir(world) if name.startswith("_op_")}


def _nobody(rank: Rank) -> None:
    """Is told of ends."""


class Engine:
    """nccl: semantics of the backend. buffer: entries that a recorder keeps. lenient: different calls pair without a hang (NCCL may do so).

    offsets: what each rank's wall clock is ahead of the judge's. start: when the first of it happens. Times are seconds from the start of the
    attempt. An event of the heap is (when, number, call, arguments); with no arguments, `call` is a rank that wakes if the number is its token.
    """

    def __init__(self, size: int, program: Callable[[int], Iterator[tuple[Any, ...]]], rng: Random, **how: Any) -> None:
        self.size, self.rng = size, rng
        self.nccl: bool = how.get("nccl", False)
        self.timing: bool = how.get("timing", False)
        self.lenient: bool = how.get("lenient", False)
        self.buffer: int = how.get("buffer", 2000)
        self.offsets: tuple[float, ...] = how.get("offsets", (0.0,) * size)
        self.wall = WALL + how.get("wall_shift_s", 0.0)
        self.start: float = how.get("start", 0.0)
        self.now = self.start
        self.blocked_devices: set[int] = set()  # ranks whose device does nothing any more
        self.frozen: set[int] = set()  # ranks of which no thread runs
        self.halt = False
        self.dead = 0
        self._until = self.start
        self.ranks = [Rank(number, program(number), rng.random() * BEAT_S, counted_at=self.start, entries=deque(maxlen=self.buffer)) for number in range(size)]
        self.mail: dict[str, int] = {}  # sent and not yet taken
        self.receivers: dict[str, Rank] = {}
        self.marks: dict[str, float] = {}
        self.reached: set[int] = set()
        self.on_exit: Callable[[Rank], None] = _nobody
        self._heap: list[tuple[float, int, Any, tuple[Any, ...] | None]] = []
        self._count = 0
        self._comms: dict[tuple[str, int, tuple[int, ...]], Comm] = {}
        self._arrived: dict[str, list[Rank]] = {}
        self._operations = _operations(type(self))
        for rank in self.ranks:
            self._wake(rank, self.start + rng.random() * 0.02)

    def run_until(self, at: float) -> None:
        """Up to `at`, or to the moment at which `halt` is set: somebody has to look now."""
        heap, self._until = self._heap, at
        while heap and heap[0][0] <= at:
            self.now, number, call, arguments = heappop(heap)
            if arguments is None:
                if call.token == number:
                    self._advance(call, at)
            else:
                call(*arguments)
            if self.halt:
                self.halt = False
                return
        self.now = at

    def close(self) -> None:
        """It is over: nothing here holds itself any more, so that its memory goes at once and not by garbage collection."""
        self._heap.clear()
        self.on_exit = _nobody
        for comm in self._comms.values():
            comm.calls.clear()

    def suspend(self, seconds: float) -> None:
        """The clocks go on by this much, and nobody does anything meanwhile."""
        self._heap[:] = [(when + seconds, *event) for when, *event in self._heap]
        heapify(self._heap)
        for rank in self.ranks:
            if rank.alive:
                self.count(rank)
            rank.counted_at += seconds
            if not rank.mute:
                rank.heard, rank.beats_from = self.beat(rank), self.now + seconds
        self.now += seconds

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._heap, (when, self._count, call, arguments))

    def _wake(self, rank: Rank, when: float) -> None:
        self._count = rank.token = self._count + 1
        if when < inf:
            heappush(self._heap, (when, rank.token, rank, None))

    def _advance(self, rank: Rank, until: float) -> None:
        """On with its program. The clock goes along up to `until` while nothing else happens."""
        if rank.blocked:
            rank.blocked, rank.blocked_on = "", None
        heap, operations, now = self._heap, self._operations, self.now
        for operation in rank.program:
            what = operation[0]
            if what == "work":
                _, seconds, act = operation
                was = rank.act
                if was.plain and not act.mutes:  # as `become` does
                    rank.cpu_s += (now - rank.counted_at) * was.cores
                    rank.counted_at = rank.act_since = now
                    rank.act = act
                else:
                    self.become(rank, act)
                when = now + seconds
                if when > until or (heap and when >= heap[0][0]):
                    self._count = rank.token = number = self._count + 1  # as `_wake` does
                    if when < inf:
                        heappush(heap, (when, number, rank, None))
                    return
                self.now = now = when
            elif what == "call":
                if not self._op_call(rank, operation[1], operation[2]):  # type: ignore[attr-defined]
                    return
            elif not (operations[what](self, rank, *operation[1:]) if len(operation) > 1 else operations[what](self, rank)):
                return
        operations["exit"](self, rank, 0)

    def _release(self, ranks: list[Rank]) -> None:
        """They get on now, in this order; if something else is due now as well, after that."""
        heap, now = self._heap, self.now
        if heap and heap[0][0] <= now:
            for rank in ranks:
                self._wake(rank, now)
            return
        last = ranks.pop()
        for rank in ranks:
            self._advance(rank, now)
        self._advance(last, self._until)

    def become(self, rank: Rank, act: Act) -> None:
        """From now on the rank does this."""
        was, now = rank.act, self.now
        elapsed = now - rank.counted_at  # as `count` does
        rank.counted_at = rank.act_since = now
        rank.cpu_s += elapsed * was.cores
        if was.elsewhere:
            rank.child_cpu_s += elapsed * was.child_cpu
            rank.io_bytes += elapsed * was.io
        if act.mutes or was.mutes:
            self._hush(rank, act.mutes)
        rank.act = act

    def count(self, rank: Rank) -> float | None:
        """Bring CPU and bytes of a living rank up to date. When its agent has beaten last."""
        now, act = self.now, rank.act
        elapsed = now - rank.counted_at
        rank.counted_at = now
        rank.cpu_s += elapsed * act.cores
        if act.elsewhere:
            rank.child_cpu_s += elapsed * act.child_cpu
            rank.io_bytes += elapsed * act.io
        if not rank.mute:
            phase_s = rank.phase_s
            at = phase_s + int((now - phase_s) / BEAT_S) * BEAT_S
            if at >= rank.beats_from:
                return at
        return rank.heard[0] if rank.heard is not None else None

    def _block(self, rank: Rank, why: str, act: Act, entry: Entry | None = None) -> bool:
        self._count = rank.token = self._count + 1
        rank.blocked, rank.blocked_since, rank.blocked_on, rank.timer = why, self.now, entry, False
        self.become(rank, act)
        return False

    def wall_of(self, rank: Rank) -> float:
        return float(self.wall + self.now + self.offsets[rank.number])

    # -- beats

    def _changes(self, rank: Rank) -> None:
        """To be called before numbers, entries or groups of a rank change."""
        if not self.nccl:  # there status numbers do not come with the beats
            tick = int((self.now - rank.phase_s) / BEAT_S)
            if tick != rank.tick:
                rank.tick, rank.before = tick, self.numbers(rank)
        rank.version += 1

    def _hush(self, rank: Rank, mute: bool) -> None:
        """Its agent's thread does not run from now on, or runs again."""
        mute = mute or rank.stage not in BEATING
        if mute and not rank.mute:
            rank.heard = self.beat(rank)
        elif rank.mute and not mute:
            rank.beats_from = self.now
        rank.mute = mute

    def _enter(self, rank: Rank, stage: str) -> None:
        rank.stage, rank.stage_since = stage, self.now
        self._hush(rank, rank.act.mutes)

    def beat(self, rank: Rank) -> tuple[float, Numbers] | None:
        """When its agent has beaten last, and the numbers that it has told then."""
        tick = int((self.now - rank.phase_s) / BEAT_S)
        at = rank.phase_s + tick * BEAT_S
        if rank.mute or at < rank.beats_from:
            return rank.heard
        return at, rank.before if tick == rank.tick else self.numbers(rank)

    def numbers(self, rank: Rank) -> Numbers:
        """As they are now; equal ones are the same objects."""
        if rank.copied_version != rank.version:
            rank.copied_version = rank.version
            rank.copied = (rank.entered.copy(), rank.completed.copy())
        return rank.copied
