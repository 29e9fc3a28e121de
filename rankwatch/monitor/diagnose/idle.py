"""A job that moves no more, with nothing open in any recorder: point-to-point waits, collectives in CUDA graphs.

No watchdog sees this and no timeout will come. What is said is careful: slow, confidence partial, never a page.
"""

from __future__ import annotations

from statistics import median

from rankwatch.model import RankState, Verdict, Want
from rankwatch.monitor.diagnose import frames, words
from rankwatch.monitor.diagnose.progress import progresses
from rankwatch.monitor.diagnose.scene import Scene

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwatch.monitor.diagnose.wants import Asked


def mark(ranks: Mapping[int, RankState]) -> tuple[object, ...]:
    """What changes whenever the job does anything that we count."""
    return (
        sum(rank.steps for rank in ranks.values()),
        sum(sum(rank.enqueued.values()) + sum(rank.completed.values()) for rank in ranks.values()),
        sum(len(rank.compiling) for rank in ranks.values()),
    )


def due(scene: Scene, since: float) -> bool:
    """Whether the silence is long against the job's own steps, where those are seen."""
    ranks, limits = scene.ranks, scene.limits
    if len(ranks) < 2 or any(rank.stage != "joined" or rank.compiling for rank in ranks.values()):
        return False
    if not _steps(scene):
        return scene.age(since) >= limits.idle_min_s
    step = median(rank.step_s or 0.0 for rank in ranks.values())
    return scene.age(since) >= max(limits.idle_min_s, limits.idle_factor * step)


def _steps(scene: Scene) -> bool:
    """Whether every rank's steps are seen; else only a rank found in a point-to-point call says anything."""
    return all(rank.steps >= scene.limits.idle_steps and rank.last_step_at is not None for rank in scene.ranks.values())


def look(scene: Scene, since: float, asked: Asked) -> tuple[list[Verdict], list[Want]]:
    """Called when `due`. Asks for stacks first; two equal samples of a rank show that it stands."""
    ranks, limits = scene.ranks, scene.limits
    sample = sorted(ranks)[: limits.max_stacks]
    steps = _steps(scene)
    every = limits.restack_s if steps else max(limits.restack_s, scene.age(since) / 4)  # a server may idle for days
    chosen = asked.due("stacks", sample, every, limits.max_stacks)
    wanted = [Want("stacks", chosen, "no step and nothing open")] if chosen else []
    graphs = any(rank.cudagraph for rank in ranks.values())  # a waiter of a graph spins, so CPU says nothing there
    standing = []
    for number in sample:
        rank = ranks[number]
        if rank.stack is None or rank.earlier_stack is None or rank.earlier_stack.at < since or frames.moved(rank.earlier_stack, rank.stack):
            return [], wanted
        if not graphs and progresses(scene.state.watches.get(number), scene.now, limits.look_s):
            return [], wanted
        standing.append(number)
    talking = tuple(number for number in standing if frames.in_point_to_point(ranks[number].stack))
    silent = tuple(number for number in standing if number not in talking)
    if not steps and not talking:
        return [], wanted
    culprits = silent if talking and len(silent) == 1 and len(standing) == len(ranks) else ()
    at = frames.where(stack.main) if culprits and (stack := ranks[culprits[0]].stack) else ""
    lines = tuple(f"rank {number} is in {frames.innermost(stack.main)}" for number in standing if (stack := ranks[number].stack))
    why = "a collective captured in a CUDA graph is suspected" if graphs else "a point-to-point wait is suspected" if talking else "nothing open is recorded"
    what = "has stepped" if steps else "has moved"
    summary = f"no rank {what} for {scene.age(since):.0f} s and no recorded collective is open; {why}"
    if culprits:
        summary += f"; {words.ranks_text(talking)} wait in point-to-point calls, {words.ranks_text(culprits)} {words.verb(culprits, 'does', 'do')} not"
    return [
        Verdict(
            key="",
            verdict="slow",
            cause="unknown",
            domain="unknown",
            culprit_ranks=culprits,
            waiting_ranks=talking,
            since=since,
            summary=summary,
            at=at,
            confidence="partial",
            advice=_advice(graphs),
            evidence=lines,
            missing_evidence=("what the ranks wait for: neither the recorder nor the watchdog sees point-to-point calls on gloo or graph replays",),
        )
    ], wanted


def _advice(graphs: bool) -> tuple[str, ...]:
    if graphs:
        return ("No timeout will come for a captured collective: compare the ranks' stacks, then end the job by hand.",)
    return words.advice("unknown")
