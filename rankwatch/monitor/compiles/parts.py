"""Parts of a frame's book: what one rank has of it, and what went wrong in it - guards that failed, graph breaks, failures. Pure."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rankwatch.monitor.compiles.guards import Guard

MAX_VALUES = 6


class Own:
    """One rank's part in a frame. variants: [torch's number of the code, newest ordinal] in the order of their first compile."""

    __slots__ = ("cache_size", "compiles", "graphs", "last_step", "recompiles", "recorded", "rolling", "seconds", "steps", "variants")

    def __init__(self) -> None:
        self.variants: list[tuple[str, int]] = []
        self.compiles = self.recompiles = self.graphs = self.cache_size = 0
        self.seconds = 0.0
        self.steps = 0  # in which it was compiled
        self.last_step: int | None = None  # newest of them: steps done when the compile ended
        self.recorded = 0  # compiles by the rank's own record, events or not
        self.rolling = ""  # its rolling hash over all graphs

    def compiled_in(self, step: int) -> None:
        """A forward compile has ended when `step` steps were done."""
        if self.last_step is None or step > self.last_step:
            self.steps += 1
            self.last_step = step


class FailedGuard:
    """A guard of a frame that has failed, by (kind, source): on which ranks, how often, with which values.

    values: found, as torch tells them or the compile that followed proves; the first few. expected: by the guards, newest last.
    """

    __slots__ = ("count", "expected", "guard", "key", "mask", "values")

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.mask = self.count = 0
        self.values: list[str] = []
        self.expected: list[str] = []
        self.key: str | None = None


class Broken:
    """A graph break, or a compile that failed: on which ranks and how often."""

    __slots__ = ("at", "count", "gb", "key", "mask", "reason", "times", "type")

    def __init__(self, at: str, reason: str, gb: str = "", type: str = "") -> None:
        self.at, self.reason, self.gb, self.type = at, reason, gb, type
        self.mask = self.count = 0
        self.key: str | None = None
        self.times: dict[int, int] = {}  # rank -> how often, as it tells itself
