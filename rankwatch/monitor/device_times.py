"""What collectives take on the device, and the bandwidth that is: from NCCL's recorder where TORCH_NCCL_ENABLE_TIMING is on. Pure.

The recorder has a duration once an operation is retired. It runs from the start on the rank's own device, so it holds the wait for the ranks
that come later: what the transfer takes is the smallest duration over the ranks of the same operation, the last one's. Only ranks of one node
are compared here; where a group has more of them the result is a lower bound of the bandwidth, since the last rank may be elsewhere.

Bus bandwidth as nccl-tests defines it (doc/PERFORMANCE.md), so that it compares with the hardware's peak whatever the number of ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rankwatch.model import CollectiveSum, Group
from rankwatch.monitor.diagnose.mismatch import DTYPE_BYTES, FAMILY

MAX_SUMS = 24  # of one rank; what comes later is added up as OTHER
OTHER = "other"
MAX_KINDS = 2048
MAX_OPEN = 2048  # operations of one group and rank that wait for the other ranks' readings
MAX_GROUPS = 64
BUCKETS = ((1 << 16, "<64KiB"), (1 << 20, "64KiB-1MiB"), (1 << 24, "1-16MiB"), (1 << 28, "16-256MiB"))
LARGEST = ">=256MiB"

# torch writes its keys in alphabetical order (nlohmann::json) and without blanks
_ENTRY, _DURATION = b'{"collective_seq_id":', b',"duration_ms":'
_GIVEN, _GOT, _PG = b'"input_dtypes":', b'"output_dtypes":', b'"pg_id":'
_UNRETIRED = re.compile(rb'"record_id":(\d+),"retired":false')
_RECORD = b'"record_id":'


@dataclass(frozen=True, slots=True)
class Kind:
    """What operations are added up by. group: name of theirs. bytes: as nccl-tests counts them, the larger of what goes in and what comes out of a rank."""

    group: str
    op: str
    bucket: str
    bytes: int
    is_p2p: bool


class Timed(NamedTuple):
    """One retired operation."""

    seq: int
    kind: Kind
    duration_s: float


@dataclass(slots=True)
class _Sum:
    count: int = 0
    bytes: int = 0
    device_s: float = 0.0


@dataclass(slots=True)
class _Moved:
    """bus_bytes: bytes times the factor. newest: those of the newest reading that had any."""

    bus_bytes: float = 0.0
    bus_s: float = 0.0
    newest: tuple[float, float] = (0.0, 0.0)


def bus_factor(op: str, ranks: int) -> float | None:
    """Bus bandwidth over bytes per second, by nccl-tests; None for what has no such figure.

    Point-to-point has a factor of 1 there, but its numbers are each rank's own, so that the two ends cannot be told to be one operation.
    """
    if ranks < 2:
        return None
    share = (ranks - 1) / ranks
    return {
        "all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share, "gather": share, "scatter": share,
        "broadcast": 1.0, "reduce": 1.0,
    }.get(op)  # fmt: skip


def bucket_of(size: int) -> str:
    """Name of the size bucket."""
    return next((name for below, name in BUCKETS if size < below), LARGEST)


class DeviceTimes:
    """One process's durations over all reads. `scan` may run in any thread, one at a time; the rest in the reader's."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[bytes, bytes, bytes], Kind] = {}
        self._settled = -1  # every record up to this is counted, or is not to come
        self._counted: set[int] = set()  # of those after it
        self._sums: dict[tuple[str, str, str], _Sum] = {}

    def scan(self, document: bytes) -> list[Timed]:
        """Durations that an NCCL recorder's answer holds beyond the ones before; [] where timing is off."""
        if b'"duration_ms":' not in document:
            return []
        last = _digits(document, document.rfind(_RECORD))
        if last < self._settled:
            self._settled, self._counted = -1, set()  # the recorder was reset
        at = document.rfind(b'"record_id":%d,' % self._settled) if self._settled >= 0 else -1
        if at >= 0:
            document = document[at:]
        found = []
        settled, counted, kinds = self._settled, self._counted, self._kinds
        for part in document.split(_ENTRY)[1:]:
            seq, _, rest = part.partition(_DURATION)
            record = rest.find(_RECORD)
            number = _digits(rest, record)
            if number <= settled or number in counted:
                continue
            given, got, pg = rest.find(_GIVEN), rest.find(_GOT), rest.find(_PG)
            op, p2p = rest.rfind(b',"op_id":', 0, got), rest.rfind(b',"p2p_seq_id":', 0, pg)
            counted.add(number)
            key = rest[given:op], rest[got:p2p], rest[pg:record]
            kind = kinds.get(key) or self._kind(*key)
            try:
                duration_s = float(rest[: given - 1]) / 1e3
                if kind is not None and 0 < duration_s < 1e6:
                    found.append(Timed(int(seq), kind, duration_s))
            except ValueError:
                continue
        unretired = _UNRETIRED.findall(document)
        self._settled = min(map(int, unretired)) - 1 if unretired else last
        self._counted = {number for number in self._counted if number > self._settled}
        return found

    def learn(self, timed: Iterable[Timed]) -> None:
        """Add them to the sums."""
        for each in timed:
            key = (each.kind.group, each.kind.op, each.kind.bucket)
            if key not in self._sums and len(self._sums) >= MAX_SUMS:
                key = (OTHER, OTHER, OTHER)
            total = self._sums.setdefault(key, _Sum())
            total.count += 1
            total.bytes += each.kind.bytes
            total.device_s += each.duration_s

    def sums(self, moved: Bandwidth, groups: Sequence[Group]) -> tuple[CollectiveSum, ...]:
        """All sums, the ones that take longest first, with the bandwidth of their group on this node where it is known."""
        known = {group.name: group for group in groups}
        rows = []
        for (name, op, bucket), total in sorted(self._sums.items(), key=lambda item: (-item[1].device_s, item[0])):
            group = known.get(name)
            bus, whole = moved.of(group, op, bucket) if group is not None else (None, False)
            rate = bus.newest[0] / bus.newest[1] if bus is not None and bus.newest[1] > 0 else None
            rows.append(
                CollectiveSum(
                    group=name, op=op, size_bucket=bucket, count=total.count, bytes=total.bytes, device_s=total.device_s, bus_bytes_per_s=rate,
                    bus_bytes=bus.bus_bytes if bus is not None else 0.0, bus_s=bus.bus_s if bus is not None else 0.0, whole=whole,
                )
            )  # fmt: skip
        return tuple(rows)

    def _kind(self, given: bytes, got: bytes, where: bytes) -> Kind | None:
        try:
            kind = kind_of(json.loads(b"{" + given + b"," + got + b"," + where.rstrip(b",") + b"}"))
        except ValueError:
            return None
        if len(self._kinds) >= MAX_KINDS:
            self._kinds.clear()
        self._kinds[given, got, where] = kind
        return kind


