"""What waits to be sent to one target: bounded, in order, tried again with growing pauses, by one thread of its own. Only the launcher's end waits for it.

A message replaces an older one of the same key that has not been sent: of a job's alerts only the newest state is worth sending. When the box is full
the oldest message that is not critical goes, and is counted.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rankwatch.notify.post import NotTaken

MAX_WAITING = 50
MAX_AGE_S = 600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
OK, FAILED, DROPPED = "ok", "failed", "dropped"
RESULTS = (OK, FAILED, DROPPED)


@dataclass(frozen=True, slots=True)
class Message:
    """One request. body: made when it is sent. critical: it goes last when there is no room. put_at: on the box's clock."""

    key: str
    body: Callable[[], bytes] = field(repr=False)
    critical: bool = False
    put_at: float = 0.0


def put(waiting: tuple[Message, ...], message: Message, limit: int = MAX_WAITING) -> tuple[tuple[Message, ...], int]:
    """(what waits with `message` in it, how many had to go). An older one of its key gives it its place."""
    if any(other.key == message.key for other in waiting):
        return tuple(message if other.key == message.key else other for other in waiting), 0
    if len(waiting) < limit:
        return (*waiting, message), 0
    victim = next((at for at, other in enumerate(waiting) if not other.critical), None)
    if victim is None and not message.critical:
        return waiting, 1
    victim = victim or 0
    return (*waiting[:victim], *waiting[victim + 1 :], message), 1


def pause_s(failures: int) -> float:
    """How long to wait after so many failures in a row: 1 s, 2 s, 4 s, ... 30 s."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10))


class Outbox:
    """The box of one target. `name` is what people read: "alertmanager http://am:9093". Its thread starts with the first message."""

    def __init__(self, name: str, post: Callable[[bytes], None], say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self._post = post
        self._say = say
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: tuple[Message, ...] = ()
        self._sending = False
        self._hurry = False
        self._started = False
        self._failures = 0  # in a row
        self._said = ""  # the failure that people know of

    def put(self, key: str, body: Callable[[], bytes], critical: bool = False) -> None:
        """Hand a message over; returns at once."""
        with self._changed:
            self._waiting, dropped = put(self._waiting, Message(key, body, critical, self._clock()))
            self.counts[DROPPED] += dropped
            start, self._started = not self._started, True
            self._changed.notify_all()
        if start:
            threading.Thread(target=self._work, name="rankwatch-notify", daemon=True).start()

    def hurry(self) -> None:
        """The launcher ends: what waits for another attempt gets it now."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()

    def empty(self, timeout_s: float) -> bool:
        """Whether everything has been sent, or given up, within timeout_s."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._sending, max(0.0, timeout_s))

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                message, self._sending = self._waiting[0], True
            try:
                problem = self._attempt(message)
            except Exception as error:  # a message that cannot be made is no reason to send no other
                problem = NotTaken(f"{type(error).__name__}: {error}", again=False)
            with self._changed:
                self._settle(message, problem)
                self._sending = False
                self._changed.notify_all()
                if problem is not None and self._waiting:
                    self._changed.wait_for(lambda: self._hurry, pause_s(self._failures))
                    self._hurry = False

    def _attempt(self, message: Message) -> NotTaken | None:
        try:
            self._post(message.body())
        except NotTaken as problem:
            return problem
        return None

    def _settle(self, message: Message, problem: NotTaken | None) -> None:
        """Count it; it stays first in the box where another attempt may help."""
        self.counts[FAILED if problem else OK] += 1
        late = self._clock() - message.put_at > MAX_AGE_S
        if problem is None or not problem.again or late:
            self._waiting = tuple(other for other in self._waiting if other is not message)
            self.counts[DROPPED] += problem is not None
        if problem is None:
            if self._said:
                self._say(f"{self.name} takes messages again")
            self._failures, self._said = 0, ""
            return
        self._failures += 1
        if str(problem) != self._said:
            self._said = str(problem)
            self._say(f"{self.name} has not taken a message: {problem}{'; tried again' if problem.again and not late else '; it is given up'}")
