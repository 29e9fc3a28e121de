"""Very many hangs alike that begin together have one cause: a switch, a file system. Most of them are told as one. Pure.

The first OWN of a kind stay incidents of their own. What comes on top is gathered into one verdict, whose key lasts as long as its incident is
open: what is in it stays in it, and what joins later changes no other incident. The order of the verdicts does not matter.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from rankwatch.model import Cause, Confidence, Domain, Verdict, VerdictName
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

OWN = 15  # with the one that stands for the rest these are 16, as many as have a metric of their own (design section 7)
WITHIN_S = 30.0  # of the start of another one of the storm: what follows from a cause follows soon
MAX_PLACES = 8
MAX_RANKS_WORDS = 200
_GATHERED: tuple[VerdictName, ...] = ("slow", "timeout_imminent", "stuck")  # in the order of gravity
_CONFIDENCE: tuple[Confidence, ...] = ("partial", "likely", "certain")
_VAGUE = frozenset({"not_entered", "unknown"})
_SEEN_IN_A_PROCESS = frozenset({"data_loading", "checkpointing", "external_io", "gil_held", "stopped", "store_wait", "uninterruptible"})
_MANY = "many-"


@dataclass(frozen=True, slots=True)
class Storm:
    """Hangs that are told as one. rule: `a0-hang-`, what their keys begin with. since, until: start of the first and of the last of their waits.

    cause: of more than half of them, else a vague one. members: their keys at the last look.
    """

    key: str
    rule: str
    cause: Cause
    since: float
    until: float
    members: frozenset[str]


def gather(storms: Iterable[Storm], verdicts: Iterable[Verdict], own: Collection[str]) -> tuple[tuple[Storm, ...], tuple[Verdict, ...]]:
    """The storms after one look, and the verdicts that are told: those that stand by themselves as they were, and one for each storm.

    storms: those after the look before. own: keys of the incidents that are open, of storms as well.
    """
    before, verdicts = [storm for storm in storms if storm.key in own], tuple(verdicts)
    gathered: set[str] = set()
    told: list[Verdict] = []
    parts: dict[str, list[Verdict]] = {storm.key: [] for storm in before}
    homes = {key: storm for storm in before for key in storm.members}
    alone: dict[str, list[Verdict]] = {}  # by rule, of those that could be gathered
    news: list[Verdict] = []
    for verdict in verdicts:
        home = homes.get(verdict.key)
        if verdict.verdict not in _GATHERED or verdict.straggling is not None:
            continue
        if home is not None and _fits(verdict, home.cause):
            parts[home.key].append(verdict)
            gathered.add(verdict.key)
        elif verdict.key in own:
            alone.setdefault(rule(verdict.key), []).append(verdict)
        else:
            news.append(verdict)
    open_storms = {storm.key: storm for storm in before}
    for verdict in sorted(news, key=_order):
        name = rule(verdict.key)
        beside = alone.setdefault(name, [])
        storm = next((each for each in open_storms.values() if _joins(verdict, name, each)), None)
        if storm is None and sum(_alike(verdict, other) for other in beside) < OWN:
            beside.append(verdict)
            continue
        if storm is None:
            number = next(number for number in range(1, len(open_storms) + 2) if f"{name}{_MANY}{number}" not in open_storms)
            storm = Storm(f"{name}{_MANY}{number}", name, verdict.cause, verdict.since, verdict.since, frozenset())
        open_storms[storm.key] = replace(storm, since=min(storm.since, verdict.since), until=max(storm.until, verdict.since))
        parts.setdefault(storm.key, []).append(verdict)
        gathered.add(verdict.key)
    after: list[Storm] = []
    for storm in open_storms.values():
        members = sorted(parts[storm.key], key=_order)
        if members:
            cause, count = Counter(sorted(member.cause for member in members)).most_common(1)[0]
            unclear: Cause = storm.cause if storm.cause in _VAGUE else "not_entered"
            storm = replace(storm, cause=cause if 2 * count > len(members) else unclear, members=frozenset(member.key for member in members))
            told.append(_verdict(storm, members))
        else:
            storm = replace(storm, members=frozenset())
        after.append(storm)
    return tuple(after), (*(verdict for verdict in verdicts if verdict.key not in gathered), *told)


def rule(key: str) -> str:
    """`a0-hang-` of `a0-hang-12`, and of the storm `a0-hang-many-1`."""
    return key.rstrip("0123456789").removesuffix(_MANY)


def _order(verdict: Verdict) -> tuple[float, int, str]:
    return (verdict.since, min((*verdict.culprit_ranks, *verdict.waiting_ranks), default=-1), verdict.key)


def _fits(verdict: Verdict, cause: Cause) -> bool:
    """The same cause, as far as both are known: looks at processes come one by one. What ranks have recorded is proof, and not overlooked."""
    if verdict.cause == cause:
        return True
    return (verdict.cause in _VAGUE and cause in _VAGUE | _SEEN_IN_A_PROCESS) or (cause in _VAGUE and verdict.cause in _SEEN_IN_A_PROCESS)


def _alike(verdict: Verdict, other: Verdict) -> bool:
    return _fits(verdict, other.cause) and abs(verdict.since - other.since) <= WITHIN_S


def _joins(verdict: Verdict, name: str, storm: Storm) -> bool:
    return storm.rule == name and _fits(verdict, storm.cause) and storm.since - WITHIN_S <= verdict.since <= storm.until + WITHIN_S


def _verdict(storm: Storm, members: Sequence[Verdict]) -> Verdict:
    """What is told of a storm, of its members in their order. One member is told as it is."""
    first = members[0]
    if len(members) == 1:
        return replace(first, key=storm.key)
    gravest = max(members, key=lambda member: _GATHERED.index(member.verdict)).verdict
    ends = min(members, key=lambda member: float("inf") if member.timeout_left_s is None else member.timeout_left_s)
    culprits = _ranks(member.culprit_ranks for member in members)
    places = {place for member in members for place in (member.at, *(at for _, at in member.places)) if place}
    each = [(rank, dict(member.places).get(rank, member.at)) for member in members for rank in member.culprit_ranks]
    different = len(places) > 1
    begun_s = max(member.since for member in members) - first.since
    shared = f"{len(members):,} more groups hang alike, begun within {max(1.0, begun_s):.0f} s: they probably have one cause that they share"
    who = f"; culprits: ranks {_short(culprits)}" if culprits else ""
    return Verdict(
        key=storm.key, verdict=gravest, cause=storm.cause, domain=_commonest(member.domain for member in members), culprit_ranks=culprits,
        waiting_ranks=_ranks(member.waiting_ranks for member in members), since=first.since, summary=f"{shared}{who}; the first: {first.summary}",
        unknown_ranks=_ranks(member.unknown_ranks for member in members), at="" if different else first.at,
        places=tuple(sorted(pair for pair in each if pair[1]))[:MAX_PLACES] if different else (),
        timeout_s=ends.timeout_s, timeout_left_s=ends.timeout_left_s, timeout_known=all(member.timeout_known for member in members),
        confidence=min((member.confidence for member in members), key=_CONFIDENCE.index),
        advice=("Look first at what these groups share, a switch, a rack, a file system, a service: so many do not hang at once by themselves.", *first.advice),
        evidence=(_counted("verdicts", (member.verdict for member in members)), _counted("causes", (member.cause for member in members)), *first.evidence),
        missing_evidence=first.missing_evidence,
    )  # fmt: skip


def _ranks(sets: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sorted({rank for ranks in sets for rank in ranks}))


def _commonest(values: Iterable[Domain]) -> Domain:
    return Counter(sorted(values)).most_common(1)[0][0]


def _counted(what: str, values: Iterable[str]) -> str:
    """`causes: 2,030 not_entered, 3 data_loading`."""
    return f"{what}: " + ", ".join(f"{count:,} {value}" for value, count in sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))


def _short(ranks: Sequence[int]) -> str:
    text = compress(ranks)
    return text if len(text) <= MAX_RANKS_WORDS else f"{text[:MAX_RANKS_WORDS].rpartition(',')[0]},... ({len(ranks):,} of them)"
