"""One hang judged: which verdict, which culprits, which words. The rules of the table in design section 4."""

from __future__ import annotations

from rankwatch.model import Cause, Verdict
from rankwatch.monitor.diagnose import ahead, captured, timeouts, witnesses, words
from rankwatch.monitor.diagnose.absent import absent
from rankwatch.monitor.diagnose.entered import all_in, deadlock, mismatched
from rankwatch.monitor.diagnose.graph import Hang
from rankwatch.monitor.diagnose.scene import Clock, Picture, Ruling, Scene
from rankwatch.monitor.diagnose.state import Trouble
from rankwatch.monitor.diagnose.waits import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_ABSENCES: tuple[Cause, ...] = ("not_entered", "data_loading", "store_wait", "unknown")  # seen in the process; no recorder entry proves or refutes them


def primary(hang: Hang, waits: Sequence[Wait]) -> Wait:
    """The wait that is told: of those that miss roots only, else a root, or are the trouble themselves, the one that began first."""
    roots = set(hang.roots)
    purely = [waits[index] for index in hang.waits if roots.issuperset(waits[index].missing) and waits[index].missing]
    purely = purely or [waits[index] for index in hang.waits if waits[index].silent and not hang.roots]
    direct = purely or [waits[index] for index in hang.waits if roots.intersection(waits[index].missing)] or [waits[index] for index in hang.hung]
    cycle = set(hang.cycle)
    direct = direct or [waits[index] for index in hang.waits if cycle.intersection(waits[index].missing)] or [waits[index] for index in hang.waits]
    return min(direct, key=lambda wait: (wait.since, wait.label))


def rule(hang: Hang, waits: Sequence[Wait], trouble: Trouble | None, scene: Scene) -> Ruling:
    """The verdict on one hang, None while it is too young to be told."""
    wait = primary(hang, waits)
    if all(waits[index].presumed for index in hang.waits):
        return Ruling(None, hang.roots, wait.since, None)
    ends = [each for index in hang.waits if (each := waits[index]).deadline is not None]
    first = min(ends, key=lambda each: each.deadline or 0.0, default=wait)
    if hang.cycle:
        picture = deadlock(hang, waits, wait, scene)
    elif hang.roots:
        picture = ahead.held_back(absent(hang.roots, wait, hang.waiting, clocks(hang, waits), scene), hang, scene)
    elif wait.mismatch:
        picture = mismatched(wait, scene)
    else:
        picture = all_in(wait, scene, tuple(sorted({rank for index in hang.waits for rank in waits[index].silent_ranks})))
    lag = _lag(picture, scene)
    told = trouble is not None and trouble.verdict is not None  # it stays told as long as its wait is there, whatever pauses and old reports take off its age
    noticed = any(
        (scene.now - since if told else scene.age(since) - lag) >= scene.limits.notice_after_s(notice_s, timeout_s)
        for since, timeout_s, _, notice_s, _ in clocks(hang, waits)
    )
    return _decide(picture, hang, first, noticed, trouble, scene)


def _lag(picture: Picture, scene: Scene) -> float:
    """How old the report is that the verdict rests on: of the culprits, and of one rank that waits; of all that wait where none is missing."""
    waiting = [scene.lag(rank) for rank in picture.wait.waiters]
    seen = min(waiting, default=0.0) if picture.culprits else max(waiting, default=0.0)
    return max(seen, *(scene.lag(rank) for rank in picture.culprits), 0.0)


def _outlives(picture: Picture, scene: Scene) -> bool:
    """Whether a rank is known to wait still, after the culprits have ended: a report from before that proves nothing."""
    ends = [process.exited_at for rank in picture.culprits if rank in scene.ranks and (process := scene.ranks[rank].process) is not None]
    reported = scene.now - min((scene.lag(rank) for rank in picture.wait.waiters), default=0.0)
    return all(at is None or reported >= scene.now - 0.5 or reported >= at + scene.limits.settle_s for at in ends)


