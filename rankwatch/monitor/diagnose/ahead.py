"""Operations that were posted ahead: nobody sits in them yet. Their ranks train on beside the handle, and wait only once they ask for the result.

Seen by what such a rank completes elsewhere: optimizer steps, and collectives of groups that no absent rank is a member of (a health check
of all ranks may run in a thread while the main thread waits).
"""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import RankState
from rankwatch.monitor.diagnose import words
from rankwatch.monitor.diagnose.graph import Hang
from rankwatch.monitor.diagnose.scene import Picture, Scene
from rankwatch.monitor.diagnose.waits import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Moves = tuple[int, int]  # optimizer steps, collectives completed in the groups that count
Ahead = tuple[Moves, "float | None"]  # and when they were last seen to grow, None: not yet
MOST = 64  # waiting ranks that are looked at in one hang: one that stands is enough


def observe(before: Mapping[int, Ahead], hangs: Sequence[Hang], waits: Sequence[Wait], scene: Scene) -> dict[int, Ahead]:
    """What the ranks that wait for absent ones have completed elsewhere."""
    found: dict[int, Ahead] = {}
    for hang in hangs:
        if not hang.roots:
            continue
        absent, inside = set(hang.roots), {waits[index].name for index in hang.waits}
        for rank in hang.waiting[:MOST]:
            moves = _moves(scene.ranks[rank], inside, absent)
            old = before.get(rank)
            grown = old is not None and old[0] != moves and old[0][0] <= moves[0] and old[0][1] <= moves[1]
            found[rank] = (moves, scene.seen_at(rank) if grown else old[1] if old is not None else None)
    return found


def _moves(rank: RankState, inside: set[str], absent: set[int]) -> Moves:
    counted = (group.name for group in rank.groups if group.name not in inside and absent.isdisjoint(group.ranks))
    return rank.steps, sum(rank.completed.get(name, 0) for name in counted)


def held_back(picture: Picture, hang: Hang, scene: Scene) -> Picture:
    """The picture of a hang with absent ranks: not stuck yet, where none of those that wait has stood for as long as a wait may last.

    What cannot heal is told all the same.
    """
    wait = picture.wait
    if picture.level != "stuck" or picture.mark or not hang.waiting:
        return picture
    moved = [seen[1] if (seen := scene.state.ahead.get(rank)) is not None else None for rank in hang.waiting[:MOST]]
    allowed_s = scene.limits.stuck_after_s(wait.timeout_s, first=wait.first)
    if any(at is None or at < wait.since or scene.age(at) >= allowed_s for at in moved):
        return picture
    who = words.ranks_text(hang.waiting)
    line = f"{who} {words.verb(hang.waiting, 'goes', 'go')} on beside it: the operation was posted ahead, and nobody sits in it yet"
    return replace(picture, level=None, evidence=(*picture.evidence, line))
