"""Memory of this rank's GPU as torch's allocator counts it: the `memory` record, bytes unless said otherwise.

  device, allocated, reserved, active, inactive_split (free parts of blocks in use: what fragmentation costs), peak_allocated, peak_reserved
  pools     {"0_1": reserved by this private pool (CUDA graphs, MemPool)}; null where torch does not tell (before 2.13)
  retries   allocations that went through only after the cache was emptied
  ooms      allocations that failed, caught or not
  oom       of the newest one: {wall_ns, device, tried, total, free, where, and the numbers above of that moment}; null while there is none
  read_us   what a look costs, microseconds

Looks are taken on the thread that steps, at most every 10 s, and at a failed allocation on its own thread. Never on a timer's: torch keeps the GIL
while it takes the allocator's lock, and a thread that hangs in cudaMalloc or cudaFree behind a dead collective holds that lock for ever. A thread
that has just finished a step holds no lock, and takes this one itself with every tensor it frees. A look makes no CUDA call but cudaGetDevice and the
question whether its stream captures, initialises nothing, and is left out during a capture.

Source (torch 2.9-2.14): torch/csrc/cuda/Module.cpp, c10/cuda/CUDACachingAllocator.cpp: observers are called without the allocator's lock, with the GIL.
"""

from __future__ import annotations

from typing import Any

from rankwatch.agent import compat
from rankwatch.agent.clock import clock
from rankwatch.agent.crash import calling
from rankwatch.agent.guard import guarded
from rankwatch.agent.threads import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rankwatch.agent.guard import Probe
    from rankwatch.agent.rank import Rank

EVERY_NS = 10_000_000_000
COST_FACTOR = 2000  # a look takes at most 0.05 % of the time
OOM_EVERY_NS = 1_000_000_000  # a loop that retries must not be slowed
MAX_POOLS = 24

_memory: Memory | None = None


def arm(rank: Rank, probe: Probe, cuda: Any) -> None:
    """cuda: torch.cuda. Whatever may initialise CUDA waits until the job has done so itself."""
    global _memory
    if not probe.on or _memory is not None:
        return
    reads, reason = compat.cuda_memory(cuda)
    if reads is None:
        probe.report("armed", reason)  # nothing to watch: no trouble either
        return
    _memory = Memory(rank, probe, cuda, reads)
    rank.on_claim.append(_memory.write)
    rank.on_step.append(_memory.stepped)
    probe.report("armed", _memory.observe())


class Memory:
    """Looks and writes. `stepped` belongs to the thread that steps, the observer to whichever thread could not allocate."""

    def __init__(self, rank: Rank, probe: Probe, cuda: Any, reads: compat.CudaMemory) -> None:
        self._rank, self._probe, self._cuda, self._reads = rank, probe, cuda, reads
        self._next_ns = 0
        self._oom_next_ns = 0
        self._ooms = 0
        self.record: dict[str, Any] = {}
        guard = guarded(probe)
        self._stepped = guard(self._stepped)  # type: ignore[method-assign]
        self._attach, self._failed = guard(self._attach), guard(self._failed)  # type: ignore[method-assign]

    def stepped(self, now_ns: int) -> None:
        """A step is done; most cost no more than this comparison."""
        if now_ns >= self._next_ns:
            self._stepped(now_ns)

    def observe(self) -> str:
        """Have failed allocations told, from the moment at which the job initialises CUDA; why they are not, "" if they are."""
        if self._reads.observe is None or self._reads.when_initialised is None:
            return "torch has no observer of failed allocations"
        self._reads.when_initialised(self._attach)
        return ""

    def write(self) -> None:
        """Write the record, once there is one."""
        if self.record:
            self._rank.slot.write_json("memory", self.record)

    def _attach(self) -> None:
        """Runs on the thread that initialises CUDA, before anything is allocated."""
        failed = self._failed

        def observer(device: int, tried: int, total: int, free: int) -> None:
            failed(device, tried, total, free)  # it must not raise: the exception would replace torch's own

        try:
            assert self._reads.observe is not None
            self._reads.observe(observer)
        except Exception as error:  # the cudaMallocAsync backend has none
            self._probe.report("armed", f"failed allocations are not told: {clean(str(error), 120)}")

    def _stepped(self, now_ns: int) -> None:
        if not self._cuda.is_initialized() or self._cuda.is_current_stream_capturing():
            self._next_ns = now_ns + EVERY_NS // 10
            return
        began_ns = clock.now_ns()
        self._look(self._reads.device())
        self.write()
        cost_ns = clock.now_ns() - began_ns
        self.record["read_us"] = cost_ns // 1000
        self._next_ns = now_ns + max(EVERY_NS, COST_FACTOR * cost_ns)

    def _look(self, device: int) -> None:
        stats = self._reads.stats(device)
        self.record = {"oom": None, "read_us": None, **self.record, "device": device, **numbers(stats)}
        self.record["ooms"] = max(self.record["ooms"], self._ooms)

    def _failed(self, device: int, tried: int, total: int, free: int) -> None:
        """An allocation has failed; the exception is about to be raised, and may be caught."""
        self._ooms += 1
        now_ns = clock.now_ns()
        if now_ns < self._oom_next_ns:
            return
        self._oom_next_ns = now_ns + OOM_EVERY_NS
        self._look(device)
        kept = ("allocated", "reserved", "active", "inactive_split", "peak_allocated", "pools")
        oom = {"wall_ns": clock.wall_ns(), "device": device, "tried": tried, "total": total, "free": free, "where": calling()}
        self.record["oom"] = {**oom, **{name: self.record[name] for name in kept}}
        self.write()
        if self._ooms & (self._ooms - 1) == 0:  # the 1st, 2nd, 4th, ...
            self._rank.slot.event("cuda_oom", ooms=self._ooms, **self.record["oom"])


def numbers(stats: Any) -> dict[str, Any]:
    """What is kept of torch's nested statistics."""

    def all_of(name: str, which: str = "current") -> int:
        return int(stats[name]["all"][which])

    pools = stats.get("reserved_bytes_by_private_pools")
    return {
        "allocated": all_of("allocated_bytes"),
        "reserved": all_of("reserved_bytes"),
        "active": all_of("active_bytes"),
        "inactive_split": all_of("inactive_split_bytes"),
        "peak_allocated": all_of("allocated_bytes", "peak"),
        "peak_reserved": all_of("reserved_bytes", "peak"),
        "pools": None if pools is None else largest(pools),
        "retries": int(stats.get("num_alloc_retries", 0)),
        "ooms": int(stats.get("num_ooms", 0)),
    }


def largest(pools: Any) -> dict[str, int]:
    """{"0_1": bytes} of the largest pools, as torch.cuda.memory_stats names them; what is beyond MAX_POOLS is summed up under "others"."""
    sizes = {"_".join(map(str, key)) if isinstance(key, tuple) else str(key): int(pool["all"]["current"]) for key, pool in pools.items()}
    order = sorted(sizes, key=lambda name: -sizes[name])
    found = {name: sizes[name] for name in order[:MAX_POOLS]}
    return {**found, "others": sum(sizes[name] for name in order[MAX_POOLS:])} if len(order) > MAX_POOLS else found
