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
from rankwatch.model import Incident, JobSnapshot, NodeReport, Want
from rankwatch.monitor import heap
from rankwatch.monitor.nodes import said
from rankwatch.monitor.workers import Workers

if TYPE_CHECKING:  # a job of one node never loads the rest of this package
    from rankwatch.monitor.nodes.peer import Peer
    from rankwatch.monitor.nodes.pull import Puller
    from rankwatch.monitor.nodes.questions import News, Order
    from rankwatch.serve.server import Server

SPOKEN_FOR_S = 15.0  # a judge that has asked within this time speaks for the whole job
FIRST_ASKED_S = 30.0  # so long it may take the judge to find this launcher
QUIET_S = 120.0  # after the judge's order, or its end with a failed job: what happens here follows from that, and torchrun takes 30 s to kill a stopped rank
END_WAIT_S = 0.3  # for the others to hear that the judge ends
SECRET_WAIT_S = 0.5
ORDER_WAIT_S = 0.5
HINT_S = 1.5
ASK_JUDGE_EVERY_S = 60.0  # whether it is the judge whom this launcher refuses
LISTEN_AGAIN_S = 10.0  # on a listed port that somebody else holds
ENDING_S = 120.0  # a planned end of one node explains what happens on the others for so long
MAX_NOTICES = 8
MANY_NODES = 64
FINAL_WAIT_S = {True: 0.2, False: 1.0}  # after success, after failure: until the judge has fetched the last report
GONE_WAIT_S = 0.2  # the same for a judge that could not be reached a moment ago
EVERYWHERE = ("[::]:{port}", "0.0.0.0:{port}")  # a machine without IPv6 has the second only


