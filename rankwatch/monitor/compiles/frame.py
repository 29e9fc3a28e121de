"""What is known of one frame of the job's code on all ranks: how often it was compiled, what each compile gave, why, and at what cost.

A compile is known by (variant, ordinal), never by torch's compile id, whose first number is counted up anew in each process. ordinal: how often
its code had been compiled before. variant: several pieces of code may bear one name (the two sides of a graph break in a branch, a function
that is defined again); they are numbered in the order in which a rank first compiles them. Sets of ranks are bits, see rank_sets.py. Bounded.
"""

from __future__ import annotations

from rankwatch.monitor.compiles.guards import Guard
from rankwatch.monitor.compiles.parts import MAX_VALUES, Broken, FailedGuard, Own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_COMPILES = 64  # of a frame that are remembered one by one; all are counted
MAX_GUARDS = 32
MAX_GRAPHS = 16  # different ones of one compile
MAX_BREAKS = 32
MAX_FAILURES = 16
MAX_VARIANTS = 16
MAX_PHASES = 16
SAMPLES = 33

Key = tuple[int, int]
"""(variant, ordinal)."""


class Compiled:
    """One compile of a frame as far as ranks have done it. mask: those that have; `ok`, `failed` and `skipped` are parts of it, the rest was inferred."""

    __slots__ = (
        "caches",
        "failed",
        "failure",
        "graphs",
        "guards",
        "longest_rank",
        "longest_s",
        "mask",
        "ok",
        "samples",
        "seen_at",
        "seen_wall",
        "skipped",
        "step",
    )

    def __init__(self) -> None:
        self.mask = self.ok = self.failed = self.skipped = 0
        self.failure = ""
        self.graphs: dict[str, tuple[int, str]] = {}  # fingerprint -> ranks, words
        self.guards: dict[tuple[str, str], tuple[int, Guard]] = {}  # (kind, source) -> ranks, newest
        self.caches: dict[str, dict[str, int]] = {}  # layer -> hit | miss -> ranks
        self.samples: dict[str, list[float]] = {}  # kind of compile -> seconds of some ranks
        self.longest_s, self.longest_rank = 0.0, 0
        self.seen_at = self.seen_wall = 0.0  # of the first rank's end
        self.step: int | None = None  # latest step in which a rank has done it