def kind_of(entry: Mapping[str, Any]) -> Kind:
    """Of a recorder's entry. Its names: "nccl:_all_gather_base", "nccl:send 0->1"."""
    name, names = str(entry.get("profiling_name", "")), entry.get("process_group")
    op = (name.partition(":")[2] or name).split(" ")[0].removesuffix("_coalesced")
    size = max(_bytes(entry.get("input_sizes"), entry.get("input_dtypes")), _bytes(entry.get("output_sizes"), entry.get("output_dtypes")))
    group = str(names[0]) if isinstance(names, list) and names else ""
    return Kind(group, FAMILY.get(op, op), bucket_of(size), size, bool(entry.get("is_p2p")))


def _bytes(sizes: Any, dtypes: Any) -> int:
    if not isinstance(sizes, list) or not isinstance(dtypes, list):
        return 0
    total = 0
    for number, size in enumerate(sizes):
        dtype = str(dtypes[min(number, len(dtypes) - 1)]) if dtypes else ""
        count = 1 if dtype.startswith("Float8") else DTYPE_BYTES.get(dtype, 4)
        for n in size if isinstance(size, list) else ():
            count *= n if isinstance(n, int) and n >= 0 else 0
        total += count
    return total


def _digits(text: bytes, at: int) -> int:
    """The number behind _RECORD at this place, -1 where there is none."""
    if at < 0:
        return -1
    start = end = at + len(_RECORD)
    while text[end : end + 1].isdigit():
        end += 1
    return int(text[start:end] or b"-1")


