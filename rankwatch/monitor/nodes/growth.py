"""What grows while a job runs: recorder entries and histories of calls. Of both a node sends only what its judge does not have yet. Pure.

Every entry gets a number when it is first seen, so that an answer names all that there are now and describes those that are new. A history goes
from the first number on that has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rankwatch.model import KIND_BYTES, Calls, Collective
from rankwatch.monitor.nodes.codec import Shift, packed, unpacked, used
from rankwatch.monitor.nodes.entries import MAX_ROWS, Form, decode_rows, encode_rows
from rankwatch.monitor.nodes.values import LEAST_INT, MOST_INT, whole_number

MAX_RUNS = 64  # beyond that a table is quicker
_NOT_HERE = "an entry that was sent before is not here"
Runs = list[list[int]]  # first number and count of each


class Gap(Exception):
    """What has come belongs to another state than the one at hand: ask for the whole."""


class SentEntries:
    """Node's side, one rank. most: so many finished entries of a group at most."""

    def __init__(self, marks: int, most: int) -> None:
        self._most = most
        self._entries: tuple[Collective, ...] = ()
        self._ids: list[int] = []
        self._forms: list[int] = []
        self._next = 0
        self._marks: deque[tuple[int, int]] = deque(maxlen=marks)  # version, first number that was new in it

    def take(self, entries: tuple[Collective, ...], version: int, form: Callable[[Collective], int]) -> None:
        """These are the entries from this version on. form: the number of an entry's form."""
        self._marks.append((version, self._next))
        entries = newest(entries, self._most)
        known = dict(zip(self._entries, zip(self._ids, self._forms, strict=True), strict=True))
        ids, forms = [], []
        for entry in entries:
            found = known.pop(entry, None)
            if found is None:
                found, self._next = (self._next, form(entry)), self._next + 1
            ids.append(found[0])
            forms.append(found[1])
        self._entries, self._ids, self._forms = entries, ids, forms

    def since(self, base: int) -> dict[str, Any] | None:
        """What has changed after this version, None where nothing has. -1: all."""
        new_from = 0 if base < 0 else next((first for version, first in self._marks if version > base), -1)
        if new_from < 0 or (base < 0 and not self._entries):
            return None
        fresh = [place for place, number in enumerate(self._ids) if number >= new_from]
        rows = encode_rows([self._entries[place] for place in fresh], [self._forms[place] for place in fresh])
        return {"order": runs(self._ids), "new": runs(self._ids[place] for place in fresh), **rows}


def newest(entries: tuple[Collective, ...], most: int) -> tuple[Collective, ...]:
    """The unfinished ones, and of the finished ones the newest `most` of each group; they are in order of time."""
    if len(entries) <= most:
        return entries
    kept, counts = [], dict[str, int]()
    for entry in reversed(entries):
        if entry.done:
            counts[entry.group] = counts.get(entry.group, 0) + 1
        if not entry.done or counts[entry.group] <= most:
            kept.append(entry)
    return tuple(reversed(kept)) if len(kept) < len(entries) else entries


def take_entries(
    held: tuple[Collective, ...], held_order: Runs, patch: Mapping[str, Any], shift: Shift, forms: Mapping[int, Form]
) -> tuple[tuple[Collective, ...], Runs]:
    """Judge's side: the entries after `since` of those held, and their numbers in runs. Gap where one is neither held nor new."""
    order, new = checked(patch["order"]), checked(patch["new"])
    fresh = decode_rows(patch, shift, forms)
    if sum([count for _, count in new]) != len(fresh):
        raise ValueError(f"{len(fresh)} entries have other numbers")
    if len(order) > MAX_RUNS or len(held_order) + len(new) > MAX_RUNS:
        places = {**dict(zip(numbers(held_order), held, strict=True)), **dict(zip(numbers(new), fresh, strict=True))}
        if not places.keys() >= set(numbers(order)):
            raise Gap(_NOT_HERE)
        return tuple([places[number] for number in numbers(order)]), order
    sources = _sources(held_order, held) + _sources(new, fresh)
    found: list[Collective] = []
    for first, count in order:
        end = first + count
        while first < end:  # most are one slice of what is held, and one of what is new
            source = next((source for source in sources if source[0] <= first < source[1]), None)
            if source is None:
                raise Gap(_NOT_HERE)
            start, upto, at, entries = source
            stop = min(end, upto)
            found += entries[at + first - start : at + stop - start]
            first = stop
    return tuple(found), order


def _sources(order: Runs, entries: Sequence[Collective]) -> list[tuple[int, int, int, Sequence[Collective]]]:
    """First number, the number after the last, where they begin in entries."""
    found, at = [], 0
    for first, count in order:
        found.append((first, first + count, at, entries))
        at += count
    return found


