"""Waits that are over without having healed: their verdicts stay, since what a person would do about them is still to be done.

A rank that is gone does not come back within its attempt, and a wait that ends because its waiters die of it, or raise, is no recovery.
That a waiter has completed what it waited in is one.
"""

from __future__ import annotations

from rankwatch.model import Cause, RankState, Verdict, VerdictName
from rankwatch.monitor.diagnose.views import alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OF_WAITS: tuple[VerdictName, ...] = ("slow", "stuck", "timeout_imminent")
GONE: tuple[Cause, ...] = ("exited", "killed", "oom_killed", "crashed")


def of(last: Iterable[Verdict], verdicts: Iterable[Verdict], ranks: Mapping[int, RankState]) -> list[Verdict]:
    """Of the verdicts of the look before, those that hold on though their wait is not found any more. verdicts: of this look."""
    return [verdict for verdict in gone(last, verdicts) if _lasts(verdict, ranks)]


def gone(last: Iterable[Verdict], verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Of the verdicts of the look before, those on waits of which no verdict of this look tells."""
    verdicts = tuple(verdicts)
    keys = {verdict.key for verdict in verdicts}
    blamed = {rank for verdict in verdicts if verdict.verdict in OF_WAITS for rank in (*verdict.culprit_ranks, *verdict.waiting_ranks)}
    over = [verdict for verdict in last if verdict.key not in keys and verdict.verdict in OF_WAITS and verdict.waiting_ranks]
    return [verdict for verdict in over if blamed.isdisjoint(verdict.waiting_ranks)]


def died_waiting(verdict: Verdict, ranks: Mapping[int, RankState]) -> bool:
    """Whether one that waited has ended badly, and none has got through: for the end of a job, which looks at no wait any more."""
    waiters = [ranks[rank] for rank in verdict.waiting_ranks if rank in ranks] if verdict.verdict in OF_WAITS else []
    return any(rank.process is not None and rank.process.exit_code not in (None, 0) for rank in waiters) and not any(
        _got_through(rank, verdict) for rank in waiters
    )


def _lasts(verdict: Verdict, ranks: Mapping[int, RankState]) -> bool:
    waiters = [ranks[rank] for rank in verdict.waiting_ranks if rank in ranks]
    if any(_got_through(rank, verdict) for rank in waiters):
        return False
    missed = verdict.cause in GONE and bool(verdict.culprit_ranks) and all(rank in ranks and not alive(ranks[rank]) for rank in verdict.culprit_ranks)
    return missed or (bool(waiters) and all(_ended_of_it(rank) for rank in waiters))


def _got_through(rank: RankState, verdict: Verdict) -> bool:
    """Whether it has completed the collective, or the start, that it waited in."""
    if _ended_of_it(rank):
        return False
    if verdict.group is None:
        return rank.stage not in ("joining", "join_failed")
    return rank.completed.get(verdict.group.name, 0) >= verdict.group.seq or (not alive(rank) and rank.process is not None and rank.process.exit_code == 0)


def _ended_of_it(rank: RankState) -> bool:
    """Whether an exception or a signal has ended it, or is about to."""
    code = rank.process.exit_code if rank.process is not None else None
    return rank.crash is not None or code not in (None, 0)