class FrameBook:
    """Everything of one frame. `mask`: ranks that have compiled it."""

    __slots__ = (
        "breaks",
        "caches",
        "compiled",
        "dropped",
        "failures",
        "graphs",
        "guards",
        "last_reason",
        "limit",
        "limited",
        "mask",
        "name",
        "ops",
        "own",
        "phases",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.mask = self.limited = self.limit = self.ops = self.dropped = 0
        self.own: dict[int, Own] = {}
        self.compiled: dict[Key, Compiled] = {}
        self.graphs: dict[str, int] = {}  # fingerprint -> ranks that ever got it
        self.guards: dict[tuple[str, str], FailedGuard] = {}
        self.breaks: dict[tuple[str, str], Broken] = {}
        self.failures: dict[tuple[str, str, str], Broken] = {}
        self.phases: dict[str, float] = {}  # own seconds, summed over ranks
        self.caches: dict[str, dict[str, int]] = {}  # layer -> state -> lookups
        self.last_reason = ""

    def of(self, rank: int) -> Own:
        """The rank's part."""
        own = self.own.get(rank)
        if own is None:
            own = self.own[rank] = Own()
        return own

    def key_of(self, rank: int, compile_id: str) -> Key | None:
        """(variant, ordinal) of a compile that the rank has done or is about to do; None for an id that has no form."""
        code, ordinal = split_id(compile_id)
        if ordinal is None:
            return None
        variants = self.own[rank].variants if rank in self.own else []
        variant = next((number for number in reversed(range(len(variants))) if variants[number][0] == code), len(variants))
        return variant, ordinal

    def begin(self, rank: int, compile_id: str) -> Compiled | None:
        """The compile of this id, which the rank has finished now: those that must have come before are marked as done. None beyond the bounds."""
        code, ordinal = split_id(compile_id)
        if ordinal is None:
            return None
        variants = self.of(rank).variants
        variant = next((number for number in reversed(range(len(variants))) if variants[number][0] == code), len(variants))
        if variant < len(variants) and variants[variant][1] >= ordinal:  # torch._dynamo.reset() has started the count again
            variant = len(variants)
        before = variants[variant][1] if variant < len(variants) else -1
        if variant >= MAX_VARIANTS:
            self.dropped += 1
            return None
        if variant == len(variants):
            variants.append((code, ordinal))
        else:
            variants[variant] = (code, ordinal)
        self.mask |= 1 << rank
        for missed in range(before + 1, min(ordinal, MAX_COMPILES)):
            if earlier := self._compile((variant, missed)):
                earlier.mask |= 1 << rank
        compiled = self._compile((variant, ordinal))
        if compiled is not None:
            compiled.mask |= 1 << rank
        return compiled

    def _compile(self, key: Key) -> Compiled | None:
        compiled = self.compiled.get(key)
        if compiled is None:
            if len(self.compiled) >= MAX_COMPILES:
                self.dropped += 1
                return None
            compiled = self.compiled[key] = Compiled()
        return compiled

    def guard_failed(self, rank: int, guard: Guard, key: Key | None, compiled: Compiled | None, text_key: str) -> None:
        """Rank's recompile `key` was for this guard. It also tells what the compile before it, if that was for the same source, had found."""
        place = (guard.kind, guard.source or guard.text)
        failed = self.guards.get(place)
        if failed is None:
            if len(self.guards) >= MAX_GUARDS:
                self.dropped += 1
                return
            failed = self.guards[place] = FailedGuard(guard)
        failed.guard = guard
        failed.key = text_key or failed.key
        failed.mask |= 1 << rank
        failed.count += 1
        _note(failed.values, guard.actual)
        if guard.expected:
            failed.expected = [*(value for value in failed.expected if value != guard.expected), guard.expected][-MAX_VALUES:]
        if compiled is not None and (place in compiled.guards or len(compiled.guards) < MAX_GRAPHS):
            mask, _before = compiled.guards.get(place, (0, guard))
            compiled.guards[place] = (mask | 1 << rank, guard)
        if key is not None and guard.ordinal and not guard.actual and guard.expected:
            self._learn(place, (key[0], guard.ordinal), guard.expected)

    def _learn(self, place: tuple[str, str], key: Key, found: str) -> None:
        """The compile `key` was made for the value `found`: so that is what its own recompile has met."""
        earlier = self.compiled.get(key)
        known = earlier.guards.get(place) if earlier is not None else None
        if earlier is not None and known is not None and not known[1].actual:
            guard = known[1]
            earlier.guards[place] = (known[0], Guard(guard.kind, guard.source, guard.text, guard.expected, found, guard.ordinal, guard.at))
            _note(self.guards[place].values, found)

    def broke(self, rank: int, at: str, reason: str, gb: str, times: int, text_key: str) -> None:
        """A graph break inside this frame, on this rank for the `times`-th time."""
        place = (at, gb or reason[:80])
        found = self.breaks.get(place)
        if found is None:
            if len(self.breaks) >= MAX_BREAKS:
                self.dropped += 1
                return
            found = self.breaks[place] = Broken(at, reason, gb)
        found.mask |= 1 << rank
        found.key = text_key or found.key
        before = found.times.get(rank, 0)
        found.times[rank] = max(before + 1, times)
        found.count += found.times[rank] - before

    def failed(self, rank: int, type_: str, reason: str, at: str, text_key: str) -> None:
        """A compile raised."""
        place = (type_, reason[:80], at)
        found = self.failures.get(place)
        if found is None:
            if len(self.failures) >= MAX_FAILURES:
                self.dropped += 1
                return
            found = self.failures[place] = Broken(at, reason, type=type_)
        found.mask |= 1 << rank
        found.key = text_key or found.key
        found.count += 1

    def add_costs(self, phases: Mapping[str, float], caches: Mapping[str, str]) -> None:
        """Own seconds by phase and cache lookups of one more compile."""
        for phase, seconds in phases.items():
            if phase in self.phases or len(self.phases) < MAX_PHASES:
                self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        for layer, state in caches.items():
            counts = self.caches.setdefault(layer, {})
            counts[state] = counts.get(state, 0) + 1


def split_id(compile_id: str) -> tuple[str, int | None]:
    """("3", 1) of torch's compile id "3/1", "!0/3" and 1 of "!0/3/1"; (..., None) where there is no ordinal."""
    code, _, ordinal = compile_id.rpartition("/")
    return code, int(ordinal) if code and ordinal.isdigit() and len(ordinal) < 9 else None


def _note(values: list[str], value: str) -> None:
    if value and value not in values and len(values) < MAX_VALUES:
        values.append(value)
