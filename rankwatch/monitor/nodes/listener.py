"""Where one launcher answers the others: the hardened server with the job's secret, which tells when somebody comes with another one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rankwatch.serve.http import Response, Route
from rankwatch.serve.server import Server

TOLD_EVERY_S = 2.0
"""A stranger that knocks all day makes nobody busy."""
REFUSED = 401


class Listener(Server):
    """on_refused: called in a connection's thread, at most once in TOLD_EVERY_S, after a request without the secret was refused: it may be an old one."""

    def __init__(
        self, listen: str, routes: Mapping[str, Route], secret: str, on_refused: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(listen, routes, secret)
        self._on_refused = on_refused
        self._clock = clock
        self._telling = threading.Lock()
        self._told_at = -1e9

    def answer(self, *request: Any, **more: Any) -> Response:
        """As any Server's."""
        response = super().answer(*request, **more)
        if response.status == REFUSED and self._due():
            self._on_refused()
        return response

    def _due(self) -> bool:
        with self._telling:
            now = self._clock()
            due = now - self._told_at >= TOLD_EVERY_S
            self._told_at = now if due else self._told_at
        return due
