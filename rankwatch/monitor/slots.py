"""Reads what a training process writes into its slot file; any bytes at all give an answer, never an exception.

The file is read, not mapped: a slot that somebody truncates would be SIGBUS in the launcher. The descriptor stays open, so the last
state of a dead rank is readable after the file has been removed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rankwatch.model import CompileActivity, Crash, Group, Join, Meeting, Timeouts
from rankwatch.wire import layout
from rankwatch.wire.phases import phase_of
from rankwatch.wire.ranks import MOST_RANKS, expand

_SEQ = struct.Struct("<Q")
_MAX_EVENTS_KEPT = 4 * layout.EVENT_SLOTS
_MAX_LINKS = 4
_MAX_CHECKED = 16  # numbers of one group, one or two a device
_MAX_MEMBERS = 4 * MOST_RANKS  # over all groups of a record


@dataclass(slots=True)
class SlotState:
    """The newest whole state in a slot. JSON records are dicts ({} = never written); times are CLOCK_MONOTONIC seconds.

    present: the file is a slot of this layout; `problem` says why not. generation: changes when another process takes the slot.
    """

    present: bool = False
    problem: str = ""
    owner: dict[str, Any] = field(default_factory=dict)
    stage: str = ""
    stage_since: float = 0.0
    crash: Crash | None = None
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    group_in_creation: str | None = None
    creation_ranks: tuple[int, ...] = ()
    timeouts: Timeouts = field(default_factory=Timeouts)
    barrier: Meeting | None = None
    join: Join | None = None
    handling: Crash | None = None
    heartbeat_at: float | None = None
    recorder_status: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    last_step_at: float | None = None
    step_s: float | None = None
    compile_totals: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    cudagraph: dict[str, Any] = field(default_factory=dict)
    numerics: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    compiling: tuple[CompileActivity, ...] = ()
    events_lost: int = 0

    @property
    def pid(self) -> int | None:
        """The process that wrote the slot, None while nobody has."""
        return _as_int(self.owner.get("pid")) or None


class SlotReader:
    """One rank's slot. `read()` gives the state, `take_events()` the events finished since the call before."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.state = SlotState()
        self._fd = -1
        self._buffer = bytearray(layout.SLOT_BYTES)
        self._view = memoryview(self._buffer)
        self._records, self._ring = self._view[: layout.EVENTS_OFFSET], self._view[layout.EVENTS_OFFSET :]
        self._seen: dict[str, int] = {}
        self._threads: dict[str, CompileActivity] = {}
        self._last_event = 0
        self._events: list[dict[str, Any]] = []

    def read(self) -> SlotState:
        """The newest state; the last whole one where a record is torn. Costs one read of the file and a look at the counters."""
        state = self.state
        problem = self._load()
        if problem:
            state.problem = problem
            return state
        state.present, state.problem = True, ""
        for name, record in layout.RECORDS.items():
            newest = max(_SEQ.unpack_from(self._buffer, record.offset)[0], _SEQ.unpack_from(self._buffer, record.offset + record.copy_bytes)[0])
            if newest == self._seen.get(name, 0):
                continue
            found = layout.read_record(self._view, record)
            if found is None or found[0] == self._seen.get(name):
                continue
            self._seen[name] = found[0]
            try:
                self._take(name, found[1], found[2])
            except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RecursionError, MemoryError) as error:
                state.problem = f"record {name} does not decode: {error}"
        self._take_new_events()
        return state

    def take_events(self) -> list[dict[str, Any]]:
        """Finished events, oldest first, each once; every event has `rank` to be added by the caller and `mono_ns`."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Give the descriptor back; the last state stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _load(self) -> str:
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                if (uid := os.fstat(self._fd).st_uid) != os.geteuid():
                    self.close()
                    return f"slot belongs to another user (uid {uid})"
            size = os.preadv(self._fd, [self._records], 0)
            if size == layout.EVENTS_OFFSET:
                size += self._load_events()
        except OSError as error:
            return f"slot is not readable: {error.strerror}"
        if size < layout.SLOT_BYTES:
            return f"slot has {size} bytes, want {layout.SLOT_BYTES}"
        try:
            layout.check_header(self._view)
        except ValueError as error:
            return str(error)
        return ""

    def _load_events(self) -> int:
        """Bytes of the events' part; they are only copied when there is an event that was not seen."""
        wanted = layout.event_offset(self._last_event + 1)
        seq = os.pread(self._fd, _SEQ.size, wanted)
        if len(seq) == _SEQ.size and _SEQ.unpack(seq)[0] <= self._last_event and os.fstat(self._fd).st_size == layout.SLOT_BYTES:
            return len(self._ring)
        return os.preadv(self._fd, [self._ring], layout.EVENTS_OFFSET)

    def _take(self, name: str, mono_ns: int, payload: bytes) -> None:
        if name.startswith("thread_"):
            self._take_thread(name, payload)
            return
        if name == "heartbeat" and not payload:  # emptied when another process took the slot
            self.state.heartbeat_at, self.state.recorder_status, self.state.handling = None, {}, None
            return
        record = json.loads(payload) if payload else {}
        if not isinstance(record, dict):
            raise ValueError(f"a JSON object is wanted, found {type(record).__name__}")
        getattr(self, f"_take_{name}")(record, mono_ns)

    def _take_owner(self, record: dict[str, Any], _mono_ns: int) -> None:
        self.state.owner = record

    def _take_lifecycle(self, record: dict[str, Any], mono_ns: int) -> None:
        self.state.stage = str(record.get("stage", ""))
        self.state.stage_since = (_as_int(record.get("since_mono_ns")) or mono_ns) / 1e9
        self.state.crash = crash_of(record.get("exception"))
        self.state.barrier = _meeting(record.get("barrier"))
        self.state.join = _join(record.get("join"))

    def _take_probes(self, record: dict[str, Any], _mono_ns: int) -> None:
        self.state.probes = {str(name): dict(probe) for name, probe in record.items() if isinstance(probe, dict)}

    def _take_groups(self, record: dict[str, Any], _mono_ns: int) -> None:
        creating, timeouts = record.get("creating"), _timeouts(record)
        ranks = expand(str(record.get("creating_ranks", ""))) if creating is not None else ()
        groups = _groups(group for group in record.get("groups") or () if isinstance(group, dict))
        # all of it or, where a part does not decode, nothing
        self.state.group_in_creation, self.state.creation_ranks = str(creating) if creating is not None else None, ranks
        self.state.groups, self.state.timeouts = groups, timeouts

    def _take_heartbeat(self, record: dict[str, Any], mono_ns: int) -> None:
        self.state.heartbeat_at = mono_ns / 1e9
        self.state.handling = crash_of(record.pop("handling", None))
        kinds = {"pg_status": dict, "entries": list}
        self.state.recorder_status = {key: value for key, value in record.items() if isinstance(value, kinds.get(key, object))}

    def _take_steps(self, record: dict[str, Any], _mono_ns: int) -> None:
        self.state.steps = _as_int(record.get("count"))
        last_ns = _as_int(record.get("last_mono_ns"))
        self.state.last_step_at = last_ns / 1e9 if last_ns else None
        self.state.step_s = _seconds(record.get("last_s"))

    def _take_compile(self, record: dict[str, Any], _mono_ns: int) -> None:
        self.state.compile_totals = record

    def _take_ddp(self, record: dict[str, Any], _mono_ns: int) -> None:
        self.state.ddp = record

    def _take_cudagraph(self, record: dict[str, Any], _mono_ns: int) -> None:
        self.state.cudagraph = record

    def _take_numerics(self, record: dict[str, Any], _mono_ns: int) -> None:
        self.state.numerics = record

    def _take_memory(self, record: dict[str, Any], _mono_ns: int) -> None:
        self.state.memory = record

    def _take_thread(self, name: str, payload: bytes) -> None:
        if len(payload) < layout.THREAD_HEADER.size:
            self._threads.pop(name, None)
        else:
            self._threads[name] = _activity(payload)
        self.state.compiling = tuple(sorted(self._threads.values(), key=lambda activity: activity.started_at))

    def _take_new_events(self) -> None:
        wanted = self._last_event + 1
        there = self._event_seq(wanted)
        if there < wanted:
            return
        if there > wanted:  # overwritten since the read before
            newest = max(self._event_seq(n) for n in range(layout.EVENT_SLOTS))
            oldest = max(wanted, newest - layout.EVENT_SLOTS + 1)
            self.state.events_lost += oldest - wanted
            wanted = oldest
        while len(self._events) < _MAX_EVENTS_KEPT and self._event_seq(wanted) == wanted:
            offset = layout.event_offset(wanted)
            found = layout.unpack(self._view[offset : offset + layout.EVENT_BYTES])
            if found is None and self._event_seq(wanted + 1) != wanted + 1:
                break  # being written now
            self._last_event = wanted
            wanted += 1
            event = _json_object(found[2]) if found is not None else None
            if event is None or found is None:
                self.state.events_lost += 1
            else:
                self._events.append({**event, "mono_ns": found[1]})

    def _event_seq(self, number: int) -> int:
        return int(_SEQ.unpack_from(self._buffer, layout.event_offset(number))[0])


