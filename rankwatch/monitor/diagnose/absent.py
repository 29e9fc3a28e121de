"""Ranks that others wait for and that have not come: who of them is to blame, and whether it is time to say stuck."""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import Crash, RankState, VerdictName
from rankwatch.monitor.diagnose import causes, ends, frames, words
from rankwatch.monitor.diagnose.finding import PRECEDENCE, Finding
from rankwatch.monitor.diagnose.progress import silent_since
from rankwatch.monitor.diagnose.scene import Clock, Picture, Scene
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.diagnose.work import fresh_stack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def absent(roots: tuple[int, ...], wait: Wait, running: Sequence[Clock], scene: Scene) -> Picture:
    found: dict[int, Finding] = {}
    for rank in roots:
        found[rank] = causes.of(scene.ranks[rank], wait.since, scene.state, scene.now, scene.limits)
    talking = {rank for rank in roots if found[rank].cause == "not_entered" and frames.in_point_to_point(fresh_stack(scene.ranks[rank], wait.since))}
    if len(talking) < len(roots):  # a rank in recv waits for somebody as well; gloo's recorder does not say for whom
        found = {rank: finding for rank, finding in found.items() if rank not in talking}
    else:
        found = {rank: _talks(finding, scene.ranks[rank], wait.since) for rank, finding in found.items()}
    called = {rank: raised for rank in found if wait.kind == "init" and (raised := ends.failed_join(scene.ranks[rank], scene.state)) is not None}
    if wait.starting:
        found = {rank: _at_start(finding, called.get(rank)) for rank, finding in found.items()}
    levels = {rank: level_of(finding, running, scene) for rank, finding in found.items()}
    top = max(levels.values())
    best = min(
        (finding for rank, finding in found.items() if levels[rank] == top),
        key=lambda finding: (PRECEDENCE.index(finding.cause), finding.rank not in called, finding.rank),
    )
    failed = best.rank in called  # a rank that failed is to blame before one that is late
    culprits = tuple(sorted(rank for rank, each in found.items() if levels[rank] == top and each.cause == best.cause and (rank in called) == failed))
    best = found[culprits[0]]
    says = words.absent(culprits, best, wait, scene.age(wait.since), called=failed)
    evidence = list(best.evidence)
    for rank in culprits[1:4]:
        evidence.append(f"rank {rank}: {found[rank].says}" if found[rank].says else f"rank {rank} likewise")
    rest = [rank for rank in roots if rank not in culprits]
    for rank in rest[:4]:
        text = found[rank].says if rank in found else "it waits in a point-to-point call"
        evidence.append(f"rank {rank} has not come either ({text or found[rank].cause})")
    level: VerdictName | None = {0: None, 1: None, 2: "stuck", 3: "stuck"}[top]
    if level == "stuck" and best.limit in ("normal", "io", "compile"):
        evidence.append(f"no progress for {scene.now - _silent_from(best, wait.since, scene):.0f} s")
    mark = (best.cause, culprits) if top == 3 else ()
    return Picture(level, best.cause, best.domain, culprits, wait, says, best.at, tuple(evidence), best.missing_evidence, best.confidence, mark, best)


def _talks(finding: Finding, rank: RankState, since: float) -> Finding:
    """A rank that waits for somebody itself: it is the last that is known of, and whether it is in the wrong is not."""
    call = frames.in_point_to_point(fresh_stack(rank, since))
    says = f"it waits in {call}{', called from ' + finding.at if finding.at else ''}"
    return replace(finding, says=says, confidence="partial", missing_evidence=(f"the peer of {call}: gloo's recorder shows no point-to-point calls",))


def _at_start(finding: Finding, raised: Crash | None) -> Finding:
    """A rank that has not come to a rendezvous is not "not in a collective". raised: what its own init_process_group has failed with."""
    if raised is not None and finding.cause in ("not_entered", "unknown", "external_io"):
        text = ends.said(raised)
        return replace(
            finding, cause="store_wait", limit="normal", says=f"its init_process_group failed with {text}", at=finding.at or ends.place(raised),
            evidence=(f"init_process_group raised {text}", *finding.evidence),
        )  # fmt: skip
    return replace(finding, cause="store_wait") if finding.cause in ("not_entered", "unknown") else finding


def _silent_from(finding: Finding, since: float, scene: Scene) -> float:
    watched = silent_since(scene.state.watches.get(finding.rank), since)
    return max(watched, finding.silent_from or 0.0) if finding.limit == "compile" else watched


def level_of(finding: Finding, running: Sequence[Clock], scene: Scene) -> int:
    """3 cannot heal, 2 silent for longer than its cause allows on any of the clocks, 1 slow, 0 a person holds it."""
    limits = scene.limits
    if finding.limit == "at_once":
        return 3 if finding.ready else 1
    if finding.limit == "never":
        return 0
    watch = scene.state.watches.get(finding.rank)
    if watch is not None and watch.looks == 0 and scene.ranks[finding.rank].process is not None:
        return 1
    for since, timeout, first, _, kind in running:
        if finding.limit == "compile":
            allowed = limits.compile_silent_s
        elif kind in ("creation", "init"):
            allowed = limits.startup_stuck_s
        elif finding.limit == "io":
            allowed = limits.io_after_s(timeout)
        else:
            allowed = limits.stuck_after_s(timeout, first=first)
        if scene.age(_silent_from(finding, since, scene)) >= allowed:
            return 2
    return 1
