"""Ranks of nodes that do not answer. They are unknown and never missing; where others wait for just these and for nobody else, the node is the suspect.

Who had come before its node fell silent is not waited for. Whether such a rank lives is not known, so confidence is partial. That it went on while its
node was silent already is known of a wait that began long after the node's last answer: then its launcher alone is gone or out of reach, its
silence proves nothing, and the wait is never called stuck for it.
"""

from __future__ import annotations

from rankwatch.model import JobSnapshot, NodeReport, RankState
from rankwatch.monitor.diagnose import words
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.graph import Hang
from rankwatch.monitor.diagnose.scene import Picture, Scene
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankwatch.monitor.diagnose.state import NodeKey, State

OLD_S = 5.0
"""A report older than this, of which rounds are 1-4 s apart, tells nothing of what its ranks do now."""
_NAMED = 4
_ADVICE = (
    "See whether the node is up (ping, ssh, the scheduler's view of it) and its ranks still run; the last lines of its kernel log say what it met.",
    "If it is up, only its launcher is gone or out of reach: look for its process, and for a firewall between the nodes. What it saw itself lies in nodes/ of "
    "the run directory.",
)


def reported(before: Mapping[NodeKey, float], snapshot: JobSnapshot) -> dict[NodeKey, float]:
    """When each node's newest report was made; that of a node that has fallen silent stays."""
    return {**before, **{key(node): snapshot.now - node.report_age_s for node in snapshot.nodes if node.ranks}}


def key(node: NodeReport) -> NodeKey:
    return (node.group_rank, node.node)


def unheard(snapshot: JobSnapshot) -> frozenset[int]:
    """Ranks of which nobody knows what they do now: their node does not answer, or not soon enough."""
    dark = [node for node in snapshot.nodes if node.silent_ranks or node.failing_since is not None or node.report_age_s > OLD_S]
    return frozenset(number for node in dark for number in (*node.silent_ranks, *(rank.rank for rank in node.ranks)))


def seen(before: Mapping[int, RankState], snapshot: JobSnapshot, ranks: Mapping[int, RankState]) -> dict[int, RankState]:
    """Every rank as it is seen now, or was before its node fell silent."""
    silent = {rank for node in snapshot.nodes for rank in node.silent_ranks}
    return {**{rank: before[rank] for rank in silent if rank in before}, **ranks}


def mark(found: Iterable[Wait], snapshot: JobSnapshot, state: State, limits: Limits) -> None:
    """Note on each wait the silent nodes and the ranks of theirs that it is for: all others are in it, or were when their node was heard last."""
    where = {rank: place for place, node in enumerate(snapshot.nodes) for rank in node.silent_ranks}
    for wait in found if where else ():
        sure = wait.kind == "collective" and not wait.missing and wait.mismatch is None and not (wait.unread and wait.backend == "gloo")
        if sure and wait.unknown and where.keys() >= set(wait.unknown):
            wait.silent_ranks = tuple(rank for rank in wait.unknown if not _was_in(state.seen.get(rank), wait))
            wait.silent = tuple(sorted({where[rank] for rank in wait.silent_ranks}))
        if wait.silent:
            wait.notice_s = limits.first_notice_s if wait.first else limits.notice_s  # it is no wait of all for a large collective


def _was_in(rank: RankState | None, wait: Wait) -> bool:
    """Whether it had entered the operation by its last report. Numbers that count messages as well do not tell."""
    if rank is None or wait.view is None or wait.name in rank.mixed:
        return False
    same = any(group.name == wait.name and group.generation == wait.view.group.generation for group in rank.groups)
    return same and rank.enqueued.get(wait.name, 0) >= wait.seq


def refuted(hangs: Sequence[Hang], found: Sequence[Wait]) -> bool:
    """Whether something that is seen explains a hang: silent ranks may wait behind it as well, where nobody sees them. Takes the suspicion off all waits."""
    if not any(wait.silent for wait in found) or all(hang.silent and not hang.roots and not hang.cycle for hang in hangs):
        return False
    for wait in found:
        wait.silent = wait.silent_ranks = ()
    return True


def suspected(culprits: tuple[int, ...], wait: Wait, scene: Scene) -> Picture:
    """`ranks 8-15 on node01, which has not answered for 40 s`: what is said where nobody else is waited for."""
    reports = [scene.snapshot.nodes[place] for place in wait.silent]
    said = f"{words.ranks_text(culprits)} on {_names(reports)}"
    text = f"{said} {words.verb(culprits, 'is', 'are')} the only {words.verb(culprits, 'one', 'ones')} not known to be in {words.place(wait)}"
    finding = Finding(culprits[0], "unknown", "node", said, advice=_ADVICE, confidence="partial")
    allowed = scene.limits.stuck_after_s(wait.timeout_s, first=wait.first)
    compiling = {rank: last.compiling for rank in culprits if (last := scene.state.seen.get(rank)) is not None and last.compiling}
    if compiling:  # whether it gets on is not seen
        allowed = max(allowed, scene.limits.compile_silent_s, scene.limits.io_after_s(wait.timeout_s))
    answers = [scene.state.reported.get(key(node)) for node in reports]
    answered = [at for at in answers if at is not None]
    with_it = len(answered) == len(answers) and wait.since <= min(answered) + scene.limits.report_stale_s  # they stopped when their node fell silent
    long = with_it and scene.age(max(wait.since, *answered)) >= allowed
    lines = [f"every seen rank of {wait.label} is in it"]
    for node, at in list(zip(reports, answers, strict=True))[:_NAMED]:
        why = f" ({node.problem})" if node.problem else ""
        since = f"its last answer is {scene.now - at:.0f} s old" if at is not None else f"it has never answered, for {node.report_age_s:.0f} s"
        lines.append(f"{node.node} does not answer{why}: {since}")
    if not with_it and answered:
        lines.append("the ranks there may run all the same: the wait began long after its last answer")
    lines += [f"rank {rank} was compiling {running[0].frame or 'a frame'} when it was seen last" for rank, running in list(compiling.items())[:_NAMED]]
    missing = (f"state of {words.ranks_text(culprits)}",)
    return Picture(
        "stuck" if long else None, "unknown", "node", culprits, wait, f"{text} for {scene.age(wait.since):.0f} s", "", tuple(lines), missing, "partial",
        finding=finding,
    )  # fmt: skip


def _names(reports: list[NodeReport]) -> str:
    """`node01, which has not answered for 40 s,`."""
    names = ", ".join(node.node for node in reports[:_NAMED]) + (f" and {len(reports) - _NAMED} more" if len(reports) > _NAMED else "")
    least = min(node.report_age_s for node in reports)
    return f"{names}, which {'has' if len(reports) == 1 else 'have'} not answered for {least:.0f} s{'' if len(reports) == 1 else ' or more'},"
