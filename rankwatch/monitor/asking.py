"""What the ranks' worker servers are asked, and when: in a small pool, so that nobody waits for a rank that does not answer.

Entries of the recorders are read on suspicion, on demand, and otherwise for the history of calls, as often as costs a fortieth of a core.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rankwatch.monitor import recorder
from rankwatch.monitor.pool import Job, Pool
from rankwatch.monitor.tracked import Reading, Tracked
from rankwatch.monitor.worker_server import NCCL, ServerError, WorkerServer, compiles

STATUS_EVERY_S = 1.0
FULL_EVERY_S = 1.0
HISTORY_EVERY_S = 5.0
HISTORY_CPU_FACTOR = 40.0  # of our own time
HISTORY_RANK_FACTOR = 100.0  # of the longest answer, which the rank writes ...
HISTORY_RANK_MOST_S = 8.0  # ... up to this: calls that do not match are told within ten seconds
TAIL_ENTRIES = 256
TAIL_FROM_BYTES = 1 << 18
COST_FACTOR = 30.0
SUSPICION_AFTER_S = 1.0
SILENT_BACKOFF_S = 2.0


def waits_long(rank: Tracked, now: float) -> bool:
    """Whether it has been waiting for longer than a healthy rank does."""
    return any(now - since >= SUSPICION_AFTER_S for _done, since in rank.waits.values())


def suspicious(ranks: Iterable[Tracked], now: float) -> bool:
    """Whether a rank that lives has."""
    return any(rank.exit_code is None and waits_long(rank, now) for rank in ranks)


class Asking:
    """Of one attempt's ranks, by number. `want`, `ask` and `close` are the reader's thread's; an answer is left in its `Tracked`.

    history: "auto", "on" or "off", as in Workers.
    """

    def __init__(self, ranks: Mapping[int, Tracked], history: str, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._ranks = ranks
        self._history = history
        self._clock = clock
        self._wall = wall
        self._pool = Pool("recorder", min(8, max(2, len(ranks))))
        self._parsing = threading.Lock()
        self._wanted: dict[str, set[int]] = {"recorder": set(), "ping": set()}
        self._next_full_at = 0.0
        self._next_history_at = 0.0

    def want(self, kind: str, ranks: Iterable[int]) -> None:
        """Ask these ranks for a "recorder" or a "ping" as soon as may be; other kinds are not of here."""
        if kind in self._wanted:
            self._wanted[kind].update(ranks)

    def close(self) -> None:
        """End the pool's threads."""
        self._pool.close()

    def ask(self, now: float, urgent: bool) -> list[Job[None]]:
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
            whole = full or number in self._wanted["recorder"] or rank.unnamed()
            wants_full = whole or (history and (self._history == "on" or rank.safe_at_any_time()))
            wants_full = wants_full and (urgent or now - rank.full_at >= max(FULL_EVERY_S, COST_FACTOR * rank.full_cost_s)) and not creating
            wants_status = rank.has_nccl() and not creating and now - rank.status_at >= STATUS_EVERY_S
            wants_ping = (number in self._wanted["ping"] or rank.stale(now) or full) and now - rank.ping_at >= 1.0
            if not (wants_full or wants_status or wants_ping):
                continue
            entries = ("whole" if whole else "newest") if wants_full else ""
            rank.busy = self._pool.submit(lambda rank=rank, e=entries, s=wants_status, p=wants_ping: self._question(rank, e, s, p))  # type: ignore[misc]
            if rank.busy is not None:
                jobs.append(rank.busy)
                self._wanted["recorder"].discard(number)
                self._wanted["ping"].discard(number)
        if jobs and full:
            self._next_full_at = now + max(FULL_EVERY_S, COST_FACTOR * max(rank.full_cost_s for rank in self._ranks.values()))
        if jobs and (full or history):
            ours_s = sum(rank.history_cpu_s for rank in self._ranks.values())
            theirs_s = max(rank.answer_s for rank in self._ranks.values())
            self._next_history_at = now + max(HISTORY_EVERY_S, HISTORY_CPU_FACTOR * ours_s, min(HISTORY_RANK_FACTOR * theirs_s, HISTORY_RANK_MOST_S))
        return jobs

    def _full_due(self, now: float, urgent: bool) -> tuple[bool, bool]:
        """(all ranks' entries because of a suspicion, entries of the cheap ones for the history)."""
        if urgent:
            return True, False
        return suspicious(self._ranks.values(), now) and now >= self._next_full_at, self._history != "off" and now >= self._next_history_at

    def _question(self, rank: Tracked, entries: str, status: bool, ping: bool) -> None:
        """Runs in the pool, alone for this rank. entries: "whole" | "newest" | "", which of them are parsed."""
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
            if entries:
                rank.full_at = now
                self._read_entries(rank, server, entries == "whole")
            rank.quiet_until = 0.0
        except ServerError as error:
            rank.quiet_until = self._clock() + SILENT_BACKOFF_S
            rank.ping_ok, rank.answered_at = (False if error.silent else None), self._clock()
        except Exception:  # bytes from another process: a surprise in them must not end the pool's thread or the rank's view
            rank.quiet_until = self._clock() + SILENT_BACKOFF_S

    def _read_entries(self, rank: Tracked, server: WorkerServer, whole: bool) -> None:
        began, cpu_began = time.perf_counter(), time.thread_time()
        documents = server.recorders()
        at, wall_at = self._clock(), self._wall()
        rank.answer_s = time.perf_counter() - began
        whole = whole or all(len(text) < TAIL_FROM_BYTES for text in documents.values())
        parsed: dict[str, dict[str, Any]] = {}
        for name, text in documents.items():
            with self._parsing:  # 2,000 parsed entries are 6 MB: those of one rank at a time, and most of them are let go at once
                document = json.loads(text if whole else recorder.tail(text, TAIL_ENTRIES))
                if isinstance(document, dict):
                    parsed[name] = recorder.newest(document)
                document = None
        if NCCL in parsed:
            rank.nccl_status = {"pg_status": parsed[NCCL].get("pg_status") or {}}
        log, times = rank.log, rank.times
        scans = {name: log.scan(name, text) for name, text in documents.items()}
        timed = tuple(times.scan(documents[NCCL])) if NCCL in documents else ()
        rank.reading = Reading(documents, parsed, scans, log, at, wall_at, whole, timed)
        rank.ping_ok, rank.answered_at = True, at
        rank.full_cost_s = time.perf_counter() - began
        if not whole:
            rank.history_cpu_s = time.thread_time() - cpu_began
        rank.witness, rank.witness_at = compiles(server.wait_counters()), self._clock()
