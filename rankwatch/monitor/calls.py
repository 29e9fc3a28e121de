"""What each rank has called, number by number: a compact history that outlives torch's recorder, which forgets within seconds.

A call is kept as the number of its kind: operation, element types and those sizes that all ranks must share. Kinds are numbered by their
content, so equal numbers mean equal calls on every rank. Cutting the few texts that are needed out of the recorder's answer costs a fifth
of parsing it, and only what was recorded since the scan before is looked at.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankwatch.model import KIND_BYTES, Calls, Collective, Group
from rankwatch.monitor.diagnose.mismatch import kind
from rankwatch.monitor.recorder import collective_of, suffix

KEEP = 4096  # numbers of one group
MAX_GROUPS = 64
MAX_KINDS = 2048
_ENTRY = b'{"collective_seq_id":'  # torch writes its keys in alphabetical order (nlohmann::json) and without blanks; what differs is parsed


@dataclass(slots=True)
class Scanned:
    """The new collectives of one group of a recorder: its number in its process, its name, when the first was made, (sequence number, kind; 0: not told)."""

    pg_id: int
    name: str
    created_ns: int
    calls: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Scan:
    """What was recorded since the scan before. first, last: record numbers, -1 where there was nothing."""

    first: int = -1
    last: int = -1
    groups: list[Scanned] = field(default_factory=list)


class Kinds:
    """The kinds of calls that were seen, by number, shared by all ranks of a launcher. `known` only grows until `prune`."""

    def __init__(self) -> None:
        self.known: dict[int, Collective] = {}
        self._numbers: dict[tuple[bytes, bytes], int] = {}

    def number(self, sizes: bytes, op: bytes) -> int:
        """Of a call of which the entry's texts from input_dtypes and from pg_id on are given; 0 where there is no room or no sense, -1 for point-to-point."""
        found = self._numbers.get((sizes, op))
        if found is None:
            if len(self._numbers) >= 8 * MAX_KINDS:
                self._numbers.clear()
            try:
                entry = json.loads(b"{" + sizes + b"," + op.rstrip(b",") + b"}")
            except ValueError:
                entry = {}
            found = self._numbers[(sizes, op)] = self.enter(entry)
        return found

    def enter(self, entry: Mapping[str, Any]) -> int:
        """The number of a parsed entry's kind, as above."""
        if entry.get("is_p2p"):
            return -1
        if not entry.get("profiling_name"):
            return 0
        call = kind(collective_of(entry, "", 0))
        number = zlib.crc32(repr((call.op, call.input_sizes, call.dtypes)).encode()) or 1
        known = self.known.get(number)
        if known is not None:
            return number if known == call else 0  # two kinds of one number: rather none than a wrong one
        if len(self.known) >= MAX_KINDS:
            return 0
        self.known[number] = call
        return number

    def prune(self, used: Iterable[int]) -> None:
        """Forget what nobody's history holds any more, once there is no room."""
        if len(self.known) >= MAX_KINDS:
            kept = set(used)
            self.known = {number: call for number, call in self.known.items() if number in kept}
            self._numbers.clear()


