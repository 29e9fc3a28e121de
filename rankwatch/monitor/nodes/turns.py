"""Whose turn it is: which nodes are pulled now, by how many threads, and when a round is over. Pure: called under the puller's lock, gets `now`."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from rankwatch.monitor.nodes import schedule

NEW_AFTER_S = 0.5
"""New nodes are pulled at once, but rounds do not follow each other faster than this."""
Node = TypeVar("Node")


@dataclass(slots=True, eq=False)
class Round(Generic[Node]):
    """Nodes whose answers belong together. left: node -> a pull that began then or later is waited for.

    regular: all nodes, on the clock. nudged: those that asked for it. extra: all that usually answer, for somebody who waits.
    """

    kind: Literal["regular", "nudged", "extra"]
    began_at: float
    until: float
    members: set[Node] = field(default_factory=set)
    left: dict[Node, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Turn:
    queued: int = 0  # number of its entry in a queue, 0: none; entries with another number are void
    busy: bool = False
    unsure: bool = False  # the pull under way is one that no round waits for
    again: bool = False  # once more when the pull under way is over
    began_at: float = -1e9
    retry_at: float = -1e9
    failures: int = 0
    took_s: float = 0.0

    def awaited(self) -> bool:
        return schedule.awaited(self.failures, self.took_s)


class Turns(Generic[Node]):
    """The plan of one puller with at most `workers` threads.

    Nodes that failed or were slow have a queue of their own, and where nodes must share threads, half of these at most: many dead nodes at once
    do not keep the living ones waiting.
    """

    def __init__(self, workers: int) -> None:
        self.suspected = False
        self._workers = workers
        self._turns: dict[Node, _Turn] = {}
        self._ready: deque[tuple[int, Node]] = deque()
        self._unsure: deque[tuple[int, Node]] = deque()
        self._later: list[tuple[float, int, Node]] = []
        self._numbers = itertools.count(1)
        self._rounds: list[Round[Node]] = []
        self._regular: Round[Node] | None = None
        self._round_at = -1e9
        self._new_at = -1e9  # when new nodes want a round
        self._unsure_busy = 0
        self._cost_s = 0.0
        self._last_cost_s = 0.0

    @property
    def threads(self) -> int:
        """How many threads there may be."""
        return min(self._workers, len(self._turns))

    @property
    def waiting(self) -> int:
        """Pulls that free threads would take now, at most."""
        return len(self._ready) + len(self._unsure)

    def set_nodes(self, nodes: Iterable[Node], now: float) -> None:
        """These nodes and no others, in the order in which they are asked. New ones are due at once."""
        before, self._turns = self._turns, {}
        for node in nodes:
            self._turns[node] = before.get(node) or _Turn()
        if self._turns.keys() - before.keys():
            self._new_at = max(now, self._round_at + NEW_AFTER_S)
        for node in before.keys() - self._turns.keys():
            self._unsure_busy -= before[node].unsure
            for each in self._rounds:
                each.members.discard(node)
                each.left.pop(node, None)

    def ask(self, nodes: Iterable[Node], now: float) -> None:
        """Pull these before all others, but for those that failed and are left alone; one that is being pulled, once more."""
        for node in nodes:
            turn = self._turns.get(node)
            if turn is not None and now >= turn.retry_at:
                self._first(node, turn, schedule.nudge_at(now, turn.began_at), now)

    def nudge(self, nodes: Iterable[Node], now: float) -> None:
        """Pull these now, as a round of their own: they have said that they are there. Nudges that come together are one."""
        known = [node for node in nodes if node in self._turns]
        if not known:
            return
        each = next((each for each in self._rounds if each.kind == "nudged" and now < each.until), None)
        if each is None:
            each = Round("nudged", now, now + schedule.SLOW_S)
            self._rounds.append(each)
        each.members.update(known)
        each.left.update(dict.fromkeys(known, now))
        for node in known:
            turn = self._turns[node]
            self._first(node, turn, schedule.nudge_at(now, turn.began_at), now)

    def extra(self, now: float, deadline_s: float) -> Round[Node]:
        """A round of all nodes that usually answer, beginning now."""
        known = [node for node, turn in self._turns.items() if turn.awaited()]
        each = Round("extra", now, now + deadline_s, set(known), dict.fromkeys(known, now))
        self._rounds.append(each)
        for node in reversed(known):
            self._first(node, self._turns[node], now, now)
        return each

    def tick(self, now: float) -> tuple[list[Round[Node]], float]:
        """Begin what is due. (rounds that are over, when to look again)."""
        while self._later and self._later[0][0] <= now:
            _at, number, node = heapq.heappop(self._later)
            self._ready.append((number, node))
        over = [each for each in self._rounds if not each.left or now >= each.until]
        self._rounds = [each for each in self._rounds if each not in over]
        if self._regular is not None and self._regular in over:
            self._regular, self._last_cost_s, self._cost_s = None, self._cost_s, 0.0
        if self._turns and self._regular is None and now >= self._due_at():
            self._begin(now)
        wakes = [each.until if each.left else now for each in self._rounds]
        wakes += [at for at, _number, _node in self._later[:1]]
        if self._turns and self._regular is None:
            wakes.append(self._due_at())
        return over, min(wakes, default=now + 3600.0)

    def next(self, now: float) -> Node | None:
        """The node that a free thread is to pull now."""
        while self._ready or (self._unsure and self._unsure_busy < self._most_unsure()):
            unsure = not self._ready
            number, node = self._unsure.popleft() if unsure else self._ready.popleft()
            turn = self._turns.get(node)
            if turn is None or turn.queued != number:
                continue
            turn.queued, turn.busy, turn.unsure, turn.began_at = 0, True, unsure, now
            self._unsure_busy += unsure
            return node
        return None

    def done(self, node: Node, now: float, failures: int, cost_s: float) -> bool:
        """A pull is over; it was the so-many-th failure in a row. Whether a round is over by it."""
        self._cost_s += cost_s
        turn = self._turns.get(node)
        if turn is None:
            return False
        self._unsure_busy -= turn.unsure
        turn.busy, turn.unsure = False, False
        turn.failures, turn.took_s, turn.retry_at = failures, now - turn.began_at, now + schedule.backoff_s(failures)
        for each in self._rounds:
            if turn.began_at >= each.left.get(node, float("inf")):
                del each.left[node]
        if turn.again:
            turn.again = False
            self._first(node, turn, now, now)
        return any(not each.left for each in self._rounds)

    def _due_at(self) -> float:
        due_at = self._round_at + schedule.period_s(self.suspected, self._last_cost_s, len(self._turns))
        return min(due_at, self._new_at) if self._new_at > self._round_at else due_at

    def _most_unsure(self) -> int:
        return self.threads if self.threads == len(self._turns) else max(1, self.threads // 2)

    def _first(self, node: Node, turn: _Turn, at: float, now: float) -> None:
        if turn.busy:
            turn.again = True
            return
        turn.queued = next(self._numbers)
        if at > now:
            heapq.heappush(self._later, (at, turn.queued, node))
        else:
            self._ready.appendleft((turn.queued, node))

    def _begin(self, now: float) -> None:
        each: Round[Node] = Round("regular", now, now + schedule.ROUND_S, set(self._turns))
        self._rounds.append(each)
        self._regular, self._round_at = each, now
        due = []
        for node, turn in self._turns.items():
            if turn.queued and turn.awaited():
                each.left[node] = now
            elif turn.busy or turn.queued or turn.retry_at > now:
                continue
            elif turn.awaited():
                due.append(node)
            else:
                turn.queued = next(self._numbers)
                self._unsure.append((turn.queued, node))
        each.left.update(dict.fromkeys(due, now))
        for place, node in enumerate(due):
            number = self._turns[node].queued = next(self._numbers)
            after_s = schedule.wave_s(place, len(due))
            if after_s > 0:
                heapq.heappush(self._later, (now + after_s, number, node))
            else:
                self._ready.append((number, node))
