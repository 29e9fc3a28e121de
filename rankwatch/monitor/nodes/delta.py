"""A node's report as its judge gets it: once as a whole, then what has changed since the answer that the judge has. Pure, but for two locks.

{"schema", "nonce", "seq", "base": seq of the answer that this goes on from, null for the whole, "node", "group_rank", "gpu_note", "ending", "final",
 "mono", "wall": when it was answered, "read_mono", "read_wall": when the report was made (null: not yet), all on the node's clocks,
 "ranks": {"8": {field: value}}, "gone": {"8": [fields that have their defaults again]}, "entries", "calls": see growth.py, "kinds", "forms": numbers in them,
 "events", "events_seq": number of the newest one here, "events_lost", "cut": absent, or the parts that are too large to be sent}
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

from rankwatch.model import KIND_BYTES, Collective, NodeReport, RankState
from rankwatch.monitor.calls import KEEP
from rankwatch.monitor.nodes.codec import KIND, RANK, encode_form
from rankwatch.monitor.nodes.entries import Form, form_of
from rankwatch.monitor.nodes.growth import Gap, SentCalls, SentEntries
from rankwatch.monitor.nodes.receiver import SCHEMA, Receiver, SchemaError, calls_kept
from rankwatch.monitor.nodes.values import CodecError
from rankwatch.monitor.recorder import KEEP_PER_GROUP

__all__ = ["SCHEMA", "CodecError", "Gap", "Receiver", "SchemaError", "Sender", "calls_kept", "entries_sent"]

MAX_BYTES = 4 << 20
MAX_EVENTS = 512
EVENTS_BYTES = 512 << 10  # of one answer; the rest follows in the next one
CALLS_BYTES = 1 << 20  # of all histories of a node, before base64
FEWEST_CALLS = 256  # of one history
FEWEST_ENTRIES = 16
ENTRIES_TOTAL = 1 << 17  # of one group, over all ranks of a job
MAX_KINDS = 8192
NAMES = tuple(each.name for each in fields(RankState))
_GROWING = ("collectives", "calls")
_PLAIN = tuple(place for place, name in enumerate(NAMES) if name not in _GROWING)
_ENTRIES, _CALLS = NAMES.index("collectives"), NAMES.index("calls")
_DEFAULTS = tuple(each.default for each in RANK.fields.values())
_CODECS = tuple(each.codec for each in RANK.fields.values())
_STACKS = ("stack", "earlier_stack", "native_stack")
_CUTS = (("calls", "kinds"), ("entries", "forms"), _STACKS, ("ranks", "gone"))  # what is left out first, where it is too much
_values = attrgetter(*NAMES)


class _Sent:
    """One rank: its values as they were sent last, and in which version each has changed."""

    def __init__(self, marks: int, entries: int) -> None:
        self.values: tuple[Any, ...] = _DEFAULTS
        self.versions = [-1] * len(NAMES)
        self.entries, self.calls = SentEntries(marks, entries), SentCalls(marks)

    def take(self, state: RankState, version: int, form: Callable[[Collective], int]) -> tuple[bool, set[int]]:
        """Whether anything has changed, and the numbers of kinds of new calls."""
        values, before, numbers = _values(state), self.values, set[int]()
        if values == before:
            return False, numbers
        self.values = values
        for place, (value, was) in enumerate(zip(values, before, strict=True)):
            if value is not was and value != was:
                self.versions[place] = version
        if self.versions[_ENTRIES] == version:
            self.entries.take(state.collectives, version, form)
        if self.versions[_CALLS] == version:
            numbers = self.calls.take(state.calls, version)
        return True, numbers

    def since(self, base: int) -> tuple[dict[str, Any], list[str]]:
        """Fields that have changed after this version, and those of them that have their defaults again. -1: all, without the defaults."""
        found, gone, versions, values = {}, [], self.versions, self.values
        for place in _PLAIN:
            if versions[place] > base:
                value, codec = values[place], _CODECS[place]
                if value == _DEFAULTS[place]:
                    gone.append(NAMES[place])
                else:
                    found[NAMES[place]] = value if codec.exact is not None else codec.encode(value)
        return found, gone if base >= 0 else []


class Sender:
    """Node's side, one for each attempt of a launcher. `update` only takes note, in any thread; an answer does the work, one at a time."""

    def __init__(self, nonce: str, resend: int = 32, entries: int = KEEP_PER_GROUP, calls: int = KEEP) -> None:
        """nonce: drawn anew for each Sender. resend: a base so many versions old still gets a difference.

        entries: so many finished ones of a group, see entries_sent; calls: so many numbers of a history, see calls_kept.
        """
        self._nonce = nonce
        self._resend, self._entries, self._calls = resend, entries, calls
        self._noting, self._answering = threading.Lock(), threading.Lock()
        self._newest: tuple[NodeReport, float | None, float | None, str, bool] | None = None
        self._taken: NodeReport | None = None
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._events_seq = 0
        self._ranks: dict[int, _Sent] = {}
        self._kinds: dict[int, tuple[int, Collective]] = {}  # number of a kind of call -> version in which it first came, what it means
        self._forms: dict[Form, tuple[int, int, Collective]] = {}  # of entries -> number, version, one of them
        self._seq = 0
        self._whole_from = 0  # nobody has a state before this version that could be gone on from
        self._cut: tuple[tuple[str, ...], ...] = ()

    def update(self, report: NodeReport, now: float, wall: float, ending: str, final: bool, events: Sequence[Mapping[str, Any]]) -> None:
        """What an answer shows from now on. now, wall: when the report was made."""
        with self._noting:
            self._newest = (report, now, wall, ending, final)
            for event in events:
                self._events.append(dict(event))
            self._events_seq += len(events)

    def answer(self, base: int | None, events_after: int, now: float, wall: float) -> dict[str, Any]:
        """What is new to somebody who has the answer of seq `base` (None: nothing) and the events up to events_after. now, wall: this moment."""
        with self._answering:
            with self._noting:
                newest, events, events_seq = self._newest, list(self._events), self._events_seq
            if newest is not None and newest[0] is not self._taken:
                self._take(newest[0], now)
            report, read_mono, read_wall, ending, final = newest or (NodeReport("", ()), None, None, "", False)
            document = {
                "schema": SCHEMA, "nonce": self._nonce, "node": report.node, "group_rank": report.group_rank, "gpu_note": report.gpu_note,
                "ending": ending, "final": final, "mono": now, "wall": wall, "read_mono": read_mono, "read_wall": read_wall,
                **_events_after(events, events_seq, events_after),
            }  # fmt: skip
            changes = self._since(base)
            while len(self._cut) < len(_CUTS) and _is_large(changes):
                self._cut = _CUTS[: len(self._cut) + 1]
                self._seq = self._whole_from = self._seq + 1
                changes = self._since(None)
            return {**document, **changes}

    def _take(self, report: NodeReport, now: float) -> None:
        """Note what has changed. The first version is a large number, so that no other Sender's can be mistaken for one of these."""
        version = self._seq + 1 if self._taken is not None else max(1, int(now * 1000))
        if len(self._kinds) + len(self._forms) > MAX_KINDS:
            self._kinds, self._forms, self._ranks = {}, {}, {}
        if self._taken is None or self._ranks.keys() != {state.rank for state in report.ranks}:
            self._seq = self._whole_from = version
            self._ranks = {state.rank: self._ranks.get(state.rank) or _Sent(self._resend + 2, self._entries) for state in report.ranks}
        self._taken = report
        for state in report.ranks:
            sent = self._ranks[state.rank]
            changed, numbers = sent.take(state, version, lambda entry: self._form(entry, version))
            if changed:
                self._seq = version
            self._learn(numbers, sent, version)

    def _learn(self, numbers: set[int], sent: _Sent, version: int) -> None:
        """What these numbers of kinds mean, by any of the rank's histories."""
        for number in numbers:
            call = next((found for line in sent.calls.lines.values() if (found := line.known.get(number)) is not None), None)
            if call is not None and (number not in self._kinds or self._kinds[number][1] != call):
                self._kinds[number] = (version, call)

    def _form(self, entry: Collective, version: int) -> int:
        """The number of an entry's form."""
        form = form_of(entry)
        found = self._forms.get(form)
        if found is None:
            found = self._forms[form] = (len(self._forms), version, entry)
        return found[0]

    def _since(self, base: int | None) -> dict[str, Any]:
        """The parts of an answer that say what the ranks do."""
        if base is None or not max(self._whole_from, self._seq - self._resend) <= base <= self._seq:
            base = None
        after = -1 if base is None else base
        ranks, gone, entries, calls = dict[str, Any](), dict[str, Any](), dict[str, Any](), dict[str, Any]()
        lines = sum(len(sent.calls.lines) for sent in self._ranks.values())
        most = min(self._calls, max(FEWEST_CALLS, CALLS_BYTES // KIND_BYTES // max(1, lines)))
        for rank, sent in self._ranks.items():
            name = str(rank)
            changed, defaults = sent.since(after)
            if changed or base is None:
                ranks[name] = changed
            if defaults:
                gone[name] = defaults
            if sent.versions[_ENTRIES] > after and (new_entries := sent.entries.since(after)) is not None:
                entries[name] = new_entries
            if sent.versions[_CALLS] > after and (new_calls := sent.calls.since(after, most)) is not None:
                calls[name] = new_calls
        kinds = {str(number): KIND.encode(call) for number, (version, call) in self._kinds.items() if version > after}
        forms = {str(number): encode_form(entry) for number, version, entry in self._forms.values() if version > after}
        changes = {"seq": self._seq, "base": base, "ranks": ranks, "gone": gone, "entries": entries, "calls": calls, "kinds": kinds, "forms": forms}
        return _without(changes, self._cut) if self._cut else changes


def entries_sent(ranks: int) -> int:
    """How many finished entries of a group each rank of so large a job sends: all that are kept up to 2,048 ranks, 16 from 8,192 on."""
    return max(FEWEST_ENTRIES, min(KEEP_PER_GROUP, ENTRIES_TOTAL // max(1, ranks)))


def _without(changes: dict[str, Any], cuts: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    """What is left where the whole is too large."""
    left_out = {part for cut in cuts for part in cut}
    found = {part: {} if part in left_out else value for part, value in changes.items()}
    found["ranks"] = {rank: {name: value for name, value in given.items() if name not in left_out} for rank, given in found["ranks"].items()}
    return {**found, "cut": sorted(left_out)}


def _is_large(changes: Mapping[str, Any]) -> bool:
    """Only what can be large is measured: a whole, entries, histories, stacks."""
    may_be = changes["base"] is None or changes["entries"] or changes["calls"] or any(name in given for given in changes["ranks"].values() for name in _STACKS)
    return bool(may_be) and len(json.dumps(changes, default=str)) > MAX_BYTES


def _events_after(events: Sequence[dict[str, Any]], newest: int, after: int) -> dict[str, Any]:
    """The events with numbers beyond `after`, as many as there is room for; after is 0 for somebody new."""
    first = newest - len(events) + 1  # number of the oldest one kept
    if after > newest:
        after = 0  # another Sender's
    lost = max(0, first - after - 1)
    chosen: list[dict[str, Any]] = []
    room = EVENTS_BYTES
    for event in events[max(0, after + 1 - first) :]:
        room -= len(json.dumps(event, default=str))
        if room < 0 and chosen:
            break
        chosen.append(event)
    return {"events": chosen, "events_seq": max(after, first - 1) + len(chosen), "events_lost": lost}
