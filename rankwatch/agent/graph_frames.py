"""What the CUDA-graph trees have recorded for each frame of the job's code, and why: for a new size, for memory that has moved, behind another graph.

A frame's sizes are told apart by its non-static inputs, as far as torch records a graph for each: once for each compiled version and, with dynamic
sizes, once for each set of integer inputs. Several functions of one compile (forward and backward, partitions, splits of DDP) are several series of
sizes; the longest counts. Bounded.
"""

from __future__ import annotations

from rankwatch.agent.clock import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_FRAMES = 8
_KNOWN_IDS = 1024
_KNOWN_SERIES = 32
_KNOWN_SIZES = 4096
_SHOWN_INPUTS = 3

Inputs = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""(integers, shapes of the tensors whose memory is not fixed)."""


class Frame:
    """Counts of one frame. sizes: different ones recorded; new_step: when the newest of them came; pool_bytes: by how much its recordings grew the pools."""

    __slots__ = ("_series", "_versions", "first_ns", "first_step", "new_ns", "new_step", "pool_bytes", "recordings", "rerecords", "seconds", "shape", "sizes")

    def __init__(self, step: int) -> None:
        self.recordings = self.rerecords = self.pool_bytes = self.sizes = 0
        self.seconds = 0.0
        self.first_step = self.new_step = step
        self.first_ns = self.new_ns = clock.wall_ns()
        self.shape = ""
        self._versions: set[int] = set()
        self._series: dict[int, set[int]] = {}

    def new_size(self, compile_id: str, function: object, inputs: Inputs, step: int) -> bool:
        """Whether one more size than before is recorded. function: what tells the functions of one compile apart."""
        integers, shapes = inputs
        if len(self._versions) < _KNOWN_SIZES:
            self._versions.add(hash((compile_id, integers)))
        series = hash((function, len(integers), tuple(map(len, shapes))))
        if series in self._series or len(self._series) < _KNOWN_SERIES:
            seen = self._series.setdefault(series, set())
            if len(seen) < _KNOWN_SIZES:
                seen.add(hash(inputs))
        before = self.sizes
        self.sizes = min(len(self._versions), max(map(len, self._series.values()), default=0))
        if self.sizes > before:
            self.new_step, self.new_ns = step, clock.wall_ns()
        return self.sizes > before

    def row(self) -> dict[str, Any]:
        return {
            "recordings": self.recordings,
            "rerecords": self.rerecords,
            "sizes": self.sizes,
            "seconds": round(self.seconds, 3),
            "pool_bytes": self.pool_bytes,
            "first_step": self.first_step,
            "new_step": self.new_step,
            "first_wall": round(self.first_ns / 1e9, 1),
            "new_wall": round(self.new_ns / 1e9, 1),
            "shape": self.shape,
        }


class Frames:
    """All frames of the process, by name; those of which the compile probe tells nothing are known by their compile id."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._frames: dict[str, Frame] = {}

    def compiled(self, compile_id: str, frame: str) -> None:
        """A compile of the frame has ended."""
        if compile_id not in self._names and len(self._names) >= _KNOWN_IDS:
            del self._names[next(iter(self._names))]
        self._names[compile_id] = frame

    def name(self, compile_id: str) -> str:
        return self._names.get(compile_id) or (f"[{compile_id}]" if compile_id else "")

    def of(self, name: str, step: int) -> Frame:
        if name not in self._frames and len(self._frames) >= _KNOWN_IDS:
            del self._frames[min(self._frames, key=lambda known: self._frames[known].recordings)]
        return self._frames.setdefault(name, Frame(step))

    def rows(self) -> dict[str, dict[str, Any]]:
        """Those with most recordings."""
        shown = sorted(self._frames.items(), key=lambda item: -item[1].recordings)[:MAX_FRAMES]
        return {name: frame.row() for name, frame in shown}


def inputs_of(manager: Any, new_inputs: Any, function_id: Any) -> tuple[Inputs, str]:
    """(what a recording is made for, that function's name in torch), to be asked before torch empties the list."""
    function = (getattr(manager, "ids_to_funcs", None) or {}).get(function_id)
    static = set(getattr(function, "static_input_idxs", ()))
    integers, shapes = [], []
    for place, value in enumerate(new_inputs):
        if isinstance(value, int):
            integers.append(value)
        elif place not in static and (shape := getattr(value, "shape", None)) is not None:
            shapes.append(tuple(shape))
    return (tuple(integers), tuple(shapes)), f"{getattr(getattr(function, 'model', None), '__name__', '')} {getattr(manager, 'mode', '')}"


def shape_text(inputs: Inputs) -> str:
    """ "[64, 2048], [64] and 3 more; sizes 64"."""
    integers, shapes = inputs
    text = ", ".join(str(list(shape)) for shape in shapes[:_SHOWN_INPUTS])
    if len(shapes) > _SHOWN_INPUTS:
        text += f" and {len(shapes) - _SHOWN_INPUTS} more"
    if integers:
        text += ("; " if text else "") + f"sizes {', '.join(map(str, integers[:_SHOWN_INPUTS]))}"
    return text[:120]


def recorded_there(manager: Any, function_id: Any) -> bool:
    """Whether the function has a graph at this very place of the tree, so that it is recorded again because that one does not fit any more."""
    node = getattr(manager, "current_node", None)
    places = getattr(manager, "roots", None) if node is None else getattr(node, "children", None)
    return bool((places or {}).get(function_id))


def counted_by_torch(manager: Any) -> int | None:
    """Re-recordings that this manager has counted itself; None where it does not."""
    counts = getattr(manager, "num_rerecord", None)
    if counts is None:
        return None
    return sum(int(number) for by_function in list(counts.values()) for number in list(by_function.values()))
