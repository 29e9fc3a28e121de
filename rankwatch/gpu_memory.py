"""Words for the memory of a rank's GPU: the `memory` record of agent/probes/memory.py, and torch's own words when an allocation fails. Pure.

Whatever a rank has written is taken: what is no number is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30
_NUMBERS = ("device", "allocated", "reserved", "active", "inactive_split", "peak_allocated", "peak_reserved", "retries", "ooms")
_OF_OOM = ("device", "tried", "total", "free", "allocated", "reserved", "inactive_split", "peak_allocated")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_SAYS = {
    "tried": re.compile(rf"Tried to allocate {_SIZE}"),
    "total": re.compile(rf"total capacity of {_SIZE}"),
    "free": re.compile(rf"of which {_SIZE} is free"),
    "allocated": re.compile(rf"{_SIZE} is allocated by PyTorch"),
    "pools": re.compile(rf"with {_SIZE} allocated in private pools"),
    "cached": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
_OTHERS = re.compile(rf"Process (?P<pid>\d+) has {_SIZE} memory in use")
_DEVICE = re.compile(r"GPU (\d+) has a total capacity")


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that failed, bytes; None where it is not known. cached: reserved by torch and free; pools: reserved by private pools;
    others: what other processes hold, by torch's own words."""

    device: int | None = None
    tried: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    cached: int | None = None
    inactive_split: int | None = None
    pools: int | None = None
    peak: int | None = None
    others: int | None = None
    where: str = ""

    @property
    def outside(self) -> int | None:
        """On the device, neither free nor torch's: CUDA contexts, NCCL's buffers, other processes."""
        if self.total is None or self.free is None or self.allocated is None or self.cached is None:
            return None
        return max(0, self.total - self.free - self.allocated - self.cached)


def numbers(memory: Mapping[str, Any]) -> dict[str, Any]:
    """The record's numbers alone, `pools` as the sum over private pools, `oom` as they were when an allocation failed last; {} for no record."""
    found: dict[str, Any] = {name: value for name in _NUMBERS if (value := _whole(memory.get(name))) is not None}
    if (pools := pool_bytes(memory.get("pools"))) is not None:
        found["pools"] = pools
    oom = memory.get("oom")
    if isinstance(oom, Mapping):
        found["oom"] = {name: value for name in _OF_OOM if (value := _whole(oom.get(name))) is not None}
        if (pools := pool_bytes(oom.get("pools"))) is not None:
            found["oom"]["pools"] = pools
        found["oom"]["wall_ns"], found["oom"]["where"] = _whole(oom.get("wall_ns")) or 0, str(oom.get("where") or "")[:200]
    return found


def pool_bytes(pools: object) -> int | None:
    """All private pools together; None where torch does not tell."""
    if not isinstance(pools, Mapping):
        return None
    return sum(_whole(size) or 0 for size in pools.values())


def is_out_of_memory(type_name: str, message: str) -> bool:
    """Whether an exception says that a GPU had no memory left."""
    return type_name.endswith("OutOfMemoryError") or "CUDA out of memory" in message or "HIP out of memory" in message


def failed(memory: Mapping[str, Any], message: str, pools: int | None = None) -> OutOfMemory:
    """What is known of an allocation that failed: the record's numbers of that moment where it has some, torch's message for the rest.

    pools: bytes of CUDA graphs' pools as last seen elsewhere.
    """
    said = {name: _size(found) for name, pattern in _SAYS.items() if (found := pattern.search(message)) is not None}
    others = {found["pid"]: _size(found, 2) for found in _OTHERS.finditer(message)}
    device = _DEVICE.search(message)
    seen: dict[str, Any] = numbers(memory).get("oom") or {}
    if said.get("tried") and abs(seen.get("tried", 0) - said["tried"]) > 0.01 * said["tried"] + 1:
        seen = {}  # of another failure
    reserved, allocated = seen.get("reserved"), seen.get("allocated", said.get("allocated"))
    return OutOfMemory(
        device=seen.get("device", int(device[1]) if device else None),
        tried=seen.get("tried", said.get("tried")),
        total=said.get("total", seen.get("total")),
        free=seen.get("free", said.get("free")),
        allocated=allocated,
        cached=max(0, reserved - allocated) if reserved is not None and allocated is not None else said.get("cached"),
        inactive_split=seen.get("inactive_split"),
        pools=seen.get("pools", said.get("pools", pools)),
        peak=seen.get("peak_allocated"),
        others=sum(others.values()) if others else None,
        where=seen.get("where", ""),
    )


def breakdown(oom: OutOfMemory) -> str:
    """`tried to allocate 2.0 GiB; GPU 0 of 139.8 GiB: 130.0 GiB allocated, 4.0 GiB reserved by torch and free (...), ...`; "" where nothing is known."""
    if oom.tried is None and oom.allocated is None:
        return ""
    parts = []
    if oom.allocated is not None:
        parts.append(f"{size(oom.allocated)} allocated")
    if oom.cached is not None:
        split = f" ({size(oom.inactive_split)} of it in parts of blocks in use)" if oom.inactive_split else ""
        parts.append(f"{size(oom.cached)} reserved by torch and free{split}")
    if oom.pools:
        parts.append(f"of both {size(oom.pools)} in private pools of CUDA graphs")
    if oom.free is not None:
        parts.append(f"{size(oom.free)} free")
    if oom.outside:
        parts.append(f"{size(oom.outside)} outside torch's allocator")
    gpu = f"GPU {oom.device}" if oom.device is not None else "the GPU"
    of = f" of {size(oom.total)}" if oom.total is not None else ""
    text = f"tried to allocate {size(oom.tried)}; " if oom.tried is not None else ""
    peak = f"; peak {size(oom.peak)} allocated" if oom.peak is not None else ""
    return f"{text}{gpu}{of}: {', '.join(parts) or 'nothing is known of what it held'}{peak}"


def line(found: Mapping[str, Any]) -> str:
    """One line about `numbers`: `GPU 0: 12.0 GiB allocated (peak 14.1 GiB), 16.0 GiB reserved, ...`; "" for none."""
    if "allocated" not in found:
        return ""
    peak = f" (peak {size(found['peak_allocated'])})" if "peak_allocated" in found else ""
    parts = [f"{size(found['allocated'])} allocated{peak}"]
    if "reserved" in found:
        parts.append(f"{size(found['reserved'])} reserved")
    if found.get("inactive_split"):
        parts.append(f"{size(found['inactive_split'])} free in parts of blocks in use")
    if found.get("pools"):
        parts.append(f"{size(found['pools'])} in private pools of CUDA graphs")
    for name, words in (("retries", "allocation retries"), ("ooms", "failed allocations")):
        if found.get(name):
            parts.append(f"{found[name]} {words}")
    gpu = f"GPU {found['device']}" if "device" in found else "its GPU"
    return f"{gpu}: {', '.join(parts)}"


def size(count: int) -> str:
    """`2.0 GiB`, `512 MiB`: in torch's own units."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def _size(found: re.Match[str], first: int = 1) -> int:
    try:
        return int(float(found[first]) * _UNITS[found[first + 1]])
    except (ValueError, OverflowError):
        return 0


def _whole(value: object) -> int | None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**53
    return int(value) if fits else None  # type: ignore[call-overload]
