"""Absent ranks that wait for a message themselves: whom they wait for is in no record (gloo's recorder shows no point-to-point calls).

Blame only by elimination. If every rank of the job waits but one, that one is what they wait for. If all the others wait for one rank that
waits for a message, the message could only come from them: it is the odd one; where some of them wait for something else, a message or
another group, that may be what keeps its message away. Otherwise nobody is named. Never more than "partial".
"""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import RankState, VerdictName
from rankwatch.monitor.diagnose import causes, frames, handles, words
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.progress import progresses
from rankwatch.monitor.diagnose.scene import Picture, Scene
from rankwatch.monitor.diagnose.views import alive, knows_collectives
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.diagnose.work import fresh_stack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_ADVICE = (
    "Compare the calls of these ranks: the peer (src, dst), the tag and the order of each send with those of the receive that it is meant for.",
    "A send waits until the other side has called the matching receive: batch_isend_irecv starts both before anyone waits.",
)
MAX_FREE = 8  # ranks outside all waits that are looked at; with more, nobody is named


def talking(rank: RankState, since: float) -> str:
    """The point-to-point call that its main thread is in, by a stack of this wait, or by a native one where Python's lines do not tell; else ""."""
    return frames.in_point_to_point(fresh_stack(rank, since)) or handles.message(rank, since)


def others(roots: Iterable[int], since: float, ranks: Mapping[int, RankState]) -> tuple[int, ...]:
    """Whose stack and progress say who is waited for, where all roots are in point-to-point calls; () where one is not. At most MAX_FREE + 1.

    A root of which no native stack can be had may be in one.

    All living ranks beside the roots; in a larger job those that are in no collective, rendezvous or monitored barrier.
    """
    inside = set(roots)
    if not inside or not all(talking(ranks[rank], since) or handles.refused(ranks[rank], since) for rank in inside):
        return ()
    found = sorted(number for number, rank in ranks.items() if number not in inside and alive(rank))
    return tuple((found if len(found) <= MAX_FREE else [number for number in found if not _waits(ranks[number])])[: MAX_FREE + 1])


def fed(roots: tuple[int, ...], since: float, scene: Scene) -> bool:
    """Whether a rank beside the roots works and sits in no call of torch: it may be about to send what a root waits for."""
    return any(
        progresses(scene.state.watches.get(rank), scene.now, scene.limits.look_s) and not frames.blocked(fresh_stack(scene.ranks[rank], since))
        for rank in others(roots, since, scene.ranks)
    )


def _inside(rank: RankState, since: float) -> bool | None:
    """Whether its main thread waits in torch.distributed, for a message or for anything else; None where that is not known."""
    if talking(rank, since):
        return True
    return None if handles.unread(rank, since) else frames.blocked(fresh_stack(rank, since))


def _waits(rank: RankState) -> bool:
    entered = any(number > rank.completed.get(name, 0) for name, number in rank.enqueued.items())
    return entered or rank.stage == "joining" or bool(rank.group_in_creation) or (rank.barrier is not None and rank.barrier.inside)


def judge(roots: tuple[int, ...], wait: Wait, waiting: tuple[int, ...], level: Callable[[Finding], int], scene: Scene) -> Picture:
    """The picture of a hang of which every root is in a point-to-point call. waiting: who waits for them, in this wait or behind it.

    level: how long a finding has lasted, as for any absent rank.
    """
    ranks, since = scene.ranks, wait.since
    calls = {rank: talking(ranks[rank], since) for rank in roots}
    where = {rank: frames.where(stack.main) for rank in roots if (stack := fresh_stack(ranks[rank], since))}
    beside = others(roots, since, ranks)
    doing = {rank: _inside(ranks[rank], since) for rank in beside}
    unread = tuple(rank for rank, blocked in doing.items() if blocked is None)
    free = tuple(rank for rank, blocked in doing.items() if blocked is False)
    everyone = len(ranks) >= scene.snapshot.world_size and all(knows_collectives(rank) for rank in ranks.values())
    closed = everyone and not unread and len(beside) <= MAX_FREE
    lines = [f"rank {rank} waits in {calls[rank]}" + (f", called from {where[rank]}" if where.get(rank) else "") for rank in roots[:8]]
    missing = [f"the peer of {next(iter(calls.values()))}: gloo's recorder shows no point-to-point calls"]
    missing += [f"stack of {words.ranks_text(unread)}"] if unread else []
    what = words.absent(roots, Finding(roots[0], "unknown", "unknown", says=lines[0].replace(f"rank {roots[0]}", "it", 1)), wait, scene.age(since))
    due: VerdictName | None
    silent = all(level(Finding(rank, "unknown", "unknown")) >= 2 for rank in (*roots, *free))

    if closed and len(free) == 1:
        finding = causes.of(ranks[free[0]], since, scene.state, scene.seen_at(free[0]), scene.limits)
        finding = replace(finding, confidence="partial", missing_evidence=(*finding.missing_evidence, *missing))
        says = f"every rank waits but rank {free[0]} ({finding.says or 'what it does is not known'}): {what}"
        due = "stuck" if level(finding) >= 2 and silent else None
        lines = [*finding.evidence, *lines]
        return Picture(due, finding.cause, finding.domain, free, wait, says, finding.at, tuple(lines), finding.missing_evidence, "partial", (), finding)
    rest = {number for number, rank in ranks.items() if alive(rank)} - {*roots}
    if closed and not free and len(roots) == 1 and rest <= {*waiting} and not any(talking(ranks[rank], since) for rank in rest):
        says = f"{what}; every other rank waits as well, so none of them can be about to send"
        finding = Finding(roots[0], "not_entered", "user_code", at=where.get(roots[0], ""))
        due = "stuck" if silent else None
        return Picture(due, "not_entered", "user_code", roots, wait, says, finding.at, tuple(lines), tuple(missing), "partial", (), finding)
    lines += [f"rank {rank} is in {frames.innermost(stack.main)}" for rank in free[:4] if (stack := fresh_stack(ranks[rank], since))]
    due = "stuck" if silent and not unread else None
    finding = Finding(roots[0], "unknown", "unknown", advice=_ADVICE)
    return Picture(due, "unknown", "unknown", (), wait, f"{what}; for whom is not known", "", tuple(lines), tuple(missing), "partial", (), finding)
