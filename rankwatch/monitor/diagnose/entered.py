"""Ranks that have come, but to different things, or that are all in and get no further."""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import Confidence
from rankwatch.monitor.diagnose import causes, devices, ends, frames, joins, mismatch, rhythm, silence, words
from rankwatch.monitor.diagnose.absent import level_of
from rankwatch.monitor.diagnose.finding import PRECEDENCE, Finding
from rankwatch.monitor.diagnose.graph import Hang
from rankwatch.monitor.diagnose.mismatch import Mismatch
from rankwatch.monitor.diagnose.scene import Picture, Scene
from rankwatch.monitor.diagnose.views import alive
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.diagnose.work import fresh_stack
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


def mismatched(wait: Wait, scene: Scene) -> Picture:
    found = wait.mismatch
    assert found is not None
    at = wait.view.at_frontier() if wait.view else {}
    confidence: Confidence = "certain" if not wait.unread and _decided(found, wait, scene) else "likely"
    if not found.majority and found.differs in ("number of elements", "dtype"):
        histories = [scene.ranks[rank].collectives for rank in at]
        if odd := mismatch.by_habit(found, {rank: mismatch.usual(entry, histories) for rank, entry in at.items()}):
            found = wait.mismatch = replace(found, culprits=odd, majority=True)
            confidence = "likely"
    by_operation = not found.majority and found.differs == "operation" and wait.kind == "collective"
    if by_operation and wait.view is not None and (odd := rhythm.odd(wait.view, at, scene.ranks)):
        found = wait.mismatch = replace(found, culprits=odd, majority=True)
        confidence = "likely"
    habits = {rank: mismatch.habit(scene.ranks[rank].collectives[-200:], at[rank]) for rank in sorted(at)[:8] if rank in scene.ranks} if len(at) <= 8 else {}
    sides = [f"{words.ranks_text(ranks)} {words.verb(ranks, 'calls', 'call')} {text}" for text, ranks in reversed(found.classes)][:4]
    where = f"#{wait.seq} of {wait.label}" if wait.kind == "collective" else wait.label
    says = (
        f"different {found.differs if found.differs != 'operation' else 'operations'} at {where}: " + ", ".join(sides) + f"; for {scene.age(wait.since):.0f} s"
    )
    evidence = mismatch.evidence(found, where, habits)
    if wait.view is not None and wait.kind == "collective":
        evidence = (*evidence, *rhythm.turn(wait.view, at, scene.ranks), *rhythm.behind(wait.view, scene))
    shown = dict.fromkeys((*found.culprits[:4], *(ranks[0] for _, ranks in found.classes[:4])))  # both sides
    for rank in shown:
        sample = fresh_stack(scene.ranks[rank], wait.since)
        if sample is not None and (line := frames.innermost(sample.main)):
            evidence = (*evidence, f"rank {rank} calls it from {line}")
    at_, places = words.places(found.culprits, scene.ranks, wait.since)
    told, lines = ends.handled_text(found.culprits, scene.ranks, wait.since, scene.snapshot)
    says, evidence = says + told, (*evidence, *lines)
    sizes = [len(ranks) for _, ranks in found.classes]
    open_ = len(wait.unread) >= max(1, sizes[0] - sizes[1])  # those that are still to be read, on another node, may turn the majority
    complete = (not wait.unread and _decided(found, wait, scene)) or scene.age(wait.since) >= limits_read(scene.limits) * (3 if open_ else 1)
    mark = ("mismatch", found.culprits) if complete else ("mismatch", "reading", scene.now)
    finding = Finding(found.culprits[0], "mismatch", "user_code", at=at_, advice=ends.HANDLER_ADVICE if told else ())
    return Picture("stuck", "mismatch", "user_code", found.culprits, wait, says, at_, evidence, (), confidence, mark, finding, places)


def _decided(found: Mismatch, wait: Wait, scene: Scene) -> bool:
    """Whether those that have not come yet can no longer change who is in the minority."""
    sizes = sorted((len(ranks) for _, ranks in found.classes), reverse=True)
    coming = [rank for rank in wait.missing if rank in scene.ranks and alive(scene.ranks[rank])]
    return len(coming) == 0 or sizes[0] - sizes[1] > len(coming)


