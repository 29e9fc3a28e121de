"""Keeps the compile document of a run: when it is made anew, and when it goes to disk. What it says is monitor/compiles'.

compile.json is replaced as a whole when it has changed, every few seconds at most, and at the end; compile/texts.jsonl has the full texts of
guards, graph breaks and failures, a line each, once. Making the document may cost a hundredth of a core: what took long is made less often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rankwatch.model import JobSnapshot, RankState, Status
from rankwatch.monitor.compiles import advice, regime
from rankwatch.monitor.compiles.book import Book
from rankwatch.monitor.compiles.document import document, summary
from rankwatch.monitor.compiles.events import take
from rankwatch.monitor.files import RunFiles

MAKE_EVERY_S = 2.0
IDLE_EVERY_S = 10.0  # while nothing but the steps changes
WRITE_EVERY_S = 5.0
WRITE_IDLE_S = 60.0
COST_FACTOR = 100.0
MAX_ATTEMPTS = 16
_MOVING = ("as_of", "steps")  # change at every step, and alone are no news


class CompileWatch:
    """One launcher's. `look` is called at every look of the loop, from its thread; `document` may be read from any."""

    def __init__(self, files: RunFiles, cpu: Callable[[], float] = time.thread_time) -> None:
        self.document: Mapping[str, Any] = {}
        self._files = files
        self._cpu = cpu
        self._book = Book()
        self._attempts: list[dict[str, Any]] = []
        self._made_at: float | None = None
        self._made_version = -1
        self._cost_s = 0.0
        self._written: tuple[float, Any] | None = None

    def begin(self, attempt: int) -> None:
        """New workers: a new book. What the ones before have compiled stays as a summary."""
        if self.document:
            self._attempts = [*self._attempts, summary(self.document)][-MAX_ATTEMPTS:]
        self._book = Book(attempt)
        self._made_at, self._made_version = None, -1

    def look(self, events: Sequence[Mapping[str, Any]], snapshot: JobSnapshot, own_ranks: Iterable[int], status: Status) -> Mapping[str, Any]:
        """The newest document. events: of `own_ranks`, since the look before; status: whose waits and numbers go into it."""
        began = self._cpu()
        book = self._book
        take(book, events)
        ranks = snapshot.ranks()
        book.look(ranks, frozenset(own_ranks), snapshot.now, snapshot.wall_at)
        for line in book.texts.take():
            self._files.compile_text(line)
        if self._due(snapshot) and self._anything(ranks):
            over = snapshot.final and not snapshot.restarting
            doc = document(book, status.job, snapshot, status.waiting, self._attempts, over)
            if status.numerics:
                doc["numerics"] = status.numerics
            doc["regime"] = regime.judge(doc)
            doc["advice"] = advice.give(doc)
            self.document, self._made_at, self._made_version = doc, snapshot.now, book.version
            self._write(doc, snapshot)
            self._cost_s = max(0.0, self._cpu() - began)
        return self.document

    def _due(self, snapshot: JobSnapshot) -> bool:
        if snapshot.final or self._made_at is None:
            return True
        every_s = MAKE_EVERY_S if self._book.version != self._made_version else IDLE_EVERY_S
        return snapshot.now - self._made_at >= max(every_s, COST_FACTOR * self._cost_s)

    def _anything(self, ranks: Mapping[int, RankState]) -> bool:
        """Whether a rank has asked for a compile or made one, in this attempt or one before. Until then there is no document."""
        if self.document or self._attempts or self._book.frames or self._book.compiling or self._book.splits.newest:
            return True
        return any(_asked(state.compile_totals) or state.cudagraph for state in ranks.values())

    def _write(self, doc: Mapping[str, Any], snapshot: JobSnapshot) -> None:
        now = snapshot.now
        same = {key: value for key, value in doc.items() if key not in _MOVING and key != "run"}
        if self._written is not None and not snapshot.final:
            written_at, before = self._written
            if now - written_at < (WRITE_EVERY_S if same != before else WRITE_IDLE_S):
                return
        self._written = (now, same)
        self._files.compiles(doc)


def _asked(record: Mapping[str, Any]) -> bool:
    asked = record.get("requested")
    return bool(isinstance(asked, dict) and asked.get("count")) or any(record.get(name) for name in ("frames", "library", "failures", "skipped", "graphs"))
