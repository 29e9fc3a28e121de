"""A rank that ended because its GPU had no memory left: what held it, and what that asks for."""

from __future__ import annotations

from rankwatch import gpu_memory
from rankwatch.gpu_memory import GIB, OutOfMemory, size
from rankwatch.model import Crash, RankState

POOLS_RATIO = 0.2  # of what torch has reserved
OUTSIDE_RATIO = 0.1  # of the device; a CUDA context and NCCL's buffers take 1 to 3 GiB
OUTSIDE_LEAST = 4 * GIB


def found(rank: RankState, crash: Crash) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(evidence, advice) where the exception says that a GPU was out of memory; ((), ()) for any other."""
    if not gpu_memory.is_out_of_memory(crash.type, crash.message):
        return (), ()
    pools = rank.cudagraph.get("pool_bytes")
    oom = gpu_memory.failed(rank.memory, f"{crash.message}\n{crash.traceback}", pools if isinstance(pools, int) else None)
    lines = [gpu_memory.breakdown(oom)]
    numbers = gpu_memory.numbers(rank.memory)
    helped = (numbers.get("retries") or 0) - (numbers.get("ooms") or 0)  # one that fails is tried again as well
    if helped > 0:
        lines.append(f"{helped} earlier allocation{'' if helped == 1 else 's'} went through only after the cache had been emptied")
    return tuple(filter(None, lines)), advice(oom)


def advice(oom: OutOfMemory) -> tuple[str, ...]:
    """The next steps that the numbers point to; the general one where they point nowhere."""
    lines = []
    reserved = (oom.allocated or 0) + (oom.cached or 0)
    if oom.pools and reserved and oom.pools >= POOLS_RATIO * reserved:
        lines.append(
            f"CUDA graphs hold {size(oom.pools)}: fewer shapes (mark_dynamic, padding), torch._inductor.config.triton.cudagraph_skip_dynamic_graphs, "
            "or no graphs for the frame whose shapes change (rankwatch compile names it)."
        )
    if oom.tried and oom.cached and oom.cached >= oom.tried:
        lines.append(f"{size(oom.cached)} were reserved and free, in pieces too small: PYTORCH_ALLOC_CONF=expandable_segments:True lets them join.")
    outside, least = oom.outside, max(OUTSIDE_LEAST, OUTSIDE_RATIO * (oom.total or 0))
    if oom.others or (outside is not None and outside >= least):
        held = size(oom.others or outside or 0)
        whose = "by other processes" if oom.others else "by something other than this process's torch (another process, or a library's own buffers)"
        lines.append(f"{held} of that GPU are held {whose}: see nvidia-smi there; two ranks on one GPU, or a process of an earlier job, look like this.")
    lines.append("Where one rank alone runs out, its batch or its part of the model is larger than its peers': bound it.")
    return tuple(lines)
