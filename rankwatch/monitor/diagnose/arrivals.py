"""Who came last to the collectives of one group, and by how much: arithmetic on arrival times, and what may be concluded from it.

An arrival is the moment a rank enqueues the operation. Collectives that are in flight together (DDP's buckets) are one round, which the
last of them ends: its wait is paid once. What a late rank costs is its distance to the last but one: that is what the others would
have gained without it. On NCCL with timing on, the duration holds the wait, so that the shortest one came last; no clock is compared.

To come last costs nothing where nobody waits: an asynchronous operation that all others have long left for the next one, a lag that the
slack before a `wait()` hides for ever. So what the others call next must come after the last arrival, and follow it more steadily than it
follows their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Table = dict[int, dict[int, float]]  # sequence number -> rank -> arrival, seconds on one clock a node
Nexts = dict[int, dict[int, tuple[float, object]]]  # likewise, what a rank calls next in any group: when, and what kind of call it is

MAX_LATES = 16  # of one reading; more of them prove nothing more
_FLOOR_S = 1e-3  # skew below this is the machine's
_FLOOR_RATIO = 0.02  # of the time between two rounds
_TRIM = 3.0  # times the median: one long wait (a checkpoint) is not what a straggler costs
_MIN_LATES = 16
_LIKE = 4  # calls of one kind, at least, that tell how steadily they come
_STEADY_S = 2e-4  # steadier than this is steady
_DRIVES = 4.0  # times as steadily, in squares
_SURE = 2.0  # standard deviations of a coin over `_MIN_LATES` and more rounds, halved: z = 4
_PER_STEP = 0.4  # rounds at which it is late, per step, or per round where no step is seen: a rank that saves every third step is no straggler


@dataclass(frozen=True, slots=True)
class Reading:
    """What one read of the recorders tells beyond the one before. lates: (rank, seconds after the last but one) of rounds with a clear last.

    rounds, covered_s: how many rounds ended in how much time. steps: optimizer steps in that time, None where none are seen.
    exact: one clock, or durations; else only looks that agree make it count. follows: (rank that is last most often, summed squared deviations
    of the others' next calls from its arrivals, the same from their own arrivals); None where that is not known.
    """

    at: float
    rounds: int
    covered_s: float
    lates: tuple[tuple[int, float], ...]
    clear: int  # rounds with a clear last, of which `lates` holds the newest
    steps: float | None = None
    exact: bool = True
    follows: tuple[int, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """The rank that is last most often over some readings. cost_ratio: share of the time that it costs every other rank."""

    rank: int
    late: int  # rounds at which it was clearly last ...
    clear: int  # ... of those that had a clear last
    rounds: int
    late_by_s: float  # median
    cost_ratio: float
    sure: bool  # no coin: rotating lateness does not look like this
    frequent: bool  # in about every step, not now and then
    exact: bool
    drives: bool  # what the others call next follows its arrivals, whatever the clocks say


def clock_shifts(stamps: Table, nodes: Mapping[int, str]) -> dict[str, float]:
    """What to take off each node's clock so that the nodes' first ranks arrive together in the median.

    So a constant offset between two clocks makes nobody late; neither does a node that is late as a whole, which this cannot tell from it.
    """
    homes = sorted(set(nodes.values()))
    if len(homes) < 2:
        return dict.fromkeys(homes, 0.0)
    firsts = {seq: _firsts(row, nodes) for seq, row in stamps.items()}
    return {home: median(first[home] - first[homes[0]] for first in firsts.values()) if firsts else 0.0 for home in homes}


def _firsts(row: Mapping[int, float], nodes: Mapping[int, str]) -> dict[str, float]:
    first: dict[str, float] = {}
    for rank, at in row.items():
        home = nodes[rank]
        first[home] = min(at, first.get(home, math.inf))
    return first


def read_stamps(stamps: Table, nodes: Mapping[int, str], at: float, steps_per_s: float | None, nexts: Nexts | None = None) -> tuple[Reading | None, int | None]:
    """One reading, and the number from which the next one must start (None: nothing complete yet).

    stamps: complete rows only, from the number that the reading before gave on. The first round only starts the clock, the last one
    may not have ended: neither is counted. nexts: where known, a rank whose peers went on without it is not late.
    """
    shifts = clock_shifts(stamps, nodes)
    table = {seq: {rank: stamp - shifts[nodes[rank]] for rank, stamp in row.items()} for seq, row in stamps.items()}
    ends: list[int] = []  # numbers that end a round
    latest = -math.inf
    for seq in sorted(table):
        row = table[seq].values()
        if ends and min(row) < latest:
            ends[-1] = seq
        else:
            ends.append(seq)
        latest = max(latest, *row)
    if len(ends) < 2:
        return None, None
    if len(ends) < 3:
        return None, ends[0]
    counted = ends[1:-1]
    covered_s = max(table[counted[-1]].values()) - max(table[ends[0]].values())
    margins = [_margin(table[seq]) for seq in counted]
    follows = None
    if nexts is not None:
        went_on = {seq: {rank: (when - shifts[nodes[rank]], what) for rank, (when, what) in nexts.get(seq, {}).items()} for seq in counted}
        margins = [margin if _held(table[seq], margin[0], went_on[seq]) else (margin[0], 0.0) for seq, margin in zip(counted, margins, strict=True)]
        follows = _follows(table, counted, margins, went_on)
    reading = _reading(margins, covered_s, at, steps_per_s, len(set(nodes.values())) == 1)
    return replace(reading, follows=follows) if reading is not None else None, counted[-1]


def _held(row: Mapping[int, float], last: int, nexts: Mapping[int, tuple[float, object]]) -> bool:
    """Whether most of the others called nothing else before the last one came."""
    stayed = sum(rank not in nexts or nexts[rank][0] >= row[last] for rank in row if rank != last)
    return 2 * stayed >= len(row) - 1


def _follows(table: Table, numbers: Sequence[int], margins: Sequence[tuple[int, float]], nexts: Nexts) -> tuple[int, float, float] | None:
    """As Reading.follows. Of each kind of next call by itself: some come soon and some late, whoever waits for whom."""
    lates = [(seq, rank, by_s) for seq, (rank, by_s) in zip(numbers, margins, strict=True) if by_s > _FLOOR_S]
    last = max({rank for _, rank, _ in lates}, key=lambda each: sum(rank == each for _, rank, _ in lates), default=None)
    if last is None:
        return None
    most_s = _TRIM * median(by_s for _, rank, by_s in lates if rank == last)
    kinds: dict[tuple[int, object], list[tuple[float, float]]] = {}
    for seq, rank, by_s in lates:
        if rank == last and by_s <= most_s:
            for other, (when, what) in nexts[seq].items():
                if other != last:
                    kinds.setdefault((other, what), []).append((when - table[seq][last], when - table[seq][other]))
    after_last = after_own = 0.0
    for each in kinds.values():
        if len(each) >= _LIKE:
            after_last += len(each) * max(_STEADY_S, _deviation([pair[0] for pair in each])) ** 2
            after_own += len(each) * max(_STEADY_S, _deviation([pair[1] for pair in each])) ** 2
    return (last, after_last, after_own) if after_own else None


def _deviation(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)


def read_durations(durations: Table, created: Mapping[int, float], at: float, steps_per_s: float | None) -> tuple[Reading | None, int | None]:
    """The same from how long each operation took on each rank (seconds). created: when one rank enqueued them, for the time covered."""
    numbers = sorted(durations)
    if len(numbers) < 2:
        return None, numbers[0] if numbers else None
    covered_s = created[numbers[-1]] - created[numbers[0]]
    margins = [_margin({rank: -taken_s for rank, taken_s in durations[seq].items()}) for seq in numbers[1:]]
    return _reading(margins, covered_s, at, steps_per_s, True), numbers[-1]


def _margin(row: Mapping[int, float]) -> tuple[int, float]:
    """(last rank, seconds after the last but one)."""
    rank = max(row, key=row.__getitem__)
    return rank, row[rank] - max(at for other, at in row.items() if other != rank)


def _reading(margins: Sequence[tuple[int, float]], covered_s: float, at: float, steps_per_s: float | None, exact: bool) -> Reading | None:
    if covered_s <= 0:
        return None
    floor = max(_FLOOR_S, _FLOOR_RATIO * covered_s / len(margins))
    clear = [(rank, by_s) for rank, by_s in margins if by_s >= floor]
    steps = steps_per_s * covered_s if steps_per_s else None
    return Reading(at, len(margins), covered_s, tuple(clear[-MAX_LATES:]), len(clear), steps, exact)


def standing(readings: Sequence[Reading]) -> Standing | None:
    """Who was last most often over these readings; None where nobody ever clearly was."""
    late: dict[int, list[float]] = {}
    for reading in readings:
        for rank, by_s in reading.lates:
            late.setdefault(rank, []).append(by_s)
    if not late:
        return None
    rank = max(late, key=lambda each: (len(late[each]), sum(late[each])))
    times, all_lates = len(late[rank]), sum(map(len, late.values()))
    typical = median(late[rank])
    cost_s, weighed = 0.0, 0.0
    for reading in readings:  # `lates` may be a part of the clear rounds: the rest is taken to be like it
        scale = reading.clear / len(reading.lates) if reading.lates else 1.0
        cost_s += scale * sum(min(by_s, _TRIM * typical) for each, by_s in reading.lates if each == rank)
        weighed += scale * sum(each == rank for each, _ in reading.lates)
    covered_s, rounds = sum(reading.covered_s for reading in readings), sum(reading.rounds for reading in readings)
    followed = _followed(rank, readings)
    steps = sum(reading.steps for reading in readings if reading.steps) if all(reading.steps is not None for reading in readings) else 0.0
    return Standing(
        rank=rank,
        late=times,
        clear=all_lates,
        rounds=rounds,
        late_by_s=typical,
        cost_ratio=cost_s / covered_s,
        sure=followed[0] <= followed[1] and all_lates >= _MIN_LATES and times >= all_lates / 2 + _SURE * math.sqrt(all_lates),
        frequent=weighed >= (_PER_STEP * (steps if steps >= 1 else rounds)),
        exact=all(reading.exact for reading in readings),
        drives=_DRIVES * followed[0] <= followed[1] and followed[1] > 0,
    )


def _followed(rank: int, readings: Sequence[Reading]) -> tuple[float, float]:
    """How unsteadily the others' next calls follow its arrivals, and their own; (0.0, 0.0) where nothing is known of that."""
    known = [reading.follows for reading in readings if reading.follows is not None and reading.follows[0] == rank]
    return sum(after_last for _, after_last, _ in known), sum(after_own for _, _, after_own in known)
