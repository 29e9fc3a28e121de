"""torch's flight recorder JSON -> model.Collective, and what has to be remembered between two reads of it. Pure.

gloo: `state` stays "scheduled", `retired` is the only sign of completion and also comes after a timeout, started is unknowable.
NCCL: `state` says it; retired without completed means timed out. Source: torch 2.9-2.14, schema 2.10.

gloo's status numbers may count sends and receives as well: numbering.py. Its entries may have no names: unnamed.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankwatch.model import Collective, Group
from rankwatch.monitor import unnamed
from rankwatch.monitor.numbering import Numbering

KEEP_PER_GROUP = 64
MAX_NAMED = 4096  # groups of one process, those made anew counted each time


class RecorderView:
    """One process's recorders (the generic one and NCCL's), over all reads of them."""

    def __init__(self, timed: bool = False) -> None:
        """timed: NCCL's start events are on by the environment; what its recorder counts tells for sure, once something has completed."""
        self._is_timed = timed
        self.collectives: tuple[Collective, ...] = ()
        self.lost = 0
        self._group_of: dict[tuple[str, int], tuple[str, int]] = {}  # (recorder, pg_id) -> group name and generation, -1 for an older one
        self._newest: dict[str, int] = {}  # recorder -> last record_id
        self._open: dict[tuple[str, int, int, bool], float] = {}  # open at the read before -> when its timeout ends, unix seconds
        self._failed: set[tuple[str, int, int, bool]] = set()
        self._numbering = Numbering()

    def names_all(self, recorder: str, status: Mapping[str, Any]) -> bool:
        """Whether every group that a status-only answer counts is known by name; if not, a full read tells."""
        return all((recorder, _int(pg_id)) in self._group_of for pg_id in _counts(status))

    def take(self, recorders: Mapping[str, Mapping[str, Any]], groups: Sequence[Group], wall_at: float, whole: bool = True) -> None:
        """Replace the entries with those of a full read: the newest KEEP_PER_GROUP of each group's current generation.

        whole: False for a document that was cut to its newest entries (`tail`): what it does not hold stays as it was.
        """
        current: Mapping[str, Group] = {group.name: group for group in groups}
        found: dict[str, list[Collective]] = {}
        still_open: dict[tuple[str, int, int, bool], float] = {}
        for recorder, document in recorders.items():
            entries: list[Mapping[str, Any]] = [entry for entry in document.get("entries") or () if isinstance(entry, dict)]
            if whole and entries:
                self.saw(recorder, _int(entries[0].get("record_id")), _int(entries[-1].get("record_id")))
            entries = self._named(recorder, entries, groups)
            for entry in entries:
                group = current.get(_name(entry))
                generation = 0 if group is None else -1 if _is_older(entry, group) else group.generation
                place = recorder, _int(entry.get("pg_id"))
                self._group_of.pop(place, None)  # what was seen last stays longest
                self._group_of[place] = (_name(entry) + suffix(recorder, group), generation)
            if "nccl" not in recorder:
                self._numbering.learn(entries)
            timed = self._is_timed = _timed(document, self._is_timed) if "nccl" in recorder else self._is_timed
            for entry in _newest_of_each(entries, current):
                group = current.get(_name(entry))
                collective = collective_of(entry, recorder, group.generation if group else 0, timed)
                collective = replace(collective, group=collective.group + suffix(recorder, group)) if group else collective
                collective = self._with_failures(collective, still_open, wall_at)
                found.setdefault(collective.group, []).append(collective)
        if not whole:
            self._keep(found, still_open, groups)
        self._open = still_open
        self.collectives = tuple(sorted((c for of_group in found.values() for c in of_group), key=lambda c: (c.created_wall_at, c.seq)))
        self._forget()

    def _named(self, recorder: str, entries: list[Mapping[str, Any]], groups: Sequence[Group]) -> list[Mapping[str, Any]]:
        """The entries with the names that gloo does not know of checked groups, where these can be told."""
        known = unnamed.names(groups) if "nccl" not in recorder else {}
        told = unnamed.told_apart(entries, known) if known else None
        if told is None:
            return entries
        for number, name in known.items():
            if not name:
                self._group_of[recorder, number] = ("", -1)
        return told

    def _forget(self) -> None:
        """What no later read can bring back."""
        while len(self._group_of) > MAX_NAMED:
            del self._group_of[next(iter(self._group_of))]
        if self._failed:
            self._failed &= {(c.group, c.generation, c.seq, c.is_p2p) for c in self.collectives}

    def _keep(self, found: dict[str, list[Collective]], still_open: dict[tuple[str, int, int, bool], float], groups: Sequence[Group]) -> None:
        """Add the known entries that a cut document left out, as many as there is room for."""
        for name in {collective.group for collective in self.collectives}:
            newer = found.get(name, [])
            held = {(c.seq, c.is_p2p) for c in newer}
            older = [c for c in self.current(groups) if c.group == name and (c.seq, c.is_p2p) not in held]
            found[name] = [*older[-max(0, KEEP_PER_GROUP - len(newer)) :], *newer] if len(newer) < KEEP_PER_GROUP else newer
        there = {(c.group, c.generation, c.seq, c.is_p2p) for of_group in found.values() for c in of_group}
        for key, until in self._open.items():
            if key in there:
                still_open.setdefault(key, until)

    def add(self, recorder: str, document: Mapping[str, Any], groups: Sequence[Group]) -> None:
        """Entries that come beside the full reads, a crashing rank's last words: they join the known ones, and replace those of the same number."""
        current: Mapping[str, Group] = {group.name: group for group in groups}
        known = {(c.group, c.generation, c.seq, c.is_p2p): c for c in self.collectives}
        entries = self._named(recorder, [entry for entry in document.get("entries") or () if isinstance(entry, dict)], groups)
        for entry in _newest_of_each(entries, current):
            group = current.get(_name(entry))
            collective = collective_of(entry, recorder, group.generation if group else 0)
            collective = replace(collective, group=collective.group + suffix(recorder, group))
            known[collective.group, collective.generation, collective.seq, collective.is_p2p] = collective
        self.collectives = tuple(sorted(known.values(), key=lambda c: (c.created_wall_at, c.seq)))

    def numbers(self, recorder: str, status: Mapping[str, Any], groups: Sequence[Group]) -> tuple[dict[str, int], dict[str, int]]:
        """({group: last enqueued}, {group: last completed}) of a status-only answer; the newest group of a name wins.

        A known group that the status does not count has 0; one is left out as long as some counted group has no known name.
        """
        counts = _counts(status)
        enqueued: dict[str, int] = {}
        completed: dict[str, int] = {}
        generations = {group.name: group.generation for group in groups}
        unnamed = 0
        for pg_id in sorted(counts, key=_int):
            found = self._group_of.get((recorder, _int(pg_id)))
            if found is None and len(counts) == 1 and list(generations.values()) == [0]:
                found = (next(iter(generations)), 0)  # the usual job: one group, before its first full read
            if found is None:
                unnamed += 1
                continue
            name, generation = found
            if generation < 0 or generations.get(name, generation) != generation:
                continue  # a group of that name that is gone is counted for ever; so is one that only checks
            entered, done = (max(0, _int(counts[pg_id].get(key))) for key in ("last_enqueued_collective", "last_completed_collective"))
            enqueued[name], completed[name] = (entered, done) if "nccl" in recorder else self._numbering.collectives(_int(pg_id), entered, done)
        if not unnamed:
            for name in generations:
                enqueued.setdefault(name, 0)
                completed.setdefault(name, 0)
        return enqueued, completed

    def mixed(self, recorder: str, status: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, bool]:
        """Mixed groups, and whether the rank has called more in them than was read: then `numbers` are lower bounds."""
        generations = {group.name: group.generation for group in groups}
        found = {}
        for pg_id, counts in _counts(status).items():
            name, generation = self._group_of.get((recorder, _int(pg_id)), ("", -1))
            if _int(pg_id) in self._numbering.mixed and generations.get(name) == generation:
                found[name] = self._numbering.behind(_int(pg_id), _int(counts.get("last_enqueued_collective")))
        return found

    def current(self, groups: Sequence[Group]) -> tuple[Collective, ...]:
        """The entries of the last full read without those of groups that were made anew since."""
        generations = {group.name: group.generation for group in groups}
        if all(generations.get(collective.group, collective.generation) == collective.generation for collective in self.collectives):
            return self.collectives
        return tuple(collective for collective in self.collectives if generations.get(collective.group, collective.generation) == collective.generation)

    def entry_numbers(self, groups: Sequence[Group]) -> tuple[dict[str, int], dict[str, int]]:
        """({group: last enqueued}, {group: last completed}), from those entries."""
        enqueued: dict[str, int] = {}
        completed: dict[str, int] = {}
        for collective in self.current(groups):
            if collective.is_p2p:
                continue
            enqueued[collective.group] = max(enqueued.get(collective.group, 0), collective.seq)
            if collective.done:
                completed[collective.group] = max(completed.get(collective.group, 0), collective.seq)
        return enqueued, completed

    def saw(self, recorder: str, first: int, last: int) -> None:
        """Entries with these record numbers were read: a gap to those before is what the recorder has dropped unseen."""
        before = self._newest.get(recorder)
        if before is not None and last >= before and first > before + 1:
            self.lost += first - before - 1
        self._newest[recorder] = last

    def _with_failures(self, collective: Collective, still_open: dict[tuple[str, int, int, bool], float], wall_at: float) -> Collective:
        """gloo retires an operation that timed out: seen open before and retired past its timeout, it did not complete."""
        key = (collective.group, collective.generation, collective.seq, collective.is_p2p)
        if collective.done and wall_at >= self._open.get(key, float("inf")):
            self._failed.add(key)
        if not collective.done and collective.timeout_s:
            still_open[key] = collective.created_wall_at + collective.timeout_s - 0.05
        if collective.done and key in self._failed:
            return replace(collective, done=False)
        return collective


