"""What one launcher lets the judge of its job read: its report, its ranks' recorders; and what the judge asks it for on the way.

The loop's thread puts, the server's threads answer. Every route is behind the job's token and changes nothing but what is noted here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rankwatch.model import NodeReport, Want
from rankwatch.monitor.nodes import last_words, nudging, questions, recorders
from rankwatch.monitor.nodes.delta import Sender, calls_kept, entries_sent
from rankwatch.monitor.nodes.peer import Peer
from rankwatch.wire.ranks import expand

if TYPE_CHECKING:
    from rankwatch.serve.http import Request, Response, Route

RECORDERS_WAIT_S = 1.0


class Offer:
    """One attempt of one launcher. nonce: drawn anew for each of them. world_size: of a large job less is told of each rank.

    asked_at: when the judge has last pulled. final_taken: it has the final report. judge_url: its status page, as it says itself.
    over: the judge has ended, "0" well, "1" badly; "" while it asks. open_there: what it has found open, as told last.
    on_wants: called in a server's thread when the judge asks for evidence, or gives an order. on_nudge: likewise, on the judge, with the node that has news.
    is_judges: whether the key of an order proves that it is the judge's; without it none is taken. judges: this launcher is the judge: nobody pulls it but
    by mistake. on_judge_line: called in a server's thread with the judge's line in the list of --peers, where it says it.
    """

    def __init__(
        self, nonce: str, version: str, world_size: int = 1, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self.asked_at: float | None = None
        self.final_taken = threading.Event()
        self.judge_url = ""
        self.over = ""
        self.open_there: last_words.LastWords | None = None
        self.on_wants: Callable[[], None] | None = None
        self.on_nudge: Callable[[int], None] | None = None
        self.is_judges: Callable[[str], bool] = lambda _key: False
        self.judges = False
        self.on_judge_line: Callable[[int], None] | None = None
        self._order: questions.Order | None = None
        self._nonce = nonce
        self._version = version
        self._clock = clock
        self._wall = wall
        self._sender = Sender(nonce, entries=entries_sent(world_size), calls=calls_kept(world_size))
        self._give: Callable[[Iterable[int]], dict[int, dict[str, bytes]]] = lambda _ranks: {}
        self._giving = threading.Lock()
        self._lock = threading.Lock()
        self._node = ""
        self._local: tuple[int, ...] = ()
        self._puts = 0
        self._final_put: int | None = None
        self._wants: dict[questions.Kind, set[int]] = {}
        self._takers: list[tuple[int, threading.Event]] = []  # to be set once the judge has the report of this number

    # -- the loop's side -------------------------------------------------------------------------------------------------------

    def put(self, report: NodeReport, events: Sequence[Mapping[str, Any]], ending: str = "", final: bool = False) -> None:
        """What the judge may read from now on. It is put into words only when somebody asks."""
        with self._lock:
            self._puts += 1
            self._node, self._local = report.node, tuple(rank.rank for rank in report.ranks)
            if final and self._final_put is None:
                self._final_put = self._puts
            self._sender.update(report, self._clock(), self._wall(), ending, final, events)

    def recorders(self, give: Callable[[Iterable[int]], dict[int, dict[str, bytes]]]) -> None:
        """Where the newest raw recorders of local ranks come from; called in a server's thread."""
        self._give = give

    def take_wants(self) -> tuple[Want, ...]:
        """What the judge has asked for since the call before."""
        with self._lock:
            taken, self._wants = self._wants, {}
        return tuple(Want(kind, tuple(sorted(ranks)), "the judge of the job asks for it") for kind, ranks in taken.items())

    def take_order(self) -> questions.Order | None:
        """The judge's order to end the workers, once."""
        with self._lock:
            taken, self._order = self._order, None
        return taken

    def taken(self) -> threading.Event:
        """Set once the judge has what was put last."""
        event = threading.Event()
        with self._lock:
            self._takers = [*self._takers[-7:], (self._puts, event)]
        return event

    @staticmethod
    def nudge(judge: Peer, secret: str, group_rank: int, wait_s: float) -> str:
        """Ask the judge to pull this node now; why it could not be asked, or "". At most wait_s."""
        return nudging.nudge(judge, secret, group_rank, wait_s)

    # -- the server's side -----------------------------------------------------------------------------------------------------

    def routes(self) -> Mapping[str, Route]:
        """Path -> route, for serve.server.Server with the job's token."""
        root = questions.ROOT
        return {
            f"{root}hello": self._hello,
            f"{root}report": self._report,
            f"{root}taken": self._taken,
            f"{root}recorder": self._recorder,
            f"{root}nudge": self._nudged,
        }

    def _hello(self, _request: Request) -> Response:
        told = {"version": self._version, "nonce": self._nonce, "node": self._node, "time": self._wall(), "mono": self._clock()}
        return _json({"schema": questions.SCHEMA, **told})

    def _report(self, request: Request) -> Response:
        try:
            base, events_after = questions.number(request.query, "base"), questions.number(request.query, "events") or 0
            wants, order = questions.wants(request.query, self._local), questions.order(request.query)
            line = questions.number(request.query, "line")
        except ValueError as error:
            return _refusal(400, str(error))
        if self.judges:
            return _refusal(questions.ITSELF, "this launcher judges the job itself")
        self.asked_at = self._clock()
        if line is not None and self.on_judge_line is not None:
            self.on_judge_line(line)
        self.judge_url = questions.page_url(request.query.get("judge", "")) or self.judge_url
        self.over = request.query.get("over", "")[:1]
        if "open" in request.query:
            self.open_there = last_words.read(request.query["open"])
        with self._lock:
            puts = self._puts  # before the answer: it holds this one or a later one
            for kind, ranks in wants.items():
                self._wants.setdefault(kind, set()).update(ranks)
        if order is not None and self.is_judges(order.key):
            with self._lock:
                self._order = order
        else:
            order = None
        if (wants or order) and self.on_wants is not None:
            self.on_wants()
        if not puts:
            return _refusal(503, "no report yet")
        answer = self._sender.answer(base, events_after, self._clock(), self._wall())
        return _json({**answer, "put": puts})

    def _taken(self, request: Request) -> Response:
        try:
            put = questions.number(request.query, "put") or 0
        except ValueError as error:
            return _refusal(400, str(error))
        with self._lock:
            done = [event for number, event in self._takers if number <= put]
            self._takers = [(number, event) for number, event in self._takers if number > put]
            final = self._final_put is not None and self._final_put <= put <= self._puts
        for event in done:
            event.set()
        if final:
            self.final_taken.set()
        return _json({})

    def _recorder(self, request: Request) -> Response:
        try:
            ranks = expand(request.query.get("ranks", ""), recorders.MAX_RANKS)
        except ValueError as error:
            return _refusal(400, str(error))
        if not self._giving.acquire(timeout=RECORDERS_WAIT_S):  # of many megabytes one answer at a time
            return _refusal(503, "another answer is being made")
        try:
            return _json(recorders.encode(self._give([rank for rank in ranks if rank in self._local])))
        finally:
            self._giving.release()

    def _nudged(self, request: Request) -> Response:
        try:
            node = questions.number(request.query, "node")
        except ValueError as error:
            return _refusal(400, str(error))
        if node is None:
            return _refusal(400, "which node?")
        if self.on_nudge is not None:
            self.on_nudge(node)
        return _json({})


def _json(value: Mapping[str, Any]) -> Response:
    from rankwatch.serve.http import Response

    return Response(json.dumps(value, separators=(",", ":"), default=str), "application/json")


def _refusal(status: int, why: str) -> Response:
    from rankwatch.serve.http import Response

    return Response(f"{why}\n", status=status)
