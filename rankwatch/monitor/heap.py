"""Memory that was needed for a moment goes back to the system.

The launcher reads some megabytes of recorder text from every rank every few seconds. glibc puts blocks that large into mappings of their own,
which end with them; but once the first was freed it raises that threshold, and from then on they leave holes in its arenas: the launcher
keeps some 20 MB more, more after every coincidence of large answers, and its size wanders by 10 MB. Set by hand the threshold stays.
Source: mallopt(3), "Dynamic mmap threshold"; glibc 2.31-2.39, measured.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Mapping

MANY_OBJECTS = 100_000  # made since the last look for cycles
LARGE_BYTES = 128 << 10  # glibc's own at the start
_M_MMAP_THRESHOLD = -3  # malloc.h


def keep_large_apart(environment: Mapping[str, str] | None = None, libc: ctypes.CDLL | None = None) -> bool:
    """Whether blocks of LARGE_BYTES and more are given back at once from now on, in this process only.

    False where the user has set the threshold, and where the C library has no such call (it is no glibc).
    """
    environment = os.environ if environment is None else environment
    if "MALLOC_MMAP_THRESHOLD_" in environment or "glibc.malloc.mmap_threshold" in environment.get("GLIBC_TUNABLES", ""):
        return False
    try:
        return bool((libc or ctypes.CDLL(None)).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES))
    except (OSError, AttributeError):
        return False


def collect_less_often() -> None:
    """For the judge of many ranks, whose reports are millions of values in no cycle: looking for cycles among them doubled what reading costs (measured).

    Only ever raises the thresholds that Python or the user has set.
    """
    first, second, third = gc.get_threshold()
    if first:  # 0: switched off by the user
        gc.set_threshold(max(first, MANY_OBJECTS), max(second, 50), max(third, 100))