@dataclass(slots=True)
class _Meeting:
    """One group on this node: what each rank has read of it that others have not, and what came of what all have."""

    open: dict[int, dict[int, Timed]] = field(default_factory=dict)  # rank -> seq
    moved: dict[tuple[str, str], _Moved] = field(default_factory=dict)


class Bandwidth:
    """The ranks of one node joined by (group, sequence number). Called from the reader's thread only."""

    def __init__(self) -> None:
        self._local: frozenset[int] = frozenset()
        self._meetings: dict[tuple[object, ...], _Meeting] = {}

    def join(self, read: Mapping[int, tuple[Sequence[Timed], Sequence[Group]]], local: Iterable[int]) -> None:
        """Take what these ranks have just read. local: all ranks of the node."""
        self._local = frozenset(local)
        touched: dict[tuple[object, ...], Group] = {}
        for rank, (timed, groups) in read.items():
            known = {group.name: group for group in groups}
            for each in timed:
                group = known.get(each.kind.group)
                if group is None or each.kind.is_p2p or bus_factor(each.kind.op, len(group.ranks)) is None:
                    continue
                key = _key(group)
                touched[key] = group
                self._meetings.setdefault(key, _Meeting()).open.setdefault(rank, {})[each.seq] = each
        for key, group in touched.items():
            self._settle(self._meetings[key], group)
        while len(self._meetings) > MAX_GROUPS:
            del self._meetings[next(iter(self._meetings))]

    def of(self, group: Group, op: str, bucket: str) -> tuple[_Moved | None, bool]:
        """What was moved, and whether all ranks of the group are of this node."""
        meeting = self._meetings.get(_key(group))
        return (meeting.moved.get((op, bucket)) if meeting is not None else None), self._local.issuperset(group.ranks)

    def forget(self, rank: int) -> None:
        """Another process runs under this rank."""
        for meeting in self._meetings.values():
            meeting.open.pop(rank, None)

    def _settle(self, meeting: _Meeting, group: Group) -> None:
        members = [rank for rank in group.ranks if rank in self._local]
        rows = [meeting.open.get(rank, {}) for rank in members]
        both = sorted(set(rows[0]).intersection(*rows[1:])) if rows else []
        fresh: dict[tuple[str, str], tuple[float, float]] = {}
        for seq in both:
            each = [row[seq] for row in rows]
            factor = bus_factor(each[0].kind.op, len(group.ranks))
            if factor is None or len({one.kind for one in each}) > 1:
                continue  # sizes that differ by rank: no one figure
            shortest = min(one.duration_s for one in each)
            key = (each[0].kind.op, each[0].kind.bucket)
            moved, took = fresh.get(key, (0.0, 0.0))
            fresh[key] = (moved + factor * each[0].kind.bytes, took + shortest)
        for key, (moved, took) in fresh.items():
            total = meeting.moved.setdefault(key, _Moved())
            total.bus_bytes += moved
            total.bus_s += took
            total.newest = (moved, took)
        for row in rows:
            if both:
                for seq in [seq for seq in row if seq <= both[-1]]:
                    del row[seq]  # a number that one of them has not read by now is lost to it
            while len(row) > MAX_OPEN:
                del row[next(iter(row))]


def _key(group: Group) -> tuple[object, ...]:
    return group.name, group.generation, group.ranks
