"""Equal stacks together: thousands of ranks are a handful of pictures, the odd one first."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from rankwatch.model import Frame, Stack, StackGroup
from rankwatch.monitor.diagnose.frames import is_user

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Role = Literal["culprit", "waiting", "other"]
_Normal = tuple[tuple[str, str, int], ...]
_ORDER: dict[Role, int] = {"culprit": 0, "waiting": 1, "other": 2}


def normalise(frames: tuple[Frame, ...]) -> _Normal:
    """What makes two stacks equal: lines count in the job's own code, in libraries only function and file do."""
    return tuple((frame.name, frame.file, frame.line if is_user(frame) else 0) for frame in frames)


def group_stacks(stacks: Mapping[int, Stack], culprits: Iterable[int] = (), waiting: Iterable[int] = ()) -> tuple[StackGroup, ...]:
    """Ranks with equal main-thread stacks, one StackGroup each: culprits first, then waiting ones, the smallest group first.

    A culprit never shares a group with a rank that only waits. Ranks whose stack is empty are left out.
    """
    culprit_set, waiting_set = set(culprits), set(waiting)
    found: dict[tuple[Role, _Normal], list[int]] = defaultdict(list)
    frames: dict[tuple[Role, _Normal], tuple[Frame, ...]] = {}
    known: dict[tuple[object, ...], _Normal] = {}  # most of many ranks are at the very same lines
    for rank in sorted(stacks):
        main = stacks[rank].main
        if not main:
            continue
        role: Role = "culprit" if rank in culprit_set else "waiting" if rank in waiting_set else "other"
        same = tuple([part for frame in main for part in (frame.line, frame.name, frame.file)])
        normal = known.get(same)
        if normal is None:
            normal = known[same] = normalise(main)
        key = (role, normal)
        found[key].append(rank)
        frames.setdefault(key, main)
    ordered = sorted(found, key=lambda key: (_ORDER[key[0]], len(found[key]), found[key][0]))
    return tuple(StackGroup(tuple(found[key]), frames[key], key[0]) for key in ordered)