def twins(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The groups, and for each with a gloo beside its NCCL ("cpu:gloo,cuda:nccl") one more: the two count their operations apart."""
    return (*groups, *(replace(group, name=group.name + suffix("", group), backend="gloo") for group in groups if suffix("", group)))


def collective_of(entry: Mapping[str, Any], recorder: str, generation: int, timed: bool = False) -> Collective:
    """One recorder entry as the model speaks of it. timed: NCCL's start events are on, so "scheduled" means that it does not run."""
    nccl = "nccl" in recorder
    state = entry.get("state")
    is_p2p = bool(entry.get("is_p2p"))
    started: bool | None = None
    if nccl and (timed or state != "scheduled"):
        started = state in ("started", "completed")
    timeout_ms = _int(entry.get("timeout_ms"))
    return Collective(
        group=_name(entry),
        generation=generation,
        seq=_int(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id")),
        op=str(entry.get("profiling_name", "")).partition(":")[2] or str(entry.get("profiling_name", "")),
        input_sizes=_sizes(entry.get("input_sizes")),
        output_sizes=_sizes(entry.get("output_sizes")),
        dtypes=tuple(str(dtype) for dtype in entry.get("input_dtypes") or ()),
        created_wall_at=_int(entry.get("time_created_ns")) / 1e9,
        timeout_s=timeout_ms / 1e3 if timeout_ms > 0 else None,
        done=state == "completed" if nccl else bool(entry.get("retired")),
        started=started,
        is_p2p=is_p2p,
        duration_s=_duration_s(entry.get("duration_ms")) if nccl else None,
    )


def tail(document: bytes, count: int) -> bytes:
    """A recorder's JSON with its newest `count` entries only, as text: parsing is what a read costs most."""
    start = len(document)
    for _ in range(count):
        start = document.rfind(b'{"collective_seq_id":', 0, start)
        if start < 0:
            return document
    head = document.find(b'"entries":[')
    return document[:head] + b'"entries":[' + document[start:] if 0 <= head < start else document


def newest(document: dict[str, Any]) -> dict[str, Any]:
    """A parsed answer without the entries that `take` passes over in any case: of 2,000 some 100 stay, a parsed one is 3 KB."""
    entries = document.get("entries")
    if not isinstance(entries, list) or len(entries) <= 2 * KEEP_PER_GROUP:
        return document
    kept: list[Any] = []
    counts: dict[tuple[object, ...], int] = {}
    for entry in reversed(entries[1:]):
        of = (str(entry.get("pg_id")), _name(entry), bool(entry.get("is_p2p"))) if isinstance(entry, dict) else ()
        counts[of] = counts.get(of, 0) + 1
        if counts[of] <= KEEP_PER_GROUP:
            kept.append(entry)
    return {**document, "entries": [entries[0], *reversed(kept)]}  # the first tells what was dropped before it


def _newest_of_each(entries: Sequence[Mapping[str, Any]], current: Mapping[str, Group]) -> list[Mapping[str, Any]]:
    """The newest KEEP_PER_GROUP entries of each group, older generations left out; oldest first."""
    kept: list[Mapping[str, Any]] = []
    counts: dict[str, int] = {}
    for entry in reversed(entries):
        name = _name(entry)
        group = current.get(name)
        if group is not None and _is_older(entry, group):
            continue
        counts[name] = counts.get(name, 0) + 1
        if counts[name] <= KEEP_PER_GROUP:
            kept.append(entry)
    kept.reverse()
    return kept


def suffix(recorder: str, group: Group | None) -> str:
    return ":gloo" if group is not None and "nccl" not in recorder and "nccl" in group.backend and "gloo" in group.backend else ""


def _counts(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """pg_status, whatever the bytes were."""
    status = document.get("pg_status")
    return {str(pg_id): counts for pg_id, counts in status.items() if isinstance(counts, dict)} if isinstance(status, dict) else {}


def _timed(document: Mapping[str, Any], believed: bool) -> bool:
    """TORCH_NCCL_ENABLE_TIMING is on: without it no group ever counts a start, whatever completes. believed: where nothing has completed yet."""
    counted = _counts(document).values()
    if any(_int(counts.get("last_started_collective")) > 0 for counts in counted):
        return True
    return believed and not any(_int(counts.get("last_completed_collective")) > 0 for counts in counted)


def _is_older(entry: Mapping[str, Any], group: Group) -> bool:
    """The entry is of an earlier group of this name. A first generation has none before it, and no clock, which may be stepped, is asked."""
    return group.generation > 0 and _int(entry.get("time_created_ns")) < group.created_wall_at * 1e9


def _name(entry: Mapping[str, Any]) -> str:
    names = entry.get("process_group")
    return str(names[0]) if isinstance(names, list) and names else ""


def _sizes(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        return ()
    return tuple(tuple(_int(n) for n in size) for size in value if isinstance(size, list))


def _duration_s(value: object) -> float | None:
    """None where timing is off or the operation is not over: torch leaves it out, or has 0."""
    return float(value) / 1e3 if isinstance(value, (int, float)) and value > 0 else None


def _int(value: object) -> int:
    """Numbers as torch writes them: the recorder's JSON has some as strings."""
    try:
        return int(value)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError, OverflowError):
        return 0
