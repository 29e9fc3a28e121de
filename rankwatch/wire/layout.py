"""Byte layout of one rank's slot: the whole wire format between a training process and its launcher.

A slot is a file of SLOT_BYTES that the launcher creates with its blocks reserved and the rank maps shared.

    header   64 bytes, written once by the launcher: magic, layout version, slot bytes, rank, attempt
    records  each two alternating copies of `copy_bytes`; a copy is a RECORD_HEADER and a payload
    events   EVENT_SLOTS entries of EVENT_BYTES, entry n at position n % EVENT_SLOTS; an entry is one such copy

RECORD_HEADER is little-endian: seq u64 (from 1, newest copy wins), mono_ns u64 (CLOCK_MONOTONIC of the write), length u32,
crc32 u32 over seq, mono_ns, length and payload. A writer fills the older copy with one slice assignment and takes no lock: a reader
that finds a torn copy (crc differs) uses the other one. For events seq is the entry number from 1, so a gap tells how many were lost.

A record named in JSON_RECORDS holds compact UTF-8 JSON; `thread_N` holds THREAD_HEADER and THREAD_TEXTS joined by NUL.
An empty payload means "nothing now". Times in payloads end in _mono_ns or _wall_ns.

Rank side writes through agent/slot.py, supervisor side reads through monitor/slots.py; both only through this module.
"""

from __future__ import annotations

import struct
from zlib import crc32

MAGIC = b"RWSLOT\r\n"
LAYOUT_VERSION = 2
HEADER = struct.Struct("<8sIIII")  # magic, layout version, slot bytes, rank, attempt
HEADER_BYTES = 64

RECORD_HEADER = struct.Struct("<QQII")  # seq, mono_ns, length, crc32
_CHECKED = struct.Struct("<QQI")  # what the crc covers ahead of the payload

THREADS = 8
EVENT_SLOTS = 64
EVENT_BYTES = 1536

THREAD_HEADER = struct.Struct("<QQQIHH")  # native thread id, compile start mono_ns, phase start mono_ns, depth, split k, split n
THREAD_TEXTS = ("compile_id", "kind", "phase", "frame", "reason", "detail")
"""kind: forward|backward|runtime; phase: torch's raw region name; frame: `name@file:line`; reason: of a recompile, "" for a first compile."""

_SIZES = {
    "owner": 1024,  # {pid, start_ticks, state: loaded|armed|claimed, rank, local_rank, world_size, attempt, ppid, python, torch, socket, wall_ns}
    "lifecycle": 4096,  # {stage: armed|joining|join_failed|joined|left|exiting, since_mono_ns, exception: {type, message, where, traceback, chain}|null,
    #                      barrier: {group, calls, inside, since_mono_ns, timeout_s}|null: of monitored_barrier, which no recorder shows,
    #                      join: {ours, rank, world_size, store, shared, reached, since_mono_ns}|null}: the init_process_group that is under way
    "probes": 2048,  # {probe: {status: armed|off|missing|failed, detail, errors}}
    "groups": 24576,  # {creating: name|null, creating_ranks, creating_timeout_s, creating_set_at, join_timeout_s, join_set_at,
    #                    extensions: [[seconds, wall_ns]] of NCCL timeouts,
    #                    groups: [{name, desc, backend, ranks: "0-3,7", timeout_s, set_at, generation, created_wall_ns}]}
    "heartbeat": 8192,  # torch's status-only recorder JSON (gloo), as torch wrote it, or {}; the last one of a crash adds `entries`; mono_ns is the beat;
    #                    ahead of it `handling`, the exception that the main thread handles, where there is one: {type, message, where, wall_ns}
    "steps": 256,  # {count, last_mono_ns, last_s, explicit}
    "compile": 4096,  # totals since start, see agent/probes/compile.py
    "ddp": 4096,  # last split, see agent/probes/ddp.py
    "cudagraph": 4096,  # totals, see agent/probes/cudagraph.py
    "memory": 4096,  # of the rank's GPU, see agent/probes/memory.py
    "numerics": 2048,  # only with --probe numerics, see agent/probes/numerics.py
    **{f"thread_{n}": 1536 for n in range(THREADS)},
}
JSON_RECORDS = tuple(name for name in _SIZES if not name.startswith("thread_"))


