"""All that one launcher can see of its ranks, as a NodeReport each time the loop asks.

`read` never waits for a rank: questions to worker servers run in a small pool and their answers are picked up by this or a later call.
Entries of the recorders are read on suspicion, on demand, and otherwise only as often as costs about a thirtieth of the time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rankwatch.model import NodeReport, Process, RankState, Want
from rankwatch.monitor import recorder
from rankwatch.monitor.crash import crash_on_disk
from rankwatch.monitor.pool import Job, Pool, wait_all
from rankwatch.monitor.processes import Processes, child_exit, oom_kills
from rankwatch.monitor.slots import SlotReader
from rankwatch.monitor.tracked import Tracked
from rankwatch.monitor.worker_server import NCCL, ServerError, WorkerServer, compiles
from rankwatch.monitor.workers import Worker, Workers
from rankwatch.wire.env import slot_name, socket_name

STATUS_EVERY_S = 1.0
FULL_EVERY_S = 1.0
HISTORY_EVERY_S = 10.0
COST_FACTOR = 30.0
SUSPICION_AFTER_S = 1.0
ANSWER_WAIT_S = 0.15
BLIND_AFTER_S = 30.0
SILENT_BACKOFF_S = 2.0
FRESH_S = 6.0
REAPED_UNSEEN_S = 1.0


class Reader:
    """One attempt's view. `read` is called from the loop's thread only; `exited` and `raw_recorders` from any."""

    def __init__(
        self, workers: Workers, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time, processes: Processes | None = None
    ) -> None:
        self.workers = workers
        self.started_at = clock()
        self._clock = clock
        self._wall = wall
        self._processes = processes or Processes(clock=clock)
        self._pool = Pool("recorder", min(8, max(2, len(workers.workers))))
        self._disk = Pool("crash", 2)
        self._ranks = {worker.rank: self._start(worker) for worker in workers.workers}
        self._events: list[dict[str, Any]] = []
        self._oom_kills = oom_kills()
        self._wanted: dict[str, set[int]] = {"recorder": set(), "ping": set()}
        self._next_full_at = 0.0
        self._next_history_at = 0.0

    def read(self, wants: Iterable[Want] = (), urgent: bool = False, final: bool = False) -> NodeReport:
        """Every local rank now. urgent: read the recorders of all living ranks and wait for them up to their deadline. final: ask nobody."""
        now = self._clock()
        for want in wants:
            if want.kind in self._wanted:
                self._wanted[want.kind].update(want.ranks)
        for rank in self._ranks.values():
            if rank.slot is not None:
                rank.slot.read()
            rank.identify()
            rank.hear_last_words()
            rank.notice_waits(now)
        asked = [] if final else self._ask(now, urgent)
        wait_all(asked, 1.2 if urgent else ANSWER_WAIT_S)
        suspicious = self._suspicious(now)
        return NodeReport(
            node=self.workers.node,
            ranks=tuple(self._state(rank, now, suspicious) for rank in self._ranks.values()),
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
        self._pool.close()
        self._disk.close()
        for rank in self._ranks.values():
            if rank.slot is not None:
                rank.slot.close()

    # -- who and whether ------------------------------------------------------------------------------------------------

    def _start(self, worker: Worker) -> Tracked:
        directory = self.workers.slot_dir
        if directory is None:
            return Tracked(worker, None, None)
        slot = SlotReader(os.path.join(directory, slot_name(worker.rank)))
        return Tracked(worker, slot, WorkerServer(os.path.join(directory, socket_name(worker.rank))))

    def _process(self, rank: Tracked, suspect: bool) -> Process:
        pid, start_ticks = rank.identity
        process = self._processes.look(pid or rank.worker.pid, start_ticks or None, suspect)
        if rank.exit_code is None:
            is_child, rank.exit_code = child_exit(rank.worker.pid)
            gone_s = self._clock() - process.exited_at if process.exited_at is not None else 0.0
            if rank.was_child and not is_child and gone_s >= REAPED_UNSEEN_S:
                rank.exit_code = 0  # torchrun reaped it and went on: it does so for exit code 0 alone, any other it reports at once
            rank.was_child = rank.was_child or is_child
        if process.alive or rank.exit_code is None:
            return process
        if not rank.exit_told:
            rank.exit_told = True
            kills = oom_kills()
            rank.oom_killed = rank.exit_code == -9 and kills is not None and self._oom_kills is not None and kills > self._oom_kills
            self._events.append(
                {"kind": "rank_exited", "rank": rank.worker.rank, "pid": process.pid, "exit_code": rank.exit_code, "oom_killed": rank.oom_killed}
            )
        return replace(process, exit_code=rank.exit_code, oom_killed=rank.oom_killed)

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

    # -- questions ------------------------------------------------------------------------------------------------------

    def _ask(self, now: float, urgent: bool) -> list[Job[None]]:
        """Hand out this poll's questions, at most one under way a rank; the jobs that may answer soon."""
        full, history = self._full_due(now, urgent)
        jobs = []
        for number, rank in self._ranks.items():
            if rank.server is None or rank.exit_code is not None or not rank.joined():
                continue
            if rank.busy is not None and not rank.busy.done:
                continue
            if now < rank.quiet_until and not urgent:
                continue
            creating = rank.slot is not None and rank.slot.state.group_in_creation is not None
            wants_full = full or (history and rank.safe_at_any_time()) or number in self._wanted["recorder"] or rank.unnamed()
            wants_full = wants_full and (urgent or now - rank.full_at >= max(FULL_EVERY_S, COST_FACTOR * rank.full_cost_s)) and not creating
            wants_status = rank.has_nccl() and not creating and now - rank.status_at >= STATUS_EVERY_S
            wants_ping = (number in self._wanted["ping"] or rank.stale(now) or full) and now - rank.ping_at >= 1.0
            if not (wants_full or wants_status or wants_ping):
                continue
            rank.busy = self._pool.submit(lambda rank=rank, f=wants_full, s=wants_status, p=wants_ping: self._question(rank, f, s, p))  # type: ignore[misc]
            if rank.busy is not None:
                jobs.append(rank.busy)
                self._wanted["recorder"].discard(number)
                self._wanted["ping"].discard(number)
        if jobs and full:
            self._next_full_at = now + max(FULL_EVERY_S, COST_FACTOR * max(rank.full_cost_s for rank in self._ranks.values()))
        if jobs and (full or history):
            self._next_history_at = now + max(HISTORY_EVERY_S, 2 * COST_FACTOR * sum(rank.full_cost_s for rank in self._ranks.values()))
        return jobs

    def _full_due(self, now: float, urgent: bool) -> tuple[bool, bool]:
        """(all ranks' entries because of a suspicion, entries of the cheap ones for the history)."""
        if urgent:
            return True, False
        return self._suspicious(now) and now >= self._next_full_at, now >= self._next_history_at

    def _question(self, rank: Tracked, full: bool, status: bool, ping: bool) -> None:
        """Runs in the pool, alone for this rank."""
        server = rank.server
        assert server is not None
        now = self._clock()
        try:
            if ping:
                rank.ping_at = now
                server.ping()
                rank.ping_ok, rank.answered_at = True, now
            if status:
                rank.status_at = now
                rank.nccl_status = server.status() or {}
            if full:
                rank.full_at = now
                self._take_full(rank, server)
            rank.quiet_until = 0.0
        except ServerError as error:
            rank.quiet_until = self._clock() + SILENT_BACKOFF_S
            rank.ping_ok, rank.answered_at = (False if error.silent else None), self._clock()
        except Exception:  # bytes from another process: a surprise in them must not end the pool's thread or the rank's view
            rank.quiet_until = self._clock() + SILENT_BACKOFF_S

    def _take_full(self, rank: Tracked, server: WorkerServer) -> None:
        began = time.perf_counter()
        documents = server.recorders()
        parsed: dict[str, Mapping[str, Any]] = {}
        for name, text in documents.items():
            document = json.loads(text)
            if isinstance(document, dict):
                parsed[name] = document
        if NCCL in parsed:
            rank.nccl_status = {"pg_status": parsed[NCCL].get("pg_status") or {}}
        groups = rank.slot.state.groups if rank.slot is not None else ()
        rank.view.take(parsed, groups, self._wall())
        rank.documents, rank.documents_at = documents, self._clock()
        rank.ping_ok, rank.answered_at = True, rank.documents_at
        rank.full_cost_s = time.perf_counter() - began
        rank.witness, rank.witness_at = compiles(server.wait_counters()), self._clock()

    def _suspicious(self, now: float) -> bool:
        return any(rank.exit_code is None and now - since >= SUSPICION_AFTER_S for rank in self._ranks.values() for _done, since in rank.waits.values())

    # -- the answer -----------------------------------------------------------------------------------------------------

    def _state(self, rank: Tracked, now: float, suspicious: bool) -> RankState:
        process = self._process(rank, suspicious or rank.stale(now))
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
        stage: Any = state.stage if state.stage in ("armed", "joining", "join_failed", "joined", "left", "exiting") else "starting"
        return RankState(
            rank=rank.worker.rank,
            local_rank=rank.worker.local_rank,
            node=self.workers.node,
            agent=agent,  # type: ignore[arg-type]
            agent_detail=detail,
            process=process,
            stage=stage,
            stage_since=state.stage_since or self.started_at,
            heartbeat_at=state.heartbeat_at,
            ping_ok=rank.ping_ok if now - rank.answered_at < FRESH_S else None,
            groups=groups,
            group_in_creation=state.group_in_creation,
            creation_ranks=state.creation_ranks,
            barrier=state.barrier,
            collectives=rank.view.current(groups),
            collectives_at=rank.documents_at,
            lost_collectives=rank.view.lost,
            enqueued=enqueued,
            completed=completed,
            compiling=state.compiling if process.alive else (),
            compile_witness=rank.witness if now - rank.witness_at < FRESH_S else None,
            compile_totals=state.compile_totals,
            ddp=state.ddp,
            cudagraph=state.cudagraph,
            probes=state.probes,
            steps=state.steps,
            last_step_at=state.last_step_at,
            step_s=state.step_s,
            events_lost=state.events_lost,
            crash=rank.crash or state.crash,
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