def limits_read(limits: Limits) -> float:
    """Age of a wait up to which the recorders of all members are waited for before sides are counted."""
    return limits.settle_s + 2.0


def deadlock(hang: Hang, waits: Sequence[Wait], wait: Wait, scene: Scene) -> Picture:
    lines, stacks = [], 0
    inside = set(hang.cycle)
    for index in hang.waits:
        each = waits[index]
        here, absent = sorted(inside.intersection(each.waiters)), sorted(inside.intersection(each.missing))
        if here and absent:
            lines.append(f"{words.ranks_text(here)} {words.verb(here, 'waits', 'wait')} in {words.place(each)} for {words.ranks_text(absent)}")
    evidence = list(lines)
    for rank in hang.cycle[:8]:
        sample = fresh_stack(scene.ranks[rank], wait.since)
        stacks += sample is not None
        if sample is not None and (line := frames.innermost(sample.main)):
            evidence.append(f"rank {rank} is in {line}")
    waited = scene.age(wait.since)
    ready = stacks == min(8, len(hang.cycle)) or waited >= scene.limits.stack_s
    if any("nccl" in waits[index].backend for index in hang.waits):  # only CPU tells a waiter from the holder of a handle
        looked = [rank for rank in hang.cycle if (watch := scene.state.watches.get(rank)) is not None and watch.looks]
        ready = len(looked) == len(hang.cycle) or waited >= 3 * scene.limits.stack_s
    mark = ("cycle", hang.cycle) if ready else ("cycle", "reading", scene.now)
    told, more = ends.handled_text(hang.cycle, scene.ranks, wait.since, scene.snapshot)
    evidence += more
    # monitored_barrier or new_group against a collective: ranks are at different calls, there is no order of groups
    if len({waits[index].name for index in hang.waits}) == 1 or any(waits[index].starting for index in hang.waits):
        return _other_calls(hang, waits, wait, lines, tuple(evidence), mark, told, scene)
    says = "groups wait for each other: " + "; ".join(lines[:4]) + f"; for {scene.age(wait.since):.0f} s"
    at, places = words.places(hang.cycle, scene.ranks, wait.since)
    finding = Finding(hang.cycle[0], "group_order_deadlock", "user_code", at=at)
    return Picture("stuck", "group_order_deadlock", "user_code", hang.cycle, wait, says, at, tuple(evidence), mark=mark, finding=finding, places=places)


def _other_calls(
    hang: Hang, waits: Sequence[Wait], wait: Wait, lines: Sequence[str], evidence: tuple[str, ...], mark: tuple[object, ...], told: str, scene: Scene
) -> Picture:
    inside = set(hang.cycle)
    crossed = [waits[index] for index in hang.waits if inside.intersection(waits[index].waiters) and inside.intersection(waits[index].missing)]
    # who waits beside a rank of the cycle is on its side, also where its own numbers were read a moment too early to be in the cycle
    sides = sorted((set(each.waiters) for each in crossed), key=len)
    uneven = len(sides) == 2 and len(sides[0]) < len(sides[1]) and not sides[0] & sides[1]
    culprits = tuple(sorted(sides[0])) if uneven else hang.cycle
    at, places = words.places(culprits, scene.ranks, wait.since)
    where = "" if any(waits[index].starting for index in hang.waits) else f" in {wait.label}"
    says = f"different operations{where}: " + (_skipped(culprits, hang, waits) or "; ".join(lines[:4])) + f"; for {scene.age(wait.since):.0f} s{told}"
    finding = Finding(culprits[0], "mismatch", "user_code", at=at, advice=ends.HANDLER_ADVICE if told else ())
    return Picture(
        "stuck", "mismatch", "user_code", culprits, wait, says, at, evidence, mark=mark, finding=finding, places=places,
        confidence="certain" if len(culprits) < len(hang.cycle) else "likely",
    )  # fmt: skip


