"""Stragglers: the same rank late at collectives, step after step. Nobody is stuck, everybody pays; a ticket, never a page.

Two kinds of evidence: arrival times where the recorders were read (arrivals.py, exact within a node), and how often each rank is found
waiting (found_waiting.py). Where arrival times are exact they alone decide; where they are not, both must name the same rank, unless the others'
next calls clearly follow its arrivals, which needs no common clock.
A rank that is late in one group because it waits in another one for a third is a consequence and is not named; nor are several that are
late at once, where none stands out. Before anybody is named its stack is looked at some times: gloo's recorder shows no point-to-point call,
and a rank that waits for a message is late for another one's sake.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankwatch.model import Straggling, Verdict, WaitedOn, Want
from rankwatch.monitor.diagnose import arrivals, found_waiting, frames, readings, words
from rankwatch.monitor.diagnose.scene import Scene
from rankwatch.monitor.diagnose.state import Lateness, Looks
from rankwatch.monitor.diagnose.views import View
from rankwatch.monitor.diagnose.wants import Asked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Key = tuple[object, ...]
_READINGS = 3  # before anybody is named
_NEAR_LATES = 8  # with a clear last, three in four of them the same
_RECENT_LATES = 8  # rounds with a clear last that decide whether it is still so
_MISSES = 3  # windows or readings in a row that do not show it end it
_SAMPLES = 6  # of a suspect's stack, none of which may show it in a point-to-point call
_SAMPLE_S = 1.5  # between two of them
_BLIND_S = 15.0  # without a stack for this long there will be none
_OUTSTANDING = 2.0  # times what any other suspect costs
_COMPARE = "Compare this rank's input, host and device with the others: it does more work per step, or does the same work slower."
_STALE_WINDOWS = 6  # without news nobody is charged for the waiting
_READ_MEMBERS = 10_000  # members of the groups that are read in one look: in a job of many thousand ranks the rest has its turn at the next ones


@dataclass(frozen=True, slots=True)
class Claim:
    """One group's suspect. opens: proved now. hint: at least likely, so that it excuses ranks that wait for it elsewhere."""

    rank: int
    late_by_s: float
    last_ratio: float
    cost_ratio: float
    opens: bool
    measured: bool
    says: tuple[str, ...]
    hint: bool = True
    lacks: tuple[str, ...] = ()
    sure: bool = False  # one clock, or durations
    arrives_last: bool = False  # arrival times are sure of it, on clocks that nothing else confirms: no ground to name it, but one not to name who waits for it
    near: bool = False  # all but proved: time to look at its stack


def look(views: Iterable[View], scene: Scene, asked: Asked, troubled: bool) -> tuple[dict[Key, Lateness], list[Verdict], list[Want]]:
    """What to remember, one verdict a straggler (its key is left open), and the evidence to fetch before one is given.

    troubled: ranks hang or are slow now, nobody new is named.
    """
    entries = readings.Entries(scene.ranks)
    compiling = {rank for rank, state in scene.ranks.items() if state.compiling}
    kept: dict[Key, Lateness] = {}
    seen: dict[Key, View] = {}
    for view in views:
        if len(view.members) < 2 or view.absent or view.unknown or view.stale:
            continue
        key: Key = (*view.key, view.group.generation)
        lowest = min(member.done for member in view.members.values())
        kept[key] = scene.state.lateness.get(key) or Lateness(Looks(scene.now, first_seq=lowest))
        seen[key] = view
    due = _due(kept, seen, scene)
    for key, late in kept.items():
        kept[key] = _observe(late, seen[key], scene, entries, not compiling.isdisjoint(seen[key].members), due.get(key))
    claims = {key: claim for key, late in kept.items() if (claim := _claim(late, seen[key], scene)) is not None}
    inside = _memberships(claims, seen)
    free = {place: claim for place, claim in claims.items() if not _excused(place, claims, inside)}
    rivals = _Rivals(free.values())
    sought: dict[int, None] = {}
    unread: dict[int, None] = {}
    for place, late in kept.items():
        claim = claims.get(place)
        if late.told is None and late.looks.culprit is not None and (claim is None or not (claim.measured and claim.opens)):  # in flight is not yet waited for
            unread.update(dict.fromkeys(seen[place].members))
        if late.told is None and place in free and (free[place].near or free[place].opens):
            late = _sampled(late, free[place].rank, scene)
            if not late.talks and not _cleared(late, scene):
                sought[free[place].rank] = None
        rivalled = troubled or (place in free and rivals.of(free[place]))
        kept[place] = _decide(late, claim, claim is not None and place not in free, scene, rivalled)
    wanted = []
    if chosen := asked.due("stacks", sought, _SAMPLE_S, scene.limits.max_stacks):
        wanted.append(Want("stacks", chosen, "late again and again"))
    if chosen := asked.due("recorder", unread, scene.limits.straggler_window_s / 2, scene.limits.max_recorders):
        wanted.append(Want("recorder", chosen, "one of them seems to be late again and again"))
    told = {key: claims[key] for key, late in kept.items() if late.told is not None and key in claims and claims[key].rank == late.told}
    best = {claim.rank: key for key, claim in sorted(told.items(), key=lambda item: item[1].cost_ratio)}
    verdicts = [_verdict(claims[key], kept[key], seen[key], scene, tuple(sorted(set(best) - {rank}))) for rank, key in sorted(best.items())]
    return kept, verdicts, wanted


