"""What torch itself says of who is to blame, in the exceptions of the ranks that are not: mismatches that it has checked for, barriers not passed.

"Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[17],
...), but Rank 2 is running collective: ...": each rank is believed of its own call alone. What it says of the other is rubbish where the two differ in
length (a barrier is told as REDUCE, a broadcast as GATHER). "[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 60000 ms" names who has not come; all
others say "received errors while waiting for send/recv from rank 0", who need not be to blame. Ranks are told by their numbers in the group, which is
not named. Run on torch 2.13.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace

from rankwatch.model import Crash, Group, JobSnapshot, RankState
from rankwatch.monitor.diagnose import blame, frames, inside, words
from rankwatch.monitor.diagnose.blame import Judged
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import Death
from rankwatch.monitor.diagnose.views import label
from rankwatch.monitor.diagnose.work import fresh_stack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_CALL = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (\d+) is running collective: CollectiveFingerPrint\(SequenceNumber=(\d+)(?:, )?"
    r"OpType=([A-Z_]+)(?:, TensorShape=\[([^\]]*)\])?(?:, TensorDtypes=(\w+))?"
)
_OTHER = re.compile(r", but Rank (\d+) is running collective")
_MISSED = re.compile(r"\[Rank 0\]: Ranks? (\d+(?:, ?\d+)*) failed to pass monitoredBarrier")
_OF_RANK_0 = re.compile(r"Rank (\d+) successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0")
_SAYS_MISMATCH = "Detected mismatch between collectives on ranks"
_HEAR_OTHERS_S = 1.2  # as in deaths.py: torchrun is held back for 1.5 s while evidence is taken
_BEFORE_S = 60.0  # how old the stack of a rank that has not come may be
_NUMBER_ADVICE = (
    "The calls are alike and their numbers differ: torch's check counts sends, receives and monitored_barrier as well, on those ranks alone that call them. "
    "A job that uses these cannot run under TORCH_DISTRIBUTED_DEBUG=DETAIL (torch 2.13); else one rank has called more than the others.",
)


@dataclass(frozen=True, slots=True)
class _Said:
    """One rank's own call, as torch has told it. place: the rank's number in the group. other: the place that differs from it."""

    place: int
    number: int
    call: str
    other: int | None


def mismatch_said(crash: Crash | None) -> bool:
    """Whether torch's check of collectives has raised it."""
    return crash is not None and _SAYS_MISMATCH in crash.message


def mismatch(snapshot: JobSnapshot, ranks: Mapping[int, RankState], firsts: Mapping[int, Death], bad: Mapping[int, Death], key: str) -> Judged | None:
    """Who called something else, where all that ended of their own ended by that check; None where it says nothing of this. firsts: those ends."""
    if not firsts or not all(mismatch_said(ranks[rank].crash) for rank in firsts):
        return None
    said = {rank: call for rank in firsts if (crash := ranks[rank].crash) is not None and (call := _said(crash)) is not None}
    group = _group({rank: call.place for rank, call in said.items()}, [call.other for call in said.values() if call.other is not None], ranks)
    if group is None:
        return None
    began = min(death.at for death in firsts.values())
    silent = [rank for rank in group.ranks if rank not in said]
    sides: dict[object, list[int]] = defaultdict(list)
    numbers_only = len({call.call for call in said.values()}) == 1
    for rank in sorted(said):
        sides[said[rank].number if numbers_only else said[rank].call].append(rank)
    differing = {group.ranks[call.other] for call in said.values() if call.other is not None}
    parts = sorted(sides.values(), key=lambda part: (-len(part), part))
    if silent and not snapshot.final and snapshot.now - min(death.seen_at for death in firsts.values()) < _HEAR_OTHERS_S:
        return Judged(None, held=True)
    others = differing.intersection(silent)  # all that have spoken say that these differ from them
    culprits, sure = _odd(parts, others, len(silent))
    if not culprits:
        return None
    lines = [f"{words.ranks_text(part)} {words.verb(part, 'calls', 'call')} {_text(said[part[0]])}" for part in parts[:8]]
    lines += [f"{words.ranks_text(sorted(others))} {words.verb(tuple(others), 'calls', 'call')} something else"] if others else []
    lines += [] if sure else ["there is no majority, so either side may be the wrong one"]
    differ = "numbers of calls" if numbers_only and len(parts) > 1 else "operations"
    places = tuple((rank, crash.where) for rank in culprits if rank in said and (crash := ranks[rank].crash) is not None and crash.where)
    at = places[0][1] if len({place for _, place in places}) == 1 else ""
    finding = Finding(
        culprits[0], "mismatch", "user_code", at=at, limit="at_once", evidence=("torch's own check of collectives has raised it", *lines),
        confidence="certain" if sure and not silent and differ == "operations" else "likely",
        advice=_NUMBER_ADVICE if differ == "numbers of calls" else (),
    )  # fmt: skip
    found = blame.verdict(finding, culprits, began, snapshot, ranks, bad, key)
    summary = f"different {differ} in {label(group)}: " + ", ".join(reversed(lines[: len(parts) + bool(others)]))
    advice = words.advice("mismatch", finding, () if at else places)
    return Judged(
        replace(
            found, summary=summary + (f"; at {at}" if at else "") + words.seen(ranks, snapshot), places=() if at else places,
            advice=advice if finding.advice else advice[:1],  # the others say how to come to this check
        )
    )  # fmt: skip


