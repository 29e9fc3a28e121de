"""Attempts that end alike, one after another: no restart helps against what happens at the same place again."""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import Verdict
from rankwatch.monitor.diagnose.state import Past, State


def ended(state: State) -> Past | None:
    """What the next attempt has to know of this one and of those before it. An end that nobody is to blame for breaks no chain."""
    told = state.failure or next((verdict for verdict in state.last if verdict.verdict == "stuck"), None)
    if state.attempt is None or told is None:
        return state.past
    key = _key(told)
    times = state.past.times + 1 if state.past is not None and state.past.key == key else 1
    return Past(key, times)


def told(verdict: Verdict, state: State) -> Verdict:
    """The verdict, with how many attempts before have ended of the same."""
    past = state.past
    if past is None or verdict.verdict not in ("failed", "stuck") or past.key != _key(verdict):
        return verdict
    before = "the attempt before" if past.times == 1 else f"the {past.times} attempts before"
    text = f"{before} ended of the same"
    advice = ("Restarts do not help against this: stop the job and mend the cause.",) if past.times > 1 else ()
    return replace(verdict, summary=f"{verdict.summary}; {text}", evidence=(*verdict.evidence, text), advice=(*verdict.advice, *advice))


def _key(verdict: Verdict) -> tuple[object, ...]:
    """The same cause at the same line; where no line is known, of the same ranks."""
    return (verdict.cause, verdict.at or verdict.culprit_ranks)