def _skipped(culprits: tuple[int, ...], hang: Hang, waits: Sequence[Wait]) -> str:
    """`rank 2 skipped new_group (group 1), in which ranks 0-1 wait, and is in all_reduce #32 of default_pg`; "" where both sides are named."""
    if len(culprits) == len(hang.cycle):
        return ""
    own = next((waits[index] for index in hang.waits if set(culprits) <= set(waits[index].waiters)), None)
    other = next((waits[index] for index in hang.waits if waits[index] is not own and set(culprits) <= set(waits[index].missing)), None)
    if own is None or other is None:
        return ""
    rest = sorted(set(hang.cycle).intersection(other.waiters))
    verb = words.verb(culprits, "is", "are")
    if other.starting:
        text = f"{words.ranks_text(culprits)} skipped {words.place(other)}, in which {words.ranks_text(rest)} {words.verb(rest, 'waits', 'wait')}"
        return f"{text}, and {verb} in {words.place(own)}"
    return f"{words.ranks_text(culprits)} {verb} in {words.place(own)} while {words.ranks_text(rest)} {words.verb(rest, 'is', 'are')} in {words.place(other)}"


def all_in(wait: Wait, scene: Scene, silent_ranks: tuple[int, ...] = ()) -> Picture:
    """silent_ranks: of nodes that do not answer, where all other ranks are in."""
    waited = scene.age(wait.since)
    members = [rank for rank in wait.ranks if rank in scene.ranks and (wait.view is None or rank in wait.view.members or rank in wait.waiters)]
    broken: dict[int, Finding] = {}
    for rank in members:
        finding = causes.of(scene.ranks[rank], wait.since, scene.state, scene.seen_at(rank), scene.limits, in_collective=True)
        if finding.cause != "unknown":
            broken[rank] = finding
    if wait.starting:
        return joins.nobody_missing(wait, scene, waited)
    if broken:
        best = min(broken.values(), key=lambda finding: (PRECEDENCE.index(finding.cause), finding.rank))
        culprits = tuple(sorted(rank for rank, finding in broken.items() if finding.cause == best.cause))
        level = level_of(best, [(wait.since, wait.timeout_s, wait.first, wait.notice_s, wait.kind)], scene)
        what = "is" if len(culprits) == 1 else "are"
        says = f"{words.ranks_text(culprits)} {what} in {words.place(wait)} and cannot go on ({best.says}) for {waited:.0f} s"
        return Picture(
            "stuck" if level >= 2 else None, best.cause, best.domain, culprits, wait, says, best.at, best.evidence, best.missing_evidence, best.confidence,
            (best.cause, culprits) if level == 3 else (), best,
        )  # fmt: skip
    if wait.silent and silent_ranks:
        return silence.suspected(silent_ranks, wait, scene)
    if wait.unknown:
        text = f"{words.ranks_text(wait.waiters)} {words.verb(tuple(wait.waiters), 'waits', 'wait')} in {words.place(wait)} for {waited:.0f} s"
        text += "; who has not come is not among the ranks seen"
        return Picture(None, "unknown", "unknown", (), wait, text, missing_evidence=(f"state of {words.ranks_text(wait.unknown)}",), confidence="partial")
    if wait.unread and wait.backend == "gloo":  # its status numbers count point-to-point calls as well: only an entry proves that a rank has come
        who = tuple(wait.waiters)
        text = (
            f"{words.ranks_text(who)} {words.verb(who, 'waits', 'wait')} in {words.place(wait)} for {waited:.0f} s; whether the others are in it is not known"
        )
        unread = (f"operations of {words.ranks_text(wait.unread)}: gloo's numbers count point-to-point calls, its recorder does not show them",)
        return Picture(None, "unknown", "unknown", (), wait, text, missing_evidence=unread, confidence="partial")
    limit = scene.limits.stuck_after_s(wait.timeout_s, first=True)
    known = devices.look(wait, members, scene)
    says = f"all ranks are in {words.place(wait)} and it does not complete for {waited:.0f} s"
    says += f"; {known.says}" if known.culprits or wait.on_nccl else ""
    entered = f"all {len(wait.ranks)} ranks have entered #{wait.seq} with equal operations: no divergence of the code"
    not_read = (f"operations of {words.ranks_text(wait.unread)}",) if wait.unread else ()
    named = Finding(known.culprits[0], "all_entered", known.domain, confidence=known.confidence, advice=known.advice) if known.culprits else None
    return Picture(
        "stuck" if waited - max((scene.lag(rank) for rank in members), default=0.0) >= limit else None,
        "all_entered",
        known.domain,
        known.culprits,
        wait,
        says,
        evidence=(entered, *known.evidence),
        missing_evidence=(*not_read, *known.missing),
        confidence=known.confidence,
        finding=named,
    )