def crash_of(record: object) -> Crash | None:
    """The lifecycle record's `exception` as a Crash; None for null."""
    if not isinstance(record, dict):
        return None
    return Crash(
        type=str(record.get("type", "")),
        message=str(record.get("message", "")),
        where=str(record.get("where", "")),
        traceback=str(record.get("traceback", "")),
        source="the rank's own exit",
        at_wall=(_as_int(record.get("wall_ns")) / 1e9) or None,
        chain=tuple(_links(record.get("chain"))),
    )


def _links(records: object) -> Iterator[tuple[str, str]]:
    for link in records[:_MAX_LINKS] if isinstance(records, list) else ():
        if isinstance(link, dict):
            yield str(link.get("type", "")), str(link.get("message", ""))


def _meeting(record: object) -> Meeting | None:
    """The lifecycle record's `barrier`."""
    if not isinstance(record, dict):
        return None
    return Meeting(
        group=str(record.get("group", "")),
        calls=_as_int(record.get("calls")),
        inside=bool(record.get("inside")),
        since=_as_int(record.get("since_mono_ns")) / 1e9,
        timeout_s=_seconds(record.get("timeout_s")),
    )


def _timeouts(record: dict[str, Any]) -> Timeouts:
    """What the groups record tells beside the groups."""
    extensions = ((_seconds(seconds), _as_int(wall_ns) / 1e9) for seconds, wall_ns in record.get("extensions") or ())
    return Timeouts(
        join_s=_seconds(record.get("join_timeout_s")),
        join_set_at=str(record.get("join_set_at") or ""),
        creation_s=_seconds(record.get("creating_timeout_s")),
        creation_set_at=str(record.get("creating_set_at") or ""),
        extensions=tuple((seconds, wall_at) for seconds, wall_at in extensions if seconds is not None),
    )


