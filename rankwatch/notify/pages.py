"""What pages: the alert of each verdict, its severity, its words. Pure.

The rules of `rankwatch rules export` and the alerts that a launcher posts itself are made from this one table: equal names and labels are what lets
Alertmanager take both for one alert.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rankwatch.model import Incident

AT_WORK = ("compiling", "checkpointing", "external_io")
"""Causes that are `timeout_imminent` only while they progress: without progress they are `stuck` long before."""
NOT_OURS = ("node", "network", "storage")
"""Domains of a death that no change of the job's code helps against."""


class Page(NamedTuple):
    """One alert of a verdict. says: what the job does, for the headline. todo: the next step; REPORT in it is where the report is found."""

    name: str
    verdict: str
    severity: str
    says: str
    todo: str


STUCK = Page(
    "RankwatchStuck",
    "stuck",
    "critical",
    "is stuck",
    "REPORT has the stack and what to do. It does not recover by itself; the ranks that wait are victims.",
)
TIMEOUT = Page(
    "RankwatchTimeoutImminent",
    "timeout_imminent",
    "critical",
    "is about to run into a timeout",
    "REPORT has the stack. What the job has not saved is lost when its watchdog ends it.",
)
TIMEOUT_AT_WORK = TIMEOUT._replace(
    severity="warning",
    todo="the rank works, but for longer than its group's timeout allows. REPORT has the line that sets it: raise it for the next run.",
)
DIVERGED = Page(
    "RankwatchDiverged",
    "diverged",
    "critical",
    "pairs different operations and trains on",
    "stop the job, its results since then are garbage. REPORT has both operations and their lines.",
)
FAILED = Page(
    "RankwatchFailed",
    "failed",
    "critical",
    "has lost a rank",
    "look at the node before the next job runs there. REPORT has the evidence. This names the first cause, torchrun's summary may name a victim.",
)
FAILED_BY_ITSELF = FAILED._replace(
    severity="ticket",
    todo="nothing points at the node, the network or the storage. REPORT has the exception and its line.",
)


def pages(incidents: Iterable[Incident]) -> dict[Page, list[Incident]]:
    """The alerts of these open incidents, each with the incidents that it is about. Of one name there is one severity, as with the rules."""
    by_verdict: dict[str, list[Incident]] = {}
    for incident in incidents:
        by_verdict.setdefault(incident.verdict.verdict, []).append(incident)
    found = {}
    for page, milder in ((STUCK, STUCK), (TIMEOUT, TIMEOUT_AT_WORK), (DIVERGED, DIVERGED), (FAILED, FAILED_BY_ITSELF)):
        if alike := by_verdict.get(page.verdict):
            found[page if page is milder or any(map(_grave, alike)) else milder] = alike
    return found


def _grave(incident: Incident) -> bool:
    judged = incident.verdict
    return judged.cause not in AT_WORK if judged.verdict == "timeout_imminent" else judged.domain in NOT_OURS
