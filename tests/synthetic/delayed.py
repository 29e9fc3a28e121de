"""Reports that come late: what a judge of many nodes sees of a generated job when each node's newest report is up to some seconds old, each its own.

A report that is there is shown again and again until a newer one has come, with a growing age. The last look of a job sees everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from generate import Case, make

from rankwatch.model import JobSnapshot, NodeReport

MOST_S = 4.0


@dataclass(slots=True)
class _Line:
    """Reports of one node on their way, oldest first, each with when it was made; the one that is there; how long the next one takes."""

    coming: list[tuple[float, NodeReport]] = field(default_factory=list)
    there: tuple[float, NodeReport] | None = None
    takes_s: float = 0.0


def delayed(snapshots: Iterable[JobSnapshot], rng: Random, most_s: float = MOST_S, ranks_per_node: int = 0) -> Iterator[JobSnapshot]:
    """The same looks with older reports of every node but the first. ranks_per_node: the job is split into nodes of so many ranks; 0: as it is."""
    lines: dict[int, _Line] = {}
    attempt = None
    for snapshot in snapshots:
        if snapshot.attempt != attempt:
            lines, attempt = {}, snapshot.attempt
        nodes = split(snapshot, ranks_per_node) if ranks_per_node else snapshot.nodes
        shown = [nodes[0]]
        for node in nodes[1:]:
            line = lines.setdefault(node.group_rank, _Line(takes_s=rng.uniform(0.0, most_s)))
            made_at = snapshot.now - node.report_age_s
            if not line.coming or made_at > line.coming[-1][0] + 1e-6:
                line.coming.append((made_at, node))
            _arrive(line, snapshot, rng, most_s)
            if line.there is not None:
                shown.append(replace(line.there[1], report_age_s=snapshot.now - line.there[0]))
        yield replace(snapshot, nodes=tuple(shown))


def _arrive(line: _Line, snapshot: JobSnapshot, rng: Random, most_s: float) -> None:
    """The newest report that has had its time, or must be there lest the one that is gets too old."""
    ready = [report for report in line.coming if snapshot.final or snapshot.now - report[0] >= line.takes_s]
    if not ready and line.there is not None and snapshot.now - line.there[0] > most_s:
        ready = line.coming[:1]
        while snapshot.now - ready[-1][0] > most_s and len(ready) < len(line.coming):
            ready = line.coming[: len(ready) + 1]
    if ready:
        line.there, line.takes_s = ready[-1], rng.uniform(0.0, most_s)
        line.coming = line.coming[len(ready) :]


def split(snapshot: JobSnapshot, ranks_per_node: int) -> tuple[NodeReport, ...]:
    """The ranks of a job of one node as those of several. One of several nodes stays as it is."""
    if len(snapshot.nodes) != 1:
        return snapshot.nodes
    ranks = snapshot.nodes[0].ranks
    found = []
    for place, first in enumerate(range(0, len(ranks), ranks_per_node)):
        part = tuple(replace(rank, node=f"node{place}") for rank in ranks[first : first + ranks_per_node])
        found.append(NodeReport(f"node{place}", part, place))
    return tuple(found)


def make_delayed(kind: str, seed: str, *, most_s: float = MOST_S, size: int | None = None, brief: bool | None = None) -> Case:
    """One case of generate.make whose nodes report late; a job of one node is split into up to eight."""
    case = make(kind, seed, size=size, brief=brief)
    rng = Random(f"delayed/{kind}/{seed}")
    if case.truth.must == "ticket":
        case.truth = replace(case.truth, must="perhaps")  # as in generate: clocks of several nodes, and late reports blur who was found waiting
    case.snapshots = delayed(case.snapshots, rng, most_s, max(1, case.plan.size // rng.choice((2, 4, 8))))
    return case


def silenced(snapshots: Iterable[JobSnapshot], node: int, after_s: float, ranks_per_node: int, stale_s: float = 10.0) -> Iterator[JobSnapshot]:
    """The same looks with nothing from this node once the job has been looked at for after_s: its last report grows old, then its ranks are unknown."""
    last: NodeReport | None = None
    start = last_at = 0.0
    for snapshot in snapshots:
        start = start or snapshot.now
        nodes = list(split(snapshot, ranks_per_node))
        if last is None or snapshot.now - start < after_s:
            last, last_at = nodes[node], snapshot.now
        else:
            age_s = snapshot.now - last_at
            gone = NodeReport(last.node, (), node, age_s, silent_ranks=tuple(rank.rank for rank in last.ranks), problem="timed out")
            nodes[node] = replace(last, report_age_s=age_s) if age_s <= stale_s else gone
        yield replace(snapshot, nodes=tuple(nodes))