@dataclass(slots=True)
class _Line:
    """The numbers of one group. pg_id and generation tell it from another group of its name."""

    pg_id: int
    generation: int
    first: int = 0
    kinds: bytearray = field(default_factory=bytearray)
    shown: Calls | None = None

    def put(self, seq: int, kind: int) -> None:
        if not self.kinds or seq - self.first >= len(self.kinds) // KIND_BYTES + KEEP:
            self.first, self.kinds = seq, bytearray()
        at = (seq - self.first) * KIND_BYTES
        if at < 0:
            return
        if at >= len(self.kinds):
            self.kinds.extend(bytes(at - len(self.kinds)))
            self.kinds += kind.to_bytes(KIND_BYTES, "little")
        elif (old := int.from_bytes(self.kinds[at : at + KIND_BYTES], "little")) != kind:
            self.kinds[at : at + KIND_BYTES] = (0 if old else kind).to_bytes(KIND_BYTES, "little")  # two entries of one number say nothing

    def trim(self) -> None:
        if len(self.kinds) > (KEEP + KEEP // 4) * KIND_BYTES:
            surplus = len(self.kinds) // KIND_BYTES - KEEP
            del self.kinds[: surplus * KIND_BYTES]
            self.first += surplus


class CallLog:
    """One process's calls over all reads of its recorders. `scan` may run in any thread, one at a time; the rest in the reader's."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._last: dict[str, int] = {}  # recorder -> last record number scanned
        self._lines: dict[str, _Line] = {}  # group name, with the recorder's suffix

    def scan(self, recorder: str, document: bytes) -> Scan:
        """What a recorder's answer holds beyond the one before."""
        last = self._last.get(recorder)
        if last is not None and (at := document.rfind(b'"record_id":%d,' % last)) >= 0:
            document = document[at:]
        found = self._cut(document) or self._parse(document, last)
        if found.last >= 0:
            self._last[recorder] = found.last
        return found

    def learn(self, recorder: str, scan: Scan, groups: Sequence[Group]) -> None:
        """Add what a scan of this recorder gave. groups: as they are known after its answer came.

        A number is only kept where it is certain which group of that name it belongs to.
        """
        by_name: dict[str, list[Scanned]] = {}
        for scanned in scan.groups:
            by_name.setdefault(scanned.name, []).append(scanned)
        for group in groups:
            found = by_name.get(group.name)
            name = group.name + suffix(recorder, group)
            line = self._lines.get(name)
            if line is not None and line.generation != group.generation:
                line = None
            if found is None:
                if line is None:
                    self._lines.pop(name, None)
                continue
            if line is None:
                made = self._certain(found, group, self._lines.pop(name, None))
                if made is None:
                    continue
                line = self._lines[name] = _Line(made, group.generation)
            for scanned in found:
                if scanned.pg_id == line.pg_id:
                    for seq, number in scanned.calls:
                        line.put(seq, number)
            line.trim()
            line.shown = None
        current = {group.name for group in groups}
        for name in [name for name in self._lines if name not in current and name.removesuffix(":gloo") not in current]:
            del self._lines[name]
        while len(self._lines) > MAX_GROUPS:
            del self._lines[next(iter(self._lines))]

    def calls(self, groups: Sequence[Group]) -> dict[str, Calls]:
        """The history of each group that is still the one it was read of."""
        found = {}
        for group in groups:
            line = self._lines.get(group.name)
            if line is None or line.generation != group.generation or not line.kinds:
                continue
            if line.shown is None:
                line.shown = Calls(line.generation, line.first, bytes(line.kinds), self._kinds.known)
            found[group.name] = line.shown
        return found

    def used(self) -> set[int]:
        """Numbers of the kinds that the history holds."""
        return {number for line in self._lines.values() for number in struct.unpack(f"<{len(line.kinds) // KIND_BYTES}I", line.kinds)}

    @staticmethod
    def _certain(found: Sequence[Scanned], group: Group, before: _Line | None) -> int | None:
        """The number of the group in its process, None while several of this name come into question."""
        made_ns = group.created_wall_at * 1e9 if group.generation else 0.0
        numbers = [each.pg_id for each in found if each.created_ns >= made_ns and (before is None or each.pg_id > before.pg_id)]
        return numbers[0] if len(numbers) == 1 else None

    def _cut(self, document: bytes) -> Scan | None:
        """By cutting; None when an entry does not look as torch writes it."""
        found, groups = Scan(), dict[bytes, Scanned]()
        number = self._kinds.number
        parts = document.split(_ENTRY)
        for part in parts[1:]:
            sizes, p2p, group, op, record = (part.find(key) for key in (b'"input_dtypes":', b',"is_p2p":', b'"pg_id":', b'"profiling_name":', b',"record_id":'))
            if not 0 < sizes < p2p < group < op < record:
                return None
            of = part[group:op]
            scanned = groups.get(of)
            if scanned is None:
                made = part.find(b'"time_created_ns":')
                try:
                    said = json.loads(b"{" + of.rstrip(b",") + b"}")
                    scanned = groups[of] = Scanned(int(said["pg_id"]), str(said["process_group"][0]), _digits(part, made + 18))
                except (ValueError, LookupError, TypeError):
                    return None
            if part[p2p + 10 : p2p + 11] == b"f":
                scanned.calls.append((int(part[: part.find(b",")]), number(part[sizes:p2p], part[op:record])))
        if len(parts) > 1:
            found.first, found.last = (_digits(part, part.find(b'"record_id":') + 12) for part in (parts[1], parts[-1]))
        elif b'"record_id":' in document[12:]:
            return None
        found.groups = list(groups.values())
        return found

    def _parse(self, document: bytes, last: int | None) -> Scan:
        """By parsing; a document that was cut at the scan before has lost its head."""
        if document.startswith(b'"record_id"'):
            start = document.find(b"{")
            document = b'{"entries":[' + document[start:] if start >= 0 else b"{}"
        try:
            parsed = json.loads(document)
        except ValueError:
            return Scan()
        found, groups = Scan(), dict[int, Scanned]()
        for entry in (parsed.get("entries") if isinstance(parsed, dict) else None) or ():
            names = entry.get("process_group") if isinstance(entry, dict) else None
            if not isinstance(names, list) or not names or _int(entry.get("record_id")) == last:
                continue
            found.last = _int(entry.get("record_id"))
            found.first = found.first if found.first >= 0 else found.last
            pg_id = _int(entry.get("pg_id"))
            scanned = groups.setdefault(pg_id, Scanned(pg_id, str(names[0]), _int(entry.get("time_created_ns"))))
            if (number := self._kinds.enter(entry)) >= 0:
                scanned.calls.append((_int(entry.get("collective_seq_id")), number))
        found.groups = list(groups.values())
        return found


def _digits(text: bytes, start: int) -> int:
    end = start
    while text[end : end + 1].isdigit():
        end += 1
    return int(text[start:end] or b"0")


def _int(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0
