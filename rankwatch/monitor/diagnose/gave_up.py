"""Waiters that end themselves: a watchdog of the job's own (a thread with os._exit, faulthandler's `exit=True`, an alarm) gave up on a rank.

No exception is raised there and Python's end does not run, since the main thread never leaves its wait. So it is told from a rank that
ends by sys.exit after it has got through. Who is to blame is who was told to keep them waiting.
"""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import JobSnapshot, RankState, Verdict
from rankwatch.monitor.diagnose import blame, unhealed, words
from rankwatch.monitor.diagnose.blame import Judged
from rankwatch.monitor.diagnose.ends import signal_name
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import Death, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_BY_ITSELF = ("", "SIGALRM")


def on(state: State, ranks: Mapping[int, RankState], bad: Mapping[int, Death]) -> dict[int, Verdict]:
    """Those of the bad ends that are of such a rank, with what was told of its wait at the look before."""
    found: dict[int, Verdict] = {}
    for verdict in (*state.frozen, *state.last):
        if verdict.verdict in unhealed.OF_WAITS and verdict.culprit_ranks:
            for rank in bad.keys() & set(verdict.waiting_ranks) - set(verdict.culprit_ranks):
                if rank in ranks and _ended_in_it(ranks[rank], bad[rank], verdict):
                    found.setdefault(rank, verdict)
    return found


def judge(snapshot: JobSnapshot, ranks: Mapping[int, RankState], ends: Mapping[int, Verdict], bad: Mapping[int, Death], key: str) -> Judged:
    """ends: of `on`; no other end is anybody's fault. A wait that was told as stuck keeps its own verdict."""
    told = max(ends.values(), key=lambda verdict: (verdict.verdict != "slow", -verdict.since))
    if told.verdict != "slow":
        return Judged(None)
    them = tuple(sorted(rank for rank, verdict in ends.items() if verdict.key == told.key))
    codes = sorted({bad[rank].code for rank in them})
    how = f"exit code {codes[0]}" if len(codes) == 1 else "exit codes " + ", ".join(map(str, codes))
    lasted = min(bad[rank].at for rank in them) - told.since
    line = f"{words.ranks_text(them)} ended in the wait itself, by no exception: as a watchdog of the job's own does it (os._exit, faulthandler, an alarm)"
    finding = Finding(
        told.culprit_ranks[0], told.cause, told.domain, at=told.at, limit="at_once", evidence=(*told.evidence, line), missing_evidence=told.missing_evidence,
        confidence="partial" if told.confidence == "partial" else "likely",
    )  # fmt: skip
    found = blame.verdict(finding, told.culprit_ranks, told.since, snapshot, ranks, bad, key)
    where = f" at {told.at}" if told.at else ""
    says = f"{words.ranks_text(told.culprit_ranks)} kept {words.ranks_text(them)} waiting for {lasted:.0f} s{where}"
    summary = f"{says}, until {words.verb(them, 'it', 'they')} gave up ({how}){words.seen(ranks, snapshot)}"
    return Judged(replace(found, summary=summary, group=told.group, places=told.places))


def _ended_in_it(rank: RankState, death: Death, told: Verdict) -> bool:
    """Whether it has never left the wait, as far as can be seen."""
    if not death.code or rank.crash is not None or signal_name(death.code) not in _BY_ITSELF or rank.agent != "claimed" or rank.stage in ("exiting", "left"):
        return False
    return told.group is None or rank.completed.get(told.group.name, 0) < told.group.seq
