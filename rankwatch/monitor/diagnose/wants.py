"""Which evidence to fetch next: little, rarely, suspects first. Healthy ranks are never sampled."""

from __future__ import annotations

from rankwatch.model import RankState, Want
from rankwatch.monitor.diagnose import handles, messages
from rankwatch.monitor.diagnose.graph import Hang
from rankwatch.monitor.diagnose.progress import last_beat
from rankwatch.monitor.diagnose.scene import Ruling, Scene
from rankwatch.monitor.diagnose.state import Trouble
from rankwatch.monitor.diagnose.views import View, alive
from rankwatch.monitor.diagnose.waits import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Case = tuple[Hang, Ruling, Trouble]
_RARELY = 6  # times restack_s: evidence of a trouble that is already told


class Asked:
    """What was asked of which rank and when, so that the same is not asked again too soon. Old marks are dropped."""

    def __init__(self, before: Mapping[tuple[str, int], float], now: float, keep_s: float) -> None:
        self.now = now
        self.times = {key: at for key, at in before.items() if now - at <= keep_s}

    def due(self, kind: str, ranks: Iterable[int], every_s: float, most: int) -> tuple[int, ...]:
        """Those of `ranks`, in this order, of which `kind` was not asked within every_s; at most `most`, and marks them asked."""
        chosen: list[int] = []
        for rank in ranks:
            if len(chosen) >= most:
                break
            if self.now - self.times.get((kind, rank), -1e9) >= every_s:
                chosen.append(rank)
                self.times[(kind, rank)] = self.now
        return tuple(chosen)


def wants(cases: Sequence[Case], waits: Sequence[Wait], scene: Scene, asked: Asked) -> tuple[list[Want], set[str]]:
    """Requests for this look, and the keys of troubles whose culprit was now asked for its native stack."""
    limits = scene.limits
    found: list[Want] = []
    native: set[str] = set()
    recorders = [rank for wait in waits if wait.view is not None for rank in _to_read(wait.view, wait, scene)]
    if chosen := asked.due("recorder", dict.fromkeys(recorders), 1.0, limits.max_recorders):
        found.append(Want("recorder", chosen, "ranks wait in their group"))
    maybe = [rank for wait in waits if scene.age(wait.since) >= limits.stack_s for rank in wait.ask]
    if chosen := asked.due("stacks", maybe, limits.restack_s, limits.max_stacks):
        found.append(Want("stacks", chosen, "they may wait for ranks that have not joined"))
    for hang, ruling, trouble in cases:
        waited = scene.age(ruling.since)
        beside = messages.others(hang.roots, ruling.since, scene.ranks)
        sides = [ranks[0] for index in hang.waits if (odd := waits[index].mismatch) is not None for _, ranks in odd.classes[:4]]
        named = dict.fromkeys((*ruling.culprits, *hang.roots, *hang.cycle, *sides, *beside))
        suspects = [rank for rank in named if rank in scene.ranks and alive(scene.ranks[rank])]
        silent = [rank for rank in suspects if (beat := last_beat(scene.ranks[rank])) is not None and scene.seen_at(rank) - beat >= 2.0]
        if chosen := asked.due("ping", silent, 2.0, limits.max_recorders):
            found.append(Want("ping", chosen, "no heartbeat"))
        stopped = [rank for rank in suspects if _stopped(scene.ranks[rank])] if waited >= limits.suspect_s else []
        if chosen := asked.due("stacks", stopped, limits.restack_s, limits.max_stacks):
            found.append(Want("stacks", chosen, "stopped: it stays where it is"))
        if waited < limits.stack_s and not hang.cycle and not (waits and any(waits[index].mismatch for index in hang.waits)):
            continue
        verdict = ruling.verdict
        every = limits.restack_s * (_RARELY if verdict is not None and verdict.verdict == "stuck" else 1)
        if chosen := asked.due("stacks", suspects, every, limits.max_stacks):
            found.append(Want("stacks", chosen, "suspects"))
        if chosen := handles.to_ask(suspects, ruling.since, scene, asked):
            found.append(Want("native_stack", chosen, "whether they wait for a message in work.wait()"))
        if verdict is None or verdict.verdict not in ("stuck", "timeout_imminent"):
            continue
        others = _representatives(hang, waits, suspects, limits.max_stacks)
        if chosen := asked.due("stacks", others, _RARELY * limits.restack_s, limits.max_stacks):
            found.append(Want("stacks", chosen, "one of each group of waiting ranks"))
        first = next((rank for rank in ruling.culprits if rank in suspects), None)
        there = first is not None and handles.read(scene.ranks[first], ruling.since)
        asleep = verdict.cause in ("stopped", "debugger", "uninterruptible")
        if verdict.verdict == "stuck" and not trouble.native_asked and first is not None and not asleep and not there:
            found.append(Want("native_stack", (first,), "culprit of a stuck job"))
            native.add(trouble.key)
    return found, native


def _stopped(rank: RankState) -> bool:
    return rank.process is not None and rank.process.state == "T"


def _to_read(view: View, wait: Wait, scene: Scene) -> list[int]:
    """Members whose recorder was not read since this wait began; those that have not come first.

    A rank whose heartbeat stopped cannot tell by its status numbers that it moved, so it is read again and again.
    """
    ranks = []
    eager = scene.age(wait.since) < 4 * scene.limits.rerecord_s
    for rank in dict.fromkeys((*wait.missing, *wait.unread, *view.members)):
        state = scene.ranks.get(rank)
        if state is None or not alive(state) or state.agent != "claimed":
            continue
        read = state.collectives_at
        beat = last_beat(state)
        unheard = rank in wait.missing and beat is not None and scene.seen_at(rank) - beat >= scene.limits.gil_stale_s
        needed = read is None or read < wait.since or rank in wait.unread
        old = read is None or scene.now - read >= scene.limits.rerecord_s * (1 if unheard or needed else 2 * _RARELY)
        if (needed and eager) or old:
            ranks.append(rank)
    return ranks


def _representatives(hang: Hang, waits: Sequence[Wait], suspects: Sequence[int], most: int) -> list[int]:
    """The lowest waiting rank of each group wait, then further ones until there are enough."""
    first = [next((rank for rank in sorted(waits[index].waiters) if rank not in suspects), None) for index in hang.waits]
    chosen = dict.fromkeys(rank for rank in first if rank is not None)
    for rank in hang.waiting:
        if len(chosen) >= most:
            break
        if rank not in suspects:
            chosen.setdefault(rank)
    return list(chosen)[:most]
