"""The same rank late at collectives, step after step: nobody is stuck, everybody pays.

Per look every rank's own numbers say whether it waits. Over a window in which the group moves, a rank that is never found waiting
while all others often are, is the one they wait for. Three windows in a row with the same rank are told, as a ticket.
"""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import Verdict, WaitedOn
from rankwatch.monitor.diagnose import words
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.state import Lateness
from rankwatch.monitor.diagnose.views import View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_MIN_LOOKS = 10
_MIN_COLLECTIVES = 8
_STREAK = 3


def look(views: Iterable[View], scene: Scene) -> tuple[dict[tuple[object, ...], Lateness], list[Verdict]]:
    """Counts to remember, and one verdict per group with a lasting straggler (its key is left open)."""
    kept: dict[tuple[object, ...], Lateness] = {}
    found: list[Verdict] = []
    for view in views:
        if len(view.members) < 2 or view.absent or view.unknown or any(member.stale for member in view.members.values()):
            continue
        key = (*view.key, view.group.generation)
        lowest = min(member.done for member in view.members.values())
        late = scene.state.lateness.get(key) or Lateness(scene.now, first_seq=lowest)
        counts, last = dict(late.waiting), dict(late.last)
        for rank in view.waiters:
            done = view.members[rank].done
            if last.get(rank) != done:  # one long wait counts once: many short ones are what makes a straggler
                counts[rank], last[rank] = counts.get(rank, 0) + 1, done
        late = replace(late, looks=late.looks + 1, waiting=counts, last=last)
        if scene.now - late.start >= scene.limits.straggler_window_s:
            culprit = _culprit(late, view, lowest, scene.limits.straggler_ratio)
            streak = (late.streak + 1 if culprit == late.culprit else 1) if culprit is not None else 0
            late = Lateness(scene.now, first_seq=lowest, culprit=culprit, streak=streak)
        kept[key] = late
        if late.streak >= _STREAK and late.culprit is not None:
            found.append(_verdict(view, late, scene))
    return kept, found


def _culprit(late: Lateness, view: View, lowest: int, ratio: float) -> int | None:
    if late.looks < _MIN_LOOKS or lowest - late.first_seq < _MIN_COLLECTIVES:
        return None
    never = [rank for rank in view.members if late.waiting.get(rank, 0) * 20 <= late.looks]
    often = [rank for rank in view.members if late.waiting.get(rank, 0) >= ratio * late.looks]
    return never[0] if len(never) == 1 and len(often) == len(view.members) - 1 else None


def _verdict(view: View, late: Lateness, scene: Scene) -> Verdict:
    rank = late.culprit if late.culprit is not None else -1
    others = tuple(other for other in sorted(view.members) if other != rank)
    lasted = late.streak * scene.limits.straggler_window_s
    seconds = _STREAK * scene.limits.straggler_window_s
    return Verdict(
        key="", verdict="straggler", cause="not_entered", domain="unknown", culprit_ranks=(rank,), waiting_ranks=others, since=scene.now - seconds,
        summary=f"rank {rank} is the last at the collectives of {view.label} again and again for {lasted:.0f} s; "
        f"{words.ranks_text(others)} {words.verb(others, 'waits', 'wait')} each time",
        group=WaitedOn(view.group.name, view.group.desc, view.group.ranks, "", 0),
        confidence="likely",
        advice=("Compare this rank's input, host and device with the others: it does more work per step, or does the same work slower.",),
        evidence=(f"found waiting in at least {scene.limits.straggler_ratio:.0%} of the looks: every rank but {rank}, which never was",),
    )  # fmt: skip
