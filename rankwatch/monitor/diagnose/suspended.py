"""All ranks stopped at once: the job is suspended from outside (scontrol suspend, kill -STOP of everything). Told, never paged.

Nobody waits for anybody in particular, and no rank is to blame; the watchdogs stand still as well, though their clocks run on. While it
lasts nothing else is judged, what was open stays as it was, and afterwards the time counts as a pause. One stopped rank among others that
run is another matter: that is `stopped`, and the others wait for it.
"""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import JobSnapshot, RankState, Verdict
from rankwatch.monitor.diagnose import clocks, words
from rankwatch.monitor.diagnose.state import State
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def observe(state: State, ranks: Mapping[int, RankState], now: float, limits: Limits) -> State:
    """The state with `suspended_at`: since when every rank that is seen is stopped. On the end of that a pause is noted."""
    stopped = bool(ranks) and all(rank.process is not None and rank.process.alive and rank.process.state == "T" for rank in ranks.values())
    if stopped:
        return state if state.suspended_at is not None else replace(state, suspended_at=now)
    if state.suspended_at is None:
        return state
    state = clocks.paused(state, now, now - state.suspended_at, limits)
    letters = {rank: (kind, now, 1) for rank, (kind, _, _) in state.letters.items()}  # who is still stopped has only now been left behind
    return replace(state, suspended_at=None, letters=letters)


def judge(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], limits: Limits) -> tuple[State, tuple[Verdict, ...]]:
    """What was judged before it, and one verdict on the suspension once it has lasted for a notice."""
    assert state.suspended_at is not None
    key = f"a{snapshot.attempt}-suspended"
    kept = tuple(verdict for verdict in state.last if verdict.key != key)
    lasted = snapshot.now - state.suspended_at
    if lasted < limits.notice_s:
        return state, kept
    who = tuple(sorted(ranks))
    text = f"{'the only rank is' if len(who) == 1 else f'all {len(who)} ranks are'} stopped (state T) for {lasted:.0f} s: suspended from outside"
    deadline = min((each.deadline for each in state.opens.values() if each.deadline is not None), default=None)
    left = deadline - snapshot.now if deadline is not None else None
    verdict = Verdict(
        key=key, verdict="slow", cause="stopped", domain="scheduler", culprit_ranks=who, waiting_ranks=(), since=state.suspended_at,
        summary=text + words.tail((), left) + words.seen(ranks, snapshot), unknown_ranks=words.unknown(ranks, snapshot), timeout_left_s=left,
        confidence="certain" if len(ranks) >= snapshot.world_size else "partial",
        advice=(
            "Nothing is wrong with the job: continue it where it was suspended (scontrol resume, kill -CONT of every rank).",
            "The clocks of the timeouts run on: a collective that is open when its timeout passes fails as soon as its rank continues.",
        ),
        evidence=(f"every rank seen has been in state T since {lasted:.0f} s",),
    )  # fmt: skip
    verdicts = (*kept, verdict)
    return replace(state, last=verdicts), verdicts
