"""This launcher's part in a job of many nodes: it judges what the others report, or it reports to the one that judges.

Starting (a secret that may have to come from the store, a listener) is a thread's of its own. What the loop calls here waits only where a bound
is given, and raises nothing for the network's sake.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from rankwatch import __version__
from rankwatch.model import JobSnapshot, NodeReport, Want
from rankwatch.monitor import heap
from rankwatch.monitor.nodes import said
from rankwatch.monitor.workers import Workers

if TYPE_CHECKING:  # a job of one node never loads the rest of this package
    from rankwatch.monitor.nodes.peer import Peer
    from rankwatch.monitor.nodes.pull import Puller
    from rankwatch.monitor.nodes.questions import Order
    from rankwatch.serve.server import Server

SPOKEN_FOR_S = 15.0  # a judge that has asked within this time speaks for the whole job
FIRST_ASKED_S = 30.0  # so long it may take the judge to find this launcher
SECRET_WAIT_S = 0.5
ORDER_WAIT_S = 0.5
HINT_S = 1.5
MANY_NODES = 64
FINAL_WAIT_S = {True: 0.2, False: 1.0}  # after success, after failure: until the judge has fetched the last report
GONE_WAIT_S = 0.2  # the same for a judge that could not be reached a moment ago
EVERYWHERE = ("[::]:{port}", "0.0.0.0:{port}")  # a machine without IPv6 has the second only


class Directory(Protocol):
    """Where the launchers of a job find each other: launcher/discovery.py."""

    on_change: Callable[[], None] | None
    port: int  # to listen on; 0: any

    def start(self) -> None: ...
    def run_name(self, wait_s: float) -> str: ...
    def secret(self, wait_s: float = 0) -> str: ...
    def publish(self, port: int, nonce: str, ranks: tuple[int, ...], run_name: str = "") -> None: ...
    def judge(self) -> Peer | None: ...
    def peers(self) -> tuple[Peer, ...]: ...
    def order_key(self) -> str: ...
    def is_judges(self, order_key: str) -> bool: ...
    def refused(self) -> None: ...
    def stop(self) -> None: ...
    @property
    def problem(self) -> str: ...
    @property
    def operations(self) -> Operations: ...


class Operations(Protocol):
    """What torchrun's store has been asked."""

    @property
    def calls(self) -> int: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Serving:
    """One listener and the secret that it asks for."""

    secret: str
    server: Server
    puller: Puller | None


