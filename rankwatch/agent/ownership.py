"""Who may write a rank's slot. Several processes inherit RANK; the slot belongs to the one that joined the process group.

Provisionally it belongs to the process that imported torch (owner state `armed`; `loaded` before that); the process that enters
init_process_group claims it (state `claimed`). Nothing is locked: the owner record decides, and each write checks that it is still one's own.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def may_arm(owner: Mapping[str, Any], pid: int, helper: bool) -> bool:
    """Whether process `pid`, which has just imported torch, becomes the provisional owner.

    A mark (state `loaded`, see mark.py) gives way. A claimed slot is never taken by arming: the last state of a rank that was killed stays.
    An armed ancestor (a wrapper that starts the trainer) gives way; an armed stranger keeps it while it lives. helper: this process is a
    multiprocessing child, which arms nothing.
    """
    if _is(owner, pid):
        return True
    if helper or owner.get("state") == "claimed":
        return False
    if owner.get("state") == "loaded":
        return True
    return not alive(owner) or descends(pid, owner)


def may_claim(owner: Mapping[str, Any], pid: int) -> bool:
    """Whether process `pid`, which enters init_process_group, takes the slot.

    Anything but a living claimer gives way, and so does one that descends from `pid`: a child with a world of its own joined it before its
    parent joined the job's.
    """
    if _is(owner, pid) or owner.get("state") != "claimed" or not alive(owner):
        return True
    return descends(_pid_of(owner), {"pid": pid, "start_ticks": start_ticks(pid)})


def alive(owner: Mapping[str, Any]) -> bool:
    """Whether the process of an owner record still runs; pid and start time must both fit. A zombie does not run."""
    pid = _pid_of(owner)
    return pid > 0 and start_ticks(pid) == owner.get("start_ticks") and _stat(pid)[0] != "Z"


def descends(pid: int, ancestor: Mapping[str, Any], parent: Callable[[int], int] | None = None) -> bool:
    """Whether `ancestor` (a record with pid and start_ticks) is a parent of `pid`, at any depth up to 64."""
    parent = parent or _parent
    for _ in range(64):
        pid = parent(pid)
        if pid <= 1:
            return False
        if _is(ancestor, pid):
            return True
    return False


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot (/proc/PID/stat field 22); 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def is_multiprocessing_child(argv: list[str] | None = None) -> bool:
    """Whether this interpreter was started by multiprocessing's spawn or forkserver."""
    return "--multiprocessing-fork" in (sys.orig_argv if argv is None else argv)


def joins_another_world(environ: Mapping[str, str], rank: object, world_size: object) -> bool:
    """Whether the arguments of init_process_group name a world other than torchrun's. Arguments that are absent (None or negative) name none."""
    for given, name in ((rank, "RANK"), (world_size, "WORLD_SIZE")):
        if isinstance(given, int) and given >= 0 and environ.get(name, str(given)) != str(given):
            return True
    return False


def _is(owner: Mapping[str, Any], pid: int) -> bool:
    return _pid_of(owner) == pid and owner.get("start_ticks") == start_ticks(pid)


def _pid_of(owner: Mapping[str, Any]) -> int:
    pid = owner.get("pid")
    return pid if isinstance(pid, int) else 0


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state letter on; the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("ascii", "replace")
    except OSError:
        return [""]
    return text.rpartition(")")[2].split()
