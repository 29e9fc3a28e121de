"""Who is named for ranks that ended badly, and in which words: the order of the ends, and the verdict about the first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankwatch.model import Crash, JobSnapshot, RankState, Verdict
from rankwatch.monitor.diagnose import causes, ends, words
from rankwatch.monitor.diagnose import victims as followed
from rankwatch.monitor.diagnose.ends import signal_name
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import Death, State
from rankwatch.monitor.diagnose.views import alive, wall_to_mono
from rankwatch.monitor.policy import Limits
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SAME_DEATH_S = 1.0  # ranks that end alike within this time ended of the same cause
NO_LIMITS = Limits()
_LONGEST_END_S = 120.0  # from an exception to the end of its process
_ORDER = {"SIGKILL": 0, "SIGSEGV": 0, "SIGBUS": 0, "SIGILL": 0, "SIGFPE": 0, "": 1, "SIGABRT": 2}


@dataclass(frozen=True, slots=True)
class Judged:
    """verdict: None while nobody is to be named. weak: named for want of a better candidate, may be replaced.

    held: a rank is dead, and who is to be named depends on what its peers are about to say.
    """

    verdict: Verdict | None
    weak: bool = False
    held: bool = False


def in_order(firsts: Mapping[int, Death], ranks: Mapping[int, RankState], snapshot: JobSnapshot) -> list[Death]:
    """By when each end began: an exception counts from when it was raised, its process may take seconds to end."""
    offsets = {node.node: node.clock_offset_s for node in snapshot.nodes}
    began = [replace(death, at=_began(death, ranks[death.rank], snapshot, offsets)) for death in firsts.values()]
    return sorted(began, key=lambda death: (round(death.at, 1), _ORDER.get(signal_name(death.code), 1), death.rank))


def _began(death: Death, rank: RankState, snapshot: JobSnapshot, offsets: Mapping[str, float]) -> float:
    crash = rank.crash
    if crash is None or crash.at_wall is None or crash.source.startswith(("log ", "error file")):  # these know whole seconds, or none
        return death.at
    return min(death.at, max(death.at - _LONGEST_END_S, wall_to_mono(snapshot, crash.at_wall, offsets.get(rank.node, 0.0))))


def first(state: State, snapshot: JobSnapshot, ranks: Mapping[int, RankState], ordered: Sequence[Death], bad: Mapping[int, Death], key: str) -> Judged:
    """The first of the deaths that are nobody's consequence, with those that died alike at the same time."""
    earliest = ordered[0]
    finding = finding_of(ranks[earliest.rank], earliest, state, snapshot)
    same = [earliest.rank]
    for other in ordered[1:]:
        theirs = finding_of(ranks[other.rank], other, state, snapshot)
        if other.at - earliest.at <= SAME_DEATH_S and theirs.cause == finding.cause and theirs.says == finding.says:
            same.append(other.rank)
    return Judged(verdict(finding, tuple(sorted(same)), earliest.at, snapshot, ranks, bad, key))


def finding_of(rank: RankState, death: Death, state: State, snapshot: JobSnapshot) -> Finding:
    """Of what it ended, or is about to end."""
    return ends.raising(rank) if alive(rank) else causes.of(rank, death.at, state, snapshot.now, NO_LIMITS)


def verdict(
    finding: Finding, culprits: tuple[int, ...], at: float, snapshot: JobSnapshot, ranks: Mapping[int, RankState], bad: Mapping[int, Death], key: str
) -> Verdict:
    """`failed`, of the culprits; the other bad ends are told as what followed."""
    waiting = tuple(
        sorted(
            rank for rank, other in ranks.items()
            if rank not in culprits and (rank in bad or (waits(other) and (alive(other) or other.stage != "joining")))
        )
    )  # fmt: skip
    victims = sorted(rank for rank in bad if rank not in culprits)
    where = f" at {finding.at}" if finding.at else ""
    who = words.ranks_text(culprits)
    said = finding.says.removeprefix("it ") or "is gone"
    summary = f"{who} failed first: {said}{where}" if culprits else f"{words.ranks_text(victims)} failed of a lost peer, and which was lost first is not known"
    if victims and culprits:
        summary += f"; {words.ranks_text(victims)} ended after it"
    evidence = list(finding.evidence)
    for rank in victims[:4]:
        crash = ranks[rank].crash
        if crash is not None and ends.said(crash) in finding.says:
            evidence.append(f"rank {rank} raised the same after it")
            continue
        evidence.append(f"rank {rank} is a consequence: " + (_raised(crash) if crash else f"exit code {bad[rank].code}"))
    if len(victims) > 4:
        evidence.append(f"and so are ranks {compress(victims[4:])}")
    partial = len(ranks) < snapshot.world_size
    return Verdict(
        key=key, verdict="failed", cause=finding.cause, domain=finding.domain, culprit_ranks=culprits, waiting_ranks=waiting, since=at,
        summary=summary + words.seen(ranks, snapshot), unknown_ranks=words.unknown(ranks, snapshot), at=finding.at,
        confidence="partial" if partial and not culprits else finding.confidence, advice=words.advice(finding.cause, finding), evidence=tuple(evidence),
        missing_evidence=finding.missing_evidence,
    )  # fmt: skip


def _raised(crash: Crash) -> str:
    text, lost = f"{crash.type}: {ends.first_line(crash.message, 120)}", followed.loss_behind(crash)
    return text if lost is None else f"{text}, which came of {lost.type}: {ends.first_line(lost.message, 120)}"


def waits(rank: RankState) -> bool:
    """Whether it is in a collective or in init_process_group."""
    return rank.stage == "joining" or any(rank.enqueued.get(group.name, 0) > rank.completed.get(group.name, 0) for group in rank.groups)
