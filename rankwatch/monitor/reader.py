"""All that one launcher can see of its ranks, as a NodeReport each time the loop asks.

`read` never waits for a rank: what its worker server is asked (asking.py) is answered to this or a later call.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rankwatch.model import NodeReport, Process, RankState, Want
from rankwatch.monitor import recorder
from rankwatch.monitor.asking import SILENT_BACKOFF_S, Asking, suspicious, waits_long
from rankwatch.monitor.calls import Kinds
from rankwatch.monitor.crash import crash_on_disk
from rankwatch.monitor.device_times import Bandwidth
from rankwatch.monitor.exits import child_exit
from rankwatch.monitor.oom import OomWatch
from rankwatch.monitor.pool import Pool, wait_all
from rankwatch.monitor.processes import Processes
from rankwatch.monitor.slots import SlotReader
from rankwatch.monitor.tracked import Tracked
from rankwatch.monitor.worker_server import WorkerServer
from rankwatch.monitor.workers import Worker, Workers
from rankwatch.wire.env import slot_name, socket_name

SUSPECTED_FOR_S = 30.0
ANSWER_WAIT_S = 0.15
BLIND_AFTER_S = 30.0
FRESH_S = 6.0
REAPED_UNSEEN_S = 1.0
OUTPUT_EVERY_S = 2.0


class Reader:
    """One attempt's view. `read` is called from the loop's thread only; `exited` and `raw_recorders` from any."""

    def __init__(
        self,
        workers: Workers,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        processes: Processes | None = None,
    ) -> None:
        self.workers = workers
        self.started_at = clock()
        self._clock = clock
        self._processes = processes or Processes(clock=clock)
        self._disk = Pool("crash", 2)
        self._kinds = Kinds()
        self._bandwidth = Bandwidth()
        self._ranks = {worker.rank: self._start(worker) for worker in workers.workers}
        self._events: list[dict[str, Any]] = []
        self._oom = OomWatch(clock=clock)
        self._asking = Asking(self._ranks, workers.history, clock, wall)
        self._suspected: dict[int, float] = {}  # rank -> when its stack was last asked for

    def read(self, wants: Iterable[Want] = (), urgent: bool = False, final: bool = False) -> NodeReport:
        """Every local rank now. urgent: read the recorders of all living ranks and wait for them up to their deadline. final: ask nobody."""
        now = self._clock()
        for want in wants:
            ranks = [rank for rank in want.ranks if rank in self._ranks]
            self._asking.want(want.kind, ranks)
            if want.kind == "stacks":
                self._suspected.update(dict.fromkeys(ranks, now))
        for rank in self._ranks.values():
            if rank.slot is not None:
                rank.slot.read()
            process = rank.identity
            rank.identify()
            if rank.identity != process:
                self._bandwidth.forget(rank.worker.rank)
            self._take(rank)
            rank.hear_last_words()
            rank.notice_waits(now)
        asked = [] if final else self._asking.ask(now, urgent)
        wait_all(asked, 1.2 if urgent else ANSWER_WAIT_S)
        self._absorb()
        suspected = suspicious(self._ranks.values(), now)
        if not final:
            self._read_output(now, suspected)
        return NodeReport(
            node=self.workers.node,
            ranks=tuple(self._state(rank, now, suspected) for rank in self._ranks.values()),
            group_rank=self.workers.group_rank,
        )

    def exited(self, exits: Mapping[int, int]) -> None:
        """Exit codes that the launcher learnt, by rank."""
        for number, code in exits.items():
            if number in self._ranks:
                self._ranks[number].exit_code = code

    def exited_pid(self, pid: int, code: int | None) -> None:
        """The same by pid of the launcher's child; None is no news."""
        for rank in self._ranks.values():
            if rank.worker.pid == pid and code is not None and rank.exit_code is None:
                rank.exit_code = code

    @property
    def suspicious(self) -> bool:
        """Whether a rank has been waiting for longer than a healthy one does."""
        return suspicious(self._ranks.values(), self._clock())

    def raw_recorders(self, ranks: Iterable[int]) -> dict[int, dict[str, bytes]]:
        """The newest recorder JSON of these ranks, by rank and recorder; ranks that never gave any are left out."""
        return {number: dict(self._ranks[number].documents) for number in ranks if number in self._ranks and self._ranks[number].documents}

    def take_events(self) -> list[dict[str, Any]]:
        """Events that ranks finished, and exits, since the call before, each with its `rank`."""
        exits, self._events = self._events, []
        return exits + [{"rank": number, **event} for number, rank in self._ranks.items() if rank.slot is not None for event in rank.slot.take_events()]

    def pids(self) -> dict[int, int]:
        """The process behind each rank that is not known to be gone."""
        return {number: rank.identity[0] or rank.worker.pid for number, rank in self._ranks.items() if rank.exit_code is None}

    def socket_of(self, number: int) -> str:
        """Path of the rank's worker server, "" without slots."""
        server = self._ranks[number].server if number in self._ranks else None
        return server.path if server is not None else ""

    def close(self) -> None:
        """End the helper threads and give the descriptors back."""
        self._asking.close()
        self._disk.close()
        self._oom.close()
        for rank in self._ranks.values():
            if rank.slot is not None:
                rank.slot.close()

    # -- who and whether ------------------------------------------------------------------------------------------------

    def _start(self, worker: Worker) -> Tracked:
        directory = self.workers.slot_dir
        if directory is None:
            return Tracked(worker, None, None, self._kinds, nccl_timing=self.workers.nccl_timing)
        slot = SlotReader(os.path.join(directory, slot_name(worker.rank)))
        return Tracked(worker, slot, WorkerServer(os.path.join(directory, socket_name(worker.rank))), self._kinds, nccl_timing=self.workers.nccl_timing)

    def _process(self, rank: Tracked, suspect: bool) -> Process:
        pid, start_ticks = rank.identity
        process = self._processes.look(pid or rank.worker.pid, start_ticks or None, suspect)
        if rank.exit_code is None:
            is_child, rank.exit_code = child_exit(rank.worker.pid)
            gone_s = self._clock() - process.exited_at if process.exited_at is not None else 0.0
            if rank.was_child and not is_child and gone_s >= REAPED_UNSEEN_S:
                rank.exit_code = 0  # torchrun reaped it and went on: it does so for exit code 0 alone, any other it reports at once
            rank.was_child = rank.was_child or is_child
        if process.alive:
            self._oom.note(process.pid)
        if process.alive or rank.exit_code is None:
            return process
        if not rank.exit_told:
            rank.exit_told = True
            if rank.exit_code == -signal.SIGKILL:
                rank.oom_killed, rank.oom_note = self._oom.killed(process.pid)
            self._events.append(
                {"kind": "rank_exited", "rank": rank.worker.rank, "pid": process.pid, "exit_code": rank.exit_code, "oom_killed": rank.oom_killed}
            )
        return replace(process, exit_code=rank.exit_code, oom_killed=rank.oom_killed, oom_note=rank.oom_note)

    def _agent(self, rank: Tracked, process: Process, now: float) -> tuple[str, str]:
        if rank.slot is None:
            return "off", self.workers.slot_reason or "no slot directory"
        state = rank.slot.state
        if not state.present:
            return "off", state.problem
        owner_state = state.owner.get("state")
        if owner_state in ("armed", "claimed"):
            return str(owner_state), state.problem
        if owner_state == "loaded" and (process if process.pid == state.pid else self._processes.look(state.pid or 0, state.owner.get("start_ticks"))).alive:
            return "loaded", "loaded; torch is not imported yet"
        if now - self.started_at < BLIND_AFTER_S:
            return "silent", "agent has not reported yet"
        guess = "is python started with -I, -E or -S, is PYTHONPATH replaced, or has the job a module named rankwatch?"
        return "silent", f"agent did not load within {BLIND_AFTER_S:g} s: {guess}"

    def _absorb(self) -> None:
        """What has just been answered. The groups are read anew: an answer may name one that was made since."""
        came = [rank for rank in self._ranks.values() if rank.reading is not None and rank.slot is not None]
        for rank in came:
            if rank.slot is not None:
                rank.slot.read()
            self._take(rank)
        if came:
            self._kinds.prune(number for rank in self._ranks.values() for number in rank.log.used())
            self._bandwidth.join({rank.worker.rank: (rank.just_timed, rank.groups()) for rank in came if rank.just_timed}, self._ranks)
            for rank in came:
                rank.just_timed = ()

    def _take(self, rank: Tracked) -> None:
        try:
            rank.absorb()
        except Exception:  # bytes from another process: a surprise in them must not end the rank's view
            rank.quiet_until = self._clock() + SILENT_BACKOFF_S

    def _read_output(self, now: float, suspected: bool) -> None:
        """What NCCL's watchdog prints, once ranks wait: it says when it has fired, and how far the end has got."""
        for rank in self._ranks.values():
            rank.hear_output(now)
            told = rank.watchdog.fired_at is not None
            if not (suspected or told) or not rank.output.known or rank.output_job is not None or not rank.has_nccl() or now - rank.output_at < OUTPUT_EVERY_S:
                continue
            rank.output_at = now
            rank.output_job = self._disk.submit(rank.output.read)

    # -- the answer -----------------------------------------------------------------------------------------------------

    def _suspect(self, rank: Tracked, now: float) -> bool:
        """Whether it is worth a close look, some 10 ms: it does not wait itself, or the judge has asked for its stack."""
        return not waits_long(rank, now) or now - self._suspected.get(rank.worker.rank, -SUSPECTED_FOR_S) < SUSPECTED_FOR_S

    def _state(self, rank: Tracked, now: float, suspected: bool) -> RankState:
        process = self._process(rank, rank.stale(now) or (suspected and self._suspect(rank, now)))
        agent, detail = self._agent(rank, process, now)
        if not process.alive or rank.exit_code is not None:
            self._look_for_crash(rank)
        if rank.slot is None:
            return RankState(
                rank=rank.worker.rank,
                local_rank=rank.worker.local_rank,
                node=self.workers.node,
                agent="off",
                agent_detail=detail,
                process=process,
                stage="starting",
                stage_since=self.started_at,
                crash=rank.crash,
            )
        state = rank.slot.state
        enqueued, completed = rank.numbers()
        groups = recorder.twins(state.groups)
        told = state.owner.get("state") != "loaded" or not process.alive  # below a shell that runs on, the end of one Python is not the rank's
        stage: Any = state.stage if told and state.stage in ("armed", "joining", "join_failed", "joined", "left", "exiting") else "starting"
        return RankState(
            rank=rank.worker.rank,
            local_rank=rank.worker.local_rank,
            node=self.workers.node,
            agent=agent,  # type: ignore[arg-type]
            agent_detail=detail,
            script_problem=self.workers.script_problem,
            process=process,
            stage=stage,
            stage_since=state.stage_since or self.started_at,
            heartbeat_at=state.heartbeat_at,
            ping_ok=rank.ping_ok if now - rank.answered_at < FRESH_S else None,
            groups=groups,
            group_in_creation=state.group_in_creation,
            creation_ranks=state.creation_ranks,
            timeouts=state.timeouts,
            barrier=state.barrier,
            join=state.join,
            handling=state.handling if process.alive else None,
            collectives=rank.view.current(groups),
            collectives_at=rank.documents_at,
            lost_collectives=rank.view.lost,
            collective_sums=rank.times.sums(self._bandwidth, groups),
            calls=rank.log.calls(groups),
            enqueued=enqueued,
            completed=completed,
            mixed=rank.mixed(),
            compiling=state.compiling if process.alive else (),
            compile_witness=rank.witness if now - rank.witness_at < FRESH_S else None,
            compile_totals=state.compile_totals,
            ddp=state.ddp,
            cudagraph=state.cudagraph,
            numerics=state.numerics,
            memory=state.memory,
            probes=state.probes,
            steps=state.steps,
            last_step_at=state.last_step_at,
            step_s=state.step_s,
            events_lost=state.events_lost,
            crash=rank.crash or (state.crash if told else None),
            watchdog=rank.watchdog,
        )

    def _look_for_crash(self, rank: Tracked) -> None:
        """The rank's own account comes from the slot; files are read in a helper, they may lie on a hung file system."""
        if rank.slot is not None and rank.slot.state.crash is not None:
            rank.crash = rank.slot.state.crash
            return
        if rank.crash is None and rank.crash_job is None:
            rank.crash_job = self._disk.submit(lambda: crash_on_disk(rank.worker))
            if rank.crash_job is not None:
                rank.crash_job.wait(0.05)
        if rank.crash_job is not None and rank.crash_job.done:
            rank.crash = rank.crash_job.value
