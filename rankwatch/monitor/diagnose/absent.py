"""Ranks that others wait for and that have not come: who of them is to blame, and whether it is time to say stuck."""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import Crash, RankState, VerdictName
from rankwatch.monitor.diagnose import captured, causes, ends, handles, joins, messages, stores, words
from rankwatch.monitor.diagnose.finding import PRECEDENCE, Finding
from rankwatch.monitor.diagnose.progress import silent_since
from rankwatch.monitor.diagnose.scene import Clock, Picture, Scene
from rankwatch.monitor.diagnose.views import alive
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.diagnose.work import fresh_stack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def absent(roots: tuple[int, ...], wait: Wait, waiting: tuple[int, ...], running: Sequence[Clock], scene: Scene) -> Picture:
    found: dict[int, Finding] = {}
    for rank in roots:
        found[rank] = causes.of(scene.ranks[rank], wait.since, scene.state, scene.seen_at(rank), scene.limits)
    talking = {rank for rank in roots if found[rank].cause == "not_entered" and messages.talking(scene.ranks[rank], wait.since)}
    if len(talking) == len(roots):  # a rank in recv waits for somebody as well
        return messages.judge(roots, wait, waiting, lambda finding: level_of(finding, running, scene), scene)
    found = {rank: finding for rank, finding in found.items() if rank not in talking}
    pending, hidden = _beside_messages(found, roots, waiting, wait, scene)
    if len(hidden) < len(found):  # these may wait for a message, the others do not
        found = {rank: finding for rank, finding in found.items() if rank not in hidden}
    found = {rank: _unread(finding, hidden, wait, scene) for rank, finding in found.items()}
    called = {rank: raised for rank in found if wait.kind == "init" and (raised := ends.failed_join(scene.ranks[rank], scene.state)) is not None}
    found = _refined(found, called, wait, scene)
    levels = {rank: level_of(finding, running, scene) for rank, finding in found.items()}
    if pending or (any(handles.refused(scene.ranks[rank], wait.since) for rank in found) and messages.fed(roots, wait.since, scene)):
        levels = {rank: 1 if level == 2 else level for rank, level in levels.items()}
    culprits = _culprits(found, levels, called)
    return _picture(culprits, max(levels.values()), found, hidden, roots, called, wait, scene)


def _beside_messages(
    found: Mapping[int, Finding], roots: tuple[int, ...], waiting: tuple[int, ...], wait: Wait, scene: Scene
) -> tuple[list[int], dict[int, Finding]]:
    """Ranks that wait for a message in work.wait(), and with them those of which no native stack can tell it."""
    pending = [rank for rank in found if found[rank].cause == "not_entered" and handles.pending(scene.ranks[rank], wait.since, scene)]
    hidden = {rank: found[rank] for rank in found if rank in pending or handles.refused(scene.ranks[rank], wait.since)}
    accounted = {*roots, *waiting}
    alone = len(roots) == 1 and all(number in accounted or not alive(rank) for number, rank in scene.ranks.items())
    return ([] if alone else pending), hidden  # whatever one that is alone waits for, all the others wait for it


def _refined(found: dict[int, Finding], called: Mapping[int, Crash], wait: Wait, scene: Scene) -> dict[int, Finding]:
    """What the wait, the start of the job and the ends of other ranks add to each finding."""
    found = {rank: stores.refine(finding, scene.ranks[rank], wait.since) for rank, finding in found.items()}
    if wait.starting:
        found = {rank: _at_start(finding, called.get(rank), scene.ranks[rank], scene) for rank, finding in found.items()}
    found = {rank: _confirmed(finding, wait, scene) for rank, finding in found.items()}
    found = _in_an_end(found, scene)
    return {rank: ends.with_handled(finding, scene.ranks[rank], wait.since, scene.snapshot) for rank, finding in found.items()}


