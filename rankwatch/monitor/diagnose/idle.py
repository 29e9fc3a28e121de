"""A job that moves no more, with nothing open in any recorder: point-to-point waits, collectives in CUDA graphs, recorders that are off.

No watchdog sees this. What is said is careful: slow, confidence partial, never stuck; replays.py has one exception, a rank that is seen to have
stopped replaying its CUDA graph. The other: messages on gloo end with their group's timeout, and that is near.
"""

from __future__ import annotations

from statistics import median

from rankwatch.model import RankState, Verdict, Want
from rankwatch.monitor.diagnose import captured, frames, handles, inside, messages, replays, stores, words
from rankwatch.monitor.diagnose.progress import progresses, silent_since
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwatch.monitor.diagnose.wants import Asked

_MESSAGES_LOOK_RATIO = 0.25  # of idle_min_s, where ranks wait for messages
_MESSAGES_TELL_RATIO = 0.5
_MESSAGES_TIMEOUT_RATIO = 0.05  # and no later than after this share of the smallest timeout, where that is short
_RECORDER_ADVICE = (
    "Compare the ranks' stacks: which of them are in another call than the rest, or in none.",
    "Give torch's flight recorder its buffer back (TORCH_FR_BUFFER_SIZE=2000, the default here): it tells who has not entered what.",
)


def mark(ranks: Mapping[int, RankState]) -> tuple[object, ...]:
    """What changes whenever the job does anything that we count."""
    return (
        sum(rank.steps for rank in ranks.values()),
        sum(sum(rank.enqueued.values()) + sum(rank.completed.values()) + sum(rank.mixed.values()) for rank in ranks.values()),
        sum(len(rank.compiling) for rank in ranks.values()),
    )


def look_after_s(ranks: Mapping[int, RankState], limits: Limits) -> float:
    """How long a silence may be before evidence of it is gathered: sooner where it may well be a wait for a message, or in a CUDA graph."""
    if _replays(ranks, limits):
        return limits.stack_s
    return _look_s(ranks, limits)


def _look_s(ranks: Mapping[int, RankState], limits: Limits) -> float:
    if not any(rank.mixed for rank in ranks.values()):
        return limits.idle_min_s * (_MESSAGES_TELL_RATIO if _unrecorded(ranks) else 1.0)  # two samples are to be there when it is time to tell
    shortest = min((group.timeout_s for rank in ranks.values() for group in rank.groups if group.timeout_s), default=None)
    least_s = limits.idle_min_s * _MESSAGES_LOOK_RATIO
    return max(limits.stack_s, min(least_s, _MESSAGES_TIMEOUT_RATIO * shortest)) if shortest else least_s


def to_watch(ranks: Mapping[int, RankState], limits: Limits) -> tuple[list[int], float]:
    """(ranks whose CPU and bytes are followed in a silence, seconds over which they are compared)."""
    return (sorted(ranks), replays.LOOK_S) if _replays(ranks, limits) else (sorted(ranks)[: limits.max_stacks], limits.look_s)


def _replays(ranks: Mapping[int, RankState], limits: Limits) -> bool:
    return any(map(captured.used, ranks.values())) and _stepping(ranks, limits)


def due(scene: Scene, since: float) -> bool:
    """Whether it is time to look at the ranks' stacks."""
    ranks = scene.ranks
    if len(ranks) < 2 or any(rank.stage != "joined" or rank.compiling or rank.compile_witness for rank in ranks.values()):
        return False
    return scene.age(since) >= max(look_after_s(ranks, scene.limits), _many_steps_s(scene))


def _long(scene: Scene, since: float, talking: int) -> bool:
    """Whether the silence is long enough to be told, against the job's own steps as well where those are seen. talking: ranks in point-to-point calls.

    Where all ranks are, none is left that could be about to send.
    """
    least_s = scene.limits.idle_min_s * (_MESSAGES_TELL_RATIO if talking >= scene.snapshot.world_size else 1.0)
    if 0 < talking < scene.snapshot.world_size and _unrecorded(scene.ranks):
        least_s += scene.limits.restack_s  # a job that has only begun to send: one more sample
    return scene.age(since) >= max(least_s, _many_steps_s(scene))


def _many_steps_s(scene: Scene) -> float:
    return scene.limits.idle_factor * median(rank.step_s or 0.0 for rank in scene.ranks.values()) if _steps(scene) else 0.0


def _steps(scene: Scene) -> bool:
    """Whether every rank's steps are seen; else only a rank found in a point-to-point call says anything."""
    return _stepping(scene.ranks, scene.limits)