def _join(record: object) -> Join | None:
    """The lifecycle record's `join`."""
    if not isinstance(record, dict):
        return None
    rank, world_size = record.get("rank"), record.get("world_size")
    return Join(
        ours=bool(record.get("ours")),
        rank=_as_int(rank) if rank is not None else None,
        world_size=_as_int(world_size) if world_size is not None else None,
        store=str(record.get("store", "")),
        shared=bool(record.get("shared")),
        since=_as_int(record.get("since_mono_ns")) / 1e9,
        reached=None if record.get("reached") is None else bool(record["reached"]),
    )


def _groups(records: Iterable[dict[str, Any]]) -> tuple[Group, ...]:
    """ValueError where all groups together have more members than any job."""
    groups: list[Group] = []
    left = _MAX_MEMBERS
    for record in records:
        groups.append(_group(record, min(left, MOST_RANKS)))
        left -= len(groups[-1].ranks)
    return tuple(groups)


def _group(record: dict[str, Any], most: int) -> Group:
    return Group(
        name=str(record.get("name", "")),
        desc=str(record.get("desc", "")),
        backend=str(record.get("backend", "")),
        ranks=expand(str(record.get("ranks", "")), most),
        timeout_s=_seconds(record.get("timeout_s")),
        generation=_as_int(record.get("generation")),
        created_wall_at=_as_int(record.get("created_wall_ns")) / 1e9,
        set_at=str(record.get("set_at") or ""),
        checked=tuple(_as_int(number) for number in record["checked"][:_MAX_CHECKED]) if isinstance(record.get("checked"), list) else (),
    )


def _activity(payload: bytes) -> CompileActivity:
    _native_id, started_ns, phase_ns, _depth, split, splits = layout.THREAD_HEADER.unpack_from(payload)
    texts = payload[layout.THREAD_HEADER.size :].decode("utf-8", "replace").split("\0")
    named = dict(zip(layout.THREAD_TEXTS, texts, strict=False))
    raw_phase = named.get("phase", "")
    return CompileActivity(
        compile_id=named.get("compile_id", ""),
        kind=named.get("kind", ""),
        frame=named.get("frame", ""),
        phase=phase_of(raw_phase),
        raw_phase=raw_phase,
        started_at=started_ns / 1e9,
        phase_since=phase_ns / 1e9,
        recompile_reason=named.get("reason", ""),
        split=split,
        splits=splits,
        detail=named.get("detail", ""),
    )


def _json_object(payload: bytes) -> dict[str, Any] | None:
    """An event; None where it is none, and without a `wall_ns` that is no number."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(value, dict):
        return None
    if "wall_ns" in value and not _as_int(value["wall_ns"]):
        del value["wall_ns"]
    return value


def _seconds(value: object) -> float | None:
    """A duration; None for null and for what is none: JSON knows NaN and Infinity, and a verdict must not."""
    return float(value) if isinstance(value, (int, float)) and 0 <= value < 2**53 else None


def _as_int(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) and value == value and abs(value) < 2**63 else 0
