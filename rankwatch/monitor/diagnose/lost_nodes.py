"""A node that is lost as a whole: its peers die of closed connections within moments, long before it counts as silent.

On gloo the kernel of a host whose processes are all gone closes their connections, so the ranks elsewhere raise at once. None of the node's ranks has
been seen to end, and its launcher, which would have told it, does not answer either: that together names the node. It does not where the launcher
answers again, where it fell silent long before, or where any rank has an end of its own to explain the others'.
"""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import Confidence, JobSnapshot, NodeReport, RankState
from rankwatch.monitor.diagnose import blame, words
from rankwatch.monitor.diagnose.blame import Judged
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import Death, State
from rankwatch.monitor.diagnose.views import alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SAME_TIME_S = 6.0
"""From its last answer to the first crash elsewhere: a round of pulls in a large job, and the pull that was in vain."""
SURE_AFTER_S = 1.0
"""Who answers late has answered by then."""
_NAMED = 4
_ADVICE = (
    "See whether the node is up (ping, ssh, the scheduler's view of it), when it was booted, and what its kernel log and its console say last.",
    "If it is up, all processes of the job there were killed at once: look at the scheduler's and the container's log for the end of that node's step.",
)


def judge(
    state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], victims: Mapping[int, Death], bad: Mapping[int, Death], key: str
) -> Judged | None:
    """Whose loss the victims died of; None where no node fits. victims: ranks that speak of a lost peer; nobody has ended of anything else."""
    start = min(death.at for death in blame.in_order(victims, ranks, snapshot))
    lost = [node for node in snapshot.nodes if _fits(node, start, state, snapshot, ranks, bad)]
    hit = {number for node in snapshot.nodes if node not in lost for rank in node.ranks if (number := rank.rank) in victims}
    if not lost or not hit:
        return None
    if not snapshot.final and snapshot.now - min(death.seen_at for death in victims.values()) < SURE_AFTER_S:
        return Judged(None, held=True)
    culprits = tuple(sorted(number for node in lost for number in _numbers(node)))
    refused = all("refused" in node.problem or "reset" in node.problem for node in lost)
    names = ", ".join(node.node for node in lost[:_NAMED]) + (f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else "")
    lines = [
        f"{node.node} has not answered since {max(0.0, node.report_age_s - (snapshot.now - start)):.1f} s before the first of them ended ({node.problem})"
        for node in lost[:_NAMED]
    ]
    lines.append("no rank there was seen to end, and no rank elsewhere ended of anything but a lost connection")
    sure: Confidence = "likely" if len(lost) == 1 else "partial"
    finding = Finding(
        culprits[0], "killed" if refused else "unknown", "node", limit="at_once", advice=_ADVICE, evidence=tuple(lines), confidence=sure,
        missing_evidence=(f"how {words.ranks_text(culprits)} ended",),
    )  # fmt: skip
    found = blame.verdict(finding, culprits, start, snapshot, ranks, bad, key)
    verb, whose = ("is", "its launcher does") if len(lost) == 1 else ("are", "their launchers do")
    text = f"{names} {verb} lost with {words.ranks_text(culprits)}: {whose} not answer, and {words.ranks_text(sorted(victims))} lost the connection to a peer"
    return Judged(replace(found, summary=text + words.seen(ranks, snapshot)), weak=not snapshot.final)


def _fits(node: NodeReport, start: float, state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], bad: Mapping[int, Death]) -> bool:
    """Whether it stopped answering when the first victim ended, and was well when it was heard last."""
    numbers = _numbers(node)
    if node.failing_since is None or not numbers:
        return False
    answered = snapshot.now - node.report_age_s
    if not start - SAME_TIME_S <= answered <= start + blame.SAME_DEATH_S:
        return False
    known = [rank for number in numbers if (rank := ranks.get(number) or state.seen.get(number)) is not None]
    return len(known) == len(numbers) and not bad.keys() & set(numbers) and all(alive(rank) and rank.stage != "exiting" for rank in known)


def _numbers(node: NodeReport) -> tuple[int, ...]:
    return node.silent_ranks or tuple(rank.rank for rank in node.ranks)
