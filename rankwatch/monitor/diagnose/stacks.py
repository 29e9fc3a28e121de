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
_ORDER: dict[Role, int] = {"culprit": 0, "waiting": 1, "other": 2}


def normalise(frames: tuple[Frame, ...]) -> tuple[tuple[str, str, int], ...]:
    """What makes two stacks equal: lines count in the job's own code, in libraries only function and file do."""
    return tuple((frame.name, frame.file, frame.line if is_user(frame) else 0) for frame in frames)


def group_stacks(stacks: Mapping[int, Stack], culprits: Iterable[int] = (), waiting: Iterable[int] = ()) -> tuple[StackGroup, ...]:
    """Ranks with equal main-thread stacks, one StackGroup each: culprits first, then waiting ones, the smallest group first.

    A culprit never shares a group with a rank that only waits. Ranks whose stack is empty are left out.
    """
    culprit_set, waiting_set = set(culprits), set(waiting)
    found: dict[tuple[Role, tuple[tuple[str, str, int], ...]], list[int]] = defaultdict(list)
    frames: dict[tuple[Role, tuple[tuple[str, str, int], ...]], tuple[Frame, ...]] = {}
    for rank in sorted(stacks):
        main = stacks[rank].main
        if not main:
            continue
        role: Role = "culprit" if rank in culprit_set else "waiting" if rank in waiting_set else "other"
        key = (role, normalise(main))
        found[key].append(rank)
        frames.setdefault(key, main)
    ordered = sorted(found, key=lambda key: (_ORDER[key[0]], len(found[key]), found[key][0]))
    return tuple(StackGroup(tuple(found[key]), frames[key], key[0]) for key in ordered)