def clocks(hang: Hang, waits: Sequence[Wait]) -> list[Clock]:
    """The clocks that run in a hang: each group has its own timeout, and the first that is due decides. At most 64, shortest first."""
    found: set[Clock] = {(each.since, each.timeout_s, each.first, each.notice_s, each.kind) for each in (waits[index] for index in hang.waits)}
    return sorted(found, key=lambda clock: (clock[1] or 1e9, clock[0]))[:64]


def _decide(picture: Picture, hang: Hang, ends: Wait, noticed: bool, trouble: Trouble | None, scene: Scene) -> Ruling:
    """ends: the wait whose watchdog comes first."""
    wait, limits = picture.wait, scene.limits
    timeout, last = ends.timeout_s, ends.deadline + ends.maybe_s if ends.deadline is not None else None
    lag = _lag(picture, scene)
    waited = scene.age(wait.since) - lag
    level, agree, witness = picture.level, 0, {}
    if picture.mark:
        agree, witness = 1, witnesses.of(picture.culprits, wait.waiters, scene)
        same = trouble is not None and trouble.finding == picture.mark
        if trouble is not None and same:
            again = witnesses.anew(trouble.witness, witness)
            agree, witness = (trouble.agree + 1, witness) if again else (trouble.agree, dict(trouble.witness))
        agrees = scene.snapshot.final or (same and agree >= limits.agree_polls)
        if not (agrees and waited >= limits.settle_s and _outlives(picture, scene)):
            level = "slow" if noticed else None
    elif level is None and noticed:
        level = "slow"
    left = ends.deadline - scene.now if ends.deadline is not None else None
    if level == "slow" and left is not None and timeout and left + lag < limits.imminent_left_s(timeout):
        level = "timeout_imminent"
    if level is None:
        return Ruling(None, picture.culprits, wait.since, last, picture.mark, agree, witness)
    if unknown := timeouts.unknown_why(ends):
        left = None
    both_sides = bool(hang.cycle) or (picture.cause == "mismatch" and wait.mismatch is not None and not wait.mismatch.majority)
    waiting = hang.waiting if both_sides else tuple(rank for rank in hang.waiting if rank not in picture.culprits)
    confidence = picture.confidence
    if len(scene.ranks) < scene.snapshot.world_size or wait.unknown:
        confidence = "partial"
    elif wait.key[0] == "checked" and confidence == "certain":
        confidence = "likely"  # of stacks alone
    evidence = picture.evidence
    at = wait.view.at_frontier() if wait.view is not None else {}  # where the operation itself is known, what was dropped before it changes nothing
    if lost := sum(scene.ranks[rank].lost_collectives > 0 for rank in wait.waiters if rank in scene.ranks and rank not in at):
        confidence = "partial" if confidence == "likely" and picture.cause not in _ABSENCES else confidence
        evidence = (*evidence, f"the recorder of {lost} rank{'' if lost == 1 else 's'} has dropped old entries")
    chain = len(hang.waits) - 1
    when = "; when the timeout comes is not known" if unknown else ""
    summary = picture.says + words.tail(waiting, left) + when + words.seen(scene.ranks, scene.snapshot)
    if chain > 0:
        evidence = (*evidence, f"{chain} more {'group waits' if chain == 1 else 'groups wait'} behind it")
    verdict = Verdict(
        key=trouble.key if trouble else "", verdict=level, cause=picture.cause, domain=picture.domain, culprit_ranks=picture.culprits,
        waiting_ranks=waiting, since=wait.since, timeout_known=not unknown,
        summary=summary, unknown_ranks=scene.unknown, at=picture.at, places=picture.places,
        group=words.waited_on(wait), timeout_s=timeout,
        timeout_left_s=left, confidence=confidence, evidence=evidence,
        advice=(
            *timeouts.advice(ends, level, scene.age(ends.since)), *words.advice(picture.cause, picture.finding, picture.places),
            *captured.advice(wait, scene.ranks),
        ),
        missing_evidence=(*picture.missing_evidence, unknown) if unknown else picture.missing_evidence,
    )  # fmt: skip
    return Ruling(verdict, picture.culprits, wait.since, last, picture.mark, agree, witness)