# -- evidence --------------------------------------------------------------------------------------------------------------


def _due(lates: Mapping[Key, Lateness], seen: Mapping[Key, View], scene: Scene) -> dict[Key, float]:
    """The groups of which a reading is taken now, and the moment of each: all that are due, those that have waited longest where they are too many."""
    every_s = scene.limits.straggler_window_s / 2
    due = {key: at for key, late in lates.items() if (at := readings.due(late, seen[key], scene.ranks, every_s)) is not None}
    if sum(len(seen[key].members) for key in due) <= _READ_MEMBERS:
        return due
    chosen: dict[Key, float] = {}
    members = 0
    for key in sorted(due, key=lambda key: lates[key].read_at):
        members += len(seen[key].members)
        if chosen and members > _READ_MEMBERS:
            break
        chosen[key] = due[key]
    return chosen


def _observe(late: Lateness, view: View, scene: Scene, entries: readings.Entries, compiling: bool, at: float | None) -> Lateness:
    """at: of the reading that is taken now, None where none is."""
    pause = scene.state.pauses[-1][0] if scene.state.pauses else -1.0
    if compiling or pause >= late.looks.start:
        late = replace(late, looks=found_waiting.restart(late.looks, view, scene.now))
    suspect = _suspect(late) if found_waiting.ends(late.looks, scene.now, scene.limits) else None
    looks, ended = found_waiting.add(late.looks, view, scene.now, scene.limits, suspect)
    if view.mixed:  # who is found waiting there depends on whose entries were read last
        looks, ended = Looks(scene.now, first_seq=late.looks.first_seq), False
    late = replace(late, looks=looks)
    if ended and late.told is not None and not _exact(late):
        late = replace(late, misses=0 if looks.culprit == late.told else late.misses + 1)
    if at is None:
        return late
    before = len(late.readings), late.readings[-1:]
    late = readings.add(late, view, scene.ranks, entries, at, compiling or pause >= late.read_at)
    if late.told is not None and _exact(late) and (len(late.readings), late.readings[-1:]) != before:
        late = replace(late, misses=0 if _still(late, scene.limits.straggler_close_ratio) else late.misses + 1)
    return late


def _suspect(late: Lateness) -> int | None:
    standing = arrivals.standing(late.readings)
    return standing.rank if standing is not None and standing.sure else None


def _exact(late: Lateness) -> bool:
    return bool(late.readings) and all(reading.exact for reading in late.readings)


def _still(late: Lateness, close_ratio: float) -> bool:
    """Whether the newest readings still show the straggler that is told."""
    first, lates = len(late.readings), 0
    while first > 0 and (lates < _RECENT_LATES or len(late.readings) - first < 2):
        first -= 1
        lates += len(late.readings[first].lates)
    now = arrivals.standing(late.readings[first:])
    return now is not None and now.rank == late.told and 2 * now.late >= now.clear and now.frequent and now.cost_ratio >= close_ratio