def _stepping(ranks: Mapping[int, RankState], limits: Limits) -> bool:
    return all(rank.steps >= limits.idle_steps and rank.last_step_at is not None for rank in ranks.values())


def _unrecorded(ranks: Mapping[int, RankState]) -> bool:
    """Whether no rank has ever reported a collective: its recorder may be off, and then only stacks show a wait."""
    return not any(rank.collectives or any(rank.enqueued.values()) or any(rank.completed.values()) for rank in ranks.values())


def _still_for(scene: Scene, since: float, sample: list[int]) -> float:
    """Seconds since the last of these ranks got anywhere; 0 while one of them is not watched."""
    watches = scene.state.watches
    return scene.age(max(silent_since(watches[rank], since) for rank in sample)) if all(rank in watches for rank in sample) else 0.0


def _calls(scene: Scene, standing: list[int], since: float) -> dict[int, str]:
    """Where no recorder works: the call that each rank sits in, if a collective is among them and nothing has moved for long enough.

    Sooner where it is plain who is waited for.
    """
    if not _unrecorded(scene.ranks):
        return {}
    least_s = scene.limits.idle_min_s * (_MESSAGES_TELL_RATIO if _outside(scene, standing) else 1.0)
    if _still_for(scene, since, standing) < least_s:
        return {}
    calls = {rank: inside.call(stack) or ("backward" if inside.backward(stack) else "") for rank in standing if (stack := scene.ranks[rank].stack)}
    if all(name in ("", "backward") for name in calls.values()):
        return {}
    return {rank: name or frames.innermost(stack.main) for rank, name in calls.items() if (stack := scene.ranks[rank].stack)}


def _outside(scene: Scene, standing: Sequence[int]) -> tuple[int, ...]:
    """The one rank that is in no call of torch.distributed while every other rank of the job is in the same one; () where its line may hide such a call."""
    if len(standing) != len(scene.ranks) or len(standing) != scene.snapshot.world_size or len(standing) < 3:
        return ()
    stacks = {rank: scene.ranks[rank].stack for rank in standing}
    names = {rank: inside.call(stack) or ("backward" if inside.backward(stack) else "") for rank, stack in stacks.items()}
    free = tuple(rank for rank, name in names.items() if not name)
    if len(free) != 1 or len(set(names.values())) != 2 or frames.blocked(stacks[free[0]]) or handles.opaque(scene.ranks[free[0]], 0.0):
        return ()
    return free


def look(scene: Scene, since: float, asked: Asked, open_waits: Sequence[Wait] = ()) -> tuple[list[Verdict], list[Want]]:
    """Called when `due`. Asks for stacks first; two equal samples of a rank show that it stands. open_waits: see replays.look."""
    ranks, limits = scene.ranks, scene.limits
    early: list[Want] = []
    if _replays(ranks, limits):
        told, early = replays.look(scene, since, asked, open_waits)
        if told or open_waits or scene.age(since) < _look_s(ranks, limits):
            return told, early
    verdicts, wanted = _careful(scene, since, asked)
    return verdicts, [*early, *wanted]


