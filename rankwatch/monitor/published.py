"""The Status that everything shown is made from, put together once a look. Pure but for `node_prefix`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rankwatch import shown
from rankwatch.model import Incident, JobSnapshot, MonitorHealth, RankState, Status, Verdict
from rankwatch.monitor import timeline
from rankwatch.monitor.capabilities import capabilities
from rankwatch.monitor.incidents import Book
from rankwatch.monitor.stacks import SelfTest

JobState = Literal["starting", "running", "stuck", "restarting", "finishing", "done", "failed"]


def status(
    before: Status,
    snapshot: JobSnapshot,
    verdicts: tuple[Verdict, ...],
    book: Book,
    health: MonitorHealth,
    url: str,
    run_dir: str,
    self_test: SelfTest | None,
) -> Status:
    """The next Status after `before`. run_dir: where files go now, another place once the first took nothing more."""
    ranks = tuple(snapshot.ranks().values())
    job = replace(
        before.job,
        run_dir=run_dir,
        world_size=snapshot.world_size,
        attempt=snapshot.attempt,
        status_url=url,
        capabilities=capabilities(ranks, self_test, before.job.capabilities),
    )
    new = replace(
        before,
        job=job,
        snapshot=snapshot,
        verdicts=book.told if book.storms else verdicts,
        open_incidents=book.open,
        closed_incidents=book.closed,
        forgotten={str(verdict): count for verdict, count in book.forgotten.items()},
        forgotten_lost_rank_s=book.forgotten_lost_rank_s,
        health=health,
        state=job_state(before.state, ranks, book.open, snapshot.ending),
    )
    if not timeline.due(before.timeline, snapshot.world_size, snapshot.wall_at):
        return new
    return replace(new, timeline=timeline.extended(before.timeline, shown.rank_views(new), snapshot.world_size, snapshot.wall_at))


def job_state(before: JobState, ranks: Sequence[RankState], open_incidents: Sequence[Incident], ending: str) -> JobState:
    """What the job as a whole does."""
    if ending:
        return "finishing"
    if any(incident.verdict.verdict in ("stuck", "timeout_imminent") for incident in open_incidents):
        return "stuck"
    if before in ("running", "stuck") or (ranks and all(rank.steps or any(rank.completed.values()) for rank in ranks)):
        return "running"
    return "starting"


def node_prefix(node: str) -> str:
    """Where a node other than the first keeps its files below the run directory, which it may share with others."""
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in node).strip(".") or "node"
    return f"nodes/{safe[:100]}-{os.urandom(3).hex()}/"
