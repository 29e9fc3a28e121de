"""The clock of a World: events in order, ranks that get on with their programs, and what that costs in CPU and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

from activities import Act
from parts import Comm, Entry, Rank

WALL = 1_796_000_000.0


class Engine:
    """nccl: semantics of the backend. buffer: entries that a recorder keeps. lenient: different calls pair without a hang (NCCL may do so).

    offsets: what each rank's wall clock is ahead of the judge's. Times are seconds from the start of the attempt, `epoch` its monotonic start.
    """

    def __init__(self, size: int, program: Callable[[int], Iterator[tuple[Any, ...]]], rng: Random, **how: Any) -> None:
        self.size, self.rng = size, rng
        self.nccl: bool = how.get("nccl", False)
        self.timing: bool = how.get("timing", False)
        self.lenient: bool = how.get("lenient", False)
        self.buffer: int = how.get("buffer", 2000)
        self.offsets: tuple[float, ...] = how.get("offsets", (0.0,) * size)
        self.wall = WALL + how.get("wall_shift_s", 0.0)
        self.now = 0.0
        self.blocked_devices: set[int] = set()  # ranks whose device does nothing any more
        self.halt = False
        self.dead = 0
        self.ranks = [Rank(number, program(number)) for number in range(size)]
        self.mail: dict[str, int] = {}
        self.marks: dict[str, float] = {}
        self.reached: set[int] = set()
        self.on_exit: Callable[[Rank], None] = lambda rank: None
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._comms: dict[tuple[str, int, tuple[int, ...]], Comm] = {}
        self._arrived: dict[str, list[Rank]] = {}
        self._ops: dict[str, Callable[..., bool]] = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_op_")}
        for rank in self.ranks:
            self._wake(rank, 0.0)

    def run_until(self, at: float) -> None:
        """Up to `at`, or to the moment at which `halt` is set: somebody has to look now."""
        heap = self._heap
        while heap and heap[0][0] <= at:
            self.now, _, call, arguments = heappop(heap)
            call(*arguments)
            if self.halt:
                self.halt = False
                return
        self.now = at

    def suspend(self, seconds: float) -> None:
        """The clocks go on by this much, and nobody does anything meanwhile."""
        self._heap = [(when + seconds, count, call, arguments) for when, count, call, arguments in self._heap]
        for rank in self.ranks:
            self.count(rank)
            rank.counted_at += seconds
            rank.wakes_at += seconds
        self.now += seconds

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heappush(self._heap, (when, self._count, call, arguments))

    def _wake(self, rank: Rank, when: float) -> None:
        rank.token += 1
        rank.wakes_at = when
        if when < inf:
            self.at(when, self._advance, rank, rank.token)

    def _advance(self, rank: Rank, token: int) -> None:
        if token != rank.token or not rank.alive or rank.held is not None:
            return
        rank.blocked, rank.blocked_on, rank.timer = "", None, False
        while True:
            operation = next(rank.program, ("exit", 0))
            if not self._ops[operation[0]](rank, *operation[1:]):
                return

    def become(self, rank: Rank, act: Act) -> None:
        """From now on the rank does this."""
        self.count(rank)
        rank.act, rank.act_since = act, self.now

    def count(self, rank: Rank) -> None:
        """Bring CPU and bytes up to date."""
        elapsed, act = self.now - rank.counted_at, rank.act
        if elapsed > 0 and rank.alive:
            rank.cpu_s += elapsed * (act.cpu + 0.0005)
            rank.child_cpu_s += elapsed * act.child_cpu
            rank.io_bytes += elapsed * act.io
        rank.counted_at = self.now

    def _block(self, rank: Rank, why: str, act: Act, entry: Entry | None = None) -> bool:
        rank.token += 1
        rank.wakes_at = inf
        rank.blocked, rank.blocked_since, rank.blocked_on = why, self.now, entry
        self.become(rank, act)
        return False

    def wall_of(self, rank: Rank) -> float:
        return self.wall + self.now + self.offsets[rank.number]
