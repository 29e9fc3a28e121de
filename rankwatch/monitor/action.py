"""Whether rankwatch ends the workers itself (`--on-stuck exit`), and when. Pure.

Only what no waiting can heal, known for certain, with every rank seen:

    stuck     mismatch               ranks sit in different operations, or in one with different shapes
    stuck     group_order_deadlock   a cycle of waits over several groups
    stuck     stopped                nobody has continued the process for Limits.exit_stopped_s
    diverged  mismatch               ranks pair different operations: what they compute is garbage
    failed    exited, killed, oom_killed, crashed   others need a rank that is gone, and torchrun has not ended them (it takes 0 for success)

Never on absence that may end (not_entered, data_loading, checkpointing, external_io, compiling, gil_held, uninterruptible, store_wait,
debugger), never on all_entered (the network may come back), nor on timeout_imminent (the watchdog acts by itself).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rankwatch.model import Incident, Verdict
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

UNHEALABLE = {
    "stuck": ("mismatch", "group_order_deadlock", "stopped"),
    "diverged": ("mismatch",),
    "failed": ("exited", "killed", "oom_killed", "crashed"),
}
EVIDENCE_MISSING = "the evidence was not complete on disk within {:g} s"


@dataclass(frozen=True, slots=True)
class ExitRequest:
    """What the launcher is asked to do: end the workers of this attempt. why: one line that names the culprit."""

    attempt: int
    incident: str
    culprit_ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Intent:
    """An incident that calls for the end of the job. finding: what must not change while it is looked at. since: how long it has stood.

    asked_at: from when the evidence is waited for. marked: what was gathered is on its way to the disk.
    """

    incident: str
    finding: tuple[object, ...]
    since: float
    asked_at: float | None = None
    marked: bool = False


Step = Literal["wait", "mark", "act", "act_incomplete"]


def unhealable(verdict: Verdict) -> bool:
    """Whether the verdict is one of the table above."""
    known = verdict.confidence == "certain" and not verdict.unknown_ranks
    return known and verdict.cause in UNHEALABLE.get(verdict.verdict, ())


def consider(before: Intent | None, incidents: Iterable[Incident], now: float, gathering: bool, written: bool, limits: Limits) -> tuple[Intent | None, Step]:
    """One look. gathering: evidence is still being fetched. written: all that was handed to the writer up to the last "mark" is on disk.

    "mark": begin to wait for the writer. "act": end the workers now. "act_incomplete": the same, though the evidence did not come in time.
    """
    chosen = next((incident for incident in incidents if incident.closed_at is None and unhealable(incident.verdict)), None)
    if chosen is None:
        return None, "wait"
    verdict = chosen.verdict
    finding = (chosen.id, verdict.verdict, verdict.cause, verdict.culprit_ranks)
    if before is None or before.finding != finding:
        return Intent(chosen.id, finding, now), "wait"
    if now - before.since < (limits.exit_stopped_s if verdict.cause == "stopped" else limits.exit_hold_s):
        return before, "wait"
    intent = before if before.asked_at is not None else replace(before, asked_at=now)
    assert intent.asked_at is not None
    if intent.marked and written:
        return intent, "act"
    if now - intent.asked_at >= limits.exit_evidence_s:
        return intent, "act_incomplete"
    if not intent.marked and not gathering:
        return replace(intent, marked=True), "mark"
    return intent, "wait"
