"""Writes one rank's slot (wire/layout.py): mapped memory that the launcher reads, also while this process hangs or after it died.

No locks and one slice assignment a write: a signal handler may come in between, KeyboardInterrupt may fall anywhere, and a reader that
finds a torn copy has the other one. Sequence numbers go on where a former owner of the slot stopped, so readers only ever see them grow.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from struct import Struct
from zlib import crc32

from rankwatch.agent.clock import clock
from rankwatch.wire import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=str).encode
_CHECKED = layout._CHECKED
_HEADER = layout.RECORD_HEADER
_HEADER_BYTES = layout.RECORD_HEADER.size
_THREAD_BYTES = layout.THREAD_HEADER.size
_THREAD_CHECKED = Struct("<" + layout._CHECKED.format[1:] + layout.THREAD_HEADER.format[1:]).pack
_THREAD_WHOLE = Struct("<" + layout.RECORD_HEADER.format[1:] + layout.THREAD_HEADER.format[1:]).pack


class Cursor:
    """Where the next copy of one record goes."""

    __slots__ = ("next_seq", "offsets", "payload_bytes")

    def __init__(self, record: layout.Record, next_seq: Iterator[int]) -> None:
        self.offsets = (record.offset, record.offset + record.copy_bytes)
        self.payload_bytes = record.payload_bytes
        self.next_seq = next_seq


class RankSlot:
    """The slot file of this rank, mapped shared. Writes of a process that does not own the slot (see ownership.py) go nowhere."""

    def __init__(self, path: str) -> None:
        """Map an existing slot. OSError when it is not there, ValueError when it is no slot of this layout; creates and extends nothing."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            if size != layout.SLOT_BYTES:
                raise ValueError(f"slot has {size} bytes, want {layout.SLOT_BYTES}")
            self._map = mmap.mmap(fd, layout.SLOT_BYTES)
        finally:
            os.close(fd)
        self.rank, self.attempt = layout.check_header(memoryview(self._map))
        self.path = path
        self._mark = b""
        owner = layout.RECORDS["owner"]
        self._mark_place = slice(owner.offset, owner.offset + _HEADER_BYTES)
        self.cursors: dict[str, Cursor] = {}
        self._next_event: Iterator[int] = iter(())
        self._follow_numbers()

    @property
    def owned(self) -> bool:
        """Whether this process wrote the owner record that is there now. A takeover changes both of its copies."""
        return bool(self._mark) and self._map[self._mark_place] == self._mark

    def disown(self) -> None:
        """Write no more from here on (a fork child's copy of its parent's object)."""
        self._mark = b""

    def owner(self) -> dict[str, Any]:
        """The owner record; {} when there is none."""
        found = layout.read_record(memoryview(self._map), layout.RECORDS["owner"])
        try:
            record = json.loads(found[2]) if found and found[2] else {}
        except ValueError:
            record = {}
        return record if isinstance(record, dict) else {}

    def take(self, record: dict[str, Any], clear: bool) -> None:
        """Become the owner. clear: a former owner's records are emptied before anything of ours is written."""
        self._follow_numbers()
        if clear:
            for name, cursor in self.cursors.items():
                if name != "owner" and any(self._map[offset : offset + _HEADER_BYTES].strip(b"\0") for offset in cursor.offsets):
                    self._put(cursor, b"")
                    self._put(cursor, b"")
        self.rewrite_owner(record)

    def rewrite_owner(self, record: dict[str, Any]) -> None:
        """Write the owner record, into both copies, and remember how to recognise it."""
        cursor = self.cursors["owner"]
        payload = fit(record, cursor.payload_bytes)
        self._put(cursor, payload)
        self._put(cursor, payload)
        self._mark = self._map[self._mark_place]

    def write(self, name: str, payload: bytes) -> None:
        """Replace a record; text that is too long is cut at the end, so it is for payloads that may be."""
        cursor = self.cursors[name]
        if self.owned:
            self._put(cursor, payload[: cursor.payload_bytes])

    def write_json(self, name: str, record: dict[str, Any]) -> None:
        """Replace a JSON record; its longest texts and lists are shortened until it fits."""
        cursor = self.cursors[name]
        if self.owned:
            self._put(cursor, fit(record, cursor.payload_bytes))

    def put(self, cursor: Cursor, payload: bytes, now_ns: int) -> None:
        """The fast path of a hook: `payload` is known to fit. The same bytes as layout.pack gives, without its calls."""
        if self._mark and self._map[self._mark_place] == self._mark:
            seq = next(cursor.next_seq)
            length = len(payload)
            at = cursor.offsets[seq & 1]
            self._map[at : at + _HEADER_BYTES + length] = _HEADER.pack(seq, now_ns, length, crc32(payload, crc32(_CHECKED.pack(seq, now_ns, length)))) + payload

    def put_thread(self, cursor: Cursor, now_ns: int, native_id: int, started_ns: int, phase_ns: int, depth: int, split: int, splits: int, text: bytes) -> None:
        """A `thread_N` record, for the hook of every phase event: the bytes of layout.pack, put together with as few calls as it takes."""
        if self._mark and self._map[self._mark_place] == self._mark:
            seq = next(cursor.next_seq)
            length = _THREAD_BYTES + len(text)
            crc = crc32(text, crc32(_THREAD_CHECKED(seq, now_ns, length, native_id, started_ns, phase_ns, depth, split, splits)))
            at = cursor.offsets[seq & 1]
            self._map[at : at + _HEADER_BYTES + length] = _THREAD_WHOLE(seq, now_ns, length, crc, native_id, started_ns, phase_ns, depth, split, splits) + text

    def event(self, kind: str, **fields: Any) -> None:
        """Append {"kind": kind, "wall_ns": ..., **fields} to the ring; texts are shortened until it fits."""
        if not self.owned:
            return
        payload = fit({"kind": kind, "wall_ns": clock.wall_ns(), **fields}, layout.EVENT_BYTES - _HEADER_BYTES)
        seq = next(self._next_event)
        data = layout.pack(seq, clock.now_ns(), payload)
        at = layout.event_offset(seq)
        self._map[at : at + len(data)] = data

    def _put(self, cursor: Cursor, payload: bytes) -> None:
        seq = next(cursor.next_seq)
        data = layout.pack(seq, clock.now_ns(), payload)
        at = cursor.offsets[seq & 1]
        self._map[at : at + len(data)] = data

    def _follow_numbers(self) -> None:
        for name, record in layout.RECORDS.items():
            found = layout.read_record(memoryview(self._map), record)
            next_seq = itertools.count(found[0] + 1 if found else 1)
            if name in self.cursors:
                self.cursors[name].next_seq = next_seq
            else:
                self.cursors[name] = Cursor(record, next_seq)
        entries = (layout.event_offset(n) for n in range(layout.EVENT_SLOTS))
        found_entries = (layout.unpack(self._map[at : at + layout.EVENT_BYTES]) for at in entries)
        self._next_event = itertools.count(max(entry[0] if entry else 0 for entry in found_entries) + 1)


