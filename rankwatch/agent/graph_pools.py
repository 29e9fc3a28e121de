"""How much memory the private pools of CUDA graphs have reserved, read rarely and never by a call that could disturb a capture.

From torch 2.13 on memory_stats counts each private pool. Before, memory_snapshot lists the allocator's segments, of which each names its pool: 5 ms at
2,000 segments with the GIL held, so its period grows with their number. torch before 2.11 cannot leave the allocation history out of it; while that
is being kept nothing is read. Both are host work under the allocator's lock, without a call into CUDA; neither is asked before CUDA is in use.
Sources: torch/cuda/memory.py of 2.9-2.14.
"""

from __future__ import annotations

from rankwatch.agent import compat
from rankwatch.agent.clock import clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

AT_ONCE_SEGMENTS = 400  # 1 ms: little beside a recording of 10 ms; with more segments the heartbeat reads
_PREFIX, _SUFFIX = "reserved_bytes_by_private_pools.", ".all.current"
_SEGMENT_NS = 5_000_000  # of period for each segment: a two-thousandth of the time goes into reading
_LEAST_NS = 1_000_000_000
_IDLE_NS = 30_000_000_000  # while nothing is recorded
_CAPTURE_NS = 60_000_000_000  # a capture whose end nobody saw counts no longer than this
MAX_POOLS = 6


class Pools:
    """What was read last. pools: bytes by pool id "0,1", the largest ones; total: of all, None until torch has told; reason: why it does not."""

    def __init__(self) -> None:
        self.pools: dict[str, int] = {}
        self.total: int | None = None
        self.reason = ""
        self.segments = 0
        self.device: int | None = None
        self.stale = False  # something was recorded since
        self._read_ns = 0
        self._capturing: dict[int, int] = {}  # thread -> since when

    def capture_begins(self, thread: int) -> None:
        self._capturing[thread] = clock.now_ns()

    def capture_ends(self, thread: int) -> None:
        self._capturing.pop(thread, None)

    def due(self) -> bool:
        """Whether the heartbeat should read now."""
        if self.device is None:
            return False
        return clock.now_ns() - self._read_ns >= max(_LEAST_NS if self.stale else _IDLE_NS, self.segments * _SEGMENT_NS)

    def read(self, cuda: Any) -> bool:
        """Ask torch; False where it is not the moment. cuda: torch.cuda, or None."""
        now_ns = clock.now_ns()
        if cuda is None or self.device is None or not cuda.is_initialized():
            return False
        if any(now_ns - since_ns < _CAPTURE_NS for since_ns in list(self._capturing.values())):
            return False
        self._read_ns, self.stale = now_ns, False
        found = _by_stats(cuda, self.device)
        if not found:
            segments, self.reason = compat.memory_segments(cuda)
            if segments is None:
                return False
            self.segments = len(segments)
            found = _by_segments(segments, self.device)
        self.total = sum(found.values())
        self.pools = dict(sorted(found.items(), key=lambda item: -item[1])[:MAX_POOLS])
        return True


def _by_stats(cuda: Any, device: int) -> dict[str, int]:
    """Bytes by pool as memory_stats tells them; {} before torch 2.13. Its keys are `<prefix>0_1.all.current`."""
    stats = cuda.memory_stats(device)
    return {key[len(_PREFIX) : -len(_SUFFIX)].replace("_", ","): value for key, value in stats.items() if key.startswith(_PREFIX) and key.endswith(_SUFFIX)}


def _by_segments(segments: list[dict[str, Any]], device: int) -> dict[str, int]:
    """Reserved bytes by pool; what a pool has active is 0 while its graphs are replayed. (0, 0) is the pool of all that is no graph's."""
    found: dict[str, int] = {}
    for segment in segments:
        pool = tuple(segment.get("segment_pool_id") or (0, 0))
        if pool != (0, 0) and segment.get("device", device) == device:
            name = ",".join(map(str, pool))
            found[name] = found.get(name, 0) + int(segment["total_size"])
    return found