def _claim(late: Lateness, view: View, scene: Scene) -> Claim | None:
    by_time = arrivals.standing(late.readings)
    by_looks = found_waiting.named(late.looks)
    if _exact(late):
        return _measured(by_time, late, scene) if by_time is not None else None
    if late.looks.culprit is None and late.told is None and (by_time is None or not (by_time.drives or by_time.sure)):
        return None
    if by_time is not None and by_time.late >= _RECENT_LATES:  # clocks of several nodes, or of the host beside the device: looks or what follows must agree
        claim = _measured(by_time, late, scene)
        backed = found_waiting.backed(late.looks, view, scene.limits)
        backed = backed if backed is not None and backed[0] == claim.rank else None
        agreed = by_looks == claim.rank or late.told == claim.rank
        shown = agreed or backed is not None or by_time.drives
        found = _found(late, view) if agreed else ()
        if backed is not None and not found:
            found = (f"found waiting: every rank but {claim.rank} at {backed[2]} collectives or more in {backed[3]} looks, that one at {backed[1]}",)
        return replace(
            claim, opens=claim.opens and shown, hint=shown, near=claim.near and (shown or late.looks.culprit is not None),
            arrives_last=by_time.sure and claim.hint, says=(*claim.says, *found),
        )  # fmt: skip
    return _estimated(late, view, scene, by_looks is not None and not late.readings)


def _measured(standing: arrivals.Standing, late: Lateness, scene: Scene) -> Claim:
    proved = standing.sure and standing.frequent and standing.cost_ratio >= scene.limits.straggler_open_ratio
    says = (
        f"arrival times of {standing.rounds} collectives in {len(late.readings)} reads of the recorders: {standing.late} of {standing.clear} that had "
        f"a clear last one waited for rank {standing.rank}, {_time(standing.late_by_s)} after the last but one in the median",
    )
    hint = standing.late >= 4 and 2 * standing.late >= standing.clear and standing.cost_ratio >= scene.limits.straggler_close_ratio
    return Claim(
        standing.rank, standing.late_by_s, standing.late / standing.clear, standing.cost_ratio, proved and len(late.readings) >= _READINGS, True, says,
        hint, sure=standing.exact, near=proved or (hint and standing.late >= _NEAR_LATES and 4 * standing.late >= 3 * standing.clear),
    )  # fmt: skip


def _estimated(late: Lateness, view: View, scene: Scene, opens: bool) -> Claim | None:
    looks = late.looks
    rank = looks.culprit if looks.culprit is not None else late.told
    if rank is None:
        return None
    others, seen = len(view.members) - 1, max(1, looks.seen)
    cost = looks.total / others / seen if looks.culprit is not None else 0.0
    moved = max(1, min(member.done for member in view.members.values()) - looks.first_seq)
    late_by_s = cost * max(0.1, scene.now - looks.start) / moved
    lacks = ("arrival times: the recorders' entries were not read, or cannot be compared",)
    last_ratio = 1.0 - looks.own / max(1, looks.own + looks.least)
    return Claim(rank, late_by_s, last_ratio, cost, opens, False, _found(late, view), looks.streak > 1, lacks, near=opens)


def _found(late: Lateness, view: View) -> tuple[str, ...]:
    looks = late.looks
    others = len(view.members) - 1
    if looks.culprit is None or not looks.seen:
        return ()
    return (f"found waiting: every rank but {looks.culprit} in {looks.total / others / looks.seen:.0%} of {looks.seen} looks, that one in {looks.own}",)


# -- judgement -------------------------------------------------------------------------------------------------------------


def _memberships(claims: Mapping[Key, Claim], seen: Mapping[Key, View]) -> dict[int, list[Key]]:
    """The groups with a claim that each suspect is a member of."""
    suspects = {claim.rank for claim in claims.values()}
    inside: dict[int, list[Key]] = {rank: [] for rank in suspects}
    for place in claims:
        for rank in suspects & seen[place].members.keys():
            inside[rank].append(place)
    return inside


def _excused(key: Key, claims: Mapping[Key, Claim], inside: Mapping[int, Sequence[Key]]) -> bool:
    """Whether the group's suspect is itself kept waiting, in another group, by another suspect. inside: the groups that each suspect is in."""
    claim = claims.get(key)
    if claim is None:
        return False
    return any(
        other.rank != claim.rank and (other.hint or (other.arrives_last and claim.measured and not claim.sure)) and other.late_by_s >= 0.5 * claim.late_by_s
        for place in inside[claim.rank]
        if place != key and (other := claims[place]) is not None
    )


class _Rivals:
    """Ranks that are likely late as well, by what they cost most."""

    def __init__(self, claims: Iterable[Claim]) -> None:
        costs: dict[int, float] = {}
        for claim in claims:
            if claim.hint:
                costs[claim.rank] = max(claim.cost_ratio, costs.get(claim.rank, claim.cost_ratio))
        self._costliest = sorted(costs.items(), key=lambda item: -item[1])[:2]

    def of(self, claim: Claim) -> bool:
        """Whether another rank is late as well, by about as much: one may wait for the other where no recorder sees it."""
        return any(rank != claim.rank and claim.cost_ratio < _OUTSTANDING * cost for rank, cost in self._costliest)