def fit(record: dict[str, Any], limit: int) -> bytes:
    """Compact UTF-8 JSON of at most `limit` bytes: the longest text is halved, then the longest list, until it fits."""
    data = _encode(record)
    if len(data) <= limit:
        return data
    record = json.loads(data)  # a copy: the caller's lists and dicts stay as they are
    while len(data) > limit:
        if not _shorten(record):
            return b"{}"
        data = _encode(record)
    return data


def _encode(record: Any) -> bytes:
    return _to_json(record).encode("utf-8", "replace")


def _shorten(record: dict[str, Any]) -> bool:
    """Halve the longest text; where no text is longer than 64, the list that takes most room. False when nothing is left to shorten."""
    texts: list[tuple[int, int, Any, Any]] = []
    lists: list[tuple[int, int, Any, Any]] = []
    waiting: list[Any] = [record]
    while waiting:
        holder = waiting.pop()
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, str) and len(value) > 1:
                texts.append((len(value), len(texts), holder, key))
            elif isinstance(value, list) and value:
                lists.append((len(_encode(value)), len(lists), holder, key))
                waiting.append(value)
            elif isinstance(value, dict):
                waiting.append(value)
    longest = max(texts, default=None)
    if lists and (longest is None or longest[0] <= 64):
        longest = max(lists)
    if longest is None:
        return False
    _size, _order, holder, key = longest
    value = holder[key]
    holder[key] = value[: len(value) // 2]
    if isinstance(value, str) and len(value) > 64:
        holder[key] += "..."
    return True