class SentCalls:
    """Node's side, one rank: the histories of its groups."""

    def __init__(self, marks: int) -> None:
        self.lines: dict[str, Calls] = {}
        self._most = marks
        self._marks: dict[str, deque[tuple[int, int]]] = {}  # version, first number that it has changed

    def take(self, calls: Mapping[str, Calls], version: int) -> set[int]:
        """These are the histories from this version on. Returns the numbers of kinds in what has changed."""
        changed: set[int] = set()
        for name, line in calls.items():
            before = self.lines.get(name)
            if before is not None and (before.generation, before.first, before.kinds) == (line.generation, line.first, line.kinds):
                continue
            start = unchanged_until(before, line)
            if before is None or before.generation != line.generation or name not in self._marks:
                self._marks[name] = deque(maxlen=self._most)
            self._marks[name].append((version, start))
            changed |= used(line.kinds[(start - line.first) * KIND_BYTES :])
        self._marks = {name: marks for name, marks in self._marks.items() if name in calls}
        self.lines = dict(calls)
        return changed

    def since(self, base: int, most: int) -> dict[str, Any] | None:
        """What has changed after this version, None where nothing has. -1: all. most: so many numbers of one history at most."""
        if base < 0 and not self.lines:
            return None
        lines = {}
        for name, line in self.lines.items():
            changed = [start for version, start in self._marks[name] if version > base]
            if base >= 0 and not changed:
                continue
            first, start = line.first, line.first if base < 0 else min(changed)
            if line.last + 1 - start > most:
                first = start = line.last + 1 - most
            first, start = max(first, line.last + 1 - most), max(start, line.first)
            lines[name] = {"generation": line.generation, "first": first, "from": start, "kinds": packed(line.kinds[(start - line.first) * KIND_BYTES :])}
        return {"names": list(self.lines), "lines": lines}


def take_calls(held: Mapping[str, Calls], patch: Mapping[str, Any], known: Mapping[int, Collective], most: int) -> dict[str, Calls]:
    """Judge's side: the histories after `since`, the newest `most` numbers of each. Gap where what they go on from is not held."""
    lines, found = patch["lines"], {}
    for name in patch["names"]:
        line, before = lines.get(name), held.get(name)
        if line is not None:
            found[name] = _extended(before, line, known, most)
        elif before is not None:
            found[name] = before
        else:
            raise Gap(f"the calls of group {name} are not here")
    return found


def _extended(held: Calls | None, line: Mapping[str, Any], known: Mapping[int, Collective], most: int) -> Calls:
    generation, first, start, kinds = whole_number(line["generation"]), whole_number(line["first"]), whole_number(line["from"]), unpacked(line["kinds"])
    if first > start:
        raise ValueError(f"a history that begins with {first} goes on from {start}")
    if first < start:
        if held is None or held.generation != generation or start > held.last + 1:
            raise Gap(f"the calls before {start} are not here")
        first = min(start, max(first, held.first))
        kinds = held.kinds[(first - held.first) * KIND_BYTES : max(0, start - held.first) * KIND_BYTES] + kinds
    surplus = len(kinds) // KIND_BYTES - most
    if surplus > 0:
        first, kinds = first + surplus, kinds[surplus * KIND_BYTES :]
    return Calls(generation, first, kinds, known)


def unchanged_until(before: Calls | None, line: Calls) -> int:
    """The first number in which a history differs from what it was; `line.first` where they have nothing in common."""
    if before is None or before.generation != line.generation or before.first > line.first:
        return line.first
    old, new = before.kinds[(line.first - before.first) * KIND_BYTES :], line.kinds
    alike, length = 0, min(len(old), len(new)) // KIND_BYTES
    if old[: length * KIND_BYTES] == new[: length * KIND_BYTES]:
        return line.first + length
    while length - alike > 1:  # alike so far, not alike up to `length`
        middle = (alike + length) // 2
        if old[: middle * KIND_BYTES] == new[: middle * KIND_BYTES]:
            alike = middle
        else:
            length = middle
    return line.first + alike


def runs(ids: Iterable[int]) -> Runs:
    """`[4, 5, 6, 2]` -> [[4, 3], [2, 1]]."""
    found: Runs = []
    for number in ids:
        if found and number == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def checked(value: Any) -> Runs:
    """What has come as runs; ValueError where it is none, or names more than MAX_ROWS entries."""
    if not all(type(first) is int and type(count) is int and count > 0 and LEAST_INT <= first <= MOST_INT for first, count in value):
        raise ValueError("numbers of entries are wanted")
    if sum([count for _, count in value]) > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} entries")
    found: Runs = value
    return found


def numbers(order: Runs) -> list[int]:
    """The numbers of these runs."""
    return [number for first, count in order for number in range(first, first + count)]
