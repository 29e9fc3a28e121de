"""A rank that gloo has aborted: whether it was in the wrong itself, or one of its peers.

When sizes differ, gloo (torch 2.9-2.14) aborts the process whose buffer is smaller than the message that comes in: the rank with fewer
bytes dies of SIGABRT, even where all others but one agree with it. What it called is not known any more; what its peers called is,
from their recorders or from what they left in their slots when they lost it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankwatch.model import Collective, Confidence, Group, RankState, WaitedOn
from rankwatch.monitor.diagnose import mismatch, words
from rankwatch.monitor.diagnose.ends import FATAL, signal_name
from rankwatch.monitor.diagnose.mismatch import Mismatch
from rankwatch.monitor.diagnose.state import Death
from rankwatch.monitor.diagnose.views import label

_ROUNDS = 3  # of an order of calls that was kept
_LONGEST_ORDER = 64
_BEFORE = 3  # so many earlier calls of an operation make a size of it new


@dataclass(frozen=True, slots=True)
class Blame:
    """Who called something else, as far as the peers' calls show it. still_there: those for whom it was the last call."""

    culprits: tuple[int, ...]
    still_there: tuple[int, ...]
    confidence: Confidence
    says: str
    group: WaitedOn
    evidence: tuple[str, ...]


def suspected(rank: RankState, death: Death) -> bool:
    """Whether gloo may have ended it: an abort without a Python exception in a process that was in a gloo group."""
    own = rank.crash is not None and not rank.crash.source.startswith("log ")  # a traceback in a log may be an older one that was caught
    return signal_name(death.code) == "SIGABRT" and not own and any("gloo" in group.backend for group in rank.groups)


def complaint(rank: RankState) -> str:
    """gloo's own words about unequal sizes, where the rank's log holds them: "op.preamble.length <= op.nbytes. 944 vs 940"."""
    crash = rank.crash
    return crash.message if crash is not None and "EnforceNotMet" in crash.type and "nbytes" in crash.message else ""


def told(dead: Mapping[int, Death], ranks: Mapping[int, RankState]) -> bool:
    """Whether every peer has said at its own end what it called, or cannot any more."""
    peers = {peer for rank in dead for group in ranks[rank].groups for peer in group.ranks if peer in ranks and peer not in dead}
    return all(ranks[peer].agent != "claimed" or _heard(ranks[peer]) or _gone(ranks[peer]) for peer in peers)


def blame(dead: Mapping[int, Death], ranks: Mapping[int, RankState]) -> Blame | None:
    """The disagreement that explains these aborts; None when the peers agree, so that the dead are the odd ones, or nothing is known."""
    for group in next(iter(ranks[rank] for rank in dead)).groups:
        calls = {rank: _calls(ranks[rank], group.name) for rank in group.ranks if rank in ranks}
        aborted = tuple(sorted(rank for rank in dead if rank in group.ranks))
        if "gloo" not in group.backend or not aborted:
            continue
        reached = max((max(found, default=0) for rank, found in calls.items() if rank not in dead), default=0)
        passed = max((max((number for number, entry in calls.get(rank, {}).items() if entry.done), default=0) for rank in aborted), default=0)
        passed = max(passed, *(ranks[rank].completed.get(group.name, 0) for rank in aborted))
        peers = {rank for rank in group.ranks if rank not in dead}
        seqs = range(max(1, passed + 1, reached - 16), reached + 1)
        for seq in seqs:
            here = {rank: found[seq] for rank, found in calls.items() if seq in found}
            found = mismatch.compare(here, strict=True)
            usual = {rank: mismatch.usual(entry, (each.values() for each in calls.values())) for rank, entry in here.items()}
            lone = None if found else _lone(here, usual, aborted, calls) or (_of_two(here, usual, aborted, calls) if len(group.ranks) == 2 else None)
            if found is not None or lone is not None:
                return _said(group, seq, here, usual, aborted, calls, found, lone, ranks)
        # the root of a broadcast may be ahead of the call that all are in
        seq = max((seq for seq in seqs if all(seq in calls.get(peer, {}) for peer in peers)), default=0)
        here = {rank: found[seq] for rank, found in calls.items() if seq in found}
        if len(here) < 2:
            continue
        sent = all(map(mismatch.size_bytes, here.values()))  # a barrier sends nothing that could be too long
        if any(complaint(ranks[rank]) for rank in aborted) or (sent and not _of_its_own(aborted, ranks)):
            usual = {rank: mismatch.usual(entry, (each.values() for each in calls.values())) for rank, entry in here.items()}
            return _said(group, seq, here, usual, aborted, calls, None, None, ranks)
    return None