class Together:
    """Of one attempt. The loop's thread calls everything but `start`'s own work and the callbacks.

    wake: make the loop look now. url: this launcher's status page.
    """

    def __init__(
        self, workers: Workers, directory: Directory, run_name: str, say: Callable[[str], None], wake: Callable[[], None], url: Callable[[], str]
    ) -> None:
        from rankwatch.monitor.nodes.nudging import Stops
        from rankwatch.monitor.nodes.offer import Offer

        self.judges = workers.group_rank == 0
        self._workers = workers
        self._directory = directory
        self._run_name = run_name
        self._say = say
        self._wake = wake
        self._url = url
        self._nonce = secrets.token_hex(8)
        self._offer = Offer(self._nonce, __version__, workers.world_size)
        self._started_at = time.monotonic()
        self._serving: Serving | None = None
        self._changed = threading.Event()
        self._stopped = False
        self._ended: set[int] = set()  # group ranks whose planned end the judge has seen in a look before
        self._endings: list[dict[str, Any]] = []  # as events, not taken yet
        self._has_peers = False
        self._stops = Stops()
        self._hinting = threading.Lock()
        self._ordered = False  # the judge ends the job, and says so itself
        self._missed = False  # the nudge before has not reached it
        self._reached = False  # the judge has answered the newest nudge
        self._news = said.Silences()
        self._local = {worker.rank for worker in workers.workers}

    def start(self, recorders: Callable[[Iterable[int]], dict[int, dict[str, bytes]]]) -> None:
        """Begin to listen and to look for the others. recorders: gives the newest raw recorders of local ranks."""
        self._offer.recorders(recorders)
        self._offer.on_wants = self._wake
        self._offer.on_nudge = self._nudged
        self._offer.is_judges = self._directory.is_judges
        self._directory.on_change = self._changed.set
        threading.Thread(target=self._serve, name="rankwatch-nodes", daemon=True).start()

    def stop(self) -> None:
        """Stop listening and asking, at once."""
        self._stopped = True
        self._changed.set()
        self._directory.stop()
        self._close()

    # -- the judge's side ----------------------------------------------------------------------------------------------------

    def merge(self, snapshot: JobSnapshot) -> JobSnapshot:
        """The snapshot of the whole job; a member's own as it is.

        A planned end elsewhere counts from the second look that shows it: the first may bring the death that it follows.
        """
        puller = self._puller
        if puller is None:
            return snapshot
        ending = snapshot.ending
        for state in puller.states():
            if state.ending and not ending and state.group_rank in self._ended:
                ending = state.ending
            if state.ending and state.group_rank not in self._ended:
                self._ended.add(state.group_rank)
                self._endings.append({"kind": "ending", "node": state.node, "reason": state.ending})
        return replace(snapshot, nodes=(*snapshot.nodes, *puller.reports(snapshot.now)), ending=ending)

    def ask(self, wants: Iterable[Want], suspected: bool) -> None:
        """Have the nodes of these ranks fetch this evidence; ask all more often while something is suspected."""
        puller = self._puller
        if puller is None:
            return
        puller.hurry(suspected)
        elsewhere = [replace(want, ranks=ranks) for want in wants if (ranks := tuple(rank for rank in want.ranks if rank not in self._local))]
        if elsewhere:
            puller.ask(elsewhere)

    @property
    def sets_pace(self) -> bool:
        """Whether rounds of reports call for looks; a judge that has found nobody looks at its own ranks as one of a single node does."""
        return self._has_peers

    def pull_now(self, deadline_s: float) -> None:
        """Every node's newest report, as far as it comes within the deadline."""
        if self._puller is not None:
            self._puller.pull_now(deadline_s)

    def order_end(self, culprit_ranks: tuple[int, ...], why: str) -> None:
        """Have every other launcher end its workers, as this one does; at most ORDER_WAIT_S. With --peers nothing proves whose it is: only torchrun does it."""
        key = self._directory.order_key() if self.judges else ""
        if self._puller is not None and key:
            from rankwatch.monitor.nodes.questions import Order

            self._puller.order(Order(key, culprit_ranks, why))
            self._puller.pull_now(ORDER_WAIT_S)

    def take_events(self) -> list[dict[str, Any]]:
        """What other nodes' ranks have finished since the call before."""
        return self._puller.take_events() if self._puller is not None else []

    def take_endings(self) -> list[dict[str, Any]]:
        """Planned ends on other nodes that have been heard of since the call before."""
        taken, self._endings = self._endings, []
        return taken

    def recorders(self, ranks: Iterable[int]) -> dict[int, dict[str, bytes]]:
        """The raw recorders of other nodes' ranks that have been fetched so far; those that have not are asked for."""
        wanted = [rank for rank in ranks if rank not in self._local]
        return self._puller.recorders(wanted, 0.0) if self._puller is not None and wanted else {}

    def tell_news(self, nodes: Sequence[NodeReport]) -> None:
        """Say once which node has fallen silent, and that it answers again."""
        for line in self._news.look(nodes):
            self._say(line)

    @property
    def store(self) -> tuple[int, int]:
        """(calls, bytes) that this launcher has asked of torchrun's store."""
        operations = self._directory.operations
        return operations.calls, operations.bytes

    @property
    def problem(self) -> str:
        """Why not every node reports; "" where all do, or for a member."""
        if not self.judges:
            return ""
        states = self._puller.states() if self._puller is not None else ()
        return said.problem(states, self._workers.nnodes, self._directory.problem)

    # -- a member's side -----------------------------------------------------------------------------------------------------

    def offer(self, report: NodeReport, events: Sequence[Mapping[str, Any]], ending: str, final: bool) -> None:
        """What the judge may fetch from now on; at once where one of the ranks is found stopped."""
        if self.judges:
            return
        self._offer.put(report, events, ending, final)
        if not final and self._stops.due(report, time.monotonic()) and self._offer.asked_at is not None and self._hinting.acquire(blocking=False):
            threading.Thread(target=self._hint, name="rankwatch-nudge", daemon=True).start()

    def take_wants(self) -> tuple[Want, ...]:
        """What the judge has asked for since the call before."""
        return self._offer.take_wants() if not self.judges else ()

    def take_order(self) -> Order | None:
        """The judge's order to end this node's workers, once."""
        order = self._offer.take_order() if not self.judges else None
        self._ordered = self._ordered or order is not None
        return order

    def spoken_for(self, now: float) -> bool:
        """Whether another launcher judges the whole job, so that this one keeps silent."""
        if self.judges:
            return False
        asked_at = self._offer.asked_at
        return now - asked_at < SPOKEN_FOR_S if asked_at is not None else now - self._started_at < FIRST_ASKED_S

    @property
    def judge(self) -> str:
        """Where the whole job is judged: the status page there, or the node."""
        found = self._directory.judge()
        return "" if self.judges else self._offer.judge_url or (found.node if found is not None else "")

    def hand_over(self, wait_s: float) -> None:
        """A rank has failed, or all is over: have the judge fetch the newest report now, and wait so long until it has, or cannot be reached."""
        found, serving = self._directory.judge(), self._serving
        if self.judges or found is None or serving is None or self._offer.asked_at is None:
            return
        wait_s = min(wait_s, GONE_WAIT_S) if self._missed else wait_s
        self._reached, self._missed, taken = False, True, self._offer.taken()
        threading.Thread(target=self._nudge, args=(found, serving.secret, wait_s, taken), name="rankwatch-nudge", daemon=True).start()
        taken.wait(wait_s)

    def judge_is_gone(self, since: float) -> bool:
        """Whether the judge knows nothing of what has happened after `since`: it has not asked, and the hand-over has not reached it."""
        asked_at = self._offer.asked_at
        return not self.judges and not self._reached and not self._ordered and (asked_at is None or asked_at < since)

    # -- threads -------------------------------------------------------------------------------------------------------------

    @property
    def _puller(self) -> Puller | None:
        return self._serving.puller if self._serving is not None else None

    def _nudge(self, judge: Peer, secret: str, wait_s: float, taken: threading.Event) -> None:
        self._reached = not self._offer.nudge(judge, secret, self._workers.group_rank, wait_s)
        self._missed = not self._reached
        if not self._reached:
            taken.set()  # nobody will come
            self._directory.refused()  # the judge may be another one by now, or ask for another secret

    def _hint(self) -> None:
        """Nobody waits for this one."""
        try:
            found, serving = self._directory.judge(), self._serving
            if found is not None and serving is not None:
                self._offer.nudge(found, serving.secret, self._workers.group_rank, HINT_S)
        finally:
            self._hinting.release()

    def _nudged(self, group_rank: int) -> None:
        if self._puller is not None:
            self._puller.nudge(group_rank)

    def _serve(self) -> None:
        """Listen with the newest secret; the judge also keeps its list of the others up to date."""
        try:
            while not self._stopped:
                secret = self._directory.secret(SECRET_WAIT_S)
                if secret and (self._serving is None or self._serving.secret != secret):
                    self._listen(secret)
                if self._puller is not None:
                    peers = self._directory.peers()
                    self._puller.set_peers(peers)
                    self._has_peers = bool(peers)
                self._changed.wait()
                self._changed.clear()
        except Exception as error:
            self._say(f"this launcher judges its own ranks only: {type(error).__name__}: {error}; the job is not affected")

    def _listen(self, secret: str) -> None:
        from rankwatch.monitor.nodes.listener import Listener
        from rankwatch.monitor.nodes.pull import Puller

        self._close()
        for where in EVERYWHERE:
            server = Listener(where.format(port=self._directory.port), self._offer.routes(), secret, self._directory.refused)
            if server.start():
                break
        else:
            self._say(f"other nodes cannot reach this launcher: {server.notice}")
            return
        if self.judges and self._workers.nnodes >= MANY_NODES:
            heap.collect_less_often()
        puller = Puller(secret, self._say, self._url, self._wake) if self.judges else None
        self._serving = Serving(secret, server, puller)
        self._directory.publish(server.port, self._nonce, tuple(sorted(self._local)), self._run_name)
        if puller is not None:
            puller.on_refused = self._directory.refused
            puller.start()
        if self._stopped:
            self._close()

    def _close(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.server.stop()
            if serving.puller is not None:
                serving.puller.stop()
