"""`--on-stuck exit`: from an incident that cannot heal, over its evidence on disk, to the request that the launcher reads. The decision is action.py's."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rankwatch import shown
from rankwatch.model import Incident, JobSnapshot
from rankwatch.monitor import action
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.writer import Writer


class OnStuck:
    """Called from the loop's thread; `request` is read by the launcher at its every poll."""

    def __init__(self, limits: Limits, writer: Writer) -> None:
        self.request: action.ExitRequest | None = None
        self._limits = limits
        self._writer = writer
        self._intent: action.Intent | None = None
        self._on_disk: threading.Event | None = None  # the evidence for what is intended

    def begin(self) -> None:
        """Other workers run from now on."""
        self._intent = self._on_disk = None

    def obey(self, attempt: int, culprit_ranks: tuple[int, ...], why: str) -> None:
        """The judge of the job ends the workers of this node too: it has the evidence, and names the incident."""
        if self.request is None or self.request.attempt != attempt:
            self.request = action.ExitRequest(attempt, "", culprit_ranks, why)

    def consider(self, snapshot: JobSnapshot, incidents: Sequence[Incident], gathering: bool) -> action.ExitRequest | None:
        """The request, in the look that makes it. gathering: evidence is still being fetched."""
        if self.request is not None and self.request.attempt == snapshot.attempt:
            return None
        written = self._on_disk is not None and self._on_disk.is_set()
        self._intent, step = action.consider(self._intent, incidents, snapshot.now, gathering, written, self._limits)
        if step == "mark":
            self._on_disk = self._writer.mark()
        if self._intent is None or not step.startswith("act"):
            return None
        incident = next(incident for incident in incidents if incident.id == self._intent.incident)
        why = f"rankwatch ended the workers (--on-stuck exit): {shown.without_countdown(incident.verdict.summary)}"
        why += f"; {action.EVIDENCE_MISSING.format(self._limits.exit_evidence_s)}" if step == "act_incomplete" else ""
        self.request = action.ExitRequest(snapshot.attempt, incident.id, incident.verdict.culprit_ranks, why)
        return self.request
