"""The judge's side of a job of many nodes: pulls every other launcher's report, round by round, and hands out one consistent set.

One thread plans, at most `workers` others ask. A node holds one of them for TRY_S at most and is then left alone for a while, see schedule.py
and turns.py. Nothing that a node sends or does raises anything here: it becomes the node's `problem`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rankwatch import __version__
from rankwatch.model import NodeReport, Want
from rankwatch.monitor.nodes import questions, schedule
from rankwatch.monitor.nodes.connection import Names
from rankwatch.monitor.nodes.delta import calls_kept
from rankwatch.monitor.nodes.peer import NodeState, Peer
from rankwatch.monitor.nodes.pulled import WAITS, Pulled
from rankwatch.monitor.nodes.recorders import Documents, RemoteRecorders
from rankwatch.monitor.nodes.turns import Round, Turns
from rankwatch.wire.ranks import compress

MAX_NODES = 16_384
MAX_EVENTS = 16_384
"""Kept for a loop that does not take them."""
WANTED_FOR_S = 5.0
"""A want that could not be passed on is of no use any more."""
REFUSED_EVERY_S = 1.0
PUBLISH_S = 0.05

_Wanted = tuple[questions.Kind, int]

__all__ = ["NodeState", "Peer", "Puller"]


class Puller:
    """Asks the launchers of `set_peers` with the job's token. Any thread may call it.

    say: a line for a person. judge_url: our status page, which the others show. came: called in the puller's thread when a round is over.
    on_refused, on_replaced: called in it, at most once a second, where a node knows another secret, or another launcher answers: look for the nodes anew.
    refusal: why a node may refuse the token. own_ranks: the judge's, for which no other node speaks. line: its own in the list of --peers.
    """

    def __init__(
        self,
        token: str,
        say: Callable[[str], None],
        judge_url: Callable[[], str],
        came: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        workers: int = 32,
        refusal: str = WAITS,
        own_ranks: Iterable[int] = (),
    ) -> None:
        self.on_refused: Callable[[], None] | None = None
        self.on_replaced: Callable[[], None] | None = None
        self.line: int | None = None
        self.events_dropped = 0
        self._token = token
        self._refusal = refusal
        self._own_ranks = frozenset(own_ranks)
        self._say = say
        self._judge_url = judge_url
        self._came = came
        self._clock = clock
        self._wall = wall
        self._names = Names()
        self._recorders = RemoteRecorders(token, self._names, clock)
        self._lock = threading.Lock()
        self._plan = threading.Condition(self._lock)  # the planning thread sleeps here
        self._work = threading.Condition(self._lock)  # the asking ones do
        self._turns: Turns[Pulled] = Turns(workers)
        self._nodes: dict[int, Pulled] = {}  # by the group rank of their peers: those that are listed may have another one
        self._itself: set[tuple[tuple[str, ...], int]] = set()  # addresses and port of lines that have turned out to be the judge's own
        self._busy: set[Pulled] = set()
        self._owners: dict[int, Pulled] = {}  # rank -> node
        self._confirm: set[Pulled] = set()
        self._waiting: dict[Round[Pulled], threading.Event] = {}
        self._wants: dict[Pulled, dict[_Wanted, float]] = {}  # not passed on yet -> when the judge asked for it
        self._passed_on: dict[Pulled, dict[_Wanted, float]] = {}  # -> when
        self._events: deque[dict[str, Any]] = deque()
        self._told_versions: set[tuple[str, int]] = set()
        self._order: questions.Order | None = None
        self._news = questions.News()
        self._refused_at = -1e9
        self._last_error = ""
        self._threads = 0
        self._idle = 0
        self._started = False
        self._stopped = False

    # -- any thread ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; the nodes may be known later."""
        with self._lock:
            if self._started or self._stopped:
                return
            self._started = True
        threading.Thread(target=self._run, name="rankwatch-pull", daemon=True).start()

    def stop(self) -> None:
        """Ask nobody any more, at once; what is under way is cut."""
        with self._lock:
            self._stopped = True
            busy, idle = list(self._busy), [node for node in self._nodes.values() if node not in self._busy]
            self._plan.notify_all()
            self._work.notify_all()
            for event in self._waiting.values():
                event.set()
        for node in busy:
            node.cut()
        for node in idle:
            node.close()
        self._names.close()
        self._recorders.close()

    def set_peers(self, peers: Iterable[Peer]) -> None:
        """The newest known set. One with a new nonce starts afresh, one that is missing is dropped."""
        wanted = {peer.group_rank: peer for peer in peers if _place(peer) not in self._itself}
        kept_calls = calls_kept(sum(len(peer.ranks) for peer in wanted.values()))
        with self._lock:
            before, self._nodes = self._nodes, {}
            for group_rank in sorted(wanted)[:MAX_NODES]:
                peer, node = wanted[group_rank], before.get(group_rank)
                if node is None or node.peer.nonce != peer.nonce or (not peer.nonce and _place(node.peer) != _place(peer)):
                    node = Pulled(peer, self._token, self._names, self._clock, self._wall, kept_calls, self._refusal, self._claim)
                node.peer, node.calls_kept = peer, kept_calls
                self._nodes[group_rank] = node
            kept = set(self._nodes.values())
            gone = [node for node in before.values() if node not in kept]
            for node in gone:
                self._wants.pop(node, None)
                self._passed_on.pop(node, None)
                self._confirm.discard(node)
            self._owners = {rank: node for node in kept for rank in node.ranks}
            self._turns.set_nodes(self._nodes.values(), self._clock())
            idle = [node for node in gone if node not in self._busy]
            self._plan.notify()
        for node in idle:
            node.close()

    def ask(self, wants: Iterable[Want]) -> None:
        """Have this evidence of remote ranks fetched: what is new is passed on at once, all of it with every pull as long as it is asked for."""
        with self._lock:
            now, fresh = self._clock(), set[Pulled]()
            for want in wants:
                for rank in want.ranks:
                    node = self._owners.get(rank)
                    if node is None:
                        continue
                    key = (want.kind, rank)
                    self._wants.setdefault(node, {})[key] = now
                    if now - self._passed_on.get(node, {}).get(key, -1e9) >= schedule.ASK_AGAIN_S:
                        fresh.add(node)
            if fresh:
                self._turns.ask(fresh, now)
                self._staff()

    def order(self, order: questions.Order) -> None:
        """Every pull from now on carries this order; `pull_now` gives it at once."""
        with self._lock:
            self._order = order

    def tell(self, news: questions.News) -> None:
        """What the other launchers are to know from now on: each with its next pull."""
        with self._lock:
            self._news = news

    def hurry(self, suspected: bool) -> None:
        """Whether something is suspected: rounds come faster then."""
        with self._lock:
            if suspected != self._turns.suspected:
                self._turns.suspected = suspected
                self._plan.notify()

    def nudge(self, group_rank: int) -> None:
        """This node has news: pull it now."""
        with self._lock:
            node = self._of(group_rank)
            if node is not None:
                self._confirm.add(node)
                self._turns.nudge((node,), self._clock())
                self._plan.notify()
                self._staff()

    def pull_now(self, deadline_s: float) -> None:
        """An extra round of all nodes that usually answer; returns when it is over, at the latest after the deadline."""
        done = threading.Event()
        with self._lock:
            if not self._started or self._stopped or not self._nodes or deadline_s <= 0:
                return
            self._waiting[self._turns.extra(self._clock(), deadline_s)] = done
            self._plan.notify()
            self._staff()
        done.wait(deadline_s + PUBLISH_S)

    def reports(self, now: float) -> tuple[NodeReport, ...]:
        """What every node had reported when the last round was over, in order of group rank; see NodeReport for silent ones."""
        return tuple(node.report(now) for node in self._known())

    def states(self) -> tuple[NodeState, ...]:
        """How pulling each node goes, in the same order."""
        now = self._clock()
        return tuple(node.state(now) for node in self._known())

    def ending(self) -> str:
        """Why a planned end is under way on some node, "" where none says so."""
        return next((node.newest.ending for node in self._known() if node.newest is not None and node.newest.ending), "")

    def take_events(self) -> list[dict[str, Any]]:
        """Events that other nodes' ranks have finished since the call before, each with its `rank`."""
        with self._lock:
            taken, self._events = list(self._events), deque()
        return taken

    def recorders(self, ranks: Iterable[int], deadline_s: float) -> Documents:
        """Raw recorder JSON of remote ranks, by rank and recorder. With deadline_s 0: what is there; what is not is asked for all the same."""
        wanted: dict[Peer, list[int]] = {}
        with self._lock:
            if self._stopped:
                return {}
            for rank in ranks:
                node = self._owners.get(rank)
                if node is not None and not node.failures_in_a_row:
                    wanted.setdefault(node.reached, []).append(rank)
        return self._recorders.get(wanted, deadline_s) if wanted else {}

    def _known(self) -> list[Pulled]:
        with self._lock:
            return sorted(self._nodes.values(), key=lambda node: node.group_rank)

    def _of(self, group_rank: int) -> Pulled | None:
        """Under the lock."""
        node = self._nodes.get(group_rank)
        if node is not None and node.group_rank == group_rank:
            return node
        return next((node for node in self._nodes.values() if node.group_rank == group_rank), None)

    def _claim(self, node: Pulled, group_rank: int, ranks: tuple[int, ...]) -> str:
        """A node that is listed says for the first time, or anew, who it is: it takes that place, or is told why not. In an asking thread."""
        with self._lock:
            other = self._of(group_rank)
            if not 0 < group_rank <= len(self._nodes) + len(self._itself):
                return f"it says that it is node {group_rank} of {len(self._nodes) + 1}"
            if other is not None and other is not node and other.claimed is not None:
                return f"it says that it is node {group_rank}, which {other.peer.node} is"
            taken = [rank for rank in ranks if rank in self._own_ranks or self._owners.get(rank, node) is not node]
            if taken:
                return f"it speaks for {'ranks' if len(taken) > 1 else 'rank'} {compress(sorted(taken)[:64])} of another node"
            if other is not None:
                other.group_rank = node.group_rank
            node.group_rank = group_rank
            self._owners = {rank: owner for rank, owner in self._owners.items() if owner is not node} | dict.fromkeys(ranks, node)
            return ""

    # -- the planning thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopped:
                    return
                now = self._clock()
                over, wake_at = self._turns.tick(now)
                self._staff()
                if not over:
                    self._plan.wait(max(0.0, wake_at - now))
                    continue
                for each in over:
                    for node in each.members:
                        node.shown = node.newest
                waiting = [self._waiting.pop(each) for each in over if each in self._waiting]
                nodes = list(self._nodes.values())
            for event in waiting:
                event.set()
            self._tell(nodes, now, came=any(each.kind != "extra" for each in over))

    def _tell(self, nodes: list[Pulled], now: float, came: bool) -> None:
        """Call back; what that raises is not ours to end by."""
        try:
            self._recorders.forget_old()
            self._tell_versions(nodes)
            refused, replaced = any(node.refused for node in nodes), any(node.replaced for node in nodes)
            if (refused or replaced) and now - self._refused_at >= REFUSED_EVERY_S:
                self._refused_at = now
                for node in nodes:
                    node.refused = node.replaced = False
                if refused and self.on_refused is not None:
                    self.on_refused()
                if replaced and self.on_replaced is not None:
                    self.on_replaced()
            if came:
                self._came()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text != self._last_error:
                self._last_error = text
                self._say(f"monitor error: {text} (after a round of pulls); the job is not affected")

    def _tell_versions(self, nodes: list[Pulled]) -> None:
        """Once for each version: which nodes cannot be understood, and what to do."""
        others: dict[tuple[str, int], list[str]] = {}
        for node in nodes:
            if node.other_schema is not None:
                others.setdefault((node.peer.version, node.other_schema), []).append(node.peer.node)
        for (version, schema), names in others.items():
            if (version, schema) in self._told_versions:
                continue
            self._told_versions.add((version, schema))
            several = len(names) > 1
            self._say(
                f"{names[0]}{f' and {len(names) - 1} more' if several else ''} {'run' if several else 'runs'} rankwatch {version} with report schema {schema}, "
                f"this is {__version__} with {questions.SCHEMA}: {'their' if several else 'its'} ranks are unknown; install the same version"
            )

    def _staff(self) -> None:
        """Wake or start as many asking threads as there is work for. Under the lock."""
        if not self._started or self._stopped:
            return
        waiting = self._turns.waiting
        self._work.notify(min(waiting, self._idle))
        for _ in range(min(waiting - self._idle, self._turns.threads - self._threads)):
            self._threads += 1
            threading.Thread(target=self._ask_nodes, name="rankwatch-pull-node", daemon=True).start()

    # -- the asking threads --------------------------------------------------------------------------------------------------

    def _ask_nodes(self) -> None:
        while True:
            with self._lock:
                node = self._next()
                if node is None:
                    return
                self._busy.add(node)
                node.order, node.news, node.line = self._order, self._news, self.line
                wanted, confirm = self._take_wants(node), node in self._confirm
                self._confirm.discard(node)
            began_s = time.thread_time()
            wants: dict[questions.Kind, list[int]] = {}
            for kind, rank in wanted:
                wants.setdefault(kind, []).append(rank)
            events = node.pull(wants, self._page(), confirm)
            cost_s = time.thread_time() - began_s
            with self._lock:
                self._busy.discard(node)
                if node.itself and self._nodes.get(node.peer.group_rank) is node:
                    self._itself.add(_place(node.peer))
                    del self._nodes[node.peer.group_rank]
                    self._turns.set_nodes(self._nodes.values(), self._clock())
                dropped = self._stopped or self._nodes.get(node.peer.group_rank) is not node
                if not dropped:
                    self._take(node, events)
                    if wanted and node.failures_in_a_row:
                        self._wants[node] = {**wanted, **self._wants.get(node, {})}
                if self._turns.done(node, self._clock(), node.failures_in_a_row, cost_s):
                    self._plan.notify()
            if dropped:
                node.close()

    def _next(self) -> Pulled | None:
        """The node to ask, None when all is over. Under the lock; sleeps while there is nothing to do."""
        while not self._stopped:
            node = self._turns.next(self._clock())
            if node is not None:
                return node
            self._idle += 1
            self._work.wait()
            self._idle -= 1
        return None

    def _take_wants(self, node: Pulled) -> dict[_Wanted, float]:
        """What is asked of it now."""
        now = self._clock()
        wanted = {key: at for key, at in self._wants.pop(node, {}).items() if now - at < WANTED_FOR_S}
        if wanted:
            recent = {key: at for key, at in self._passed_on.get(node, {}).items() if now - at < schedule.ASK_AGAIN_S}
            self._passed_on[node] = {**recent, **dict.fromkeys(wanted, now)}
        return wanted

    def _page(self) -> str:
        try:
            return self._judge_url()
        except Exception:
            return ""

    def _take(self, node: Pulled, events: list[dict[str, Any]]) -> None:
        self._owners.update(dict.fromkeys(node.ranks, node))
        self._events.extend(events)
        while len(self._events) > MAX_EVENTS:
            self._events.popleft()
            self.events_dropped += 1


def _place(peer: Peer) -> tuple[tuple[str, ...], int]:
    return peer.addresses, peer.port
