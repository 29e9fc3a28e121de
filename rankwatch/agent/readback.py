"""Small results on their way from a device to the host, read when they have arrived: nothing here waits for a device.

On the CPU a result is there at once. On a GPU it is copied into pinned memory without blocking; an event tells when it can be read.
"""

from __future__ import annotations

from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_WAITING = 16
DEVICES = ("cpu", "cuda")


class Readback:
    """Hands each tensor's values to its own function, oldest first. torch: the module."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._waiting: deque[tuple[Any, Any, Callable[[list[Any]], None]]] = deque()
        self._free: dict[tuple[Any, int], list[Any]] = {}

    def capturing(self, device: Any) -> bool:
        """Whether the device's stream records a CUDA graph: nothing may be asked or issued now."""
        return device.type == "cuda" and bool(self._torch.cuda.is_current_stream_capturing())

    def take(self, tensor: Any, done: Callable[[list[Any]], None]) -> None:
        """Call `done(list of the values)` of a flat tensor once it can be read; a 17th that waits is dropped. Not while capturing."""
        if tensor.device.type == "cpu":
            done(tensor.tolist())
            return
        if len(self._waiting) >= MOST_WAITING:
            return
        spare = self._free.setdefault((tensor.dtype, tensor.numel()), [])
        buffer = spare.pop() if spare else self._torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
        with self._torch.cuda.device(tensor.device):
            buffer.copy_(tensor, non_blocking=True)
            event = self._torch.cuda.Event()
            event.record()
        self._waiting.append((event, buffer, done))

    def poll(self) -> None:
        """Read what has arrived. Not while capturing."""
        while self._waiting and self._waiting[0][0].query():
            _event, buffer, done = self._waiting.popleft()
            values = buffer.tolist()
            self._free[(buffer.dtype, buffer.numel())].append(buffer)
            done(values)
