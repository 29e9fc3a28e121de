"""A page that many ask for is made once for each state of what it shows, however many ask at one moment."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from rankwatch.serve.http import Request, Response, Route

WAIT_S = 1.0
"""Who asks while the page is being made waits so long, then is refused."""


@dataclass(frozen=True, slots=True)
class _Kept:
    state: object
    mark: bytes
    response: Response


class Shared:
    """A route over one that depends on nothing but `state()`, compared by identity, and on the request's nonce. Keeps the newest answer, if it is a 200.

    Each answer has the nonce of its own request: the page is made with a mark in its place, which no client ever sees.
    """

    def __init__(self, route: Route, state: Callable[[], object]) -> None:
        self._route = route
        self._state = state
        self._making = threading.Lock()
        self._kept: _Kept | None = None

    def __call__(self, request: Request) -> Response:
        """The page of the state as it is now. What the route raises, this raises."""
        kept = self._newest()
        if kept is None:
            if not self._making.acquire(timeout=WAIT_S):
                return Response("busy, try again\n", status=503, headers={"Retry-After": "1"})
            try:
                kept = self._newest() or self._made(request)
            finally:
                self._making.release()
        return replace(kept.response, body=kept.response.payload.replace(kept.mark, request.nonce.encode()))

    def _newest(self) -> _Kept | None:
        kept, state = self._kept, self._state()
        return kept if kept is not None and kept.state is state else None

    def _made(self, request: Request) -> _Kept:
        state, mark = self._state(), secrets.token_urlsafe(12)  # the state first: a page that is newer than it is made again
        response = self._route(replace(request, nonce=mark))
        made = _Kept(state, mark.encode(), replace(response, body=response.payload))
        if response.status == 200:
            self._kept = made
        return made
