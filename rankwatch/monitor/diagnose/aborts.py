"""A rank that gloo has aborted: whether it was in the wrong itself, or one of its peers.

When sizes differ, gloo (torch 2.9-2.14) aborts the process whose buffer is smaller than the message that comes in: the rank with fewer
bytes dies of SIGABRT, even where all others but one agree with it. What it called is not known any more; what its peers called is,
from their recorders or from what they left in their slots when they lost it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankwatch.model import Collective, Confidence, Group, JobSnapshot, RankState, WaitedOn
from rankwatch.monitor.diagnose import mismatch, victims, words
from rankwatch.monitor.diagnose.ends import FATAL, signal_name
from rankwatch.monitor.diagnose.mismatch import Mismatch
from rankwatch.monitor.diagnose.state import Death
from rankwatch.monitor.diagnose.views import label, wall_to_mono

_ROUNDS = 3  # of an order of calls that was kept
_LONGEST_ORDER = 64
_LASTS_S = 0.5  # an entry that was open for so long when it was read is one that its rank waits in
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


def blame(dead: Mapping[int, Death], ranks: Mapping[int, RankState], snapshot: JobSnapshot) -> Blame | None:
    """The disagreement that explains these aborts; None when the peers agree, so that the dead are the odd ones, or nothing is known."""
    died_at = min(death.at for death in dead.values())
    lost: Blame | None = None
    for group in next(iter(ranks[rank] for rank in dead)).groups:
        calls = {rank: _calls(ranks[rank], group.name) for rank in group.ranks if rank in ranks}
        aborted = tuple(sorted(rank for rank in dead if rank in group.ranks))
        if "gloo" not in group.backend or not aborted:
            continue
        reached = max((max(found, default=0) for rank, found in calls.items() if rank not in dead), default=0)
        passed = max((max((number for number, entry in calls.get(rank, {}).items() if entry.done), default=0) for rank in aborted), default=0)
        passed = max(passed, *(ranks[rank].completed.get(group.name, 0) for rank in aborted))
        peers = {rank for rank in group.ranks if rank not in dead}
        told = {rank for rank in peers if rank in ranks and _is_known(ranks[rank], group.name, calls[rank], died_at, snapshot)}
        seqs = range(max(1, passed + 1, reached - 16), reached + 1)
        for seq in seqs:
            here = {rank: found[seq] for rank, found in calls.items() if seq in found}
            found = mismatch.compare(here, strict=True)
            usual = _usual(here, calls)
            lone = _lone(here, usual, aborted, calls) if not found and told.issuperset(here) else None
            if found is not None or lone is not None:
                return _said(group, seq, here, usual, aborted, calls, found, lone, ranks)
        if len(group.ranks) == 2 and len(peers) == 1 and told == peers and (two := _of_two(seqs, calls, aborted, *peers)) is not None:
            seq, lone = two
            here = {rank: calls[rank][seq] for rank in peers}
            return _said(group, seq, here, _usual(here, calls), aborted, calls, None, lone, ranks)
        # the root of a broadcast may be ahead of the call that all are in
        seq = max((seq for seq in seqs if all(seq in calls.get(peer, {}) for peer in peers)), default=0)
        here = {rank: found[seq] for rank, found in calls.items() if seq in found}
        sent = all(map(mismatch.size_bytes, here.values()))  # a barrier sends nothing that could be too long
        if len(here) >= 2 and told and (any(complaint(ranks[rank]) for rank in aborted) or (sent and not _of_its_own(aborted, ranks))):
            return _said(group, seq, here, _usual(here, calls), aborted, calls, None, None, ranks)
        send = all(any(map(mismatch.size_bytes, calls.get(peer, {}).values())) for peer in peers)
        if lost is None and group.backend == "gloo" and send and not told and not _of_its_own(aborted, ranks):
            lost = _unheard(group, aborted, peers, ranks)
    return lost


def _usual(here: Mapping[int, Collective], calls: Mapping[int, Mapping[int, Collective]]) -> dict[int, bool]:
    return {rank: mismatch.usual(entry, (each.values() for each in calls.values())) for rank, entry in here.items()}


def _is_known(rank: RankState, group: str, calls: Mapping[int, Collective], died_at: float, snapshot: JobSnapshot) -> bool:
    """Whether its newest entry is what it called when its peer died: it was read after that, or shows a wait that lasts.

    An entry that is open in an older reading alone says nothing: gloo notes an end later than it comes about.
    """
    read = rank.collectives_at
    if read is None or _heard(rank) or read >= died_at:
        return read is not None
    newest = calls[max(calls)] if calls else None
    if newest is None or newest.done or rank.completed.get(group, 0) >= newest.seq:
        return False
    offset_s = next((node.clock_offset_s for node in snapshot.nodes if node.node == rank.node), 0.0)
    return read - wall_to_mono(snapshot, newest.created_wall_at, offset_s) >= _LASTS_S


def _unheard(group: Group, aborted: tuple[int, ...], peers: Iterable[int], ranks: Mapping[int, RankState]) -> Blame | None:
    """All peers lost it in a collective of theirs, and none has said in which: gloo's abort most likely, over calls that are not known."""
    crashes = {rank: ranks[rank].crash for rank in peers if rank in ranks}
    if not crashes or not all(crash is not None and victims.speaks_of_peers(crash) for crash in crashes.values()):
        return None
    two = len(group.ranks) == 2
    culprits = tuple(sorted((*aborted, *crashes))) if two else aborted
    them, others = words.ranks_text(aborted), words.ranks_text(sorted(crashes))
    says = f"gloo most likely aborted {them} over a call that differs from what {others} called in {label(group)}"
    lines = (
        f"{them} died of SIGABRT: gloo ends the rank whose buffer is smaller than what it is sent",
        f"{others} lost it in a collective; which one was not read any more",
        *(("either side may be the wrong one",) if two else ("a failure in native code of its own ends a process alike",)),
    )
    return Blame(culprits, (), "partial", says, WaitedOn(group.name, group.desc, group.ranks, "", 0), lines)


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
    seqs: Iterable[int], calls: Mapping[int, Mapping[int, Collective]], aborted: tuple[int, ...], peer: int
) -> tuple[int, tuple[tuple[int, ...], Confidence]] | None:
    """The only peer calls something usual: in a job that repeats its calls in a fixed order, it is its turn or it is not. Else both may be wrong.

    (number, who and how sure); None where the peer has called nothing since. It may have gone on to its next call: gloo ends the smaller side alone.
    """
    both: tuple[tuple[int, ...], Confidence] = (tuple(sorted((peer, *aborted))), "partial")
    mine = [calls[peer][seq] for seq in seqs if seq in calls.get(peer, {}) and mismatch.size_bytes(calls[peer][seq])]  # a barrier sends nothing
    newest = max(calls.get(peer, {}), default=0)
    known = True
    for entry in mine:
        before = {past.seq: mismatch.signature(past) for found in calls.values() for past in found.values() if past.seq < entry.seq}
        turn = _turn(before, entry.seq) if mismatch.usual(entry, (each.values() for each in calls.values())) else None
        if turn is not None and turn != mismatch.signature(entry):
            return entry.seq, ((peer,), "partial")
        known = known and turn is not None
    if not mine or mine[-1].seq != newest:
        return None
    return newest, ((aborted, "partial") if known else both)


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
