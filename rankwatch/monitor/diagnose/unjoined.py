"""Ranks whose own init_process_group raised something about connections: who had not come, who is not seen, or nobody's fault."""

from __future__ import annotations

import re
from dataclasses import replace

from rankwatch.model import Confidence, Crash, JobSnapshot, RankState, Verdict
from rankwatch.monitor.diagnose import blame, ends, words
from rankwatch.monitor.diagnose.blame import Judged
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import Death, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMED_OUT = re.compile(r"time[d -]*out", re.IGNORECASE)


def judge(
    state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], failed_joins: Mapping[int, Death], bad: Mapping[int, Death], key: str
) -> Judged | None:
    """Ranks whose own init_process_group raised something about connections. A timeout there is the fault of who had not come."""
    ordered = blame.in_order(failed_joins, ranks, snapshot)
    if not snapshot.final and snapshot.now - min(death.seen_at for death in ordered) < blame.SAME_DEATH_S:
        return Judged(None, held=True)
    partial = len(ranks) < snapshot.world_size
    raised = ends.failed_join(ranks[ordered[0].rank], state)
    if raised is not None and _TIMED_OUT.search(f"{raised.type}: {raised.message}"):
        late = tuple(sorted(other.rank for other in ranks.values() if _had_not_come(other, state)))
        when = f"when that of {words.ranks_text(failed_joins)} timed out"
        if late:
            sure: Confidence = "partial" if partial else "likely"
            finding = Finding(late[0], "store_wait", "user_code", limit="at_once", evidence=(ends.said(raised),), confidence=sure)
            verdict = blame.verdict(finding, late, ordered[0].at, snapshot, ranks, bad, key)
            text = f"{words.ranks_text(late)} had not called init_process_group {when}"
            return Judged(replace(verdict, summary=text + words.seen(ranks, snapshot)))
        if partial:
            unseen = words.unknown(ranks, snapshot)
            finding = Finding(-1, "store_wait", "unknown", limit="at_once", evidence=(ends.said(raised),), confidence="partial")
            finding = replace(finding, missing_evidence=(f"state of {words.ranks_text(unseen)}",))
            verdict = blame.verdict(finding, (), ordered[0].at, snapshot, ranks, bad, key)
            text = f"every rank seen had called init_process_group {when}; {words.ranks_text(unseen)} {words.verb(unseen, 'is', 'are')} not seen from here"
            return Judged(replace(verdict, summary=text))
    if raised is not None and ends.stale_store(ranks[ordered[0].rank], raised, state):
        return Judged(_stale(raised, failed_joins, ordered[0].at, state, snapshot, ranks, bad, key))
    judged = blame.first(state, snapshot, ranks, ordered, bad, key)
    return judged if judged.verdict is None else Judged(replace(judged.verdict, confidence="partial" if partial else "likely"))


def _stale(
    raised: Crash, failed_joins: Mapping[int, Death], at: float, state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState],
    bad: Mapping[int, Death], key: str,
) -> Verdict:  # fmt: skip
    """Nobody's fault: the ranks have met the addresses of processes that are gone."""
    attempt = state.attempt or 0
    line = f"attempt {attempt} of the workers meets in torchrun's own store, which has served attempt {attempt - 1} as well"
    finding = Finding(-1, "store_wait", "scheduler", limit="at_once", evidence=(ends.said(raised), line), confidence="likely", advice=ends.STALE_ADVICE)
    verdict = blame.verdict(finding, (), at, snapshot, ranks, bad, key)
    text = f"init_process_group of {words.ranks_text(failed_joins)} failed, most likely of the stale store of the attempt before: {ends.said(raised)}"
    return replace(verdict, summary=text + words.seen(ranks, snapshot))


def _had_not_come(rank: RankState, state: State) -> bool:
    death = state.deaths.get(rank.rank)
    return rank.stage in ("starting", "armed") and rank.agent not in ("off", "silent") and (death is None or death.after_ending)
