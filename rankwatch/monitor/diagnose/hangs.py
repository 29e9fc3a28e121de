"""One hang judged: which verdict, which culprits, which words. The rules of the table in design section 4."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankwatch.model import Cause, Confidence, Crash, Domain, JobSnapshot, RankState, Verdict, VerdictName
from rankwatch.monitor.diagnose import causes, frames, mismatch, words
from rankwatch.monitor.diagnose.causes import PRECEDENCE, Finding
from rankwatch.monitor.diagnose.graph import Hang
from rankwatch.monitor.diagnose.progress import silent_since
from rankwatch.monitor.diagnose.state import State, Trouble, age
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_ABSENCES: tuple[Cause, ...] = ("not_entered", "data_loading", "store_wait", "unknown")  # seen in the process; no recorder entry proves or refutes them
Clock = tuple[float, float | None, bool, float, str]  # since, timeout, first collective, notice, kind of the wait


@dataclass(frozen=True, slots=True)
class Ruling:
    """What is said of a hang at this look. mark: the unhealable evidence, () if there is none; equal marks in two looks agree."""

    verdict: Verdict | None
    culprits: tuple[int, ...]
    since: float
    deadline: float | None
    mark: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """What every rule looks at."""

    state: State
    snapshot: JobSnapshot
    ranks: Mapping[int, RankState]
    limits: Limits

    @property
    def now(self) -> float:
        return self.snapshot.now

    def age(self, since: float) -> float:
        return age(self.state.pauses, since, self.now)


@dataclass(frozen=True, slots=True)
class Picture:
    """A hang reduced to what a verdict needs, whichever rule made it."""

    level: VerdictName | None
    cause: Cause
    domain: Domain
    culprits: tuple[int, ...]
    wait: Wait
    says: str
    at: str = ""
    evidence: tuple[str, ...] = ()
    missing_evidence: tuple[str, ...] = ()
    confidence: Confidence = "certain"
    mark: tuple[object, ...] = ()
    finding: Finding | None = None


def primary(hang: Hang, waits: Sequence[Wait]) -> Wait:
    """The wait that is told: of those that miss roots only, else a root, or are the trouble themselves, the one that began first."""
    roots = set(hang.roots)
    purely = [waits[index] for index in hang.waits if roots.issuperset(waits[index].missing) and waits[index].missing]
    direct = purely or [waits[index] for index in hang.waits if roots.intersection(waits[index].missing)] or [waits[index] for index in hang.hung]
    cycle = set(hang.cycle)
    direct = direct or [waits[index] for index in hang.waits if cycle.intersection(waits[index].missing)] or [waits[index] for index in hang.waits]
    return min(direct, key=lambda wait: (wait.since, wait.label))


def rule(hang: Hang, waits: Sequence[Wait], trouble: Trouble | None, scene: Scene) -> Ruling:
    """The verdict on one hang, None while it is too young to be told."""
    wait = primary(hang, waits)
    deadlines = [(each.deadline, each.timeout_s) for index in hang.waits if (each := waits[index]).deadline is not None]
    deadline, timeout = min(deadlines, key=lambda pair: pair[0] or 0.0) if deadlines else (None, wait.timeout_s)
    if hang.cycle:
        picture = _deadlock(hang, waits, wait, scene)
    elif hang.roots:
        picture = _absent(hang.roots, wait, clocks(hang, waits), scene)
    elif wait.mismatch:
        picture = _mismatch(wait, scene)
    else:
        picture = _all_in(wait, scene)
    noticed = any(scene.age(since) >= notice_s for since, _, _, notice_s, _ in clocks(hang, waits))
    return _decide(picture, hang, deadline, timeout, noticed, trouble, scene)


def clocks(hang: Hang, waits: Sequence[Wait]) -> list[Clock]:
    """The clocks that run in a hang: each group has its own timeout, and the first that is due decides. At most 64, shortest first."""
    found: set[Clock] = {(each.since, each.timeout_s, each.first, each.notice_s, each.kind) for each in (waits[index] for index in hang.waits)}
    return sorted(found, key=lambda clock: (clock[1] or 1e9, clock[0]))[:64]


def _decide(picture: Picture, hang: Hang, deadline: float | None, timeout: float | None, noticed: bool, trouble: Trouble | None, scene: Scene) -> Ruling:
    wait, limits = picture.wait, scene.limits
    waited = scene.age(wait.since)
    level = picture.level
    if picture.mark:
        agrees = scene.snapshot.final or (trouble is not None and trouble.finding == picture.mark and trouble.agree + 1 >= limits.agree_polls)
        if not (agrees and waited >= limits.settle_s):
            level = "slow" if noticed else None
    elif level is None and noticed:
        level = "slow"
    left = deadline - scene.now if deadline is not None else None
    if level == "slow" and left is not None and timeout and left < limits.imminent_left_s(timeout):
        level = "timeout_imminent"
    if level is None:
        return Ruling(None, picture.culprits, wait.since, deadline, picture.mark)
    both_sides = bool(hang.cycle) or (picture.cause == "mismatch" and wait.mismatch is not None and not wait.mismatch.majority)
    waiting = hang.waiting if both_sides else tuple(rank for rank in hang.waiting if rank not in picture.culprits)
    confidence = picture.confidence
    if len(scene.ranks) < scene.snapshot.world_size or wait.unknown:
        confidence = "partial"
    evidence = picture.evidence
    if lost := sum(scene.ranks[rank].lost_collectives > 0 for rank in wait.waiters if rank in scene.ranks):
        confidence = "partial" if confidence == "likely" and picture.cause not in _ABSENCES else confidence
        evidence = (*evidence, f"the recorder of {lost} rank{'' if lost == 1 else 's'} has dropped old entries")
    chain = len(hang.waits) - 1
    summary = picture.says + words.tail(waiting, left) + words.seen(scene.ranks, scene.snapshot)
    if chain > 0:
        evidence = (*evidence, f"{chain} more {'group waits' if chain == 1 else 'groups wait'} behind it")
    verdict = Verdict(
        key=trouble.key if trouble else "", verdict=level, cause=picture.cause, domain=picture.domain, culprit_ranks=picture.culprits,
        waiting_ranks=waiting, since=wait.since,
        summary=summary, unknown_ranks=words.unknown(scene.ranks, scene.snapshot), at=picture.at, group=words.waited_on(wait), timeout_s=timeout,
        timeout_left_s=left, confidence=confidence, advice=words.advice(picture.cause, picture.finding), evidence=evidence,
        missing_evidence=picture.missing_evidence,
    )  # fmt: skip
    return Ruling(verdict, picture.culprits, wait.since, deadline, picture.mark)


# -- ranks that have not come ----------------------------------------------------------------------------------------------


def _absent(roots: tuple[int, ...], wait: Wait, running: Sequence[Clock], scene: Scene) -> Picture:
    found: dict[int, Finding] = {}
    for rank in roots:
        found[rank] = causes.of(scene.ranks[rank], wait.since, scene.state, scene.now, scene.limits)
    talking = {rank for rank in roots if found[rank].cause == "not_entered" and frames.in_point_to_point(causes.fresh_stack(scene.ranks[rank], wait.since))}
    if len(talking) < len(roots):  # a rank in recv waits for somebody as well; gloo's recorder does not say for whom
        found = {rank: finding for rank, finding in found.items() if rank not in talking}
    else:
        found = {rank: _talks(finding, scene.ranks[rank], wait.since) for rank, finding in found.items()}
    called = {rank: raised for rank in found if wait.kind == "init" and (raised := causes.failed_join(scene.ranks[rank], scene.state)) is not None}
    if wait.starting:
        found = {rank: _at_start(finding, called.get(rank)) for rank, finding in found.items()}
    levels = {rank: _level(finding, running, scene) for rank, finding in found.items()}
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
    call = frames.in_point_to_point(causes.fresh_stack(rank, since))
    says = f"it waits in {call}{', called from ' + finding.at if finding.at else ''}"
    return replace(finding, says=says, confidence="partial", missing_evidence=(f"the peer of {call}: gloo's recorder shows no point-to-point calls",))


def _at_start(finding: Finding, raised: Crash | None) -> Finding:
    """A rank that has not come to a rendezvous is not "not in a collective". raised: what its own init_process_group has failed with."""
    if raised is not None and finding.cause in ("not_entered", "unknown", "external_io"):
        text = causes.said(raised)
        return replace(
            finding, cause="store_wait", limit="normal", says=f"its init_process_group failed with {text}", at=finding.at or causes.place(raised),
            evidence=(f"init_process_group raised {text}", *finding.evidence),
        )  # fmt: skip
    return replace(finding, cause="store_wait") if finding.cause in ("not_entered", "unknown") else finding


def _silent_from(finding: Finding, since: float, scene: Scene) -> float:
    watched = silent_since(scene.state.watches.get(finding.rank), since)
    return max(watched, finding.silent_from or 0.0) if finding.limit == "compile" else watched


def _level(finding: Finding, running: Sequence[Clock], scene: Scene) -> int:
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


# -- ranks that have come, but to different things --------------------------------------------------------------------------


def _mismatch(wait: Wait, scene: Scene) -> Picture:
    found = wait.mismatch
    assert found is not None
    at = wait.view.at_frontier() if wait.view else {}
    confidence: Confidence = "certain" if not wait.unread else "likely"
    if not found.majority and found.differs in ("number of elements", "dtype"):
        histories = [scene.ranks[rank].collectives for rank in at]
        if odd := mismatch.by_habit(found, {rank: mismatch.usual(entry, histories) for rank, entry in at.items()}):
            found = wait.mismatch = replace(found, culprits=odd, majority=True)
            confidence = "likely"
    habits = {rank: mismatch.habit(scene.ranks[rank].collectives[-200:], at[rank]) for rank in sorted(at)[:8] if rank in scene.ranks} if len(at) <= 8 else {}
    sides = [f"{words.ranks_text(ranks)} {words.verb(ranks, 'calls', 'call')} {text}" for text, ranks in reversed(found.classes)][:4]
    where = f"#{wait.seq} of {wait.label}" if wait.kind == "collective" else wait.label
    says = (
        f"different {found.differs if found.differs != 'operation' else 'operations'} at {where}: " + ", ".join(sides) + f"; for {scene.age(wait.since):.0f} s"
    )
    stack = causes.fresh_stack(scene.ranks[found.culprits[0]], wait.since) if found.culprits[0] in scene.ranks else None
    evidence = mismatch.evidence(found, where, habits)
    for rank in found.culprits[:4]:
        sample = causes.fresh_stack(scene.ranks[rank], wait.since)
        if sample is not None and (line := frames.innermost(sample.main)):
            evidence = (*evidence, f"rank {rank} calls it from {line}")
    complete = not wait.unread or scene.age(wait.since) >= limits_read(scene.limits)
    mark = ("mismatch", found.culprits) if complete else ("mismatch", "reading", scene.now)
    finding = Finding(found.culprits[0], "mismatch", "user_code")
    return Picture(
        "stuck", "mismatch", "user_code", found.culprits, wait, says, frames.where(stack.main) if stack else "", evidence, (), confidence, mark, finding
    )


def limits_read(limits: Limits) -> float:
    """Age of a wait up to which the recorders of all members are waited for before sides are counted."""
    return limits.settle_s + 2.0


def _deadlock(hang: Hang, waits: Sequence[Wait], wait: Wait, scene: Scene) -> Picture:
    lines, stacks = [], 0
    inside = set(hang.cycle)
    for index in hang.waits:
        each = waits[index]
        here, absent = sorted(inside.intersection(each.waiters)), sorted(inside.intersection(each.missing))
        if here and absent:
            lines.append(f"{words.ranks_text(here)} {words.verb(here, 'waits', 'wait')} in {words.place(each)} for {words.ranks_text(absent)}")
    evidence = list(lines)
    for rank in hang.cycle[:8]:
        sample = causes.fresh_stack(scene.ranks[rank], wait.since)
        stacks += sample is not None
        if sample is not None and (line := frames.innermost(sample.main)):
            evidence.append(f"rank {rank} is in {line}")
    waited = scene.age(wait.since)
    ready = stacks == min(8, len(hang.cycle)) or waited >= scene.limits.stack_s
    if any("nccl" in waits[index].backend for index in hang.waits):  # only CPU tells a waiter from the holder of a handle
        looked = [rank for rank in hang.cycle if (watch := scene.state.watches.get(rank)) is not None and watch.looks]
        ready = len(looked) == len(hang.cycle) or waited >= 3 * scene.limits.stack_s
    mark = ("cycle", hang.cycle) if ready else ("cycle", "reading", scene.now)
    if len({waits[index].name for index in hang.waits}) == 1:  # monitored_barrier against a collective: two calls of one group, no order of groups
        return _one_group(hang, waits, wait, lines, tuple(evidence), mark, scene)
    says = "groups wait for each other: " + "; ".join(lines[:4]) + f"; for {scene.age(wait.since):.0f} s"
    return Picture("stuck", "group_order_deadlock", "user_code", hang.cycle, wait, says, evidence=tuple(evidence), mark=mark)


def _one_group(
    hang: Hang, waits: Sequence[Wait], wait: Wait, lines: Sequence[str], evidence: tuple[str, ...], mark: tuple[object, ...], scene: Scene
) -> Picture:
    sides = sorted((sorted(set(hang.cycle).intersection(waits[index].waiters)) for index in hang.waits), key=len)
    culprits = tuple(sides[0]) if len(sides) == 2 and len(sides[0]) < len(sides[1]) else hang.cycle
    stack = causes.fresh_stack(scene.ranks[culprits[0]], wait.since)
    says = f"different operations in {wait.label}: " + "; ".join(lines[:4]) + f"; for {scene.age(wait.since):.0f} s"
    finding = Finding(culprits[0], "mismatch", "user_code")
    return Picture(
        "stuck", "mismatch", "user_code", culprits, wait, says, frames.where(stack.main) if stack else "", evidence, mark=mark, finding=finding,
        confidence="certain" if len(culprits) < len(hang.cycle) else "likely",
    )  # fmt: skip


def _all_in(wait: Wait, scene: Scene) -> Picture:
    waited = scene.age(wait.since)
    members = [rank for rank in wait.ranks if rank in scene.ranks and (wait.view is None or rank in wait.view.members or rank in wait.waiters)]
    broken: dict[int, Finding] = {}
    for rank in members:
        finding = causes.of(scene.ranks[rank], wait.since, scene.state, scene.now, scene.limits, in_collective=True)
        if finding.cause != "unknown":
            broken[rank] = finding
    if wait.starting:
        return _nobody_missing_at_start(wait, scene, waited)
    if broken:
        best = min(broken.values(), key=lambda finding: (PRECEDENCE.index(finding.cause), finding.rank))
        culprits = tuple(sorted(rank for rank, finding in broken.items() if finding.cause == best.cause))
        level = _level(best, [(wait.since, wait.timeout_s, wait.first, wait.notice_s, wait.kind)], scene)
        what = "is" if len(culprits) == 1 else "are"
        says = f"{words.ranks_text(culprits)} {what} in {words.place(wait)} and cannot go on ({best.says}) for {waited:.0f} s"
        return Picture(
            "stuck" if level >= 2 else None, best.cause, best.domain, culprits, wait, says, best.at, best.evidence, best.missing_evidence, best.confidence,
            (best.cause, culprits) if level == 3 else (), best,
        )  # fmt: skip
    if wait.unknown:
        text = f"{words.ranks_text(wait.waiters)} {words.verb(tuple(wait.waiters), 'waits', 'wait')} in {words.place(wait)} for {waited:.0f} s"
        text += "; who has not come is not among the ranks seen"
        return Picture(None, "unknown", "unknown", (), wait, text, missing_evidence=(f"state of {words.ranks_text(wait.unknown)}",), confidence="partial")
    limit = scene.limits.stuck_after_s(wait.timeout_s, first=True)
    says = f"all ranks are in {words.place(wait)} and it does not complete for {waited:.0f} s"
    evidence = [f"all {len(wait.ranks)} ranks have entered #{wait.seq} with equal operations: no divergence of the code"]
    missing = [f"operations of {words.ranks_text(wait.unread)}"] if wait.unread else []
    if wait.behind:
        says += f"; {words.ranks_text(wait.behind)}: {wait.behind_why}"
        evidence.append(f"{words.ranks_text(wait.behind)}: {wait.behind_why}")
    elif wait.backend == "nccl":
        missing.append("which device has started it (TORCH_NCCL_ENABLE_TIMING is off)")
    return Picture(
        "stuck" if waited >= limit else None,
        "all_entered",
        "network",
        wait.behind,
        wait,
        says,
        evidence=tuple(evidence),
        missing_evidence=tuple(missing),
        confidence="likely",
    )


def _nobody_missing_at_start(wait: Wait, scene: Scene, waited: float) -> Picture:
    who = tuple(sorted(wait.waiters))
    if wait.unknown:
        text = f"{words.ranks_text(who)} {words.verb(who, 'waits', 'wait')} in {wait.label} for {waited:.0f} s; who has not come is not among the ranks seen"
        return Picture(None, "store_wait", "unknown", (), wait, text, missing_evidence=(f"state of {words.ranks_text(wait.unknown)}",), confidence="partial")
    text = f"no rank is missing in {wait.label}, and it does not complete for {waited:.0f} s"
    level: VerdictName | None = "stuck" if waited >= scene.limits.startup_stuck_s else None
    return Picture(
        level,
        "store_wait",
        "network",
        (),
        wait,
        text,
        evidence=("every rank has called it: the store or the connections between ranks do not come about",),
        confidence="likely",
    )
