"""Which connections there are, what each does, and whom to cut: bookkeeping that is handed the time. Touches no socket.

However many clients hang, each holds one thread, so their number is bounded; and however many do not read their answer, each holds a body in memory,
so the bytes on their way are bounded. The one that has made the others wait longest goes, never the newest, which may be a scrape.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


@dataclass(slots=True)
class _Now:
    due: float
    since: float
    reading: bool = True
    sending_bytes: int = 0


class Connections(Generic[Connection]):
    """Open connections in order of arrival. Thread-safe. A method that returns connections has forgotten them: the caller cuts them."""

    def __init__(self, most: int, most_sending_bytes: int) -> None:
        self._most = most
        self._most_sending_bytes = most_sending_bytes
        self._open: dict[Connection, _Now] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection, now: float, limit_s: float) -> Connection | None:
        """A new one, for limit_s. Who has to go for it: the oldest whose request is not there yet, else the oldest; None while there is room."""
        with self._lock:
            victim = None
            if len(self._open) >= self._most:
                victim = next((old for old, what in self._open.items() if what.reading), next(iter(self._open), None))
            if victim is not None:
                del self._open[victim]
            self._open[connection] = _Now(now + limit_s, now)
            return victim

    def reading(self, connection: Connection, now: float, limit_s: float) -> None:
        """It waits for a request, at most limit_s."""
        self._set(connection, _Now(now + limit_s, now))

    def working(self, connection: Connection, now: float, limit_s: float) -> None:
        """Its request is there; the answer may take limit_s in all."""
        self._set(connection, _Now(now + limit_s, now, reading=False))

    def sending(self, connection: Connection, now: float, size_bytes: int) -> list[Connection]:
        """Its answer of so many bytes goes out. Who has to go for it: those that have not read theirs for longest, until all that is left fits."""
        with self._lock:
            mine = self._open.get(connection)
            if mine is None:
                return []
            mine.since, mine.sending_bytes = now, size_bytes
            total = sum(what.sending_bytes for what in self._open.values())
            victims = []
            for old, what in sorted(self._open.items(), key=lambda item: item[1].since):
                if total <= self._most_sending_bytes:
                    break
                if old != connection and what.sending_bytes:
                    victims.append(old)
                    total -= what.sending_bytes
            for old in victims:
                del self._open[old]
            return victims

    def late(self, now: float) -> list[Connection]:
        """Those past their time."""
        with self._lock:
            late = [connection for connection, what in self._open.items() if what.due < now]
            for connection in late:
                del self._open[connection]
            return late

    def gone(self, connection: Connection) -> None:
        """It is closed."""
        with self._lock:
            self._open.pop(connection, None)

    def all(self) -> list[Connection]:
        """Every one, at the end."""
        with self._lock:
            connections = list(self._open)
            self._open.clear()
            return connections

    def _set(self, connection: Connection, what: _Now) -> None:
        """What it does from now on; one that was cut meanwhile stays forgotten."""
        with self._lock:
            if connection in self._open:
                self._open[connection] = what