class Record:
    """Where one record lies: `offset` of its first copy, `copy_bytes` of each of the two."""

    __slots__ = ("copy_bytes", "name", "offset")

    def __init__(self, name: str, offset: int, copy_bytes: int) -> None:
        self.name = name
        self.offset = offset
        self.copy_bytes = copy_bytes

    @property
    def payload_bytes(self) -> int:
        """The longest payload that fits."""
        return self.copy_bytes - RECORD_HEADER.size


def _place() -> tuple[dict[str, Record], int]:
    records, offset = {}, HEADER_BYTES
    for name, copy_bytes in _SIZES.items():
        records[name] = Record(name, offset, copy_bytes)
        offset += 2 * copy_bytes
    return records, offset


RECORDS, EVENTS_OFFSET = _place()
SLOT_BYTES = -(-(EVENTS_OFFSET + EVENT_SLOTS * EVENT_BYTES) // 4096) * 4096


def pack(seq: int, mono_ns: int, payload: bytes) -> bytes:
    """One copy of a record or one event entry, ready for a slice assignment."""
    return RECORD_HEADER.pack(seq, mono_ns, len(payload), crc32(payload, crc32(_CHECKED.pack(seq, mono_ns, len(payload))))) + payload


def unpack(copy: bytes | memoryview) -> tuple[int, int, bytes] | None:
    """(seq, mono_ns, payload) of one copy; None when it was never written or is torn. Never raises on bytes."""
    if len(copy) < RECORD_HEADER.size:
        return None
    seq, mono_ns, length, crc = RECORD_HEADER.unpack_from(copy)
    if seq == 0 or length > len(copy) - RECORD_HEADER.size:
        return None
    payload = bytes(copy[RECORD_HEADER.size : RECORD_HEADER.size + length])
    if crc32(payload, crc32(_CHECKED.pack(seq, mono_ns, length))) != crc:
        return None
    return seq, mono_ns, payload


def read_record(slot: bytes | memoryview, record: Record) -> tuple[int, int, bytes] | None:
    """(seq, mono_ns, payload) of the newest whole copy; None when there is none."""
    first = unpack(slot[record.offset : record.offset + record.copy_bytes])
    second = unpack(slot[record.offset + record.copy_bytes : record.offset + 2 * record.copy_bytes])
    if first is None or (second is not None and second[0] > first[0]):
        return second
    return first


def event_offset(seq: int) -> int:
    """Where event number `seq` (from 1) lies."""
    return EVENTS_OFFSET + (seq % EVENT_SLOTS) * EVENT_BYTES


def pack_header(rank: int, attempt: int) -> bytes:
    """The first HEADER_BYTES of a new slot."""
    return HEADER.pack(MAGIC, LAYOUT_VERSION, SLOT_BYTES, rank, attempt).ljust(HEADER_BYTES, b"\0")


def check_header(slot: bytes | memoryview) -> tuple[int, int]:
    """(rank, attempt) of a slot; ValueError that says what is wrong when the bytes are no slot of this layout."""
    if len(slot) < HEADER_BYTES:
        raise ValueError(f"slot has {len(slot)} bytes, want {SLOT_BYTES}")
    magic, version, slot_bytes, rank, attempt = HEADER.unpack_from(slot)
    if magic != MAGIC:
        raise ValueError("not a rankwatch slot (magic differs)")
    if version != LAYOUT_VERSION or slot_bytes != len(slot):
        raise ValueError(f"slot has layout {version} and {slot_bytes} bytes, this rankwatch reads layout {LAYOUT_VERSION} and {SLOT_BYTES} bytes")
    return int(rank), int(attempt)
