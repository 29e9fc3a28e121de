"""What the history of a group's calls says of a disagreement: whose turn it was, who left something out, who is behind since when.

Training repeats its calls step by step. That a call is not the next in turn is a hint at the odd rank, never the proof: all may leave
the rhythm for a good reason. So it makes evidence, and names a rank only where no majority does: one that calls what no rank has called
before, while the other side calls just what is due.
"""

from __future__ import annotations

import struct

from rankwatch.model import KIND_BYTES, Calls, Collective, RankState
from rankwatch.monitor.diagnose import clocks, words
from rankwatch.monitor.diagnose.mismatch import kind, say
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.views import View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_MOST = 1024  # numbers that are looked at
_ROUNDS = 3  # so often the calls must have repeated
_LEAST = 12  # over so many numbers
_CLEAR_S = 0.005  # a collective this close to the end of a step may belong to either side of it


def turn(view: View, at: Mapping[int, Collective], ranks: Mapping[int, RankState]) -> tuple[str, ...]:
    """Who calls at the frontier what was to be expected there, and what the others call instead. () where the calls do not repeat."""
    due = _due(view, at, ranks)
    expected = due[0] if due else None
    if expected is None:
        return ()
    lines = [f"the calls of {view.label} repeat every {len(due)}; next in turn at #{view.frontier} is {say(expected)}"]
    sides: dict[str, list[int]] = {}
    for rank, entry in at.items():
        sides.setdefault(_place(kind(entry), due), []).append(rank)
    if len(sides) < 2:
        return ()
    for text, side in sides.items():
        lines.append(f"{words.ranks_text(side)} {words.verb(side, 'calls', 'call')} {text}")
    return tuple(lines)


def odd(view: View, at: Mapping[int, Collective], ranks: Mapping[int, RankState]) -> tuple[int, ...]:
    """The ranks whose call breaks a rhythm that all have kept, with something that none has ever called there; () where habit decides nothing."""
    due = _due(view, at, ranks)
    expected = due[0] if due else None
    if expected is None:
        return ()
    others = tuple(sorted(rank for rank, entry in at.items() if kind(entry) != expected))
    if not 0 < len(others) < len(at):
        return ()
    known: set[Collective | None] = set()
    for rank in view.members:
        calls = _calls(view, ranks[rank])
        known |= {calls.known.get(number) for number in set(_before(calls, view.frontier, len(calls.kinds)))} if calls is not None else set()
        known |= {kind(entry) for entry in ranks[rank].collectives if entry.group == view.group.name and entry.seq < view.frontier}
    return others if known.isdisjoint(kind(at[rank]) for rank in others) else ()


def _due(view: View, at: Mapping[int, Collective], ranks: Mapping[int, RankState]) -> list[Collective | None]:
    """The round of calls that is to be expected from the frontier on; [] where the calls do not repeat, or its first is not known."""
    calls = next((found for rank in sorted(at) if (found := _calls(view, ranks[rank])) is not None), None)
    before = _before(calls, view.frontier) if calls is not None else ()
    period = _period(before)
    if calls is None or period is None or 0 in before[-period:]:
        return []
    return [calls.known.get(before[-period + ahead]) for ahead in range(period)]


def behind(view: View, scene: Scene) -> tuple[str, ...]:
    """`rank 1 had issued 420 collectives of default_pg when its step 40 ended, ranks 0,2 421`: of ranks that are in the same step."""
    counts: dict[int, dict[int, list[int]]] = {}
    for rank, member in view.members.items():
        number = _at_step_end(scene.ranks[rank], view.group.name, member.group.generation, scene)
        if number is not None:
            counts.setdefault(scene.ranks[rank].steps, {}).setdefault(number, []).append(rank)
    lines = []
    for step, by_number in counts.items():
        if len(by_number) > 1:
            sides = sorted(by_number.items(), key=lambda item: (len(item[1]), item[0]))
            first, side = sides[0]
            rest = ", ".join(f"{words.ranks_text(ranks)} {number}" for number, ranks in sides[1:4])
            its = "its" if len(side) == 1 else "their"
            lines.append(f"{words.ranks_text(side)} had issued {first} collectives of {view.label} when {its} step {step} ended, {rest}")
    return tuple(lines[:4])


def _calls(view: View, rank: RankState) -> Calls | None:
    calls = rank.calls.get(view.group.name)
    return calls if calls is not None and calls.generation == view.members[rank.rank].group.generation and calls.last >= view.frontier - 1 else None


def _before(calls: Calls, number: int, most: int = _MOST) -> tuple[int, ...]:
    """The kinds of the calls up to the one before `number`, at most so many."""
    end = (number - calls.first) * KIND_BYTES
    part = calls.kinds[max(0, end - most * KIND_BYTES) : end] if end > 0 else b""
    return struct.unpack(f"<{len(part) // KIND_BYTES}I", part)


def _period(kinds: Sequence[int]) -> int | None:
    """The shortest length after which the newest calls repeat, _ROUNDS times at least; None while they do not."""
    for period in range(1, len(kinds) // _ROUNDS + 1):
        span = max(_ROUNDS * period, min(len(kinds), _LEAST))
        newest = kinds[-span:]
        if newest[period:] == newest[:-period]:
            return period
    return None


def _place(call: Collective, due: Sequence[Collective | None]) -> str:
    """Where in the round a call belongs."""
    for ahead, other in enumerate(due):
        if other == call:
            if ahead == 0:
                return "just that"
            return f"{say(call)}, which comes {ahead} later in turn" if ahead < len(due) - 1 else f"{say(call)}, which came just before"
    return f"{say(call)}, which is no part of that"


def _at_step_end(rank: RankState, group: str, generation: int, scene: Scene) -> int | None:
    """Its last collective number of the group at its last step's end; None where no entry tells."""
    if not rank.steps or rank.last_step_at is None:
        return None
    number, oldest = None, None
    for entry in rank.collectives:
        if (entry.group, entry.generation) != (group, generation) or entry.is_p2p or not entry.created_wall_at:
            continue
        at = clocks.mono(scene.state, scene.snapshot, entry.created_wall_at)
        if abs(at - rank.last_step_at) < _CLEAR_S:
            return None
        oldest = entry.seq if oldest is None else min(oldest, entry.seq)
        if at < rank.last_step_at:
            number = entry.seq if number is None else max(number, entry.seq)
    return number if number is not None and (oldest or 0) <= number else None
