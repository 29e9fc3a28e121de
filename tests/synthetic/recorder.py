"""What is read of a rank's recorder: its newest entries, and the history of its calls as far as the buffer has held them between two reads."""

from __future__ import annotations

from itertools import islice

from engine import BEATING
from parts import Call, Entry, Rank
from quick import blank, quick
from sight import View
from world import World

from rankwatch.model import KIND_BYTES, Calls, Collective

KEEP_PER_GROUP = 64
_CALLS = quick(Calls, "generation first kinds known")
_COLLECTIVE = blank(Collective, "group generation seq op input_sizes output_sizes dtypes created_wall_at timeout_s done started")
_MAPPED = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")  # ops whose sizes are equal on all ranks


class Recorder:
    """Reads the recorders of a World; kinds of calls are numbered alike for all ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._kinds: dict[int, Collective] = {}
        self._kind_numbers: dict[tuple[object, ...], int] = {}
        self._kind_of: dict[Call, bytes] = {}

    def read(self, rank: Rank, view: View) -> None:
        """A whole read of it, as far as the buffer holds it."""
        view.wants_read = False
        view.read_at = self.world.now
        view.witness = rank.act.compile is not None
        rank.cpu_s += 0.03
        if view.read_version == rank.version:
            return
        view.read_version = rank.version
        fresh = min(rank.recorded - view.recorded, len(rank.entries))
        if fresh:
            self._learn(rank, view, fresh)
        if view.recorded:
            view.lost += max(0, rank.recorded - len(rank.entries) - view.recorded)
        view.recorded = rank.recorded
        view.read = self._newest(rank)
        if rank.stage in BEATING:
            view.told_at = self.world.now
            view.enqueued, view.completed = self.world.numbers(rank)

    def _newest(self, rank: Rank) -> tuple[Collective, ...]:
        """So many of every group's current generation."""
        generations, entries, show, timing = rank.generations, rank.entries, self._show, self.world.timing
        if len(entries) > KEEP_PER_GROUP:
            entries = _kept(rank)
        if any(generations.values()):  # some group was made anew
            entries = [entry for entry in entries if generations[entry.comm.name] == entry.comm.generation]
        if timing:
            return tuple([entry.shown if entry.done and entry.shown is not None else show(entry) for entry in entries])
        return tuple([entry.shown or show(entry) for entry in entries])

    def _learn(self, rank: Rank, view: View, fresh: int) -> None:
        """Add the last `fresh` calls to the history."""
        lines, kind_of = view.lines, self._kind_of
        for entry in reversed(list(islice(reversed(rank.entries), fresh))):
            comm, seq = entry.comm, entry.seq
            line = lines.get(comm.name)
            if line is None or line[0] != comm.generation or seq < line[1]:
                if line is not None and line[0] > comm.generation:
                    continue
                line = lines[comm.name] = (comm.generation, seq, bytearray())
            _, first, kinds = line
            kind, at = kind_of.get(entry.call) or self._kind(entry.call), (seq - first) * KIND_BYTES
            if at == len(kinds):
                kinds += kind
            else:
                kinds.extend(bytes(max(0, at - len(kinds))))
                kinds[at : at + KIND_BYTES] = kind
        view.calls = {name: _CALLS(generation, first, bytes(kinds), self._kinds) for name, (generation, first, kinds) in lines.items()}

    def _kind(self, call: Call) -> bytes:
        kind = Collective("", 0, 0, call.op, call.shapes, (), (call.dtype,)) if call.op in _MAPPED else Collective("", 0, 0, call.op)
        number = self._kind_numbers.setdefault((kind.op, kind.input_sizes, kind.dtypes), len(self._kind_numbers) + 1)
        self._kinds[number] = kind
        found = self._kind_of[call] = number.to_bytes(KIND_BYTES, "little")
        return found

    def _show(self, entry: Entry) -> Collective:
        """Its frozen form. The recorder tells what has started with timing only, and of what is done."""
        call, comm, done = entry.call, entry.comm, entry.done
        shown = _COLLECTIVE()
        shown.group, shown.generation = comm.name, comm.generation
        shown.seq, shown.op = entry.seq, call.op
        shown.input_sizes = shown.output_sizes = call.shapes
        shown.dtypes, shown.created_wall_at = call.dtypes, entry.created
        shown.timeout_s, shown.done = comm.group.timeout_s, done
        shown.started = (done or self.world.runs_on_device(entry)) if comm.nccl and (done or self.world.timing) else None
        shown.__class__ = Collective
        entry.shown = shown
        return shown  # type: ignore[no-any-return]


def _kept(rank: Rank) -> list[Entry]:
    """The newest of each group, oldest first."""
    if len(rank.generations) == 1:
        return list(islice(reversed(rank.entries), KEEP_PER_GROUP))[::-1]
    left = dict.fromkeys(rank.generations, KEEP_PER_GROUP)
    room, kept = sum(left.values()), []
    for entry in reversed(rank.entries):
        name = entry.comm.name
        if left[name]:
            left[name] -= 1
            kept.append(entry)
            room -= 1
            if not room:
                break
    return kept[::-1]
