"""What waiting costs, by the rank that is waited for and why: the sum that the last line of a run shows, incidents or not.

Long waits are charged from their start to whoever was blamed for most of them. Short ones are below every notice: there each
beat of a rank's heart is a sample of whether it waits in a collective, taken without regard to what it does, so that shares of time come
out right over a minute. A rank that waits clearly less than all others is the one that they wait for, and what they wait more than it is
lost; what all wait alike is the cost of communication and is not counted, nor is a lateness that goes round. Ranks of a node that does not
answer are left out until it tells what they did.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import sqrt

from rankwatch.model import RankState, Verdict, Waited
from rankwatch.monitor.diagnose import silence
from rankwatch.monitor.diagnose.state import age

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rankwatch.monitor.diagnose.scene import Scene
    from rankwatch.monitor.diagnose.views import View
    from rankwatch.monitor.diagnose.waits import Wait
    from rankwatch.monitor.diagnose.wants import Case

MAX_ROWS = 256  # pairs of rank and reason; the cheapest are added up under "other" beyond that
NO_RANK = -1
MAX_BLAMED = 8  # of more culprits none is charged by itself
STRAGGLING = "straggling"
_SIGHT_S = 4.0  # from a rank's entry to the first look that shows it: a round of reports, and two beats of its numbers
_WINDOW_S = 60.0
_SHORTEST_S = 10.0  # of a window that counts when its group or the run ends
_BEAT_S = 0.5
_LONGEST_BEAT_S = 2.0  # a beat after a longer silence is no sample of that time
_CLEAR_RATIO = 0.02  # of its time that every other rank has to wait more than the straggler, and ...
_CLEAR_SIGMAS = 3.0  # ... so many standard deviations of the sampling

Row = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Blame:
    """Seconds for which somebody was blamed, and the reason that tells most of those given (detail: how much)."""

    seconds: float
    reason: str
    detail: int
    reasons: Mapping[int, str] = field(default_factory=dict)  # of culprits that are in different places


@dataclass(frozen=True, slots=True)
class Pending:
    """One trouble that lasts. waiting: ranks that are charged up to now. blamed: by culprits; at most MAX_BLAMED of them.

    until: up to when those are charged that waited and are not heard of any more.
    """

    rank_s: float = 0.0
    blamed: Mapping[tuple[int, ...], Blame] = field(default_factory=dict)
    waiting: frozenset[int] = frozenset()
    until: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Window:
    """Samples of one group: seconds that each rank was looked at, and those in which it was found waiting."""

    start: float
    seen: Mapping[int, float] = field(default_factory=dict)
    waited: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Rank-seconds lost so far. `Ledger()` is empty. It outlives the attempts of a run; what is open does not."""

    spent: Mapping[Row, float] = field(default_factory=dict)
    pending: Mapping[str, Pending] = field(default_factory=dict)  # by the trouble's key
    windows: Mapping[tuple[object, ...], Window] = field(default_factory=dict)
    beats: Mapping[int, float] = field(default_factory=dict)
    counted_at: float | None = None


def observe(ledger: Ledger, cases: Sequence[Case], found: Sequence[Wait], views: Iterable[View], scene: Scene) -> Ledger:
    """The ledger after one look. cases: the hangs of this look; found: the waits behind them."""
    paused = scene.snapshot.gap_s > scene.limits.max_gap_s or ledger.counted_at is None
    dt = 0.0 if paused or ledger.counted_at is None else max(0.0, scene.now - ledger.counted_at)
    pending: dict[str, Pending] = {}
    unheard = silence.unheard(scene.snapshot)
    long: dict[int, float] = {}  # ranks in long waits, with the seconds that were charged only now
    for hang, ruling, trouble in cases:
        verdict = ruling.verdict
        waiting = verdict.waiting_ranks if verdict is not None else tuple(rank for rank in hang.waiting if rank not in ruling.culprits)
        old = ledger.pending.get(trouble.key) or Pending()
        until = old.until
        if unheard:
            until = {**until, **dict.fromkeys(unheard & old.waiting, ledger.counted_at or scene.now)}
            waiting = tuple(rank for rank in waiting if rank not in unheard)
            if not waiting:  # for whom anybody waits is not known now
                pending.update({trouble.key: replace(old, waiting=frozenset(), until=until)} if old.blamed else {})
                continue
        fresh = [rank for rank in waiting if rank not in old.waiting]
        late = _waited(fresh, [found[index] for index in hang.waits], scene, old.until) if fresh else {}
        lost = old.rank_s + dt * sum(rank in old.waiting for rank in waiting) + sum(late.values())
        reason, detail = _reason(verdict, found[hang.waits[0]].kind, ruling.culprits, scene.ranks)
        before = old.blamed.get(ruling.culprits) or Blame(0.0, reason, -1)
        better = detail >= before.detail
        each = {rank: f"{verdict.cause} at {place}" for rank, place in verdict.places} if verdict is not None else {}
        blame = Blame(before.seconds + dt, reason if better else before.reason, detail if better else before.detail, each or before.reasons)
        others = dict(list(old.blamed.items())[-MAX_BLAMED:])
        pending[trouble.key] = Pending(lost, {**others, ruling.culprits: blame}, frozenset(waiting), until)
        long.update({**dict.fromkeys(waiting, 0.0), **late})
    spent = dict(ledger.spent)
    for key, ended in ledger.pending.items():
        if key not in pending:
            _charge(spent, ended)
    windows, beats = _sample(ledger, views, long, scene, paused)
    for place, window in ledger.windows.items():
        if place not in windows:  # the group is gone
            _charge_rest(spent, window)
    for place, window in list(windows.items()):
        if scene.now - window.start >= _WINDOW_S:
            _charge_straggler(spent, window)
            windows[place] = Window(scene.now)
    return Ledger(_bounded(spent), pending, windows, beats, scene.now)


