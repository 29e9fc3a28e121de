"""What the judge has found open, as the other launchers hold it: should it fall silent, the one that takes over says what was told last. Pure.

It travels in the line of a pull's request, so it is short: the gravest incidents first, each without its countdown, as many as there is room for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote_plus

from rankwatch import shown
from rankwatch.model import Incident

MAX_INCIDENTS = 16
MAX_SUMMARY = 200
MAX_BYTES = 1500
"""Of the text as it goes over the wire; a request's line is limited to 4096 bytes."""
_SAFE = "[]:/,()="


@dataclass(frozen=True, slots=True)
class Seen:
    """One open incident of the judge's. ranks: its culprits, as "0-3,7"."""

    id: str
    verdict: str
    cause: str
    ranks: str
    summary: str


@dataclass(frozen=True, slots=True)
class LastWords:
    """What was open `at` (unix seconds, the judge's clock). num_open: how many there were, also those beyond `seen`."""

    at: float
    num_open: int
    seen: tuple[Seen, ...]


def key(incidents: Sequence[Incident]) -> tuple[object, ...]:
    """What makes it worth while to tell the others again."""
    return tuple((incident.id, incident.verdict.verdict, incident.verdict.cause, incident.verdict.culprit_ranks) for incident in incidents)


def words(incidents: Sequence[Incident], wall_at: float) -> str:
    """For the wire, already quoted; at most MAX_BYTES."""
    order = sorted(incidents, key=lambda incident: (-shown.VERDICT_ORDER.index(incident.verdict.verdict), incident.opened_at))
    rows = [_row(incident) for incident in order[:MAX_INCIDENTS]]
    while len(text := _quoted([round(wall_at, 3), len(incidents), *rows])) > MAX_BYTES and rows:
        rows.pop()
    return text


def read(text: str) -> LastWords | None:
    """What another launcher has told; None for what is none."""
    try:
        at, num_open, *rows = json.loads(text)
        seen = tuple(Seen(*(shown.one_line(part)[: 2 * MAX_SUMMARY] for part in row)) for row in rows[:MAX_INCIDENTS])
        return LastWords(float(at), max(int(num_open), len(seen)), seen)
    except (ValueError, TypeError, OverflowError, OSError, RecursionError):
        return None


def lines(told: LastWords | None, judge: str) -> list[str]:
    """One line an incident, for people; none where nothing was open."""
    if told is None:
        return []
    at = f"as {judge or 'it'} last saw it at {shown.utc(told.at, date=False)}"
    found = [f"{at}: {each.verdict.upper()} rank={each.ranks or '-'} cause={each.cause}: {each.summary}" for each in told.seen]
    more = told.num_open - len(told.seen)
    return [*found, f"{at}: {shown.plural(more, 'more incident')} open"] if more else found


def _row(incident: Incident) -> list[str]:
    judged = incident.verdict
    summary = shown.cut(shown.without_countdown(shown.public_line(judged.summary)), MAX_SUMMARY)
    return [incident.id, judged.verdict, judged.cause, shown.short_ranks(judged.culprit_ranks), summary]


def _quoted(document: list[object]) -> str:
    return quote_plus(json.dumps(document, separators=(",", ":")), safe=_SAFE)
