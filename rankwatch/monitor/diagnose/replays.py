"""A job that replays its collectives in CUDA graphs and has stopped: who waits on its device, and who does not replay any more.

Neither recorder nor watchdog nor NCCL's own monitor sees such a collective (recorded with NCCL 2.28), so no timeout will come. What tells is that steps were
made with next to no recorded collective, that they have ended on all ranks at once, and the stacks: the ranks that wait sit in a stream wait and spin
there, the one that has stopped is at a line of the job and does nothing. That the graph holds a collective is inferred: confidence is never certain.
"""

from __future__ import annotations

import re
from statistics import median
from typing import Literal

from rankwatch.model import RankState, Stack, Verdict, VerdictName, Want
from rankwatch.monitor.diagnose import causes, clocks, frames, inside, words
from rankwatch.monitor.diagnose.absent import level_of
from rankwatch.monitor.diagnose.finding import PRECEDENCE, Finding
from rankwatch.monitor.diagnose.progress import progresses
from rankwatch.monitor.diagnose.scene import Clock, Scene
from rankwatch.monitor.diagnose.waits import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwatch.monitor.diagnose.wants import Asked

LOOK_S = 3.0  # over which a rank's CPU is compared
_AGAIN_S = 3.0  # between the first two stacks
_NATIVE_S = 5.0  # age of the silence from which native stacks are taken, once both samples have left it open who waits
_SPIN_RATIO, _QUIET_RATIO = 0.5, 0.05  # of a core
_WINDOW_STEPS = 20  # before the silence: how many collectives were recorded in them
_PER_STEP = 0.5
_PAGE_RATIO = 0.5  # of idle_min_s: no page before
_STREAM_WAIT = re.compile(r"^(cuda|cu|hip)(Stream|Event|Device|Ctx)Synchronize")
_SYNCHRONIZE = re.compile(r"torch/cuda/(streams|__init__)\.py$")

Doing = Literal["waits", "stopped", "moves", ""]
ADVICE = (
    "Neither the recorder nor the watchdog sees a collective that a CUDA graph replays: no timeout ends it. Find out what the rank waits for, or end the job.",
    "After ending it with SIGTERM look for ranks that stay: a rank in a captured collective may need SIGKILL.",
)


def sample(scene: Scene) -> list[int]:
    """Whose stacks are looked at: the ranks that do least, and one that does most; the lowest ones while that is not known."""
    busy = {rank: watch.busy_ratio for rank in scene.ranks if (watch := scene.state.watches.get(rank)) is not None and watch.busy_ratio is not None}
    if len(busy) < len(scene.ranks) or len(busy) <= scene.limits.max_stacks:
        return sorted(scene.ranks)[: scene.limits.max_stacks]
    ordered = sorted(busy, key=lambda rank: (busy[rank], rank))
    return [*ordered[: scene.limits.max_stacks - 1], ordered[-1]]


def look(scene: Scene, since: float, asked: Asked, open_waits: Sequence[Wait]) -> tuple[list[Verdict], list[Want]]:
    """What is said of a silence in a job that uses CUDA graphs and whose steps are seen; ([], ...) where the evidence names nobody.

    open_waits: recorded operations that everybody has entered and nobody has started, as those behind a replay are.
    """
    ranks, limits = scene.ranks, scene.limits
    chosen = sample(scene)
    twice = all(_both(ranks[rank], since) for rank in chosen)
    wanted = []
    if stacks := asked.due("stacks", chosen, limits.restack_s if twice else _AGAIN_S, limits.max_stacks):
        wanted.append(Want("stacks", stacks, "no step, and CUDA graphs are replayed"))
    unread = [rank for rank in chosen if (read := ranks[rank].collectives_at) is None or read < since]
    if unread and (recorders := asked.due("recorder", unread, limits.rerecord_s, limits.max_recorders)):
        wanted.append(Want("recorder", recorders, "whether steps are made without recorded collectives"))
    if not twice or unread or not all(_captured(ranks[rank], since, scene) for rank in chosen):
        return [], wanted
    doing = {rank: _doing(ranks[rank], since, scene) for rank in chosen}
    doing.update({rank: _unsampled(rank, scene) for rank in ranks if rank not in doing})
    waiters = tuple(sorted(rank for rank, what in doing.items() if what == "waits"))
    culprits = tuple(sorted(rank for rank, what in doing.items() if what == "stopped"))
    lasted = scene.age(since)
    unsure = [rank for rank in chosen if not doing[rank] or not waiters]  # who waits may sleep as well as the one that is waited for
    named = dict.fromkeys((*waiters[:1], *culprits[:1], *unsure)) if lasted >= _NATIVE_S and "moves" not in doing.values() else ()
    if native := asked.due("native_stack", [rank for rank in named if not _native(ranks[rank], since)], limits.idle_min_s, limits.max_stacks):
        wanted.append(Want("native_stack", native, "whether it waits on its device"))
    if not waiters or not culprits or len(waiters) + len(culprits) < len(ranks) or (len(culprits) >= len(waiters) and len(ranks) > 2):
        return [], wanted
    found = {rank: causes.of(ranks[rank], since, scene.state, scene.seen_at(rank), limits) for rank in culprits}
    if lasted < limits.idle_min_s and any(progresses(scene.state.watches.get(rank), scene.now, LOOK_S) for rank in culprits):
        return [], wanted
    best = min(found.values(), key=lambda finding: (PRECEDENCE.index(finding.cause), finding.rank))
    return [_told(scene, since, culprits, waiters, best, _level(scene, since, list(found.values()), lasted), open_waits)], wanted