def explained(ledger: Ledger, failure: Verdict) -> Ledger:
    """The ledger once it is known of what ranks have ended that others wait for: nobody has said so of this wait before."""
    culprits, word = failure.culprit_ranks, f"{failure.cause} at {failure.at}" if failure.at else failure.cause
    pending = {
        key: replace(each, blamed={**each.blamed, culprits: replace(each.blamed[culprits], reason=word, detail=1)})
        if culprits in each.blamed and each.blamed[culprits].detail <= 0 else each
        for key, each in ledger.pending.items()
    }  # fmt: skip
    return replace(ledger, pending=pending)


def ended(ledger: Ledger) -> Ledger:
    """The ledger when its processes are gone: what was open is charged."""
    spent = dict(ledger.spent)
    for pending in ledger.pending.values():
        _charge(spent, pending)
    for window in ledger.windows.values():
        _charge_rest(spent, window)
    return Ledger(_bounded(spent))


def rows(ledger: Ledger | None, *, over: bool = False) -> tuple[Waited, ...]:
    """What is charged so far, open troubles included, costliest first. over: the processes are gone, so that the last samples count as well."""
    if ledger is None:
        return ()
    ledger = ended(ledger) if over else ledger
    spent = dict(ledger.spent)
    for pending in ledger.pending.values():
        _charge(spent, pending)
    return tuple(Waited(rank, reason, rank_s) for (rank, reason), rank_s in sorted(spent.items(), key=lambda item: (-item[1], item[0])))


# -- long waits ------------------------------------------------------------------------------------------------------------


def _waited(ranks: Sequence[int], waits: Sequence[Wait], scene: Scene, until: Mapping[int, float]) -> dict[int, float]:
    """How long each of these ranks has waited when it is first charged, or since `until`. Never longer than it was seen in it, whatever its clock says."""
    starts: dict[int, float] = {}
    for wait in waits:
        for rank, since in wait.waiters.items():
            least = max(since, scene.snapshot.started_at, until.get(rank, since))
            member = wait.view.members.get(rank) if wait.view is not None else None
            opened = scene.state.opens.get((rank, wait.name, member.group.generation)) if member is not None else None
            if opened is not None:
                least = max(least, opened.seen_at - scene.lag(rank) - _SIGHT_S)
            starts[rank] = min(least, starts.get(rank, least))
    return {rank: max(0.0, age(scene.state.pauses, starts[rank], scene.now) - scene.lag(rank)) if rank in starts else 0.0 for rank in ranks}


def _reason(verdict: Verdict | None, kind: str, culprits: Sequence[int], ranks: Mapping[int, RankState]) -> tuple[str, int]:
    """Why, and how much that tells: 0 nothing but what kind of wait it is, 1 the cause, 2 with its place.

    verdict None: the wait is too young for one. A compile in flight on every culprit is its reason then, until a verdict says another.
    """
    start = {"init": "start-up", "creation": "group creation"}.get(kind, "")
    if verdict is None:
        each = {_compiles(ranks[rank]) if rank in ranks else "" for rank in culprits}
        if not each or "" in each:
            return start or "late", 0
        return each.pop() if len(each) == 1 else "compiling", 1
    if verdict.cause == "compiling":
        running = [activity for rank in verdict.culprit_ranks[:MAX_BLAMED] if rank in ranks for activity in ranks[rank].compiling]
        activity = min(running, key=lambda each: each.started_at, default=None)
        if activity is not None and activity.frame:
            return f"{'recompiling' if activity.recompile_reason else 'compiling'} {activity.frame}", 2
        return f"compiling at {verdict.at}" if verdict.at else "compiling", 1
    word = start if start and verdict.cause in ("store_wait", "not_entered", "unknown") else verdict.cause
    return (f"{word} at {verdict.at}", 2) if verdict.at else (word, 1)


