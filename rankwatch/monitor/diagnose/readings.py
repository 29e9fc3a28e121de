"""From the recorders' entries to readings of arrivals: which rows are complete, which kind of time says who came last."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from rankwatch.model import Collective, RankState
from rankwatch.monitor.diagnose import arrivals
from rankwatch.monitor.diagnose.state import Lateness
from rankwatch.monitor.diagnose.views import View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_KEEP = 6  # readings, more while they hold fewer than ...
_KEEP_LATES = 24  # ... rounds with a clear last
_KEEP_MOST = 60
_BUSY_RATIO = 0.05  # of the time between two readings spent compiling: what it shows is the compiler's skew


class Entries:
    """Collectives of each rank by group and generation, sorted out only where they are asked for."""

    def __init__(self, ranks: Mapping[int, RankState]) -> None:
        self._ranks = ranks
        self._next: dict[int, dict[tuple[str, int, int], tuple[float, object]]] = {}
        self._compiled_s: dict[int, float] = {}

    def of(self, rank: int, group: str, generation: int) -> dict[int, Collective]:
        return {entry.seq: entry for entry in self._ranks[rank].collectives if entry.group == group and entry.generation == generation and not entry.is_p2p}

    def compiled_s(self, rank: int) -> float:
        """Seconds that it has spent compiling so far."""
        if rank not in self._compiled_s:
            self._compiled_s[rank] = _compiled_s(self._ranks[rank])
        return self._compiled_s[rank]

    def after(self, rank: int) -> dict[tuple[str, int, int], tuple[float, object]]:
        """Of each of its collectives by (group, generation, seq): when it called the next thing, in any group, and what that was."""
        if rank not in self._next:
            found = self._next[rank] = {}
            calls = sorted((entry for entry in self._ranks[rank].collectives if entry.created_wall_at), key=lambda entry: entry.created_wall_at)
            for entry, later in pairwise(calls):
                if not entry.is_p2p:
                    kind = (entry.op, entry.input_sizes, later.group, later.op, later.input_sizes)
                    found[entry.group, entry.generation, entry.seq] = (later.created_wall_at, kind)
        return self._next[rank]


def due(late: Lateness, view: View, ranks: Mapping[int, RankState], every_s: float) -> float | None:
    """The moment of the newest of one new read of every member; None until all were read again and every_s has gone by."""
    newest = late.read_at
    for rank in view.members:
        at = ranks[rank].collectives_at
        if at is None or at <= late.read_at:
            return None
        newest = max(newest, at)
    return newest if newest - late.read_at >= every_s else None


def add(late: Lateness, view: View, ranks: Mapping[int, RankState], entries: Entries, at: float, disturbed: bool) -> Lateness:
    """With the reading of `at`. The first only sets the start; a disturbed one (a pause, a compile) is left out."""
    rows = {rank: entries.of(rank, member.group.name, member.group.generation) for rank, member in view.members.items()}
    common = sorted(set.intersection(*map(set, rows.values())))
    steps = max(ranks[rank].steps for rank in view.members)
    compiled_s = sum(entries.compiled_s(rank) for rank in view.members)
    elapsed_s = at - late.read_at
    disturbed = disturbed or compiled_s - late.compiled_s > _BUSY_RATIO * elapsed_s
    news = replace(late, read_at=at, steps=steps, compiled_s=compiled_s)
    if late.seq is None or disturbed or not common:
        return replace(news, seq=common[-1] if common else late.seq)
    numbers = [seq for seq in common if seq >= late.seq]
    rate = (steps - late.steps) / elapsed_s if steps > late.steps else None
    reading, seq = _reading({rank: {seq: row[seq] for seq in numbers} for rank, row in rows.items()}, view, ranks, entries, at, rate)
    news = replace(news, seq=seq if seq is not None else late.seq)
    return replace(news, readings=_kept((*late.readings, reading))) if reading is not None else news


def _reading(
    rows: Mapping[int, Mapping[int, Collective]], view: View, ranks: Mapping[int, RankState], entries: Entries, at: float, steps_per_s: float | None
) -> tuple[arrivals.Reading | None, int | None]:
    first = rows[min(rows)]
    if "nccl" in view.group.backend and ":gloo" not in view.group.name:
        timed = {seq: took for seq in first if len(took := {rank: s for rank, row in rows.items() if (s := row[seq].duration_s) is not None}) == len(rows)}
        if timed:
            return arrivals.read_durations(timed, {seq: first[seq].created_wall_at for seq in timed}, at, steps_per_s)
    stamps = {seq: {rank: row[seq].created_wall_at for rank, row in rows.items()} for seq in first if all(row[seq].created_wall_at for row in rows.values())}
    nodes = {rank: ranks[rank].node for rank in rows}
    nexts: arrivals.Nexts = {}
    if "nccl" not in view.group.backend:  # there the host goes on at once
        for rank, row in rows.items():
            after = entries.after(rank)
            for entry in row.values():
                if (found := after.get((entry.group, entry.generation, entry.seq))) is not None:
                    nexts.setdefault(entry.seq, {})[rank] = found
    reading, seq = arrivals.read_stamps(stamps, nodes, at, steps_per_s, nexts or None)
    if reading is not None and "nccl" in view.group.backend:
        reading = replace(reading, exact=False)  # when the host enqueued it says little of when the device got there
    return reading, seq


def _kept(readings: tuple[arrivals.Reading, ...]) -> tuple[arrivals.Reading, ...]:
    first, lates = len(readings), 0
    while first > 0 and len(readings) - first < _KEEP_MOST and (len(readings) - first < _KEEP or lates < _KEEP_LATES):
        first -= 1
        lates += len(readings[first].lates)
    return readings[first:]


def _compiled_s(rank: RankState) -> float:
    seconds = rank.compile_totals.get("seconds")
    return sum(value for value in seconds.values() if isinstance(value, (int, float))) if isinstance(seconds, dict) else 0.0
