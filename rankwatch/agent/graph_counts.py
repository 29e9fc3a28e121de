"""Counts what the CUDA-graph probe is told: the fields of the `cudagraph` record, described in probes/cudagraph.py, and its events."""

from __future__ import annotations

import sys
from threading import get_ident

from rankwatch.agent.clock import clock
from rankwatch.agent.graph_frames import Frames, counted_by_torch, inputs_of, recorded_there, shape_text
from rankwatch.agent.graph_pools import AT_ONCE_SEGMENTS, Pools
from rankwatch.agent.graph_sites import capture_site, user_line
from rankwatch.agent.guard import guarded
from rankwatch.agent.threads import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from rankwatch.agent.graph_frames import Inputs
    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank

_SKIP_REASONS = 6
_CAPTURE_SITES = 6
_KNOWN_FUNCTIONS = 4096
_KNOWN_MANAGERS = 64
_KNOWN_THREADS = 64


class Counts:
    """Each method is called in a hook and raises nothing. torch_counts_all: whether torch's own count of re-recordings holds all of them."""

    def __init__(self, rank: Rank, probe: Probe) -> None:
        self._rank = rank
        self.frames, self.pools = Frames(), Pools()
        self.recording: set[int] = set()  # threads inside a tree's recording: its captures are not by hand
        self._recorded: set[tuple[int, int]] = set()
        self._counts: dict[int, int] = {}  # manager -> torch's own count of re-recordings
        self._again = self._counted_before = 0
        self.torch_counts_all = True
        self._by_hand: set[int] = set()  # threads inside a capture by hand
        self._compiled_last: dict[int, str] = {}  # thread -> frame: some functions are judged at their first run, right after their compile
        self._written = False
        self.totals: dict[str, Any] = {
            "warmups": 0,
            "recordings": 0,
            "seconds": 0.0,
            "rerecords": 0,
            "rerecords_torch": None,
            "eager": 0,
            "skips": 0,
            "skip_reasons": [],
            "captures": 0,
            "capture_sites": [],
            "pool_bytes": None,
            "pool_first_bytes": None,
            "pools": {},
            "pools_reason": "",
            "frames": {},
            "last": None,
        }
        guard = guarded(probe)
        self.compiled, self.beat = guard(self.compiled), guard(self.beat)  # type: ignore[method-assign]
        self.before, self.recorded, self.ran_eagerly = guard(self.before), guard(self.recorded), guard(self.ran_eagerly)  # type: ignore[method-assign]
        self.skipped, self.captured, self.capture_ended = guard(self.skipped), guard(self.captured), guard(self.capture_ended)  # type: ignore[method-assign]

    def write(self) -> None:
        """Write the totals, once there is something to tell."""
        if self._written:
            self._rank.slot.write_json("cudagraph", self.totals)

    def compiled(self, compile_id: str, frame: str) -> None:
        """A frame was compiled: what is recorded under this id is its."""
        self.frames.compiled(compile_id, frame)
        if get_ident() in self._compiled_last or len(self._compiled_last) < _KNOWN_THREADS:
            self._compiled_last[get_ident()] = frame

    def beat(self) -> None:
        """Twice a second, on the heartbeat's thread: the pools, when it is time."""
        if self.pools.due() and self._read_pools():
            self.write()

    # -- in the hooks

    def before(self, manager: Any, new_inputs: Any, function_id: Any) -> tuple[int, Inputs, str, bool]:
        inputs, function = inputs_of(manager, new_inputs, function_id)
        return clock.now_ns(), inputs, function, recorded_there(manager, function_id)

    def recorded(self, manager: Any, function_id: Any, started_ns: int, inputs: Inputs, function: str, again: bool) -> None:
        seconds = (clock.now_ns() - started_ns) / 1e9
        key = (id(manager), _number(function_id))
        elsewhere = key in self._recorded
        if len(self._recorded) < _KNOWN_FUNCTIONS:
            self._recorded.add(key)
        self._again += again
        self._count_by_torch(manager)
        step, compile_id = self._rank.steps_done(), _compile_id(manager)
        frame = self.frames.of(self.frames.name(compile_id), step)
        frame.recordings += 1
        frame.rerecords += again
        frame.seconds += seconds
        frame.shape = shape_text(inputs)
        first = frame.recordings == 1
        bigger = frame.new_size(compile_id, function, inputs, step)
        why = "moved" if again else "path" if elsewhere else "size" if bigger and not first and frame.sizes > 1 else "first"
        grown = self._pools_after(manager)
        frame.pool_bytes += grown
        self.totals["recordings"] += 1
        self.totals["seconds"] = round(self.totals["seconds"] + seconds, 4)
        self.totals["frames"] = self.frames.rows()
        self._tell(
            "rerecord" if again else "record", why=why, frame=self.frames.name(compile_id), shape=frame.shape, compile_id=compile_id,
            fn_id=_number(function_id), pool=str(getattr(manager, "cuda_graphs_thread_pool", "")), pool_grown_bytes=grown, duration_s=round(seconds, 4),
            step=step,
        )  # fmt: skip

    def _count_by_torch(self, manager: Any) -> None:
        count = counted_by_torch(manager)
        if count is not None:
            before = self._counts.get(id(manager), 0)
            if count < before:  # another manager at the same address
                self._counted_before += before
            self._counts[id(manager)] = count
            if len(self._counts) > _KNOWN_MANAGERS:  # one a device and thread; the oldest has counted all that it will
                self._counted_before += self._counts.pop(next(iter(self._counts)))
            self.totals["rerecords_torch"] = self._counted_before + sum(self._counts.values())
        by_torch = self.totals["rerecords_torch"]
        self.totals["rerecords"] = by_torch if by_torch is not None and self.torch_counts_all else self._again

    def _pools_after(self, manager: Any) -> int:
        """Bytes by which the pools have grown; 0 where reading them now would cost too much: the heartbeat does it."""
        device = getattr(manager, "device_index", None)
        self.pools.device = device if isinstance(device, int) else self.pools.device
        self.pools.stale = True
        before = self.pools.total or 0
        if self.pools.segments <= AT_ONCE_SEGMENTS:
            self._read_pools()
        return max(0, (self.pools.total or 0) - before)

    def _read_pools(self) -> bool:
        read = self.pools.read(sys.modules.get("torch.cuda"))
        totals = self.totals
        totals["pools_reason"] = self.pools.reason
        if read:
            totals["pool_bytes"], totals["pools"] = self.pools.total, self.pools.pools
            if totals["pool_first_bytes"] is None:
                totals["pool_first_bytes"] = self.pools.total
        return read

    def ran_eagerly(self, manager: Any, function_id: Any) -> None:
        fields = {"compile_id": _compile_id(manager), "fn_id": _number(function_id), "frame": self.frames.name(_compile_id(manager))}
        if function_id in getattr(manager, "warmed_up_functions", ()):
            self.totals["eager"] += 1
            if self.totals["eager"] & (self.totals["eager"] - 1) == 0:  # this may happen every step: written at 1, 2, 4, 8, ...
                self._tell("eager", **fields)
        else:
            self.totals["warmups"] += 1
            self._tell("warmup", **fields)

    def skipped(self, message: str) -> None:
        """torch's words are `skipping cudagraphs due to <reason>. Found from : File "x.py", line 31, in f`, the innermost place last."""
        head, _, found_from = str(message).partition("Found from")
        reason, at = clean(head.rstrip(" ."), 160), user_line(found_from)
        live = self._rank.threads.here()
        frame = live.frame if live.regions else self._compiled_last.get(get_ident(), "")
        self.totals["skips"] += 1
        rows = self.totals["skip_reasons"]
        row = next((row for row in rows if (row["reason"], row["at"], row["frame"]) == (reason, at, frame)), None)
        if row is not None:
            row["count"] += 1
        elif len(rows) < _SKIP_REASONS:
            self.totals["skip_reasons"] = [*rows, {"reason": reason, "at": at, "frame": frame, "count": 1}]
        self._tell("skip", reason=reason, at=at, frame=frame)

    def captured(self) -> None:
        thread = get_ident()
        self.pools.capture_begins(thread)
        if thread in self.recording:
            return
        at, via = capture_site()
        if not via:
            return
        cuda = sys.modules.get("torch.cuda")
        self.pools.device = cuda.current_device() if cuda is not None and self.pools.device is None else self.pools.device
        self._by_hand.add(thread)
        self.totals["captures"] += 1
        sites = self.totals["capture_sites"]
        site = next((site for site in sites if (site["at"], site["via"]) == (at, via)), None)
        if site is not None:
            site["count"] += 1
        elif len(sites) < _CAPTURE_SITES:
            self.totals["capture_sites"] = [*sites, {"at": at, "via": via, "count": 1}]
        self._tell("manual_capture", at=at, via=via, step=self._rank.steps_done())

    def capture_ended(self) -> None:
        thread = get_ident()
        self.pools.capture_ends(thread)
        if thread in self._by_hand:
            self._by_hand.discard(thread)
            self.pools.stale = True
            if self.pools.segments <= AT_ONCE_SEGMENTS and self._read_pools():
                self.write()

    def _tell(self, action: str, **fields: Any) -> None:
        self._written = True
        self.totals["last"] = {"action": action, **fields}
        self.write()
        self._rank.slot.event("cudagraph", action=action, **fields)


def _compile_id(manager: Any) -> str:
    return str(getattr(manager, "compile_id", None) or "")


def _number(function_id: Any) -> int:
    """torch's FunctionID is a dataclass around `id`."""
    return int(getattr(function_id, "id", function_id))
