"""Ranks that do the same: equal phase, operation, group, number and stack are one row, however many ranks there are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rankwatch import shown, traces
from rankwatch.model import Incident, RankState, Stack

MAX_ROWS = 24
_ODD_FIRST = ("culprit", "dead", "unknown", "no_report")


@dataclass(frozen=True, slots=True)
class Alike:
    """One row. place: the user's innermost line, "" where no stack is known."""

    ranks: tuple[int, ...]
    kind: str
    label: str
    detail: str
    place: str
    culprit: bool


def groups(views: Mapping[int, shown.RankView], places: Mapping[int, str], silent: Iterable[int] = ()) -> list[Alike]:
    """Culprits first, then those that are odd, then the smaller groups. silent: ranks without a report; of those that train, steps tell nothing apart."""
    found: dict[tuple[bool, str, str, str, str], list[int]] = {}
    for rank, view in views.items():
        calm = view.phase in ("running", "starting") and not view.culprit
        detail = "" if calm else view.detail
        place = "" if calm or view.phase in ("dead", "shutdown") else places.get(rank, "")
        found.setdefault((view.culprit, view.kind, view.label, detail, "" if place == detail else place), []).append(rank)
    rows = [Alike(tuple(sorted(ranks)), kind, label, detail, place, culprit) for (culprit, kind, label, detail, place), ranks in found.items()]
    if unseen := tuple(sorted(silent)):
        rows.append(Alike(unseen, "no_report", "no report", "what they do is not known", "", False))
    return sorted(rows, key=lambda row: (not row.culprit, row.kind not in _ODD_FIRST, len(row.ranks), row.ranks))


def places(states: Mapping[int, RankState], incidents: Iterable[Incident]) -> dict[int, str]:
    """rank -> "train.py:31:load_batch", its innermost line that is not a library's, from the stacks of the open incidents and of the last look."""
    stacks: dict[int, Stack] = {}
    for incident in incidents:
        stacks.update(incident.stacks)
    stacks.update((rank, state.stack) for rank, state in states.items() if state.stack is not None)
    return {rank: place for rank, stack in stacks.items() if (place := _user_line(stack))}


def _user_line(stack: Stack) -> str:
    return next((shown.one_line(frame.short) for frame in stack.main if not traces.is_library(frame.file)), "")


def to_json(rows: Iterable[Alike]) -> list[dict[str, Any]]:
    """At most MAX_ROWS; the last one then stands for the rest."""
    every = list(rows)
    kept = every if len(every) <= MAX_ROWS else every[: MAX_ROWS - 1]
    listed = [
        {
            "ranks": shown.short_ranks(row.ranks, 200), "number": len(row.ranks), "kind": row.kind, "label": row.label, "detail": row.detail,
            "place": row.place, "culprit": row.culprit,
        }
        for row in kept
    ]  # fmt: skip
    if len(kept) < len(every):
        rest = [rank for row in every[MAX_ROWS - 1 :] for rank in row.ranks]
        listed.append(
            {
                "ranks": shown.short_ranks(rest, 200), "number": len(rest), "kind": "other", "label": "other",
                "detail": f"{len(every) - len(kept)} more groups", "place": "", "culprit": False,
            }
        )  # fmt: skip
    return listed
