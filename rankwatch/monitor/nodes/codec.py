"""RankState <-> JSON values, decided by the type hints of model.py. Times on the wire are the node's own; decoding shifts them. Pure.

What hints cannot say stands here: which floats are times of which clock, that members of groups are written as "0-15", recorder entries as
columns, and histories of calls as base64 with the meaning of those numbers that they hold.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from operator import lt
from typing import Any

from rankwatch.model import KIND_BYTES, Calls, Collective, RankState
from rankwatch.monitor.nodes.entries import Form, decode_rows, encode_rows, form_of, plain, shared_form
from rankwatch.monitor.nodes.values import Codec, CodecError, Codecs, Kind, Kinds, Shift, whole_number
from rankwatch.wire.ranks import MOST_RANKS, compress, expand

__all__ = ["CodecError", "Shift", "TIMES", "decode_fields", "decode_rank", "encode_field", "encode_rank"]

# Where they are filled: monitor/slots.py, reader.py, recorder.py, processes.py, watchdog_log.py, gpus.py, stacks.py, crash.py
TIMES: dict[str, Kind | Kinds] = {
    "Collective.created_wall_at": "wall",
    "Collective.duration_s": "plain",
    "Collective.timeout_s": "plain",
    "CollectiveSum.bus_bytes": "plain",
    "CollectiveSum.bus_bytes_per_s": "plain",
    "CollectiveSum.bus_s": "plain",
    "CollectiveSum.device_s": "plain",
    "CompileActivity.phase_since": "mono",
    "CompileActivity.started_at": "mono",
    "Crash.at_wall": "wall",
    "Gpu.at": "mono",
    "Gpu.power_w": "plain",
    "Gpu.sm_clock_hz": "plain",
    "Gpu.temperature_c": "plain",
    "Gpu.utilisation_ratio": "plain",
    "Gpu.xids": "mono",
    "Group.created_wall_at": "wall",
    "Group.timeout_s": "plain",
    "Join.since": "mono",
    "KernelWait.asleep_s": "plain",
    "Meeting.since": "mono",
    "Meeting.timeout_s": "plain",
    "Process.cpu_s": "plain",
    "Process.exited_at": "mono",
    "Process.main_cpu_s": "plain",
    "Process.started_at": "mono",
    "Process.tree_cpu_s": "plain",
    "RankState.collectives_at": "mono",
    "RankState.heartbeat_at": "mono",
    "RankState.last_step_at": "mono",
    "RankState.stage_since": "mono",
    "RankState.step_s": "plain",
    "Stack.at": "mono",
    "Timeouts.creation_s": "plain",
    "Timeouts.extensions": ("plain", "wall"),
    "Timeouts.join_s": "plain",
    "Watchdog.aborted_at": "mono",
    "Watchdog.aborts_at": "mono",
    "Watchdog.ends_at": "mono",
    "Watchdog.fired_at": "mono",
}
MAX_MEMBERS = 4 * MOST_RANKS  # over all member lists that are kept to be shared


def encode_rank(state: RankState) -> dict[str, Any]:
    """Field -> JSON value, without the fields that have their defaults."""
    return RANK.encode(state)


def encode_field(name: str, value: Any) -> Any:
    """The JSON value of one field of RankState."""
    return RANK.fields[name].codec.encode(value)


def decode_fields(fields: Mapping[str, Any], shift: Shift) -> dict[str, Any]:
    """Those of these fields that are known. CodecError names the one that is wrong."""
    try:
        return RANK.decode_fields(fields, shift)
    except CodecError:
        raise
    except ValueError as error:
        raise CodecError(f"a rank: {error}") from None


def decode_rank(fields: Mapping[str, Any], shift: Shift) -> RankState:
    """The state that encode_rank was given, with its times on the judge's clocks."""
    try:
        state: RankState = RANK.decode(fields, shift)
    except CodecError:
        raise
    except ValueError as error:
        raise CodecError(f"a rank: {error}") from None
    return state


