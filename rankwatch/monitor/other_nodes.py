"""What the other nodes of a job add to the loop: their reports, their planned ends, the judge's order, who speaks for the job, and what its end asks of them.

In a job of one node there is nobody to ask and to tell, and this launcher speaks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from rankwatch.config import RUNS
from rankwatch.model import JobSnapshot, Status
from rankwatch.monitor.announce import Announcer
from rankwatch.monitor.cases import Cases
from rankwatch.monitor.files import RunFiles
from rankwatch.monitor.nodes import leavers
from rankwatch.monitor.nodes.together import FINAL_WAIT_S, Directory, Together
from rankwatch.monitor.on_stuck import OnStuck
from rankwatch.monitor.workers import Workers

FAILURE_WAIT_S = 0.5  # so long other nodes are waited for when a rank has failed


class OtherNodes:
    """Of all attempts. Called from the loop's thread only, but for `shown`.

    wake: make the loop look now. url: this launcher's status page.
    """

    def __init__(self, cases: Cases, announcer: Announcer, files: RunFiles, wake: Callable[[], None], url: Callable[[], str]) -> None:
        self.together: Together | None = None  # of the attempt that runs, in a job of many nodes
        self._cases = cases
        self._announcer = announcer
        self._files = files
        self._wake = wake
        self._url = url
        self._store_before = (0, 0)  # calls of torchrun's store and their bytes, of attempts that are over
        self._leaving: list[tuple[str, str]] = []  # (node, why): planned ends elsewhere since the workers started
        self._refusal_said = False

    # -- attempts ------------------------------------------------------------------------------------------------------------

    def begin(
        self, workers: Workers, directory: Directory | None, run_dir: str, recorders: Callable[[Iterable[int]], dict[int, dict[str, bytes]]], status: Status
    ) -> None:
        """These workers run. directory: where the launchers of the other nodes are found. recorders: gives the newest raw recorders of local ranks."""
        if directory is not None and workers.nnodes > 1:
            folder, run_name = os.path.split(run_dir)
            run_name = run_name if os.path.basename(folder) == RUNS else ""  # one that was given is given to every node
            self.together = Together(workers, directory, run_name, self._announcer.notice, self._wake, self._url)
            self.together.start(recorders)
        self._speak(self.judges, status, anew=True)

    def tell_leavers(self, workers: Workers, nnodes_before: int) -> None:
        """Say on the first node which nodes go on no more."""
        if workers.group_rank == 0 and (left := leavers.words(self._leaving, nnodes_before, workers.world_size, workers.nnodes)):
            self._announcer.notice(left)
        self._leaving = []

    def part(self) -> None:
        """The workers are gone; the other nodes are found anew by the next ones."""
        together = self.together
        if together is None:
            return
        if together.judge_has_ended and together.judge_node:
            self._leaving.append((together.judge_node, ""))
        self._store_before = self.store
        together.stop()
        self.together = None

    # -- a look --------------------------------------------------------------------------------------------------------------

    @property
    def judges(self) -> bool:
        """Whether this launcher judges all ranks of the job."""
        return self.together is None or self.together.judges

    @property
    def sets_pace(self) -> bool:
        """Whether rounds of other nodes' reports call for looks."""
        return self.together is not None and self.together.sets_pace

    def exchange(self, snapshot: JobSnapshot, events: list[dict[str, Any]], ending: str) -> tuple[JobSnapshot, list[dict[str, Any]]]:
        """Offer what this node has seen to the judge; what is to be judged here, and the events of all nodes whose reports come here."""
        together = self.together
        if together is None:
            return snapshot, events
        together.offer(snapshot.nodes[0], events, ending, snapshot.final)
        return together.merge(snapshot), [*events, *together.take_events()]

    def look_around(self, snapshot: JobSnapshot, ending: str, status: Status) -> None:
        """Say who of the other nodes reports, and find out who speaks for the job. ending: of this launcher."""
        together = self.together
        if together is None:
            return
        together.tell_news(snapshot.nodes)
        for event in together.take_endings():
            self._leaving.append((str(event["node"]), str(event["reason"])))
            self._files.event(snapshot.wall_at, event.pop("kind"), event)
        together.tell_open(self._cases.book.open, snapshot.wall_at)
        speaks = not together.spoken_for(snapshot.now)
        if speaks and not self._cases.speaks and (ending or snapshot.final):
            return  # what is to be said of the end is said at the end
        self._speak(speaks, status)

    def all_seen(self, snapshot: JobSnapshot) -> bool:
        """Whether every rank has been heard of that this launcher is to judge."""
        return self.together is None or not self.together.judges or len(snapshot.ranks()) == snapshot.world_size

    def capabilities(self) -> dict[str, str]:
        """On the judge of many nodes: whether all of them report."""
        return {"nodes": self.together.problem or "ok"} if self.together is not None and self.together.judges else {}

    @property
    def store(self) -> tuple[int, int]:
        """What torchrun's store has been asked so far: calls, bytes."""
        (calls, sizes), (now_calls, now_sizes) = self._store_before, self.together.store if self.together is not None else (0, 0)
        return calls + now_calls, sizes + now_sizes

    def shown(self, status: Status) -> Status:
        """The status for pages and metrics (any thread): verdicts and incidents are the judge's alone."""
        together = self.together
        if self._cases.speaks or together is None:
            return status
        return replace(status, verdicts=(), open_incidents=(), closed_incidents=(), judge=together.judge or "another node")

    # -- --on-stuck exit -----------------------------------------------------------------------------------------------------

    @property
    def may_act(self) -> bool:
        """Whether this launcher is the one that may end the workers."""
        return self._cases.speaks and (self.together is None or self.together.may_act)

    def order_end(self, culprit_ranks: tuple[int, ...], why: str) -> None:
        """This launcher ends its workers: the others shall end theirs."""
        if self.together is not None:
            self.together.order_end(culprit_ranks, why)

    def obey(self, snapshot: JobSnapshot, ending: str, on_stuck: OnStuck | None) -> None:
        """The judge ends the whole job: this node's workers too, where its own command says so. on_stuck: None where it does not."""
        order = self.together.take_order() if self.together is not None else None
        if order is None or ending or snapshot.final:
            return
        self._files.event(snapshot.wall_at, "order", {"end": on_stuck is not None, "ranks": order.culprit_ranks, "why": order.why})
        if on_stuck is not None:
            on_stuck.obey(snapshot.attempt, order.culprit_ranks, order.why)
        elif not self._refusal_said:
            self._refusal_said = True
            self._announcer.notice("the judge of the job ends the workers (--on-stuck exit); this launcher was started without it: its workers run on")

    # -- failures and the end ------------------------------------------------------------------------------------------------

    def newest(self, wait_s: float) -> None:
        """A rank has failed: have every node's newest report, since the first death may be elsewhere. At most FAILURE_WAIT_S."""
        if self.together is not None:
            self.together.pull_now(min(FAILURE_WAIT_S, wait_s))

    def hand_over(self, wait_s: float) -> None:
        """A rank has failed: have the judge know of it while the others live. At most FAILURE_WAIT_S."""
        if self.together is not None:
            self.together.hand_over(min(FAILURE_WAIT_S, wait_s))

    def end(self, failed: bool, began: float, failure_seen: bool, status: Status) -> None:
        """The judge gets the last look. Of a failed job a member says how, should nobody else; where its judge has said so and is gone, it says where.

        began: when the failure did (monotonic). failure_seen: whether one came before any planned end.
        """
        together = self.together
        if together is None:
            return
        together.hand_over(FINAL_WAIT_S[not failed])
        if not failed or self._cases.speaks:
            return
        if together.judge_is_gone(began):
            self._speak(True, status)
        elif together.judge_has_told(time.monotonic()) and (failure_seen or self._cases.book.open):
            self._announcer.notice(f"{together.judge_node or 'the launcher of group rank 0'} has ended; its log tells of the whole job")

    def tell_end(self, failed: bool, wait_s: float) -> None:
        """All that is to be said here has been said: the others shall know that this launcher has not vanished."""
        if self.together is not None:
            self.together.tell_end(failed, wait_s)

    def _speak(self, speaks: bool, status: Status, anew: bool = False) -> None:
        takes_over = speaks and not self._cases.speaks and not anew
        together = self.together if takes_over else None
        self._cases.speaks = speaks
        ended, last_words = (together.judge_has_ended, together.last_words()) if together is not None else (False, [])
        self._announcer.speak(speaks, status, anew, ended, last_words)
        if takes_over:
            self._cases.take_over(status)
