"""What each thread compiles now: torch's start and end of every timed region, kept as phase, frame, reason, and own time by phase.

torch/_dynamo/utils.py calls record_chromium_event_internal at start and end of each region, on the thread that does the work; what it raises
breaks the user's compile. A region's own time is that without the regions inside it, so phases add up to the whole.
"""

from __future__ import annotations

import sys
from threading import get_ident

from rankwatch.agent import compat
from rankwatch.agent.clock import clock
from rankwatch.agent.compiling.names import frame_name, ordinal
from rankwatch.agent.guard import here
from rankwatch.agent.sources import is_torch_or_stdlib
from rankwatch.agent.threads import LIBRARY
from rankwatch.wire.phases import PHASES, phase_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

    from rankwatch.agent.guard import Probe
    from rankwatch.agent.threads import LiveThread, LiveThreads

KNOWN_FRAMES = 1024
_WALK_FRAMES = 25
_REASON_LOOKS = 4  # regions that may start before torch has found the recompile reason: it has it before the second
_KNOWN_REGIONS = 2048
_OTHER = PHASES.index("other")


class LiveCompiles:
    """The hook of every region, and what it knows of frames. `spent_ns`: own time of all compiles so far, by phase (wire.phases.PHASES)."""

    def __init__(self, probe: Probe, threads: LiveThreads, utils: Any) -> None:
        self._probe, self._threads, self._utils = probe, threads, utils
        self._phases: dict[str, int] = {}  # raw region name -> place in PHASES
        self.frames: dict[str, str] = {}  # compile id -> frame, for backward records, which do not name theirs
        self.spent_ns = [0] * len(PHASES)

    def wrap_event(self, previous: Any) -> Any:
        """The hook of every region's start and end. It runs on the thread that compiles and costs about 2 us."""
        chain = None if compat.is_stub(previous) else previous
        probe, by_ident, add, put_thread = self._probe, self._threads._by_ident, self._threads.here, self._threads.slot.put_thread
        frame_starts, root_starts, look_for_reason, root_ends = self._frame_starts, self._root_starts, self._look_for_reason, self._root_ends
        phases, phase_index, now = self._phases, self._phase_index, clock.now_ns

        def record_chromium_event_internal(event: dict[str, Any]) -> Any:
            if probe.on and here.pid:  # 0 in a fork child; asking for the pid would be a sixth of the whole cost
                try:
                    live = by_ident.get(get_ident()) or add()
                    name = event["name"]
                    regions = live.regions
                    now_ns = now()
                    if regions:
                        live.own_ns[regions[-1][2]] += now_ns - live.since_ns
                        live.since_ns = now_ns
                    if event["ph"] == "B":
                        phase = phases.get(name, _OTHER)
                        if phase == _OTHER:
                            phase = phase_index(name, regions)
                        if name == "dynamo":
                            frame_starts(live, event)
                        elif not regions:
                            root_starts(live, name, event)
                        elif live.reason_looks:
                            look_for_reason(live)
                        regions.append((name, now_ns, phase))
                    elif regions:
                        if regions[-1][0] == name:
                            regions.pop()
                        else:
                            _end(live, name)
                        if not regions:
                            root_ends(live)
                    if regions and live.cursor is not None:  # LiveThreads.show, without its call
                        name, phase_ns, _phase = regions[-1]
                        text = live.texts.get(name) or live.encode(name)
                        live.shown = True
                        put_thread(live.cursor, now_ns, live.native_id, regions[0][1], phase_ns, len(regions), live.split, live.splits, text)
                except Exception as error:
                    probe.caught(error)
            return chain(event) if chain is not None else None

        return record_chromium_event_internal

    def take(self, compile_id: str) -> tuple[LiveThread, int, list[int]]:
        """(thread, start of the root region in mono_ns or 0, own time by phase in ns) of a compile that is finished on this thread.

        Forward compiles are reported from inside their root region, backward ones right after theirs. What is given out is counted and gone.
        """
        live = self._threads.here()
        if live.regions and live.compile_id == compile_id:
            now_ns = clock.now_ns()
            live.own_ns[live.regions[-1][2]] += now_ns - live.since_ns
            live.since_ns = now_ns
            started_ns, own_ns = live.regions[0][1], live.own_ns
            live.own_ns = [0] * len(PHASES)
            self._count(own_ns)
        elif not live.regions and live.ended and live.ended[0] == compile_id:
            _id, started_ns, own_ns = live.ended
            live.ended = None
        else:
            return live, 0, []
        return live, started_ns, own_ns

    def _phase_index(self, name: str, regions: list[tuple[str, int, int]]) -> int:
        """Place in PHASES of a region; a region that no rule knows belongs to the one around it."""
        if name not in self._phases:
            if len(self._phases) >= _KNOWN_REGIONS:
                self._phases.clear()
            self._phases[name] = PHASES.index(phase_of(name))
        phase = self._phases[name]
        return regions[-1][2] if phase == _OTHER and regions else phase

    def _frame_starts(self, live: LiveThread, event: dict[str, Any]) -> None:
        """Region `dynamo` begins: a frame is about to be compiled. The event does not say which; the caller's frame does."""
        if live.regions:
            self._repair(live)
            if live.regions:
                return  # a compile inside a compile: the outer one is what the thread is in
        self._root_starts(live, "dynamo", event)
        code, live.one_graph = _under_compilation()
        if code is not None:
            live.frame = frame_name(code.co_name, code.co_filename, code.co_firstlineno)
            if is_torch_or_stdlib(code.co_filename):
                live.detail = LIBRARY
            self._remember(live.compile_id, live.frame)
            if ordinal(live.compile_id) > 0:
                live.code = code
                live.reason_place = len(self._utils.guard_failures.get(code, ()))
                live.reason_looks = _REASON_LOOKS
        live.retext()

    def _root_starts(self, live: LiveThread, name: str, event: dict[str, Any]) -> None:
        compile_id = str((event.get("args") or {}).get("compile_id") or "")
        live.begin()
        live.since_ns = live.started_ns
        live.compile_id = "" if compile_id == "None" else compile_id
        live.kind = "forward" if name == "dynamo" else "backward" if "backward" in name else "runtime"
        live.frame = self.frames.get(live.compile_id, "")
        live.retext()
        if live.compile_id or live.is_main:  # C++ compile threads only repeat what the main thread waits for
            self._threads.opens(live)

    def _root_ends(self, live: LiveThread) -> None:
        if live.compile_id or live.is_main:
            self._count(live.own_ns)
            live.ended = (live.compile_id, live.started_ns, live.own_ns)
        live.own_ns = [0] * len(PHASES)
        self._threads.closes(live)

    def _look_for_reason(self, live: LiveThread) -> None:
        """torch notes the guard that failed right after `dynamo` begins, well before the compile is long."""
        live.reason_looks -= 1
        failures = self._utils.guard_failures.get(live.code, ())
        if len(failures) > live.reason_place:
            live.reason = str(failures[live.reason_place])
            live.reason_looks = 0
            live.retext()

    def _repair(self, live: LiveThread) -> None:
        """Drop regions that never end because a KeyboardInterrupt fell into a hook or into torch's own bookkeeping."""
        depth = len(self._utils.get_chromium_event_logger().get_stack())
        outer = next((n for n, region in enumerate(live.regions) if region[0] == "dynamo"), depth)
        if outer < depth and not _inside_another_compile():
            depth = outer
        del live.regions[depth:]
        if not live.regions:
            self._root_ends(live)

    def _count(self, own_ns: list[int]) -> None:
        for place, spent in enumerate(own_ns):
            self.spent_ns[place] += spent

    def _remember(self, compile_id: str, frame: str) -> None:
        if len(self.frames) >= KNOWN_FRAMES:
            self.frames.pop(next(iter(self.frames)))
        self.frames[compile_id] = frame


def _end(live: LiveThread, name: str) -> None:
    """A region ends that is not the innermost one: those inside it have ended unseen. One that never began changes nothing."""
    for depth in reversed(range(len(live.regions))):
        if live.regions[depth][0] == name:
            del live.regions[depth:]
            return


def _under_compilation() -> tuple[CodeType | None, bool]:
    """(`code`, `one_graph`) of torch._dynamo.convert_frame._compile, a few frames up; (None, False) when it is not there.

    one_graph: a graph break is an error, not a fall back to Python.
    """
    frame = sys._getframe(2)
    for _ in range(_WALK_FRAMES):
        if frame.f_code.co_name == "_compile":
            found = frame.f_locals
            code = found.get("code")
            return (code, found.get("one_graph") is True) if hasattr(code, "co_firstlineno") else (None, False)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None, False


def _inside_another_compile() -> bool:
    """Whether two frames on the stack are torch's `_compile`: the one that begins now, and one around it."""
    frame, seen = sys._getframe(1).f_back, 0
    while frame is not None and seen < 2:
        seen += frame.f_code.co_name == "_compile"
        frame = frame.f_back
    return seen == 2
