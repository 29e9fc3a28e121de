"""Raw recorders of other nodes' ranks, for the files of an incident: fetched beside the pulls, kept for a moment."""

from __future__ import annotations

import base64
import binascii
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankwatch.monitor.nodes.connection import Connection, Resolve, Unanswered
from rankwatch.monitor.nodes.peer import Peer
from rankwatch.monitor.pool import Job, Pool, wait_all
from rankwatch.wire.ranks import compress

MAX_RANKS = 16
"""Of one question."""
MAX_RAW_BYTES = 32 << 20
"""Of one answer, before base64."""
MAX_ANSWER_BYTES = 48 << 20
MAX_WANTED = 128
THREADS = 12
"""An incident of 64 nodes asks each of them for a rank or two ..."""
MAX_IN_FLIGHT = 32
"""... but of so many ranks together, each of a megabyte or more until its answer is parsed."""
FETCH_S = 5.0
FRESH_S = 5.0
KEPT_S = 30.0
KEPT_BYTES = 64 << 20
_NAME = re.compile(r"[0-9A-Za-z_]{1,64}\Z")  # it becomes a part of a file's name
Documents = dict[int, dict[str, bytes]]


def encode(documents: Mapping[int, Mapping[str, bytes]]) -> dict[str, dict[str, str]]:
    """Rank -> recorder -> base64, as JSON wants it; ranks beyond the bounds are left out."""
    told: dict[str, dict[str, str]] = {}
    left = MAX_RAW_BYTES
    for rank in sorted(documents)[:MAX_RANKS]:
        left -= sum(map(len, documents[rank].values()))
        if left < 0:
            break
        told[str(rank)] = {name: base64.b64encode(text).decode() for name, text in documents[rank].items()}
    return told


def decode(value: Any, wanted: Iterable[int]) -> Documents:
    """The other way, of the wanted ranks only. ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    found: Documents = {}
    for rank in wanted:
        texts = value.get(str(rank))
        if isinstance(texts, dict):
            try:
                found[rank] = {name: base64.b64decode(text, validate=True) for name, text in texts.items() if _NAME.match(name)}
            except (binascii.Error, TypeError) as error:
                raise ValueError(f"rank {rank}: {error}") from None
    return found


@dataclass(slots=True)
class _Kept:
    at: float
    documents: dict[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(map(len, self.documents.values()))


class RemoteRecorders:
    """What was fetched last, by rank. `get` may be called from any thread."""

    def __init__(self, token: str, resolve: Resolve, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = token
        self._resolve = resolve
        self._clock = clock
        self._pool = Pool("recorders", THREADS, backlog=MAX_WANTED)
        self._lock = threading.Lock()
        self._parsing = threading.Lock()
        self._room = threading.Condition()
        self._in_flight = 0  # ranks
        self._kept: dict[int, _Kept] = {}
        self._jobs: dict[int, Job[None]] = {}  # rank -> the fetch that it is part of

    def get(self, wanted: Mapping[Peer, Iterable[int]], deadline_s: float) -> Documents:
        """Of these nodes' ranks what has been fetched within KEPT_S; what is not fresh is asked for, and waited for up to the deadline."""
        with self._lock:
            jobs = self._ask(wanted, self._clock())
        if deadline_s > 0:
            wait_all(jobs, deadline_s)
        with self._lock:
            self._forget(self._clock())
            ranks = [rank for ranks in wanted.values() for rank in ranks]
            return {rank: dict(self._kept[rank].documents) for rank in ranks if rank in self._kept and self._kept[rank].documents}

    def forget_old(self) -> None:
        """Give memory back."""
        with self._lock:
            self._forget(self._clock())

    def close(self) -> None:
        """Let the threads end."""
        self._pool.close()

    def _ask(self, wanted: Mapping[Peer, Iterable[int]], now: float) -> list[Job[None]]:
        jobs: dict[int, Job[None]] = {}
        self._jobs = {rank: job for rank, job in self._jobs.items() if not job.done}
        left = MAX_WANTED
        for peer, ranks in wanted.items():
            stale = []
            for rank in list(ranks)[:left]:
                if rank in self._jobs:
                    jobs[id(self._jobs[rank])] = self._jobs[rank]
                elif rank not in self._kept or now - self._kept[rank].at > FRESH_S:
                    stale.append(rank)
            left -= len(stale)
            for start in range(0, len(stale), MAX_RANKS):
                part = stale[start : start + MAX_RANKS]
                job = self._pool.submit(lambda peer=peer, part=part: self._fetch(peer, part))  # type: ignore[misc]
                if job is not None:
                    jobs[id(job)] = job
                    self._jobs.update(dict.fromkeys(part, job))
        return list(jobs.values())

    def _fetch(self, peer: Peer, ranks: list[int]) -> None:
        """In the pool. A node that does not answer has none, which is kept too: nobody asks it again at once."""
        with self._room:
            self._room.wait_for(lambda: self._in_flight + len(ranks) <= MAX_IN_FLIGHT)
            self._in_flight += len(ranks)
        connection = Connection(peer.addresses, peer.port, self._token, self._resolve, self._clock)
        found: Documents = {}
        try:
            answer = connection.get(f"/peer/v1/recorder?ranks={compress(ranks)}", self._clock() + FETCH_S, MAX_ANSWER_BYTES)
            if answer.status == 200:
                with self._parsing:  # of many megabytes those of one answer at a time
                    found = decode(json.loads(answer.body), ranks)
        except (Unanswered, ValueError, RecursionError):
            pass
        finally:
            connection.close()
            with self._room:
                self._in_flight -= len(ranks)
                self._room.notify_all()
        with self._lock:
            now = self._clock()
            for rank in ranks:
                self._kept[rank] = _Kept(now, found.get(rank, {}))
            self._forget(now)

    def _forget(self, now: float) -> None:
        kept = sorted(((rank, kept) for rank, kept in self._kept.items() if now - kept.at <= KEPT_S), key=lambda item: -item[1].at)
        self._kept, total = {}, 0
        for rank, each in kept:
            total += each.size
            if total > KEPT_BYTES:
                break
            self._kept[rank] = each