def _careful(scene: Scene, since: float, asked: Asked) -> tuple[list[Verdict], list[Want]]:
    """The same of a silence in which nobody can be named for sure."""
    ranks, limits = scene.ranks, scene.limits
    sample = sorted(ranks)[: limits.max_stacks]
    steps = _steps(scene)
    every = limits.restack_s
    if not steps:  # a server may idle for days
        still = _still_for(scene, since, sample) if _unrecorded(scene.ranks) else 0.0
        every = max(every, (still or scene.age(since)) / 4)
    chosen = asked.due("stacks", sample, every, limits.max_stacks)
    wanted = [Want("stacks", chosen, "no step and nothing open")] if chosen else []
    graphs = any(map(captured.used, ranks.values()))  # a waiter of a graph spins, so CPU says nothing there
    standing = []
    for number in sample:
        rank = ranks[number]
        if rank.stack is None or rank.earlier_stack is None or rank.earlier_stack.at < since or frames.moved(rank.earlier_stack, rank.stack):
            return [], wanted
        if not graphs and progresses(scene.state.watches.get(number), scene.now, limits.look_s):
            return [], wanted
        standing.append(number)
    talking = tuple(number for number in standing if messages.talking(ranks[number], since))
    every = max(limits.idle_min_s, scene.age(since) / 4)
    if hidden := handles.to_ask(standing, since, scene, asked, every):
        wanted.append(Want("native_stack", hidden, "whether they wait for a message in work.wait()"))
    if hidden or any(handles.pending(ranks[number], since, scene) for number in standing if asked.times.get(("native_stack", number), 0.0) >= since):
        return [], wanted
    timeout_s, left_s = _message_timeout(scene, talking, since) if len(talking) >= scene.snapshot.world_size - 1 else (None, None)
    near = timeout_s is not None and left_s is not None and left_s < limits.imminent_left_s(timeout_s)
    if not near and not _long(scene, since, len(talking)):
        return [], wanted
    silent = tuple(number for number in standing if number not in talking)
    held = {number: name for number in standing if (name := stores.seen(ranks[number], since))} if not talking and not graphs else {}
    calls = _calls(scene, standing, since) if not talking and not held and not graphs else {}
    if not steps and not talking and not held and not calls:
        return [], wanted
    if steps and not talking and not held and not calls and not graphs and (chosen := asked.due("native_stack", standing[:1], every, 1)):
        wanted.append(Want("native_stack", chosen, "no step and nothing open"))  # a wait in the store has no Python frame
    culprits: tuple[int, ...] = silent if talking and len(silent) == 1 and len(standing) == len(ranks) else ()
    alone = _outside(scene, standing) if calls else ()
    culprits = culprits or alone
    at = frames.where(stack.main) if culprits and (stack := ranks[culprits[0]].stack) else ""
    lines = tuple(f"rank {number} is in {frames.innermost(stack.main)}" for number in standing if (stack := ranks[number].stack))
    why = "a collective captured in a CUDA graph is suspected" if graphs else "a point-to-point wait is suspected" if talking else "nothing open is recorded"
    if held:
        why = f"{words.ranks_text(held)} {words.verb(tuple(held), 'waits', 'wait')} in {next(iter(held.values()))} of the store, for a key that nobody has set"
    summary = f"no rank {'has stepped' if steps else 'has moved'} for {scene.age(since):.0f} s and no recorded collective is open; {why}"
    missing = "what the ranks wait for: neither the recorder nor the watchdog sees point-to-point calls on gloo or graph replays"
    if calls:
        still = _still_for(scene, since, standing)
        text, since = inside.together(calls), scene.now - still
        who = "no rank has" if len(standing) == len(ranks) else f"none of {words.ranks_text(standing)} has"
        summary, lines = f"{who} moved for {still:.0f} s: {text}; no recorder tells of collectives", (text, *lines)
        missing = "which collectives are open: the ranks' recorders hold none (is TORCH_FR_BUFFER_SIZE 0?)"
    if alone:
        summary += f"; only {words.ranks_text(alone)} is not in it"
    elif culprits:
        summary += f"; {words.ranks_text(talking)} wait in point-to-point calls, {words.ranks_text(culprits)} {words.verb(culprits, 'does', 'do')} not"
    if near:
        summary += words.tail((), left_s)
    return [
        Verdict(
            key="",
            verdict="timeout_imminent" if near else "slow",
            timeout_s=timeout_s,
            timeout_left_s=left_s,
            cause="store_wait" if held else "not_entered" if alone else "unknown",
            domain="user_code" if held or alone else "unknown",
            culprit_ranks=culprits,
            waiting_ranks=talking or tuple(rank for rank in calls if rank not in alone),
            since=since,
            summary=summary,
            at=at,
            confidence="partial",
            advice=stores.ADVICE if held else _RECORDER_ADVICE if calls else _advice(graphs),
            evidence=lines,
            missing_evidence=(missing,),
        )
    ], wanted


def _message_timeout(scene: Scene, talking: Sequence[int], since: float) -> tuple[float | None, float | None]:
    """(timeout, seconds left at the least) of messages on gloo: until the first of these ranks gives up, if all its groups have the same timeout.

    A wait counts from the first sample that shows it: it has begun earlier.
    """
    found = []
    for rank in talking:
        timeouts = {group.timeout_s for group in scene.ranks[rank].groups if "gloo" in group.backend}
        timeout_s = timeouts.pop() if len(timeouts) == 1 else None
        watch, earlier = scene.state.watches.get(rank), scene.ranks[rank].earlier_stack
        seen = max(since, watch.same_since) if watch is not None and watch.same_samples else earlier.at if earlier is not None else scene.now
        if timeout_s:
            found.append((timeout_s - scene.age(seen), timeout_s))
    left_s, timeout_s = min(found, default=(None, None))
    return timeout_s, left_s


def _advice(graphs: bool) -> tuple[str, ...]:
    if graphs:
        return ("No timeout will come for a captured collective: compare the ranks' stacks, then end the job by hand.",)
    return words.advice("unknown")