def _culprits(found: Mapping[int, Finding], levels: Mapping[int, int], called: Mapping[int, Crash]) -> tuple[int, ...]:
    """Those of the worst level that share its first cause. A rank that failed is to blame before one that is late."""
    worst = [rank for rank in found if levels[rank] == max(levels.values())]
    best = min(worst, key=lambda rank: (PRECEDENCE.index(found[rank].cause), rank not in called, rank))
    return tuple(sorted(rank for rank in worst if found[rank].cause == found[best].cause and (rank in called) == (best in called)))


def _picture(
    culprits: tuple[int, ...], top: int, found: Mapping[int, Finding], hidden: Mapping[int, Finding],
    roots: tuple[int, ...], called: Mapping[int, Crash], wait: Wait, scene: Scene,
) -> Picture:  # fmt: skip
    best = found[culprits[0]]
    elsewhere = wait.kind == "init" and best.advice == joins.WORLD_ADVICE
    says = words.absent(culprits, best, wait, scene.age(wait.since), called=best.rank in called or elsewhere)
    says += captured.behind_replay(wait.stalled, scene.ranks)
    evidence = [*best.evidence, *([wait.why] if wait.why else []), *_symptom(wait, scene)]
    for rank in culprits[1:4]:
        evidence.append(f"rank {rank}: {found[rank].says}" if found[rank].says else f"rank {rank} likewise")
    rest = [rank for rank in roots if rank not in culprits]
    for rank in rest[:4]:
        each = found.get(rank) or hidden.get(rank)
        evidence.append(f"rank {rank} has not come either ({each.says or each.cause if each is not None else 'it waits in a point-to-point call'})")
    level: VerdictName | None = {0: None, 1: None, 2: "stuck", 3: "stuck"}[top]
    if level == "stuck" and best.limit in ("normal", "pause", "io", "compile"):
        evidence.append(f"no progress for {scene.now - _silent_from(best, wait.since, scene):.0f} s")
    mark = (best.cause, culprits) if top == 3 else ()
    return Picture(level, best.cause, best.domain, culprits, wait, says, best.at, tuple(evidence), best.missing_evidence, best.confidence, mark, best)


def _unread(finding: Finding, hidden: Iterable[int], wait: Wait, scene: Scene) -> Finding:
    """Beside ranks, or of one, that may be in work.wait() of a message, and of which no native stack can be had."""
    refused = [rank for rank in hidden if handles.refused(scene.ranks[rank], wait.since)]
    if finding.cause != "not_entered" or not refused:
        return finding
    native = scene.ranks[refused[0]].native_stack
    missing = f"native stack of {words.ranks_text(refused)}, which would show a wait for a message" + (f" ({native.error})" if native and native.error else "")
    return replace(finding, confidence="partial", missing_evidence=(*finding.missing_evidence, missing))


def _symptom(wait: Wait, scene: Scene) -> tuple[str, ...]:
    """What is said where the device of the waiters has not got to the operation: it is only the next one behind something that nobody records."""
    if not wait.stalled:
        return ()
    who, has = words.ranks_text(wait.stalled), "its device has" if len(wait.stalled) == 1 else "their devices have"
    graph = any(scene.ranks[rank].cudagraph for rank in wait.stalled if rank in scene.ranks)
    earlier = "a replay of a CUDA graph, whose collectives no recorder shows" if graph else "a kernel, or a CUDA graph, whose collectives no recorder shows"
    call = f"{wait.entry.op} #{wait.seq}" if wait.entry is not None else f"#{wait.seq}"
    return (f"{who} {words.verb(wait.stalled, 'has', 'have')} enqueued {call}, and {has} not started it: it is behind earlier work there ({earlier})",)


_NUMBERS_AGE_S = 2.5  # NCCL's numbers are asked for once a second


def _confirmed(finding: Finding, wait: Wait, scene: Scene) -> Finding:
    """A rank that ended well may have done its part at the last moment: it is missed once a waiter's numbers are younger than its end."""
    process = scene.ranks[finding.rank].process
    ended_at = process.exited_at if process is not None else None
    if finding.cause != "exited" or finding.limit != "at_once" or ended_at is None or scene.snapshot.final or wait.kind != "collective":
        return finding
    beats = [beat for rank in wait.waiters if (beat := scene.ranks[rank].heartbeat_at) is not None]
    sure = scene.now - ended_at > _NUMBERS_AGE_S or ("nccl" not in wait.backend and any(beat > ended_at for beat in beats))
    return finding if sure else replace(finding, ready=False)