# -- what the hints do not say ----------------------------------------------------------------------------------------------------


class _Members:
    """Member lists by their text. Equal groups of many ranks on many nodes share one tuple: that of a large world has 16,384 numbers."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}
        self._total = 0

    def encode(self, ranks: Sequence[int]) -> Any:
        in_order = all(map(lt, ranks, ranks[1:])) and (not ranks or 0 <= ranks[0] <= ranks[-1] < MOST_RANKS)
        return compress(ranks) if in_order else list(ranks)

    def decode(self, value: Any, _shift: Shift) -> tuple[int, ...]:
        if type(value) is list:
            return tuple(map(whole_number, value))
        if type(value) is not str:
            raise ValueError(f"a text like 0-15 is wanted, found {type(value).__name__}")
        found = self._known.get(value)
        if found is None:
            found = expand(value)
            self._total += len(found) + 1
            if self._total > MAX_MEMBERS:
                self._known, self._total = {}, len(found)
            self._known[value] = found
        return found


def used(kinds: bytes) -> set[int]:
    """The numbers of kinds that a history holds."""
    return set(struct.unpack(f"<{len(kinds) // KIND_BYTES}I", kinds))


def packed(kinds: bytes) -> str:
    return base64.b64encode(kinds).decode("ascii")


def unpacked(text: Any) -> bytes:
    """ValueError where it is no history."""
    kinds = base64.b64decode(text, validate=True)
    if len(kinds) % KIND_BYTES:
        raise ValueError(f"{len(kinds)} bytes are no numbers of {KIND_BYTES}")
    return kinds


def _encode_entries(entries: Sequence[Collective]) -> Any:
    forms: dict[Any, int] = {}
    of = [forms.setdefault(form_of(entry), len(forms)) for entry in entries]
    first = dict(zip(reversed(of), reversed(entries), strict=True))
    return {"forms": {str(number): encode_form(entry) for number, entry in first.items()}, **encode_rows(entries, of)}


def _decode_entries(value: Any, shift: Shift) -> tuple[Collective, ...]:
    return tuple(decode_rows(value, shift, decode_forms(value["forms"])))


def encode_form(entry: Collective) -> Any:
    """The form of an entry, see entries.py."""
    return KIND.encode(plain(entry))


def decode_forms(value: Any) -> dict[int, Form]:
    return {int(number): shared_form(KIND.decode(form, _STILL)) for number, form in value.items()}


def _encode_calls(calls: Mapping[str, Calls]) -> Any:
    return {
        name: {"generation": of.generation, "first": of.first, "kinds": packed(of.kinds), "known": encode_kinds(of.known, used(of.kinds))}
        for name, of in calls.items()
    }


def _decode_calls(value: Any, shift: Shift) -> dict[str, Calls]:
    return {
        str(name): Calls(whole_number(of["generation"]), whole_number(of["first"]), unpacked(of["kinds"]), decode_kinds(of["known"], shift))
        for name, of in value.items()
    }


def encode_kinds(known: Mapping[int, Collective], numbers: set[int]) -> dict[str, Any]:
    """The meaning of those numbers that have one."""
    return {str(number): KIND.encode(known[number]) for number in sorted(numbers) if number in known}


def decode_kinds(value: Any, shift: Shift) -> dict[int, Collective]:
    return {int(number): KIND.decode(kind, shift) for number, kind in value.items()}


_STILL = Shift(0.0, 0.0)
_members = _Members()
_codecs = Codecs(
    TIMES,
    {
        "Group.ranks": Codec(_members.encode, _members.decode),
        "RankState.creation_ranks": Codec(_members.encode, _members.decode),
        "RankState.collectives": Codec(_encode_entries, _decode_entries),
        "RankState.calls": Codec(_encode_calls, _decode_calls),
    },
)
KIND: Codec = Codec(_codecs.record(Collective).encode, _codecs.record(Collective).decode)
RANK = _codecs.record(RankState)