def _compiles(state: RankState) -> str:
    """ "recompiling forward@model.py:31" of a rank whose compile is in flight, and waits for nobody itself."""
    activity = min((each for each in state.compiling if each.phase != "cross_rank_wait"), key=lambda each: each.started_at, default=None)
    if activity is None or not activity.frame:
        return ""
    return f"{'recompiling' if activity.recompile_reason else 'compiling'} {activity.frame}"


def _charge(spent: dict[Row, float], pending: Pending) -> None:
    culprits, blame = max(pending.blamed.items(), key=lambda item: (item[1].seconds, item[1].detail))
    blamed = culprits if 0 < len(culprits) <= MAX_BLAMED else (NO_RANK,)
    for rank in blamed:
        row = (rank, blame.reasons.get(rank, blame.reason))
        spent[row] = spent.get(row, 0.0) + pending.rank_s / len(blamed)


# -- short waits -----------------------------------------------------------------------------------------------------------


def _sample(
    ledger: Ledger, views: Iterable[View], long: Mapping[int, float], scene: Scene, paused: bool
) -> tuple[dict[tuple[object, ...], Window], dict[int, float]]:
    """The windows with one more sample of each rank whose heart has beaten since the look before."""
    beats = {rank: state.heartbeat_at for rank, state in scene.ranks.items() if state.heartbeat_at is not None}
    spans = {
        rank: span for rank, at in beats.items()
        if rank not in long and (before := ledger.beats.get(rank)) is not None and 0.0 < (span := at - before) <= _LONGEST_BEAT_S
    }  # fmt: skip
    windows: dict[tuple[object, ...], Window] = {}
    for view in views:
        if len(view.members) < 2:
            continue
        key = (*view.key, view.group.generation)
        window = ledger.windows.get(key)
        if window is None or paused:
            windows[key] = window or Window(scene.now)
            continue
        seen, waited = dict(window.seen), dict(window.waited)
        for rank, member in view.members.items():
            if rank in spans:
                seen[rank] = seen.get(rank, 0.0) + spans[rank]
                if member.entered > member.done:
                    waited[rank] = waited.get(rank, 0.0) + spans[rank]
            elif long.get(rank) and rank in waited:  # its samples were of a wait that is charged as a long one now
                taken = min(waited[rank], long[rank])
                waited[rank], seen[rank] = waited[rank] - taken, seen[rank] - taken
        windows[key] = replace(window, seen=seen, waited=waited)
    return windows, beats


def _charge_rest(spent: dict[Row, float], window: Window) -> None:
    """A window that ends early."""
    if max(window.seen.values(), default=0.0) >= _SHORTEST_S:
        _charge_straggler(spent, window)


def _charge_straggler(spent: dict[Row, float], window: Window) -> None:
    most = max(window.seen.values(), default=0.0)
    shares = sorted((window.waited.get(rank, 0.0) / seen, rank) for rank, seen in window.seen.items() if seen >= 0.5 * most and seen > 0.0)
    if len(shares) < 2:
        return
    (least, rank), (next_least, next_rank) = shares[0], shares[1]
    spread = sqrt(sum(share * (1.0 - share) * _BEAT_S / window.seen[who] for share, who in ((least, rank), (next_least, next_rank))))
    if next_least - least < max(_CLEAR_RATIO, _CLEAR_SIGMAS * spread):
        return
    row = (rank, STRAGGLING)
    spent[row] = spent.get(row, 0.0) + sum((share - least) * window.seen[other] for share, other in shares[1:])


def _bounded(spent: dict[Row, float]) -> dict[Row, float]:
    if len(spent) <= MAX_ROWS:
        return spent
    order = sorted((row for row in spent if row != (NO_RANK, "other")), key=lambda row: -spent[row])
    kept = {row: spent[row] for row in order[: MAX_ROWS // 2]}
    rest = sum(spent[row] for row in order[MAX_ROWS // 2 :]) + spent.get((NO_RANK, "other"), 0.0)
    return {**kept, (NO_RANK, "other"): rest}
