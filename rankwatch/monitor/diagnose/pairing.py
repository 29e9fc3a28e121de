"""Ranks that pair different operations without hanging: the job trains on, and the results are garbage.

A lead of some operations is everyday noise; numbers that stay apart while they move make the recorders be read, where no history reaches so far.
Between looks at two moments the lead wavers: two H200s that had come apart by 3 showed -3 to +15, and 0 at every look before. The proof is two
different calls at one number that all have left behind. Once proven it holds for the rest of the attempt: nothing heals it.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, replace

from rankwatch.model import KIND_BYTES, Calls, Collective, RankState, Verdict, WaitedOn, Want
from rankwatch.monitor.diagnose import mismatch, words
from rankwatch.monitor.diagnose.mismatch import Mismatch
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.state import Lead, Paired
from rankwatch.monitor.diagnose.views import View, alive, wall_to_mono

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankwatch.monitor.diagnose.waits import Wait
    from rankwatch.monitor.diagnose.wants import Asked

_SHAPES = 3  # so many numbers have to differ where only the shape does
_MAX_TOLD = 16  # groups; more are consequences
_READINGS = 6  # of one lead, then more and more rarely
_AGAIN_S = 300.0  # and at least so often while the numbers are apart
_LATE_S = 20.0  # histories of other nodes' ranks are waited for, where those at hand do not tell who is odd
_SCANNED = 20_000  # numbers that are compared one by one in one look

GroupOf = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Odd:
    """What differs in one group: the numbers of it that were compared, the first that differs and what was called there."""

    compared: int
    numbers: tuple[int, ...]
    first: Mismatch
    calls: Mapping[int, Collective]
    culprits: tuple[int, ...]
    known_start: bool  # the number before was alike on all


def look(
    views: Iterable[View], waits: Sequence[Wait], scene: Scene, asked: Asked
) -> tuple[dict[GroupOf, Lead], dict[GroupOf, Paired], dict[GroupOf, Verdict], list[Want]]:
    """Leads and comparisons to remember, divergences that are proven, by group, and the recorders to read."""
    leads: dict[GroupOf, Lead] = {}
    paired: dict[GroupOf, Paired] = {}
    proven = dict(scene.state.diverged)
    wanted: list[Want] = []
    worlds = {rank: next((group.generation for group in state.groups if group.desc == "default_pg"), -1) for rank, state in scene.ranks.items()}
    hung = {wait.key[1:-1]: wait.seq for wait in waits if wait.kind == "collective" and wait.mismatch is not None}
    for view in views:
        if len(view.members) < 2 or view.stale:
            continue
        key = (*view.key, view.group.generation)
        earlier = scene.state.leads.get(key)
        lead = _lead(view, earlier) if not view.mixed else None
        if lead is not None:
            leads[key] = lead
        if key in proven:
            continue
        before = scene.state.paired.get(key, Paired())
        if key in hung and hung[key] not in before.hung:
            before = replace(before, hung=(*before.hung, hung[key])[-64:])
        lines = _lines(view, scene.ranks, worlds)
        if len(lines) > 1 and scene.state.frozen_at is None and len(proven) < _MAX_TOLD:
            same = len(before.lines) == len(lines) and all(lines.get(rank) is calls for rank, calls in before.lines.items())
            settled = min([view.members[rank].done for rank in lines])
            upto = min(settled, max([calls.last for calls in lines.values()])) if not same or settled > before.upto else settled
            if not same or upto > before.upto:
                before = replace(before, lines=lines, upto=upto)
                if (odd := _compare(lines, upto, before.hung)) is not None:
                    before = replace(before, split_at=scene.now if before.split_at is None else before.split_at)
                    if len(odd.culprits) < len(lines) or not (unread := _unread(view, lines, before, scene)):
                        proven[key] = _verdict(view, odd, lead, scene)
                    elif chosen := asked.due("recorder", filter(scene.ranks.__contains__, unread), scene.limits.rerecord_s, scene.limits.max_recorders):
                        wanted.append(Want("recorder", chosen, "which side most are on"))
        if before.lines or before.hung or before.split_at is not None:
            paired[key] = before
        moving = lead is not None and earlier is not None and lead.lowest > earlier.lowest  # else it is a hang, which has its own rules
        if lead is not None and moving and lead.apart >= scene.limits.lead_polls and key not in proven:
            every = min(_AGAIN_S, scene.limits.rerecord_s * max(1, lead.apart // (_READINGS * scene.limits.lead_polls)))
            read = all(rank in lines and lines[rank].last > lead.began for rank in view.members)
            if read and lead.polls < scene.limits.lead_polls:
                every = _AGAIN_S
            if chosen := asked.due("recorder", sorted(view.members), every, scene.limits.max_recorders):
                wanted.append(Want("recorder", chosen, "the numbers stay apart"))
    return leads, paired, proven, wanted


def told(proven: Mapping[GroupOf, Verdict], attempt: int) -> list[Verdict]:
    """One verdict for groups that share ranks: there the rank that is odd in most of them is named."""
    clusters: list[list[tuple[GroupOf, Verdict]]] = []
    for key, verdict in proven.items():
        mine = set(_ranks(verdict))
        home = next((cluster for cluster in clusters if mine.intersection(_ranks(cluster[0][1]))), None)
        if home is None:
            clusters.append([(key, verdict)])
        else:
            home.append((key, verdict))
    return [_cluster(cluster, attempt) for cluster in clusters]


def _ranks(verdict: Verdict) -> tuple[int, ...]:
    return verdict.group.ranks if verdict.group is not None else verdict.culprit_ranks


def _cluster(cluster: Sequence[tuple[GroupOf, Verdict]], attempt: int) -> Verdict:
    key, first = cluster[0]
    first = replace(first, key=f"a{attempt}-diverged-{key[0]}-{min(_ranks(first))}")
    if len(cluster) == 1:
        return first
    votes = Counter(rank for _, verdict in cluster for rank in verdict.culprit_ranks)
    most = max(votes.values())
    culprits = tuple(sorted(rank for rank, count in votes.items() if count == most))
    summary = first.summary
    if most > 1 and len(culprits) < len(first.culprit_ranks):
        summary += f"; {words.ranks_text(culprits)} {words.verb(culprits, 'is', 'are')} in every group that differs"
    others = tuple(f"{verdict.group.desc if verdict.group else ''}: {verdict.summary.partition(';')[0]}" for _, verdict in cluster[1:5])
    return replace(first, culprit_ranks=culprits if most > 1 else first.culprit_ranks, summary=summary, evidence=(*first.evidence, *others))


def _lead(view: View, old: Lead | None) -> Lead | None:
    """How far whom, while the numbers move."""
    lowest = min(member.entered for member in view.members.values())
    ahead = tuple(sorted((rank, member.entered - lowest) for rank, member in view.members.items() if member.entered > lowest))
    if not ahead or lowest == 0:
        return None
    if old is None:
        return Lead(ahead, 0, lowest, 0, lowest)
    moved = lowest > old.lowest
    return Lead(ahead, old.polls + moved if old.leads == ahead else 0, lowest, old.apart + moved, old.began)


def _lines(view: View, ranks: Mapping[int, RankState], worlds: Mapping[int, int]) -> dict[int, Calls]:
    """The histories of those members that are in the same group for certain. worlds: generation of each rank's default group.

    A name is given anew once the default group was destroyed, and ranks do so at different moments: then they are in different ones.
    """
    name, found = view.group.name, {}
    for rank, member in view.members.items():
        calls = ranks[rank].calls.get(name)
        if calls is not None and calls.generation == member.group.generation and len(calls.kinds) >= KIND_BYTES:
            found[rank] = calls
    numbered = name.isdigit()  # else named by its members, and made anew within a world
    places = {(worlds[rank],) if numbered else (worlds[rank], calls.generation) for rank, calls in found.items()}
    if len(places) < 2:
        return found
    newest = max(places)
    return {rank: calls for rank, calls in found.items() if newest == ((worlds[rank],) if numbered else (worlds[rank], calls.generation))}


def _unread(view: View, lines: Mapping[int, Calls], paired: Paired, scene: Scene) -> list[int]:
    """Members whose histories may still show which side most are on: those of other nodes come later. [] once they were waited for."""
    if paired.split_at is not None and scene.now - paired.split_at >= _LATE_S:
        return []
    return [rank for rank in view.group.ranks if rank not in lines and (rank not in scene.ranks or alive(scene.ranks[rank]))]


def _compare(lines: Mapping[int, Calls], settled: int, hung: Sequence[int]) -> _Odd | None:
    start = max(calls.first for calls in lines.values())
    behind = [rank for rank, calls in lines.items() if calls.last < start]  # not read for long
    lines = {rank: calls for rank, calls in lines.items() if rank not in behind}
    if len(lines) < 2:
        return None
    start = max(calls.first for calls in lines.values())
    end = min(settled, min(calls.last for calls in lines.values()))
    if end < start:
        return None
    parts = {rank: calls.kinds[(start - calls.first) * KIND_BYTES : (end + 1 - calls.first) * KIND_BYTES] for rank, calls in lines.items()}
    reference = next(iter(parts.values()))
    if all(part == reference for part in parts.values()):
        return None
    if (end + 1 - start) * len(parts) > _SCANNED:
        start = end + 1 - max(64, _SCANNED // len(parts))
        parts = {rank: part[-(end + 1 - start) * KIND_BYTES :] for rank, part in parts.items()}
    return _odd(lines, {rank: struct.unpack(f"<{len(part) // KIND_BYTES}I", part) for rank, part in parts.items()}, start, hung)


def _odd(lines: Mapping[int, Calls], numbers: Mapping[int, Sequence[int]], start: int, hung: Sequence[int]) -> _Odd | None:
    found: list[tuple[int, Mismatch, dict[int, Collective]]] = []
    seen: dict[tuple[tuple[int, int], ...], Mismatch | None] = {}
    last_alike = -1
    for offset, column in enumerate(zip(*numbers.values(), strict=True)):
        if len(set(column)) == 1:
            last_alike = start + offset if column[0] and not found else last_alike
            continue
        known = tuple((rank, number) for rank, number in zip(numbers, column, strict=True) if number in lines[rank].known)
        if start + offset in hung or len({number for _, number in known}) < 2:
            continue
        calls = {rank: lines[rank].known[number] for rank, number in known}
        if known not in seen:
            seen[known] = mismatch.compare(calls, shapes=True)
        if (disagreement := seen[known]) is not None:
            found.append((start + offset, disagreement, calls))
    hard = [each for each in found if each[1].differs != "shape"]
    if not hard and len(found) < _SHAPES:
        return None
    votes = Counter(rank for _, each, _ in found if each.majority for rank in each.culprits)
    culprits = tuple(sorted(rank for rank, count in votes.items() if 2 * count > len(found))) or tuple(sorted(lines))
    first, disagreement, calls = found[0]
    return _Odd(len(next(iter(numbers.values()))), tuple(each[0] for each in found), disagreement, calls, culprits, last_alike == first - 1)


def _verdict(view: View, odd: _Odd, lead: Lead | None, scene: Scene) -> Verdict:
    first, where = odd.numbers[0], f"#{odd.numbers[0]} of {view.label}"
    sides = ", ".join(f"{words.ranks_text(ranks)}: {text}" for text, ranks in odd.first.classes[:3])
    example = odd.calls[odd.first.classes[0][1][0]]
    count, since = len(odd.numbers), _since(view, first, scene)
    lines = [f"{count} of {odd.compared} common sequence numbers differ in {_differs(odd.first)}; the ranks have completed all of them"]
    lines += mismatch.evidence(odd.first, where, {})
    if lead is not None and lead.polls >= scene.limits.lead_polls:
        lines += [f"rank {rank} stays {ahead} operations ahead" for rank, ahead in lead.leads[:4]]
    named = ""
    if len(odd.culprits) < len(view.members):
        named = f"; {words.ranks_text(odd.culprits)} {words.verb(odd.culprits, 'differs', 'differ')} from the others"
    return Verdict(
        key="", verdict="diverged", cause="mismatch", domain="user_code", culprit_ranks=odd.culprits, waiting_ranks=(), since=since,
        summary=f"ranks pair different operations in {view.label} since #{first}{'' if odd.known_start else ' or earlier'} without hanging ({sides}){named}; "
        "results since then are garbage",
        unknown_ranks=scene.unknown,
        group=WaitedOn(view.group.name, view.label, view.group.ranks, example.op, first, example.input_sizes, example.dtypes),
        confidence="certain" if len(scene.ranks) >= scene.snapshot.world_size else "partial",
        advice=("Stop the job: what it learned since then is worthless.", *words.advice("mismatch")),
        evidence=tuple(lines),
    )  # fmt: skip


def _differs(found: Mismatch) -> str:
    return {"operation": "operation", "number of elements": "number of elements", "dtype": "element type", "shape": "shape"}.get(found.differs, found.differs)


def _since(view: View, number: int, scene: Scene) -> float:
    """When it was called, where the entry is still at hand; else now."""
    name = view.group.name
    times = [
        entry.created_wall_at for rank, member in view.members.items() for entry in scene.ranks[rank].collectives
        if (entry.group, entry.generation, entry.seq) == (name, member.group.generation, number) and not entry.is_p2p and entry.created_wall_at
    ]  # fmt: skip
    return wall_to_mono(scene.snapshot, min(times)) if times else scene.now