def _said(
    group: Group, seq: int, here: Mapping[int, Collective], usual: Mapping[int, bool], aborted: tuple[int, ...], calls: Mapping[int, Mapping[int, Collective]],
    found: Mismatch | None, lone: tuple[tuple[int, ...], Confidence] | None, ranks: Mapping[int, RankState],
) -> Blame:  # fmt: skip
    """found: the peers disagree at `seq`. lone: who is named by what one peer calls. Neither: they agree, so the aborted are the odd ones."""
    culprits, confidence = _odd(found, usual, aborted, here) if found else lone or (aborted, "likely")
    shown = here[culprits[0]] if culprits[0] in here else next(iter(here.values()))
    sides = found.classes if found else ((mismatch.say(shown), tuple(sorted(here))),)
    head = "ranks disagree" if found else "ranks most likely disagree"
    if not found and not lone:
        head = f"{words.ranks_text(aborted)} most likely called something else than the others"
    says = (
        f"{head} at #{seq} of {label(group)}: "
        + ", ".join(f"{words.ranks_text(side)} {words.verb(side, 'calls', 'call')} {text}" for text, side in sides[:4])
        + f"; gloo aborted {words.ranks_text(aborted)} over it"
    )
    lines = [f"{words.ranks_text(aborted)} died of SIGABRT: gloo ends the rank whose buffer is smaller than what it is sent"]
    lines += [f"rank {rank}: {text}" for rank in aborted if (text := complaint(ranks[rank]))]
    if not found and not lone:
        lines.append(f"{words.ranks_text(aborted)} most likely called something smaller; a failure in native code of its own ends a process alike")
    lines += [f"rank {rank}: {'its ranks called this often before' if usual[rank] else 'nobody called this before'}" for rank in sorted(here)[:4]]
    if confidence == "partial":
        lines.append("what the aborted rank called is not known, so either side may be the wrong one")
    waited = WaitedOn(group.name, group.desc, group.ranks, shown.op, seq, shown.input_sizes, shown.dtypes)
    still_there = tuple(rank for rank in culprits if max(calls[rank], default=0) == seq)
    return Blame(culprits, still_there, confidence, says, waited, tuple(lines))


def _odd(found: Mismatch, usual: Mapping[int, bool], aborted: tuple[int, ...], here: Mapping[int, Collective]) -> tuple[tuple[int, ...], Confidence]:
    """By habit first: what all called before is right. Then by number, the aborted with the side that has fewer elements."""
    everybody = tuple(sorted({*here, *aborted}))
    if odd := mismatch.by_habit(found, usual):
        return odd, "likely"
    if len(found.classes) == 2 and found.differs != "operation":
        small, large = sorted((side for _, side in found.classes), key=lambda side: mismatch.size_bytes(here[side[0]]))
        small = (*small, *(rank for rank in aborted if rank not in here))
        if len(small) != len(large):
            return tuple(sorted(small if len(small) < len(large) else large)), "likely"
    elif found.majority and len(found.classes[0][1]) > len(found.classes[1][1]) + len(aborted):
        return found.culprits, "likely"
    return everybody, "partial"


def _lone(
    here: Mapping[int, Collective], usual: Mapping[int, bool], aborted: tuple[int, ...], calls: Mapping[int, Mapping[int, Collective]]
) -> tuple[tuple[int, ...], Confidence] | None:
    """One peer is left to ask, and it calls what nobody called before.

    Where several ranks were aborted at once it has sent them more than they expect. Where one was, that is only said of an operation that
    always had another size: the peer may as well wait in something new for a rank that crashed.
    """
    if len(here) != 1 or next(iter(here)) in aborted:
        return None
    ((rank, entry),) = here.items()
    if len(aborted) > 1 and not usual[rank]:
        return (rank,), "likely"
    before = [past for found in calls.values() for past in found.values() if past.seq < entry.seq and past.op == entry.op]
    if usual[rank] or len(before) < _BEFORE or {mismatch.signature(past) for past in before} != {mismatch.signature(before[0])}:
        return None
    if mismatch.signature(before[0]) == mismatch.signature(entry):
        return None
    return tuple(sorted((rank, *aborted))), "partial"


def _of_two(
    here: Mapping[int, Collective], usual: Mapping[int, bool], aborted: tuple[int, ...], calls: Mapping[int, Mapping[int, Collective]]
) -> tuple[tuple[int, ...], Confidence] | None:
    """The only peer calls something usual: in a job that repeats its calls in a fixed order, it is its turn or it is not. Else both may be wrong."""
    if len(here) != 1 or next(iter(here)) in aborted:
        return None
    ((rank, entry),) = here.items()
    if not mismatch.size_bytes(entry):
        return None  # a barrier sends nothing that is too long
    before = {past.seq: mismatch.signature(past) for found in calls.values() for past in found.values() if past.seq < entry.seq}
    turn = _turn(before, entry.seq)
    if turn is None or not usual[rank]:
        return tuple(sorted((rank, *aborted))), "partial"
    return ((rank,), "partial") if turn != mismatch.signature(entry) else (aborted, "partial")


def _turn(before: Mapping[int, tuple[object, ...]], seq: int) -> tuple[object, ...] | None:
    """What a job that repeats its calls calls at `seq`, by the shortest order that the last three rounds have kept; None without such an order."""
    for length in range(1, _LONGEST_ORDER + 1):
        last = range(seq - _ROUNDS * length, seq)
        if any(number not in before for number in last):
            return None
        if all(before[number] == before[number + length] for number in last[:-length]):
            return before[seq - length]
    return None


def _of_its_own(aborted: tuple[int, ...], ranks: Mapping[int, RankState]) -> bool:
    """Whether a log tells of another end: a C++ exception that is none of gloo's, or a fatal error outside of a collective."""
    for crash in (ranks[rank].crash for rank in aborted):
        if crash is not None and ("::" in crash.type or crash.type == FATAL) and "gloo" not in crash.type and "torch/distributed" not in crash.traceback:
            return True
    return False


def _calls(rank: RankState, group: str) -> dict[int, Collective]:
    return {entry.seq: entry for entry in rank.collectives if entry.group == group and not entry.is_p2p}


def _heard(rank: RankState) -> bool:
    """Its last words have come in: what it called was read after it had begun to end."""
    return rank.stage == "exiting" and rank.collectives_at is not None and rank.collectives_at >= rank.stage_since


def _gone(rank: RankState) -> bool:
    return rank.process is not None and (rank.process.exit_code is not None or not rank.process.alive)