def _sampled(late: Lateness, rank: int, scene: Scene) -> Lateness:
    """With what the newest stack of this suspect shows."""
    if late.suspect != rank:
        late = replace(late, suspect=rank, suspect_since=scene.now, samples=0, sampled_at=scene.now, talks=False, places=())
    stack = scene.ranks[rank].stack
    if stack is None or not stack.main or stack.at <= late.sampled_at:
        return late
    place = "" if frames.blocked(stack) else frames.where(stack.main)
    places = (*late.places, place)[-_SAMPLES:]
    return replace(late, samples=late.samples + 1, sampled_at=stack.at, talks=late.talks or bool(frames.in_point_to_point(stack)), places=places)


def _place(late: Lateness) -> tuple[str, str]:
    """("train.py:31:load_batch", "4 of 6 samples ...") of the function that it was found in most often outside of collectives; "" where none stands out."""
    by_function: dict[tuple[str, str], list[str]] = {}
    for place in filter(None, late.places):
        file, _, function = place.split(":", 2) if place.count(":") >= 2 else (place, "", "")
        by_function.setdefault((file, function), []).append(place)
    found = max(by_function.values(), key=len, default=[])
    if len(found) < 2 or 2 * len(found) < len(late.places):
        return "", ""
    at = max(found, key=found.count)
    return at, f"{len(found)} of the newest {len(late.places)} samples of its stack were in {at}"


def _cleared(late: Lateness, scene: Scene) -> bool:
    """Whether the suspect's stack was seen often enough, or is not to be had."""
    return not late.talks and (late.samples >= _SAMPLES or scene.now - max(late.suspect_since, late.sampled_at) >= _BLIND_S)


def _decide(late: Lateness, claim: Claim | None, excused: bool, scene: Scene, nobody_new: bool) -> Lateness:
    if late.told is None:
        if claim is None or not claim.opens or excused or nobody_new or late.suspect != claim.rank or not _cleared(late, scene):
            return late
        return replace(late, told=claim.rank, since=_since(late, scene), misses=0)
    if late.misses >= _MISSES or excused or claim is None or claim.rank != late.told:
        return replace(late, told=None, readings=(), looks=Looks(scene.now, first_seq=late.looks.first_seq), misses=0, suspect=None)
    return late


def _since(late: Lateness, scene: Scene) -> float:
    window_s = scene.limits.straggler_window_s
    if late.readings:
        return min(late.readings[0].at - late.readings[0].covered_s, scene.now - 2 * window_s)
    return scene.now - late.looks.streak * window_s


def _verdict(claim: Claim, late: Lateness, view: View, scene: Scene, also: Sequence[int]) -> Verdict:
    rank, limits = claim.rank, scene.limits
    others = tuple(other for other in sorted(view.members) if other != rank)
    news_at = max(late.readings[-1].at if late.readings else 0.0, late.looks.start)
    cost = claim.cost_ratio if scene.now - news_at < _STALE_WINDOWS * limits.straggler_window_s else 0.0
    per_min = 60.0 * cost * len(others)
    about = "" if claim.measured else "about "
    at, line = _place(late) if late.suspect == rank else ("", "")
    note = (f"{words.ranks_text(also)} {words.verb(also, 'is', 'are')} late as well: one may wait for another where no recorder sees it",) if also else ()
    return Verdict(
        key="", verdict="straggler", cause="not_entered", domain="unknown", culprit_ranks=(rank,), waiting_ranks=others, since=late.since,
        summary=f"rank {rank} is the last at {claim.last_ratio:.0%} of the collectives of {view.label}, by {about}{_time(claim.late_by_s)}: "
        f"{words.ranks_text(others)} {words.verb(others, 'loses', 'lose')} {about}{per_min:.1f} rank-s a minute waiting for it",
        group=WaitedOn(view.group.name, view.group.desc, view.group.ranks, "", 0),
        confidence="partial" if also else "certain" if claim.sure else "likely",
        at=at,
        advice=(*((f"Start at {at} on rank {rank}.",) if at else ()), _COMPARE),
        evidence=(*claim.says, *((line,) if line else ()), *note),
        missing_evidence=claim.lacks,
        straggling=Straggling(claim.late_by_s, claim.last_ratio, cost, per_min, claim.measured),
    )  # fmt: skip


def _time(seconds: float) -> str:
    """`148 ms`, `2.4 s`."""
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
