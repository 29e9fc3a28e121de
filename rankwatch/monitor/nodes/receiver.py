"""The judge's copy of one node's report, brought up to date by its answers. Pure: nothing that comes is trusted, and one answer counts wholly or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from operator import attrgetter
from typing import Any, TypeVar

from rankwatch.model import KIND_BYTES, Collective, NodeReport, RankState
from rankwatch.monitor.calls import KEEP
from rankwatch.monitor.frozen import constructor, default_of
from rankwatch.monitor.nodes.codec import decode_fields, decode_forms, decode_kinds
from rankwatch.monitor.nodes.entries import Form
from rankwatch.monitor.nodes.growth import Gap, Runs, take_calls, take_entries
from rankwatch.monitor.nodes.values import LEAST_INT, MOST_INT, WRONG, CodecError, Shift, shifted
from rankwatch.wire.ranks import MOST_RANKS

Value = TypeVar("Value")
SCHEMA = 1
SHIFT_MOVED_S = 0.05
SHIFT_ANSWERS = 16  # a whole is asked for anew at most every so many answers, whatever the clocks do
CALLS_TOTAL_BYTES = 256 << 20  # of the histories of all ranks of a job
CALLS_GROUPS = 4  # groups that a rank is thought to have one of
FEWEST_CALLS = 512
MAX_RANKS = 1024  # of one node
MAX_KINDS = 1 << 16
_FIELDS = fields(RankState)
_PLACE = {each.name: place for place, each in enumerate(_FIELDS)}
_RANK, _ENTRIES, _CALLS = _PLACE["rank"], _PLACE["collectives"], _PLACE["calls"]
_values = attrgetter(*_PLACE)
_state = constructor(RankState)


class SchemaError(Exception):
    """The node speaks another schema. schema: as it says, or None."""

    def __init__(self, schema: object) -> None:
        super().__init__(f"report schema {schema!r:.40}, this is {SCHEMA}")
        self.schema = schema if type(schema) is int else None


def calls_kept(ranks: int) -> int:
    """How many numbers of each history a judge of so many ranks keeps: all where they are few."""
    return min(KEEP, max(FEWEST_CALLS, CALLS_TOTAL_BYTES // KIND_BYTES // CALLS_GROUPS // max(1, ranks)))


class Receiver:
    """One node; `apply` one call at a time, the rest from any thread. base, events_after: what to ask it for; base is None where the whole is wanted.

    ending, final: as the node says. read_at: when its report was made, on the judge's monotonic clock. events_lost: so far. calls: numbers of each history
    that are kept, see calls_kept.
    """

    def __init__(self, calls: int = KEEP) -> None:
        self.base: int | None = None
        self.events_after = 0
        self.events_lost = 0
        self.ending = ""
        self.final = False
        self.read_at: float | None = None
        self._calls = calls
        self._nonce: str | None = None
        self._node, self._group_rank, self._gpu_note = "", 0, ""
        self._states: dict[int, RankState] = {}
        self._order: dict[int, Runs] = {}  # rank -> numbers of its entries
        self._kinds: dict[int, Collective] = {}
        self._forms: dict[int, Form] = {}
        self._shift = Shift(0.0, 0.0)  # under which the oldest fields were decoded
        self._answers = SHIFT_ANSWERS  # since the whole was last asked for because of the clocks

    def apply(self, document: Mapping[str, Any], shift: Shift) -> list[dict[str, Any]]:
        """Take one answer; its events, oldest first, with their times on the judge's clocks.

        Gap: it goes on from another state than this one. SchemaError: another schema. CodecError: it is none of an answer. After each of them, and where the
        clocks have moved by more than SHIFT_MOVED_S since a field was decoded, base is None: what is asked for next is the whole.
        """
        base, self.base = self.base, None
        try:
            if document["schema"] != SCHEMA:
                raise SchemaError(document["schema"])
            whole = document["base"] is None
            if not whole and (base is None or document["base"] != base or document["nonce"] != self._nonce):
                raise Gap("the answer goes on from another one")
            return self._apply(document, shift, whole)
        except (SchemaError, Gap, CodecError):
            raise
        except WRONG as error:
            raise CodecError(f"{type(error).__name__}: {error}") from None

    def report(self, age_s: float, clock_offset_s: float = 0.0) -> NodeReport:
        """The node as of its newest answer. clock_offset_s: 0.0 for a judge, since wall times here are the judge's own already."""
        return NodeReport(self._node, tuple(self._states.values()), self._group_rank, age_s, clock_offset_s, self._gpu_note)

    def _apply(self, document: Mapping[str, Any], shift: Shift, whole: bool) -> list[dict[str, Any]]:
        nonce, seq, node, group_rank = _of(document, "nonce", str), _of(document, "seq", int), _of(document, "node", str), _of(document, "group_rank", int)
        gpu_note, ending, final = _of(document, "gpu_note", str), _of(document, "ending", str), _of(document, "final", bool)
        read_at = None if document["read_mono"] is None else _number(document["read_mono"]) + shift.mono_s
        events = [event for each in _of(document, "events", list) if type(each) is dict and (event := _event(each, shift)) is not None]
        events_seq, events_lost = _of(document, "events_seq", int), _of(document, "events_lost", int)
        states, order = ({}, {}) if whole else (dict(self._states), dict(self._order))
        known, forms = ({}, {}) if whole else (self._kinds, self._forms)
        forms.update(decode_forms(_of(document, "forms", dict)))
        known.update(decode_kinds(_of(document, "kinds", dict), shift))
        ranks, gone, entries, calls = (_of(document, part, dict) for part in ("ranks", "gone", "entries", "calls"))
        if max(len(ranks), len(gone), len(entries), len(calls)) > MAX_RANKS or len(known) + len(forms) > MAX_KINDS:
            raise ValueError("more ranks, or kinds of calls, than a node has")
        for name in {**ranks, **gone, **entries, **calls} if gone or entries or calls else ranks:
            rank = _rank(name)
            before = states.get(rank)
            if before is None and not whole:
                raise Gap(f"rank {rank} is not known here")
            values = list(_values(before)) if before is not None else [default_of(each) for each in _FIELDS]
            values[_RANK] = rank
            try:
                for field, value in decode_fields(ranks.get(name) or {}, shift).items():
                    values[_PLACE[field]] = value
            except CodecError as error:
                raise CodecError(f"rank {rank}: {error}") from None
            for field in gone.get(name) or ():
                if field in _PLACE:
                    values[_PLACE[field]] = default_of(_FIELDS[_PLACE[field]])
            if name in entries:
                held = before.collectives if before is not None else ()
                values[_ENTRIES], order[rank] = take_entries(held, order.get(rank, []), entries[name], shift, forms)
            if name in calls:
                values[_CALLS] = take_calls(before.calls if before is not None else {}, calls[name], known, self._calls)
            states[rank] = _state(*values)
        self._node, self._group_rank, self._gpu_note, self._nonce = node, group_rank, gpu_note, nonce
        self._states = dict(sorted(states.items())) if whole else states
        self._order, self._kinds, self._forms = order, known, forms
        self.ending, self.final, self.read_at = ending, final, read_at
        self.events_after, self.events_lost = events_seq, self.events_lost + max(0, events_lost)
        self.base = seq if self._is_as_of(shift, whole) else None
        return events

    def _is_as_of(self, shift: Shift, whole: bool) -> bool:
        """Whether all fields here are right under this shift; if not, the whole is due."""
        self._answers += 1
        if whole:
            self._shift = shift
        moved_s = max(abs(shift.mono_s - self._shift.mono_s), abs(shift.wall_s - self._shift.wall_s))
        if moved_s <= SHIFT_MOVED_S or self._answers < SHIFT_ANSWERS:
            return True
        self._answers = 0
        return False


def _of(document: Mapping[str, Any], name: str, wanted: type[Value]) -> Value:
    value = document[name]
    if type(value) is int and not LEAST_INT <= value <= MOST_INT:
        raise CodecError(f"{name}: a number of at most 64 bits is wanted")
    if type(value) is wanted:
        return value
    raise CodecError(f"{name}: {wanted.__name__} is wanted, found {type(value).__name__}")


def _event(event: dict[str, Any], shift: Shift) -> dict[str, Any] | None:
    """None for one that cannot be written: the others are news all the same."""
    if type(event.get("wall_ns", 0)) not in (int, float):
        return None
    try:
        found: dict[str, Any] = shifted(event, shift)
    except (ValueError, RecursionError):
        return None
    return found


def _number(value: Any) -> float:
    if type(value) in (int, float) and isfinite(value):
        return float(value)
    raise ValueError(f"a time is wanted, found {value!r:.40}")


def _rank(name: str) -> int:
    if name.isdecimal() and len(name) < 9 and int(name) < MOST_RANKS:
        return int(name)
    raise ValueError(f"{name[:40]!r} is no rank")