def missed(snapshot: JobSnapshot, ranks: Mapping[int, RankState], victims: Mapping[int, Death], bad: Mapping[int, Death], key: str) -> Judged | None:
    """Who has not come to a monitored barrier, by what those have raised that waited in it; None where they say nothing of it."""
    places: dict[int, int] = {}
    named: tuple[int, ...] = ()
    for rank in sorted(victims):
        text = _texts(ranks[rank].crash)
        if (late := _MISSED.search(text)) is not None:
            places[rank], named = 0, tuple(int(part) for part in late[1].split(","))
        elif (of_0 := _OF_RANK_0.search(text)) is not None:
            places[rank] = int(of_0[1])
    if not places:
        return None
    group = _group(places, named, ranks)
    if group is None:
        return None
    culprits = tuple(group.ranks[place] for place in named)
    if not named:
        root = group.ranks[0]
        everybody = all(rank in places for rank in group.ranks[1:])
        if not everybody or root in victims or root not in ranks or _in_it(ranks[root]):
            return None  # rank 0 itself knows, or is about to
        culprits = (root,)
    at = min(death.at for death in victims.values())
    line = f"rank {group.ranks[0]} raised: {words.ranks_text(culprits)} failed to pass monitoredBarrier" if named else "all others have waited for it in vain"
    stack = fresh_stack(ranks[culprits[0]], at - _BEFORE_S) if culprits[0] in ranks else None
    where = frames.where(stack.main) if stack is not None else ""
    finding = Finding(culprits[0], "not_entered", "user_code", at=where, limit="at_once", evidence=(line,), confidence="likely")
    found = blame.verdict(finding, culprits, at, snapshot, ranks, bad, key)
    have = words.verb(culprits, "has", "have")
    summary = f"{words.ranks_text(culprits)} {have} not come to a collective or barrier of {label(group)} in time"
    summary += f" (it is in {finding.at})" if finding.at else ""
    summary += f"; {words.ranks_text(sorted(victims))} {words.verb(tuple(victims), 'has', 'have')} ended of it"
    return Judged(replace(found, summary=summary + words.seen(ranks, snapshot)))


def _texts(crash: Crash | None) -> str:
    """Its message, and those of the exceptions that it was raised from."""
    return "\n".join((crash.message, *(message for _type, message in crash.chain))) if crash is not None else ""


def _said(crash: Crash) -> _Said | None:
    found, other = _CALL.search(crash.message), _OTHER.search(crash.message)
    if found is None:
        return None
    call = found[3].lower() + (f" of [{found[4]}]" if found[4] is not None else "") + (f" {found[5]}" if found[5] else "")
    return _Said(int(found[1]), int(found[2]), call, int(other[1]) if other is not None else None)


def _text(said: _Said) -> str:
    return f"#{said.number}: {said.call}"


def _group(places: Mapping[int, int], others: Iterable[int], ranks: Mapping[int, RankState]) -> Group | None:
    """The group in which these ranks have these numbers; None where there is none, or where groups would name different ranks."""
    if not places:
        return None
    found = {
        group.ranks: group
        for group in sorted(ranks[min(places)].groups, key=lambda group: group.desc == "default_pg")
        if all(place < len(group.ranks) and group.ranks[place] == rank for rank, place in places.items()) and all(place < len(group.ranks) for place in others)
    }
    meant = {tuple(group.ranks[place] for place in others) for group in found.values()}
    return next(iter(found.values())) if len(meant) == 1 else None


def _odd(parts: Sequence[Sequence[int]], others: set[int], silent: int) -> tuple[tuple[int, ...], bool]:
    """(those outside the majority, whether there is one). others: ranks that have not spoken, and differ; silent: how many have not."""
    outside = sorted({*others, *(rank for part in parts[1:] for rank in part)})
    most = len(parts[0])
    rivals = max((len(part) for part in parts[1:]), default=0)
    if most > rivals and most > silent:
        return tuple(outside), True
    return tuple(sorted({*outside, *parts[0]})), False


def _in_it(rank: RankState) -> bool:
    """Whether it is in a collective or a monitored barrier itself."""
    return (rank.barrier is not None and rank.barrier.inside) or bool(inside.call(rank.stack))