def _told(
    scene: Scene, since: float, culprits: tuple[int, ...], waiters: tuple[int, ...], best: Finding, level: VerdictName, open_waits: Sequence[Wait]
) -> Verdict:
    ranks, lasted = scene.ranks, scene.age(since)
    where = {rank: frames.innermost(stack.main) for rank in (*culprits, *waiters) if (stack := ranks[rank].stack)}
    at, places = words.places(culprits, ranks, since)
    proved = _native(ranks[waiters[0]], since)
    waits = f"{words.ranks_text(waiters)} {words.verb(waiters, 'waits on its device', 'wait on their devices')}"
    does = best.says or (f"it is in {where[culprits[0]]}" if where.get(culprits[0]) else "what it does is not known")
    if len(culprits) > 1:
        does = does.replace("it is", "they are", 1)
    calls = [f"{wait.entry.op if wait.entry else 'operation'} #{wait.seq} of {wait.label}" for wait in open_waits[:2]]
    recorded = f"{' and '.join(calls)} {'is' if len(calls) == 1 else 'are'} open only behind it" if calls else "no recorded collective is open"
    when = "whose own timeout never comes" if calls else "no timeout will come"
    summary = (
        f"no rank has stepped for {lasted:.0f} s and {recorded}: {words.ranks_text(culprits)} {words.verb(culprits, 'has', 'have')} stopped replaying "
        f"({does}), {waits}; a collective captured in a CUDA graph is suspected, {when}"
    )
    lines = [f"rank {rank} {'sits in' if rank in waiters else 'is in'} {where[rank]}" for rank in (*culprits[:4], *waiters[:4]) if where.get(rank)]
    lines.append(f"{words.ranks_text(waiters)}: " + (f"{_sync_name(proved)} is on its stack" if proved else "main thread runs outside of Python at one line"))
    lines += [line for line in best.evidence if line not in lines]
    missing = ["which collective it is: neither recorder nor watchdog nor NCCL sees what a CUDA graph replays"]
    missing += [] if proved else ["the native stack of a waiting rank, which would show the stream wait"]
    return Verdict(
        key="", verdict=level, cause=best.cause, domain=best.domain, culprit_ranks=culprits, waiting_ranks=waiters, since=since, summary=summary, at=at,
        places=places, timeout_known=True, confidence="likely" if proved and _native(ranks[culprits[0]], since) else "partial", advice=ADVICE,
        evidence=tuple(lines), missing_evidence=tuple(missing),
    )  # fmt: skip


def _level(scene: Scene, since: float, found: Sequence[Finding], lasted: float) -> VerdictName:
    """`stuck` once every culprit has been silent for longer than its cause allows, with every rank of the job seen."""
    timeouts = [group.timeout_s for rank in scene.ranks.values() for group in rank.groups if group.timeout_s]
    clock: Clock = (since, min(timeouts, default=None), False, 0.0, "collective")
    silent = all(level_of(finding, (clock,), scene) >= 2 and (watch := scene.state.watches.get(finding.rank)) is not None and watch.looks for finding in found)
    everybody = len(scene.ranks) >= scene.snapshot.world_size
    return "stuck" if silent and everybody and lasted >= _PAGE_RATIO * scene.limits.idle_min_s else "slow"


# -- one rank ---------------------------------------------------------------------------------------------------------------------


def _both(rank: RankState, since: float) -> bool:
    """Whether there are two samples of this silence."""
    return rank.stack is not None and rank.earlier_stack is not None and rank.earlier_stack.at >= since and frames.comparable(rank.earlier_stack, rank.stack)


def _captured(rank: RankState, since: float, scene: Scene) -> bool:
    """Whether its last steps were made with next to no recorded collective, so that what keeps the ranks together is none of those."""
    window = _WINDOW_STEPS * median(each.step_s or 0.0 for each in scene.ranks.values())
    offset = next((node.clock_offset_s for node in scene.snapshot.nodes if node.node == rank.node), 0.0)
    made = [clocks.mono(scene.state, scene.snapshot, entry.created_wall_at, offset, rank.node) for entry in rank.collectives if entry.created_wall_at]
    return sum(since - window <= at <= since for at in made) < _PER_STEP * _WINDOW_STEPS


def _native(rank: RankState, since: float) -> Stack | None:
    stack = rank.native_stack
    return stack if stack is not None and stack.main and stack.at >= since else None


def _sync_name(stack: Stack) -> str:
    return next((frame.name for frame in stack.main if _STREAM_WAIT.search(frame.name)), "no stream wait")


def _doing(rank: RankState, since: float, scene: Scene) -> Doing:
    stack, earlier, watch = rank.stack, rank.earlier_stack, scene.state.watches.get(rank.rank)
    if stack is None or earlier is None or frames.moved(earlier, stack):
        return "moves"
    native = _native(rank, since)
    if native is not None and any(_STREAM_WAIT.search(frame.name) for frame in native.main):
        return "waits"
    if any(_SYNCHRONIZE.search(frame.file) and frames.function(frame) == "synchronize" for frame in stack.main):
        return "waits"
    if stack.asked or earlier.asked or watch is None or watch.busy_ratio is None:
        return ""  # whether its main thread runs is not known
    threads = [each.threads if inside.backward(each) else each.threads[:1] for each in (stack, earlier)]  # autograd works on a thread of its own
    if watch.busy_ratio >= _SPIN_RATIO and all(any(thread.active and not thread.owns_gil for thread in found) for found in threads):
        return "waits"
    return "stopped" if watch.busy_ratio < _QUIET_RATIO and not any(thread.active for found in threads for thread in found) else ""


def _unsampled(rank: int, scene: Scene) -> Doing:
    """Of a large job's other ranks the CPU has to do: who waits for NCCL spins."""
    watch = scene.state.watches.get(rank)
    return "waits" if watch is not None and watch.busy_ratio is not None and watch.busy_ratio >= _SPIN_RATIO else ""
