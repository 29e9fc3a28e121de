"""A day of training with stalls that pass: what the monitor remembers is as large in its last hour as in its third."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from itertools import combinations

import pytest
from build_calls import MONO, WALL, answer, entry
from build_jobs import MAIN, frames

from rankwatch.export.samples import Ledger as Counted
from rankwatch.model import CompileActivity, Group, JobInfo, JobSnapshot, NodeReport, Process, RankState, Stack, Status, Thread
from rankwatch.monitor import calls, incidents, recorder
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.incidents import Book, fold
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.worker_server import GENERIC

RANKS = (0, 1, 2)
CYCLES = 15  # an hour
CYCLE_S = 240.0
PER_CYCLE = 40  # collectives
CULPRITS = [*((rank,) for rank in RANKS), *combinations(RANKS, 2)]
JOB = JobInfo("job", "run", ("python",), "node05", 3, 1, 0, {}, {}, WALL)
PLACES = [
    ("train.py:20:write", "@torch/serialization.py:1220:_save", "@torch/serialization.py:960:save", "train.py:30:save_checkpoint"),
    ("train.py:41:work",),
    ("@torch/utils/data/dataloader.py:1291:_try_get_data", "@torch/utils/data/dataloader.py:730:__next__", "train.py:34:epoch"),
    ("train.py:77:evaluate",),
]


class Day:
    """Three ranks on gloo: forty collectives in four minutes, ten of them of a size of their own, two compiles, and a stall of 12 s.

    A second group is made anew every half an hour. Looks are sparse while nothing happens, as if those between had been alike.
    """

    def __init__(self) -> None:
        self.kinds = calls.Kinds()
        self.views = {rank: recorder.RecorderView() for rank in RANKS}
        self.logs = {rank: calls.CallLog(self.kinds) for rank in RANKS}
        self.state, self.book, self.counted = State(), Book(), Counted()
        self.number = 0  # that all have completed
        self.groups: tuple[Group, ...] = ()
        self.pages: list[str] = []

    def play(self, cycle: int) -> None:
        """Four minutes."""
        t = cycle * CYCLE_S
        remade = int(t // 1800)
        self.groups = (
            Group("0", "default_pg", "gloo", RANKS, 600.0),
            Group("1", "undefined", "gloo", RANKS, 600.0, generation=remade, created_wall_at=WALL + remade * 1800 - 1.0),
        )
        self.number += PER_CYCLE
        self._read(RANKS, t, remade)
        self._look(t, cycle, compiling=f"a{cycle}")
        self._look(t + 30, cycle, compiling=f"b{cycle}")
        culprits = CULPRITS[cycle % len(CULPRITS)]
        waiting = tuple(rank for rank in RANKS if rank not in culprits)
        self._read(waiting, t + 60, remade, waits=True)
        for at in (61, 64, 67, 72):
            self._look(t + at, cycle, culprits=culprits, since=t + 60)
        self.number += 1
        for at in (73, 73.5, 74):
            self._look(t + at, cycle)

    def _read(self, ranks, t, remade, waits=False) -> None:
        entries = [self._entry(number, t) for number in range(self.number - PER_CYCLE, self.number + 1)]
        entries.append(entry(1, ("barrier", ()), name="1", pg_id=1 + remade, record_id=self.number * 3 + 1, at=remade * 1800.0))
        if waits:
            entries.append(self._entry(self.number + 1, t, retired=False))
        document = answer(entries)
        parsed = recorder.newest({"entries": entries})
        for rank in ranks:
            self.logs[rank].learn(GENERIC, self.logs[rank].scan(GENERIC, document), self.groups)
            self.views[rank].take({GENERIC: parsed}, self.groups, WALL + t)
        self.kinds.prune(number for log in self.logs.values() for number in log.used())

    def _entry(self, number, t, retired=True):
        size = number if number % 4 == 0 else 100 + number % 4
        return entry(number, ("all_reduce", ((size,),)), at=t - (self.number + 1 - number) * 0.5, record_id=number * 3, retired=retired)

    def _look(self, t, cycle, culprits=(), since=0.0, compiling="") -> None:
        ranks = tuple(self._rank(rank, t, cycle, culprits, since, compiling) for rank in RANKS)
        snapshot = JobSnapshot(MONO + t, WALL + t, len(RANKS), 0, (NodeReport("node05", ranks),), gap_s=0.5, started_at=MONO - 60)
        self.state, verdicts, _ = diagnose(self.state, snapshot, snapshot.now, Limits())
        self.book, changes = fold(self.book, verdicts, snapshot, snapshot.now, Limits())
        self.pages += [change.incident.id for change in changes if change.incident.verdict.verdict not in ("slow", "recovered")]
        self.counted.note(Status(JOB, snapshot, verdicts, open_incidents=self.book.open, closed_incidents=self.book.closed))

    def _rank(self, rank, t, cycle, culprits, since, compiling) -> RankState:
        waits = bool(culprits) and rank not in culprits
        activity = CompileActivity(compiling, "forward", f"block{compiling}@train.py:31", "dynamo", "dynamo", MONO + t - 1.0, MONO + t - 1.0)
        stack = Stack(100 + rank, MONO + t, (Thread("MainThread", 1, frames(*PLACES[cycle % 4], *MAIN)),), text="a stack") if rank in culprits else None
        moved = int(2e6 * (t - since)) if rank in culprits else 0
        process = Process(100 + rank, True, "S", t, t, io_bytes=moved, disk_bytes=moved)
        return RankState(
            rank=rank, node="node05", agent="claimed", process=process, stage="joined", stage_since=MONO - 60, heartbeat_at=MONO + t, groups=self.groups,
            collectives=self.views[rank].current(self.groups), collectives_at=MONO + t, calls=self.logs[rank].calls(self.groups), steps=self.number,
            enqueued={"0": self.number + waits, "1": 1}, completed={"0": self.number, "1": 1}, last_step_at=MONO + t, step_s=0.5, stack=stack,
            compiling=(activity,) if compiling and rank == cycle % 3 else (),
        )  # fmt: skip

    def remembered(self) -> dict[str, int]:
        """How much each part holds."""
        kept = {field.name: getattr(self.state, field.name) for field in fields(self.state)} | {
            field.name: getattr(self.book, field.name) for field in fields(self.book)
        }
        return {name: size(part) for name, part in {**kept, "kinds": self.kinds, "logs": self.logs, "views": self.views, "counted": self.counted}.items()}


def size(root: object) -> int:
    """Members of all containers below it, each once, and bytes."""
    seen: set[int] = set()
    left, total = [root], 0
    while left:
        found = left.pop()
        if isinstance(found, (str, int, float, type(None))) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, (bytes, bytearray)):
            total += len(found)
            continue
        if isinstance(found, dict):
            members = [*found, *found.values()]
        elif isinstance(found, (list, tuple, set, frozenset)):
            members = list(found)
        elif is_dataclass(found):
            members = [getattr(found, field.name) for field in fields(found)]
        else:
            members = list(vars(found).values())
        total += len(members)
        left += members
    return total


@pytest.fixture(scope="module")
def day():
    """The day that was played, and the largest size of each part within its third and its last hour. Bounds that a day does not reach are made smaller."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incidents, "MAX_HISTORY", 20)
        patch.setattr(incidents, "MAX_CLOSED", 20)
        patch.setattr(calls, "KEEP", 512)
        patch.setattr(recorder, "MAX_NAMED", 4)
        patch.setattr(calls, "MAX_KINDS", 256)
        patch.setattr("rankwatch.export.samples.MAX_BY_NAME", 30)
        played, hours = Day(), []
        for hour in range(24):
            largest: dict[str, int] = {}
            for cycle in range(CYCLES):
                played.play(hour * CYCLES + cycle)
                for name, count in played.remembered().items() if hour in (2, 23) else ():
                    largest[name] = max(largest.get(name, 0), count)
            hours.append(largest)
    return played, hours[2], hours[23]


def test_the_day_is_healthy_and_has_stalls_enough_to_fill_every_list(day):
    played, _, _ = day
    assert played.pages == []
    assert played.book.opened > 24
    assert len(played.book.closed) == 20
    assert sum(played.book.forgotten.values()) > 0
    assert len(played.logs[0].calls(played.groups)["0"].kinds) >= 4 * 512
    assert len(played.state.frame_times) == 64


def test_nothing_that_is_remembered_grows_from_the_third_hour_to_the_last(day):
    """But for a twentieth: a history is trimmed when it is a quarter too long, and incidents differ in their words."""
    _, third, last = day
    assert last.keys() == third.keys()
    assert {name: (third[name], count) for name, count in last.items() if count > 1.05 * third[name] + 2} == {}
