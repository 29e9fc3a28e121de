"""What a person asks a running launcher for, through its private socket: who it is, the state, the compile document, stacks taken now.

Answers are made in the socket's threads from the published Status; only the ranks' processes are asked of the loop. One dump at a time, with a
deadline: py-spy reads the memory of ranks that train.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rankwatch import shown
from rankwatch.model import Stack, Status
from rankwatch.monitor.diagnose.stacks import group_stacks
from rankwatch.monitor.evidence import reported_stacks
from rankwatch.monitor.files import RunFiles
from rankwatch.monitor.pool import Job, Pool
from rankwatch.monitor.stacks import StackCapture, Target
from rankwatch.monitor.workers import Workers
from rankwatch.serve.control import NAME, SCHEMA, Answer, Control, ControlError, Request
from rankwatch.wire.ranks import compress, expand

MAX_RANKS = 128
"""Of one dump: the answer is at most 128 x 200 kB."""
ALL_UP_TO = 64
WAITING_SHOWN = 8
DEADLINE_S = 20.0
MOST_DEADLINE_S = 60.0
AT_ONCE = 4
ASK_AGAIN_S = 2.0
LOOK_EVERY_S = 0.2
CLOCK_ERROR_S = 0.5  # of another node's clock, compared with ours


@dataclass(frozen=True, slots=True)
class Found:
    """Ranks that are to be dumped. here: of this node; elsewhere: their nodes have been asked, and report the stacks."""

    here: Sequence[Target] = ()
    elsewhere: frozenset[int] = frozenset()


class OnDemand:
    """Of one launcher, over its attempts. status: as pages show it. find: (ranks, native) -> Found, None where the loop does not answer in time.

    token_at: the file of the token that the status page asks for, "" while it asks for none. served_at: where it is reached on this node, "" for nowhere.
    """

    def __init__(
        self,
        status: Callable[[], Status],
        find: Callable[[Iterable[int], bool], Found | None],
        capture: StackCapture,
        files: RunFiles,
        say: Callable[[str], None],
        token_at: Callable[[], str] = str,
        served_at: Callable[[], str] = str,
    ) -> None:
        self._status = status
        self._find = find
        self._capture = capture
        self._files = files
        self._say = say
        self._token_at = token_at
        self._served_at = served_at
        self._workers: Workers | None = None
        self._control: Control | None = None
        self._pool = Pool("on-demand", AT_ONCE)
        self._dumping = threading.Lock()
        self._unfinished: list[Job[Stack]] = []  # of a dump whose deadline has passed

    def begin(self, workers: Workers) -> None:
        """These workers run now: listen in their node-local directory, and note where in the run directory."""
        self._workers = workers
        if workers.slot_dir is None:
            return  # the launcher has said why there is no place for it
        path = os.path.join(os.path.dirname(workers.slot_dir), NAME)
        if self._control is not None and self._control.path == path and os.path.exists(path):
            return
        self._stop_listening()
        control = Control(path, self.answer)
        try:
            control.start()
        except OSError as error:
            self._say(f"rankwatch stacks and top cannot reach this job: no socket at {path}: {error.strerror or error}; ranks are watched all the same")
            return
        self._control = control
        self._files.control({"schema": SCHEMA, "node": workers.node, "pid": os.getpid(), "socket": path})

    def stop(self) -> None:
        """Answer nobody any more; waits for nobody."""
        self._stop_listening()
        self._pool.close()

    def answer(self, request: Request) -> Answer:
        """The answer to one request. ControlError says why there is none."""
        what = request.get("do")
        if what == "info":
            return self._info()
        if what == "state":
            from rankwatch.report import state

            return dict(state.to_json(self._status()))
        if what == "compile":
            document = self._status().compile
            if not document:
                raise ControlError("no rank has compiled anything yet")
            return dict(document)
        if what == "stacks":
            return self._stacks(request)
        raise ControlError(f"this launcher does not know {str(what)[:40]!r}: it is of another rankwatch")

    def _stop_listening(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.stop()

    def _info(self) -> Answer:
        from rankwatch.report import incident as incidents

        status, workers = self._status(), self._workers
        gravest = max(status.open_incidents, key=lambda incident: (shown.VERDICT_ORDER.index(incident.verdict.verdict), -incident.opened_at), default=None)
        return {
            "pid": os.getpid(),
            "run": incidents.run(status),
            "state": status.state,
            "verdict": gravest.verdict.verdict if gravest is not None else "",
            "summary": incidents.summary(gravest.verdict) if gravest is not None else "",
            "group_rank": workers.group_rank if workers is not None else 0,
            "ranks": compress(worker.rank for worker in workers.workers) if workers is not None else "",
            "judge": shown.one_line(status.judge),
            "token_file": shown.clean(self._token_at()),
            "served_at": shown.clean(self._served_at()),
        }

    # -- stacks --------------------------------------------------------------------------------------------------------------

    def _stacks(self, request: Request) -> Answer:
        native = request.get("native") is True
        deadline_s = request.get("deadline_s")
        if not isinstance(deadline_s, (int, float)) or not 0 < deadline_s <= MOST_DEADLINE_S:
            deadline_s = DEADLINE_S
        try:
            asked = expand(str(request.get("ranks") or ""), MAX_RANKS)
        except ValueError as error:
            raise ControlError(str(error)) from None
        if not self._dumping.acquire(blocking=False):
            raise ControlError("another dump is under way; ask again when it is over")
        try:
            if not all(job.done for job in self._unfinished):
                raise ControlError("an earlier dump has not ended yet: py-spy hangs, or is slow; ask again later")
            return self._dump(asked, native, time.monotonic() + deadline_s)
        finally:
            self._dumping.release()

    def _dump(self, asked: tuple[int, ...], native: bool, until: float) -> Answer:
        status = self._status()
        if status.snapshot is None or self._workers is None:
            raise ControlError("no rank has reported yet")
        local = [worker.rank for worker in self._workers.workers]
        ranks = asked or _by_default(status, local)
        outside = [rank for rank in ranks if rank >= status.job.world_size]
        if outside:
            raise ControlError(f"{shown.rank_words(outside)} is not in this job of {shown.plural(status.job.world_size, 'rank')}")
        asked_at = time.monotonic()
        found = self._find(ranks, native)
        if found is None:
            raise ControlError("the monitor has not answered in time: it is busy or hangs; see `rankwatch status`")
        jobs = {target.rank: self._start(target, native) for target in found.here}
        stacks = self._wait(found, jobs, asked_at, until)
        self._unfinished = [job for job in jobs.values() if job is not None and not job.done]
        errors = {rank: self._why_not(rank, local, native, found) for rank in ranks if rank not in stacks}
        return self._document(status, ranks, native, stacks, errors, not asked and len(ranks) < status.job.world_size)

    def _start(self, target: Target, native: bool) -> Job[Stack] | None:
        return self._pool.submit(lambda: self._capture.capture(target, native))

    def _wait(self, found: Found, jobs: dict[int, Job[Stack] | None], asked_at: float, until: float) -> dict[int, Stack]:
        """The stacks that come before `until`. Those of other nodes are read from their reports, and asked for until they are there."""
        stacks: dict[int, Stack] = {}
        asked_again_at = asked_at
        while True:
            stacks.update((rank, job.value) for rank, job in jobs.items() if job is not None and job.done and job.value is not None)
            missing = found.elsewhere - stacks.keys()
            if missing and (snapshot := self._status().snapshot) is not None:
                stacks.update(reported_stacks(snapshot.ranks(), missing, asked_at - CLOCK_ERROR_S))
                missing = found.elsewhere - stacks.keys()
            running = [job for job in jobs.values() if job is not None and not job.done]
            left_s = until - time.monotonic()
            if left_s <= 0 or not (missing or running):
                return stacks
            if missing and time.monotonic() - asked_again_at > ASK_AGAIN_S:
                asked_again_at = time.monotonic()
                self._find(missing, False)
            if running:
                running[0].wait(min(LOOK_EVERY_S, left_s))
            else:
                time.sleep(min(LOOK_EVERY_S, left_s))

    def _why_not(self, rank: int, local: Sequence[int], native: bool, found: Found) -> str:
        if rank in found.elsewhere:
            return "its node has sent no stack within the time"
        if any(target.rank == rank for target in found.here):
            return "no answer within the time"
        if rank in local:
            return "its process is gone"
        judge = self._status().judge
        if judge:
            return f"it runs on another node; ask there, or the launcher that judges the job ({shown.one_line(judge)})"
        return "native stacks are taken on the rank's own node: run `rankwatch stacks --native` there" if native else "no node reports it"

    def _document(self, status: Status, ranks: Sequence[int], native: bool, stacks: dict[int, Stack], errors: dict[int, str], left_out: bool) -> Answer:
        from rankwatch.report import incident as incidents

        states = status.snapshot.ranks() if status.snapshot is not None else {}
        verdicts = shown.current_verdicts(status)
        culprits = [rank for verdict in verdicts for rank in verdict.culprit_ranks]
        waiting = [rank for verdict in verdicts for rank in verdict.waiting_ranks]
        groups = group_stacks(stacks, culprits, waiting)

        def row(rank: int) -> dict[str, Any]:
            stack = stacks.get(rank)
            error = errors.get(rank, "") if stack is None else stack.error
            node = states[rank].node if rank in states else ""
            return {
                "rank": rank,
                "node": shown.one_line(node),
                "pid": stack.pid if stack is not None else None,
                "native": stack is not None and stack.native,
                "text": incidents.stack_text(stack),
                "error": shown.public_line(error),
            }

        return {
            "run": incidents.run(status),
            "native": native,
            "left_out": left_out,
            "ranks": [row(rank) for rank in ranks],
            "groups": [
                {
                    "ranks": compress(group.ranks),
                    "role": group.role,
                    "frames": [shown.clean(f"{frame.name} ({frame.file}:{frame.line})") for frame in group.frames],
                }
                for group in groups
            ],
        }


def _by_default(status: Status, local: Sequence[int]) -> tuple[int, ...]:
    """All ranks of a small job; of a large one those that verdicts name, else this node's."""
    if status.job.world_size <= ALL_UP_TO and not status.judge:
        return tuple(range(status.job.world_size))
    named: list[int] = []
    for verdict in shown.current_verdicts(status):
        named += [*verdict.culprit_ranks, *verdict.waiting_ranks[:WAITING_SHOWN]]
    return tuple(dict.fromkeys(named or sorted(local)))[:ALL_UP_TO]