class Directory(Protocol):
    """Where the launchers of a job find each other: launcher/discovery.py, launcher/listed.py.

    listed: by --peers, so that nobody has announced anything. line: this launcher's own in that list. fixed: the secret is a token file's and stays.
    refusal: why another launcher may refuse it. ports: to listen on, the first that can be had; 0: any. notice: what a person has to mend on this node.
    """

    on_change: Callable[[], None] | None

    @property
    def listed(self) -> bool: ...
    @property
    def line(self) -> int | None: ...
    @property
    def fixed(self) -> bool: ...
    @property
    def refusal(self) -> str: ...
    @property
    def ports(self) -> tuple[int, ...]: ...
    @property
    def notice(self) -> str: ...

    def start(self) -> None: ...
    def run_name(self, wait_s: float) -> str: ...
    def secret(self, wait_s: float = 0) -> str: ...
    def publish(self, port: int, nonce: str, ranks: tuple[int, ...], run_name: str = "") -> bool: ...
    def judge_is_at(self, line: int) -> None: ...
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
    """One secret, and the listener that asks for it; None while it has no port."""

    secret: str
    server: Server | None
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
        self._ended: dict[int, float] = {}  # group rank -> when the judge has first seen its planned end
        self._endings: list[dict[str, Any]] = []  # as events, not taken yet
        self._has_peers = False
        self._stops = Stops()
        self._hinting = threading.Lock()
        self._ordered_at: float | None = None  # the judge ends the job, and says so itself
        self._open_key: tuple[object, ...] = ()  # which open incidents the others have been told of
        self._news: News | None = None
        self._missed = False  # the nudge before has not reached it
        self._reached = False  # the judge has answered the newest nudge
        self._silences = said.Silences()
        self._local = {worker.rank for worker in workers.workers}
        self._noticed: set[str] = set()
        self._asked_judge_at = -1e9

    def start(self, recorders: Callable[[Iterable[int]], dict[int, dict[str, bytes]]]) -> None:
        """Begin to listen and to look for the others. recorders: gives the newest raw recorders of local ranks."""
        self._offer.recorders(recorders)
        self._offer.on_wants = self._wake
        self._offer.on_nudge = self._nudged
        self._offer.is_judges = self._directory.is_judges
        self._offer.on_judge_line = self._directory.judge_is_at
        self._offer.judges = self.judges
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

        A planned end elsewhere counts from the second look that shows it, since the first may bring the death that it follows, and for ENDING_S: the word of
        one node does not keep the trouble of the others silent for ever.
        """
        puller = self._puller
        if puller is None:
            return snapshot
        ending = snapshot.ending
        for state in puller.states():
            if state.ending and not ending and snapshot.now - self._ended.get(state.group_rank, -1e9) < ENDING_S:
                ending = state.ending
            if state.ending and state.group_rank not in self._ended:
                self._ended[state.group_rank] = snapshot.now
                self._endings.append({"kind": "ending", "node": state.node, "reason": state.ending})
        reports = puller.reports(snapshot.now)
        if self._directory.listed and self._all_heard:  # the list has more lines than the job has nodes
            reports = tuple(report for report in reports if report.ranks or report.silent_ranks)
        leaving = [report for report in reports if report.group_rank in self._ended]
        ranks = frozenset(rank for report in leaving for rank in (*(each.rank for each in report.ranks), *report.silent_ranks))
        return replace(snapshot, nodes=(*snapshot.nodes, *reports), ending=ending, leaving=ranks)

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
    def may_act(self) -> bool:
        """Whether --on-stuck may act. Launchers that are listed have to show first that they are of this job: on the judge all, to a member the judge."""
        if not self._directory.listed:
            return True
        return self._all_heard if self.judges else self._offer.asked_at is not None

    @property
    def _all_heard(self) -> bool:
        """Whether the launchers of all other nodes of the job have answered with its secret."""
        states = self._puller.states() if self._puller is not None else ()
        return sum(state.report_age_s is not None for state in states) >= self._workers.nnodes - 1

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

    def tell_open(self, incidents: Sequence[Incident], wall_at: float) -> None:
        """What is open, for whoever takes over should this launcher fall silent: with the next pulls, whenever it has changed."""
        if self._puller is None:
            return
        from rankwatch.monitor.nodes import last_words
        from rankwatch.monitor.nodes.questions import News

        if (found := last_words.key(incidents)) != self._open_key:
            self._open_key, self._news = found, News(last_words.words(incidents, wall_at))
        if self._news is not None:
            self._puller.tell(self._news)  # the puller may be another one by now

    def tell_end(self, failed: bool, wait_s: float) -> None:
        """Have the others know that this launcher ends and has told all, so that none mistakes it for one that has vanished; at most wait_s."""
        puller = self._puller
        if puller is None or all(state.final for state in puller.states()):
            return
        from rankwatch.monitor.nodes.questions import News

        puller.tell(replace(self._news or News(), over=str(int(failed))))
        puller.pull_now(min(wait_s, END_WAIT_S))

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
        for line in self._silences.look(nodes):
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
        if order is not None and self._ordered_at is None:
            self._ordered_at = time.monotonic()
        return order

    def spoken_for(self, now: float) -> bool:
        """Whether another launcher judges the whole job, so that this one keeps silent."""
        if self.judges:
            return False
        if (self._ordered_at is not None and now - self._ordered_at < QUIET_S) or self.judge_has_told(now):
            return True
        asked_at = self._offer.asked_at
        return now - asked_at < SPOKEN_FOR_S if asked_at is not None else now - self._started_at < FIRST_ASKED_S

    def judge_has_told(self, now: float) -> bool:
        """Whether the judge has ended a moment ago with a failed job, and told of it: what fails here now follows from that."""
        asked_at = self._offer.asked_at
        return not self.judges and self._offer.over == "1" and asked_at is not None and now - asked_at < QUIET_S

    @property
    def judge_has_ended(self) -> bool:
        """Whether the judge has said that it ends, and has not asked since."""
        return not self.judges and self._offer.over != ""

    @property
    def judge_node(self) -> str:
        """The host of the launcher that judges the whole job; "" where it is not known, or this one."""
        found = self._directory.judge() if not self.judges else None
        return found.node if found is not None else ""

    def last_words(self) -> list[str]:
        """Lines that say what the judge had found open when it was heard last."""
        from rankwatch.monitor.nodes import last_words

        return last_words.lines(self._offer.open_there, self.judge_node)

    @property
    def judge(self) -> str:
        """Where the whole job is judged: the status page there, or the node. An address of that machine's own is told with the machine."""
        from rankwatch.monitor.nodes.questions import seen_there_only

        url, node = self._offer.judge_url, self.judge_node
        if self.judges or not url:
            return node
        return f"{node or 'node 0'} ({url} there)" if node != self._workers.node and seen_there_only(url) else url

    def hand_over(self, wait_s: float) -> None:
        """A rank has failed, or all is over: have the judge fetch the newest report now, and wait so long until it has, or cannot be reached."""
        found, serving = self._directory.judge(), self._serving
        if self.judges or found is None or serving is None or self._offer.asked_at is None or self._offer.over:
            return
        wait_s = min(wait_s, GONE_WAIT_S) if self._missed else wait_s
        self._reached, self._missed, taken = False, True, self._offer.taken()
        threading.Thread(target=self._nudge, args=(found, serving.secret, wait_s, taken), name="rankwatch-nudge", daemon=True).start()
        taken.wait(wait_s)

    def judge_is_gone(self, since: float) -> bool:
        """Whether the judge knows nothing of what has happened after `since`: it has not asked, and the hand-over has not reached it."""
        asked_at = self._offer.asked_at
        if self.judges or self._reached or self._ordered_at is not None or self.judge_has_told(time.monotonic()):
            return False
        return asked_at is None or asked_at < since

    # -- threads -------------------------------------------------------------------------------------------------------------

    @property
    def _puller(self) -> Puller | None:
        return self._serving.puller if self._serving is not None else None

    def _nudge(self, judge: Peer, secret: str, wait_s: float, taken: threading.Event) -> None:
        problem = self._offer.nudge(judge, secret, self._workers.group_rank, wait_s)
        self._reached, self._missed = not problem, bool(problem)
        if problem:
            taken.set()  # nobody will come
        if problem and not self._tell_refused(judge, problem):
            self._directory.refused()  # the judge may be another one by now, or ask for another secret

    def _hint(self) -> None:
        """Nobody waits for this one."""
        try:
            found, serving = self._directory.judge(), self._serving
            if found is not None and serving is not None:
                self._tell_refused(found, self._offer.nudge(found, serving.secret, self._workers.group_rank, HINT_S))
        finally:
            self._hinting.release()

    def _tell_refused(self, judge: Peer, problem: str) -> bool:
        """Whether the judge has refused a secret that stays: said once, and nothing is looked for."""
        from rankwatch.monitor.nodes.nudging import REFUSES

        if REFUSES not in problem or not self._directory.fixed:
            return False
        self._notice(f"the judge of the job on {judge.node} and this launcher refuse each other: {self._directory.refusal}; this one judges its own ranks")
        return True

    def _somebody_refused(self) -> None:
        """In a server's thread: somebody has come with another secret. With one that stays, a member sees whether that was the judge."""
        if not self._directory.fixed:
            self._directory.refused()
            return
        now = time.monotonic()
        if self.judges or self._directory.judge() is None or now - self._asked_judge_at < ASK_JUDGE_EVERY_S or not self._hinting.acquire(blocking=False):
            return
        self._asked_judge_at = now
        threading.Thread(target=self._hint, name="rankwatch-nudge", daemon=True).start()

    def _notice(self, text: str) -> None:
        """Say it, once."""
        if text and text not in self._noticed and len(self._noticed) < MAX_NOTICES and not self._stopped:
            self._noticed.add(text)
            self._say(text)

    def _nudged(self, group_rank: int) -> None:
        if self._puller is not None:
            self._puller.nudge(group_rank)

    def _serve(self) -> None:
        """Listen with the newest secret; the judge also keeps its list of the others up to date."""
        try:
            while not self._stopped:
                secret = self._directory.secret(SECRET_WAIT_S)
                if secret and (self._serving is None or self._serving.secret != secret):
                    self._begin(secret)
                if self._serving is not None and self._serving.server is None:
                    self._listen(self._serving)
                if self._puller is not None:
                    self._puller.line = self._directory.line
                    peers = self._directory.peers()
                    self._puller.set_peers(peers)
                    self._has_peers = bool(peers)
                self._notice(self._directory.notice)
                self._changed.wait(LISTEN_AGAIN_S if self._serving is not None and self._serving.server is None else None)
                self._changed.clear()
        except Exception as error:
            self._say(f"this launcher judges its own ranks only: {type(error).__name__}: {error}; the job is not affected")

    def _begin(self, secret: str) -> None:
        """With a secret, the first one or another: the judge begins to ask."""
        self._close()
        puller = None
        if self.judges:
            from rankwatch.monitor.nodes.pull import Puller

            if self._workers.nnodes >= MANY_NODES:
                heap.collect_less_often()
            puller = Puller(secret, self._say, self._url, self._wake, refusal=self._directory.refusal, own_ranks=self._local)
            puller.on_refused = None if self._directory.fixed else self._directory.refused
            puller.on_replaced = self._directory.refused
            puller.start()
        self._serving = Serving(secret, None, puller)
        if self._stopped:
            self._close()

    def _listen(self, serving: Serving) -> None:
        """Where the others look for this launcher, as far as that can be had."""
        from rankwatch.monitor.nodes.listener import Listener

        for port in self._directory.ports:
            for where in EVERYWHERE:
                server = Listener(where.format(port=port), self._offer.routes(), serving.secret, self._somebody_refused)
                if server.start():
                    break
            else:
                self._notice(f"other nodes cannot reach this launcher: {server.notice}")
                continue
            self._serving = replace(serving, server=server)
            found = self._directory.publish(server.port, self._nonce, tuple(sorted(self._local)), self._run_name)
            if found and not self._stopped:
                return
            self._serving = serving
            server.stop()
            if self._stopped:
                self._close()
                return

    def _close(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None and serving.server is not None:
            serving.server.stop()
        if serving is not None and serving.puller is not None:
            serving.puller.stop()
