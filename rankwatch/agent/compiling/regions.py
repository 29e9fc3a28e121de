"""Regions of work that torch has no timed region for: they are put among torch's own on the calling thread, as a compile of kind `runtime` where nothing
else is compiled there."""

from __future__ import annotations

from rankwatch.agent.clock import clock
from rankwatch.wire.phases import PHASES, phase_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rankwatch.agent.threads import LiveThread, LiveThreads


class Regions:
    """begin and end are called in pairs, end also after an exception. spent_ns: own time of all compiles so far by phase, to be counted up."""

    def __init__(self, threads: LiveThreads, spent_ns: list[int]) -> None:
        self._threads, self._spent_ns = threads, spent_ns

    def begin(self, name: str, frame: str) -> None:
        """Region `name`, which wire.phases knows, begins; frame: whose it is, where it is the outermost."""
        live, now_ns = self._threads.here(), clock.now_ns()
        if live.regions:
            self._count(live, now_ns)
        else:
            live.begin()
            live.since_ns = live.started_ns = now_ns
            live.compile_id, live.kind, live.frame = "", "runtime", frame
            live.retext()
            self._threads.opens(live)
        live.regions.append((name, now_ns, PHASES.index(phase_of(name))))
        self._threads.show(live, now_ns)

    def end(self, name: str) -> None:
        """The innermost region of this name ends, and what is left inside it."""
        live, now_ns = self._threads.here(), clock.now_ns()
        depth = next((depth for depth in reversed(range(len(live.regions))) if live.regions[depth][0] == name), None)
        if depth is None:
            return
        self._count(live, now_ns)
        del live.regions[depth:]
        if live.regions:
            self._threads.show(live, now_ns)
            return
        for place, spent in enumerate(live.own_ns):
            self._spent_ns[place] += spent
        live.own_ns = [0] * len(PHASES)
        self._threads.closes(live)

    def _count(self, live: LiveThread, now_ns: int) -> None:
        live.own_ns[live.regions[-1][2]] += now_ns - live.since_ns
        live.since_ns = now_ns
