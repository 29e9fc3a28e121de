"""One node as its judge pulls it: its connection, what it has reported so far, and what is wrong with it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rankwatch import __version__
from rankwatch.model import NodeReport
from rankwatch.monitor.calls import KEEP
from rankwatch.monitor.nodes import questions, schedule
from rankwatch.monitor.nodes.clock import Offset
from rankwatch.monitor.nodes.connection import Answer, Connection, Resolve, Unanswered
from rankwatch.monitor.nodes.delta import Gap, Receiver
from rankwatch.monitor.nodes.peer import NodeState, Peer

LARGE_BYTES = 1 << 20
MAX_EVENTS = 4096
MAX_TEXT = 300
SAID_BYTES = 200
MOST_S = 1e11  # no clock shows more
WAITS = "it waits for the newest one"
Claim = Callable[["Pulled", int, tuple[int, ...]], str]
_large = threading.Lock()
"""Parsed, an answer takes some ten times its size: large ones one at a time."""


@dataclass(frozen=True, slots=True)
class Newest:
    """The last report of a node, at the judge's clocks. read_at: when its launcher had looked at its ranks. ended: none of them runs any more, for good."""

    report: NodeReport
    read_at: float
    ending: str = ""
    final: bool = False
    ended: bool = False


class Pulled:
    """`pull` runs in one thread at a time and raises nothing. What it leaves in the public fields any thread may read.

    peer, calls_kept, order, news, line: may be replaced at any time; the peer by one with the same nonce. calls_kept: see receiver.py, it only shrinks.
    refusal: why it may refuse our secret. claim: whether one that --peers lists may be this group rank and speak for these ranks; "", or why not.
    """

    def __init__(
        self,
        peer: Peer,
        token: str,
        resolve: Resolve,
        clock: Callable[[], float],
        wall: Callable[[], float],
        calls_kept: int = KEEP,
        refusal: str = WAITS,
        claim: Claim = lambda _node, _group_rank, _ranks: "",
    ) -> None:
        self.peer = peer
        self.group_rank = peer.group_rank
        self.claimed: tuple[int, tuple[int, ...]] | None = None  # group rank and ranks that one that is listed has said, and may have
        self.itself = False  # it is the judge, under another name
        self.line: int | None = None  # the judge's own in the list, goes with every pull
        self.calls_kept = calls_kept
        self.order: questions.Order | None = None  # goes with every pull
        self.news = questions.News()  # its incidents go with the next pull that is answered
        self._told = ""  # which of them are known there
        self.since = clock()
        self.newest: Newest | None = None
        self.shown: Newest | None = None  # as of the last round that is over: the puller's
        self.problem = ""
        self.refused = False  # it knows another secret: until somebody has taken note
        self.replaced = False  # another launcher answers in its place: likewise
        self.other_schema: int | None = None
        self.failures_in_a_row = 0
        self.failing_since: float | None = None
        self._pulls = self._failures = self._bytes = self._put = 0
        self._clock = clock
        self._wall = wall
        self._refusal = refusal
        self._claim = claim
        self._proven = False  # the address in use has answered as this peer
        self._calls_kept = calls_kept
        self._receiver = Receiver(calls_kept)
        self._offset = Offset()
        self._clock_offset_s = self._clock_error_s = 0.0
        self._token = token
        self._resolve = resolve
        self._connection, self._connected_to = self._connect(peer), peer

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks by its last report, or by its announcement."""
        newest = self.newest
        return tuple(rank.rank for rank in newest.report.ranks) if newest is not None and newest.report.ranks else self.peer.ranks

    @property
    def reached(self) -> Peer:
        """As announced, with the address in use first."""
        return replace(self.peer, addresses=(self._connection.host, *(each for each in self.peer.addresses if each != self._connection.host)))

    def cut(self) -> None:
        """End a pull that is under way in another thread."""
        self._connection.cut()

    def close(self) -> None:
        """Give the connection back. Not while a pull is under way."""
        self._connection.close()

    def report(self, now: float) -> NodeReport:
        """Its report as of the last round; without ranks when it is silent, see NodeReport."""
        shown = self.shown
        age_s = max(0.0, now - (shown.read_at if shown is not None else self.since))
        if shown is not None and shown.ended:
            return shown.report  # as true as on the first day
        gone = age_s > schedule.STALE_S
        failing_since = self.failing_since
        problem = self.problem if failing_since is not None or gone else ""
        if shown is not None and not gone:
            return replace(shown.report, report_age_s=age_s, problem=problem, failing_since=failing_since)
        silent = self.ranks if gone else ()  # before that it is only new
        return NodeReport(self.peer.node, (), self.group_rank, age_s, silent_ranks=silent, problem=problem if gone else "", failing_since=failing_since)

    def state(self, now: float) -> NodeState:
        """How pulling it goes."""
        newest = self.newest
        return NodeState(
            group_rank=self.group_rank,
            node=self.peer.node,
            address=self._connection.address,
            report_age_s=max(0.0, now - newest.read_at) if newest is not None else None,
            clock_offset_s=self._clock_offset_s,
            clock_error_s=self._clock_error_s,
            version=self.peer.version,
            problem=self.problem,
            pulls=self._pulls,
            failures=self._failures,
            bytes=self._bytes,
            ending=newest.ending if newest is not None else "",
            final=newest is not None and newest.final,
            events_lost=self._receiver.events_lost,
        )

    # -- a pull, in a worker's thread ------------------------------------------------------------------------------------------

    def pull(self, wants: Mapping[questions.Kind, Iterable[int]], judge_url: str, confirm: bool) -> list[dict[str, Any]]:
        """Ask for its report; the events that came. confirm: tell it that its report is here. At most TRY_S."""
        deadline = self._clock() + schedule.TRY_S
        was_final = self.newest is not None and self.newest.final
        self._pulls += 1
        try:
            if self.peer is not self._connected_to:
                self._follow()
            if self.calls_kept < self._calls_kept:
                self._shorten()
            events = self._pull(wants, judge_url, deadline)
        except Unanswered as error:
            if error.reached and not self._proven:
                self._connection.turn()
            return self._failed(str(error), was_final)
        except Exception as error:  # bytes from another machine: a surprise in them must not end the thread
            return self._failed(f"its answer cannot be read: {type(error).__name__}: {error}", was_final)
        self.problem, self.failures_in_a_row, self.failing_since = "", 0, None
        if confirm or (self.newest is not None and self.newest.final and not was_final):
            self._confirm(deadline)
        return events

    def _failed(self, problem: str, was_final: bool) -> list[dict[str, Any]]:
        """That a launcher which has said its last word does not answer any more is no problem."""
        self.failures_in_a_row += 1
        self._failures += not was_final
        self.problem = "" if was_final else problem[:MAX_TEXT]
        if not was_final and self.failing_since is None:
            self.failing_since = self._clock()
        return []

    def _follow(self) -> None:
        """Its announcement has changed: the same launcher, perhaps under other addresses."""
        before, self._connected_to = self._connected_to, self.peer
        if (before.addresses, before.port) != (self.peer.addresses, self.peer.port):
            self._connection.close()
            self._connection, self._proven = self._connect(self.peer), False

    def _shorten(self) -> None:
        """The job is larger than was known: begin anew with shorter histories of calls."""
        after, self._calls_kept = self._receiver.events_after, self.calls_kept
        self._receiver = Receiver(self._calls_kept)
        self._receiver.events_after = after

    def _connect(self, peer: Peer) -> Connection:
        return Connection(peer.addresses, peer.port, self._token, self._resolve, self._clock)

    def _pull(self, wants: Mapping[questions.Kind, Iterable[int]], judge_url: str, deadline: float) -> list[dict[str, Any]]:
        for _ in range(2):
            news = self.news if self.order is None and self.news.open_now != self._told else replace(self.news, open_now="")
            target = questions.report(self._receiver.base, self._receiver.events_after, wants, judge_url, self.order, news, self.line)
            answer = self._connection.get(target, deadline)
            self._bytes += answer.wire_bytes
            document = self._document(answer)
            node_mono, node_wall = _time_of(document, "mono"), _time_of(document, "wall")
            wall_now = self._wall() - (self._clock() - answer.sent_at)
            self._offset.add(answer.sent_at, answer.received_at, wall_now, node_mono, node_wall)
            shift = self._offset.shift
            if shift is None:
                raise Unanswered("its clocks say nothing")
            self._told = news.open_now or self._told
            self._clock_offset_s, self._clock_error_s = shift.wall_s, self._offset.error_s
            try:
                events = self._receiver.apply(document, shift)
            except Gap:  # it has forgotten what we have: the whole, at once
                continue
            self._note(document, answer.received_at)
            return [event for event in events[:MAX_EVENTS] if self._is_ours(event.get("rank"))]
        raise Unanswered("its answers do not follow each other")

    def _note(self, document: Mapping[str, Any], received_at: float) -> None:
        """What the receiver holds now is the newest."""
        receiver, put = self._receiver, document.get("put")
        if receiver.read_at is None:
            raise Unanswered("it has not looked at its ranks yet")
        report = receiver.report(0.0)
        if not self.peer.nonce:
            self._learn(report)
        report = self._ours(report)
        ended = receiver.final and not any(rank.process is not None and rank.process.alive for rank in report.ranks)
        self.newest = Newest(report, min(received_at, receiver.read_at), receiver.ending, receiver.final, ended)
        self._put = put if isinstance(put, int) else 0

    def _learn(self, report: NodeReport) -> None:
        """What one that is only listed has not announced: its group rank and ranks, as far as nobody else has them."""
        said = (report.group_rank, tuple(rank.rank for rank in report.ranks))
        if said != self.claimed:
            problem = self._claim(self, *said)
            if problem:
                raise Unanswered(problem)
            self.claimed = said

    def _document(self, answer: Answer) -> dict[str, Any]:
        """The answer of this very launcher as JSON; Unanswered, and on to the next address, for any other."""
        address = self._connection.address
        if answer.status == 401:
            self.refused = True
            raise Unanswered(f"{address} refuses this judge's secret: {self._refusal}")
        if answer.status == questions.ITSELF:
            self.itself = not self.peer.nonce
            raise Unanswered(f"{address} is this launcher itself")
        if answer.status != 200:
            said = " ".join(answer.body[:SAID_BYTES].decode("utf-8", "replace").split())
            raise Unanswered(f"{address} answers {answer.status}: {''.join(filter(str.isprintable, said))}")
        try:
            if len(answer.body) > LARGE_BYTES:
                with _large:
                    document = json.loads(answer.body, parse_constant=_not_finite)
            else:
                document = json.loads(answer.body, parse_constant=_not_finite)
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"{address} answers with what is no JSON ({type(error).__name__})") from None
        if not isinstance(document, dict):
            raise Unanswered(f"{address} answers with what is no JSON object")
        schema = document.get("schema")
        if schema != questions.SCHEMA:
            self.other_schema = schema if isinstance(schema, int) else -1
            raise Unanswered(f"it runs rankwatch {self.peer.version} with report schema {str(schema)[:20]}, this is {__version__} with {questions.SCHEMA}")
        if self.peer.nonce and document.get("nonce") != self.peer.nonce:  # --peers knows none
            self.replaced, self._proven = True, False
            raise Unanswered(f"another launcher answers at {address}: this one has restarted, or the address is another machine's")
        self.other_schema, self._proven = None, True
        return document

    def _ours(self, report: NodeReport) -> NodeReport:
        """With what was announced: a node cannot speak for another one's ranks."""
        ranks = report.ranks
        if not all(self._is_ours(rank.rank) for rank in ranks):
            ranks = tuple(rank for rank in ranks if self._is_ours(rank.rank))
        return replace(report, node=self.peer.node, group_rank=self.group_rank, ranks=ranks)

    def _is_ours(self, rank: Any) -> bool:
        known = self.peer.ranks or (self.claimed[1] if self.claimed is not None else ())
        return type(rank) is int and (rank in known if known or not self.peer.nonce else True)

    def _confirm(self, deadline: float) -> None:
        try:
            self._bytes += self._connection.get(f"{questions.ROOT}taken?put={self._put}", deadline).wire_bytes
        except Unanswered:
            pass  # it waits for this, and not for long


def _not_finite(constant: str) -> float:
    """Python's json takes NaN and Infinity, and writes them: what reads our files need not."""
    raise ValueError(f"{constant} is no JSON")


def _time_of(document: Mapping[str, Any], name: str) -> float:
    value: Any = document.get(name)
    if type(value) not in (int, float) or not -MOST_S < value < MOST_S:
        raise Unanswered(f"its answer has no time {name!r}")
    return float(value)
