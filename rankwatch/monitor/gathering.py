"""Has the evidence fetched that the judge wants and that incidents show: from the ranks of this node, and through the launchers of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from rankwatch.model import NodeReport, RankState, Want
from rankwatch.monitor.evidence import Evidence
from rankwatch.monitor.nodes.together import Together
from rankwatch.monitor.on_demand import Found
from rankwatch.monitor.processes import Processes
from rankwatch.monitor.reader import Reader
from rankwatch.monitor.stacks import Target

SELF_TEST_AFTER_S = 5.0


class Gathering:
    """Of one attempt's ranks. Called from the loop's thread only. states: every rank as it was last seen."""

    def __init__(self, evidence: Evidence, reader: Reader, together: Together | None, states: Callable[[], Mapping[int, RankState]]) -> None:
        self._evidence = evidence
        self._reader = reader
        self._together = together
        self._states = states
        self._children = Processes()

    def asked_here(self, wants: Iterable[Want]) -> tuple[Want, ...]:
        """What is wanted of this node's ranks: by its own judge, and by the one of the whole job."""
        return (*wants, *(self._together.take_wants() if self._together is not None else ()))

    def fetch(self, wants: tuple[Want, ...], asked_here: Iterable[Want], shown: tuple[int, ...], suspected: bool) -> None:
        """Start the dumps that are wanted and those of `shown`, the ranks of a new incident."""
        for want in asked_here:
            if want.kind in ("stacks", "native_stack"):
                self._evidence.request(self._targets(want.ranks), native=want.kind == "native_stack")
        self._evidence.request(self._targets(shown), at_once=True)
        if self._together is not None:
            self._together.ask((*wants, Want("stacks", shown, "an incident shows them")) if shown else wants, suspected)

    def on_demand(self, ranks: Iterable[int], native: bool) -> Found:
        """Ranks that a person asks for: how to dump those of this node; the other nodes are asked for theirs, but not for native ones."""
        wanted, pids = tuple(ranks), self._reader.pids()
        elsewhere: frozenset[int] = frozenset()
        if self._together is not None and self._together.judges and not native:
            elsewhere = frozenset(rank for rank in wanted if rank not in pids and rank in self._states())
        if self._together is not None and elsewhere:
            self._together.ask((Want("stacks", tuple(sorted(elsewhere)), "a person asks for them"),), suspected=True)
        return Found(tuple(self._targets(wanted)), elsewhere)

    def everybody(self) -> None:
        """Start a dump of every rank of this node that lives."""
        self._evidence.request(self._targets(self._reader.pids()), at_once=True)

    def test_once(self, report: NodeReport) -> None:
        """Find out whether stacks can be had here, as soon as a rank is there to try it on."""
        if self._evidence.self_test is not None:
            return
        ready = [rank.rank for rank in report.ranks if rank.agent in ("armed", "claimed")]
        if ready or time.monotonic() - self._reader.started_at > SELF_TEST_AFTER_S:
            self._evidence.test(self._targets(ready or self._reader.pids()))

    def recorders(self, ranks: Iterable[int]) -> dict[int, dict[str, bytes]]:
        """The newest recorder JSON of these ranks, here and elsewhere, as far as it is there."""
        wanted = tuple(ranks)
        found = self._reader.raw_recorders(wanted)
        return {**found, **self._together.recorders(wanted)} if self._together is not None else found

    def _targets(self, ranks: Iterable[int]) -> list[Target]:
        pids = self._reader.pids()
        return [self._target(rank, pids[rank], self._reader.socket_of(rank)) for rank in ranks if rank in pids]

    def _target(self, rank: int, pid: int, socket: str) -> Target:
        return Target(rank, pid, socket, lambda: self._children.children(pid), lambda: self._heartbeat_at(rank))

    def _heartbeat_at(self, rank: int) -> float | None:
        state = self._states().get(rank)
        return state.heartbeat_at if state is not None else None