def _in_an_end(found: dict[int, Finding], scene: Scene) -> dict[int, Finding]:
    """A rank that ended well beside one that lives and has not come either: they may all have been told to end, and the second saves first.

    Nobody in the collective can tell, its handler cannot run there. The living one's own limit bounds how long that is believed.
    """
    if all(finding.limit == "at_once" for finding in found.values()):
        return found
    well = {rank for rank in found if (process := scene.ranks[rank].process) is not None and process.exit_code == 0 and found[rank].cause == "exited"}
    return {rank: replace(finding, ready=False) if rank in well else finding for rank, finding in found.items()}


def _at_start(finding: Finding, raised: Crash | None, rank: RankState, scene: Scene) -> Finding:
    """A rank that has not come to a rendezvous is not "not in a collective". raised: what its own init_process_group has failed with."""
    elsewhere = joins.another_world(rank.rank, rank.join, scene.snapshot.world_size)
    if elsewhere and finding.cause in ("not_entered", "unknown", "external_io"):
        return replace(
            finding, cause="store_wait", domain="user_code", limit="normal", says=f"it calls it {elsewhere}", advice=joins.WORLD_ADVICE,
            evidence=(f"it calls init_process_group {elsewhere}", *finding.evidence),
        )  # fmt: skip
    if raised is not None and finding.cause in ("not_entered", "unknown", "external_io"):
        text = ends.said(raised)
        return replace(
            finding, cause="store_wait", limit="normal", says=f"its init_process_group failed with {text}", at=finding.at or ends.place(raised),
            evidence=(f"init_process_group raised {text}", *finding.evidence),
        )  # fmt: skip
    return replace(finding, cause="store_wait") if finding.cause in ("not_entered", "unknown") else finding


def _silent_from(finding: Finding, since: float, scene: Scene) -> float:
    """Start of the silence. A compile is watched from its start, also while nobody waits for it yet."""
    if finding.silent_from is not None:
        return finding.silent_from
    return silent_since(scene.state.watches.get(finding.rank), since)


_COMPILE_SUSPECT_RATIO = 1 / 3  # of compile_silent_s, for which it must have been waited: only the stacks of suspects are sampled, every 10 s


def level_of(finding: Finding, running: Sequence[Clock], scene: Scene) -> int:
    """3 cannot heal, 2 silent for longer than its cause allows on any of the clocks, 1 slow, 0 a person holds it."""
    limits = scene.limits
    if finding.limit == "at_once":
        return 3 if finding.ready else 1
    if finding.limit == "never":
        return 0
    rank, watch = scene.ranks[finding.rank], scene.state.watches.get(finding.rank)
    if watch is not None and watch.looks == 0 and rank.process is not None:
        return 1
    gloo = any(group.backend == "gloo" for group in rank.groups)
    for since, timeout, first, _, kind in running:
        if finding.limit == "compile":
            allowed = limits.compile_silent_s
            if scene.age(since) < allowed * _COMPILE_SUSPECT_RATIO:
                continue
        elif kind in ("creation", "init"):
            allowed = limits.startup_stuck_s
        elif finding.limit == "io":
            allowed = limits.io_after_s(timeout)
        elif finding.limit == "pause":
            allowed = limits.pause_after_s(timeout, first=first)
        else:
            allowed = limits.stuck_after_s(timeout, first=first)
        if finding.cause == "not_entered" and gloo and fresh_stack(rank, since) is None:
            allowed += limits.stack_s  # it may itself wait for a message, which only its stack shows
        if scene.age(_silent_from(finding, since, scene)) - scene.lag(finding.rank) >= allowed:
            return 2
    return 1
