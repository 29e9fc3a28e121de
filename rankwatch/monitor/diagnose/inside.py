"""Which call of torch.distributed a rank's main thread is in, by its stack: for ranks of which no recorder tells."""

from __future__ import annotations

import re

from rankwatch.model import Stack
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_PYTHON = re.compile(r"\.py$")
_THROUGH = re.compile(r"torch/_ops\.py$|torch/distributed/c10d_logger\.py$|torch/utils/_contextlib\.py$")
_CALLS = re.compile(r"torch/distributed/(distributed_c10d|utils|_functional_collectives)\.py$")
_BACKWARD = re.compile(r"torch/autograd/(graph|__init__)\.py$")


def call(stack: Stack | None) -> str:
    """`barrier`: the call of torch.distributed in which the main thread sits, with no line of other code further in; "" where there is none."""
    found = ""
    for frame in stack.main if stack is not None else ():
        if _CALLS.search(frame.file):
            found = frame.name.rsplit(".", 1)[-1]  # the outermost is the one that was called
        elif _PYTHON.search(frame.file) and not _THROUGH.search(frame.file):
            break
    return found


def backward(stack: Stack | None) -> bool:
    """Whether it sits in the autograd engine, where DDP waits for its buckets."""
    innermost = next((frame for frame in (stack.main if stack is not None else ()) if _PYTHON.search(frame.file)), None)
    return innermost is not None and bool(_BACKWARD.search(innermost.file))


def together(calls: Mapping[int, str]) -> str:
    """`ranks 1-2 are in all_reduce, rank 0 is in barrier`; at most four calls, those of most ranks."""
    who: dict[str, list[int]] = {}
    for rank, name in sorted(calls.items()):
        who.setdefault(name, []).append(rank)
    groups = sorted(who.items(), key=lambda item: (-len(item[1]), item[1]))
    return ", ".join(f"rank {ranks[0]} is in {name}" if len(ranks) == 1 else f"ranks {compress(ranks)} are in {name}" for name, ranks in groups[:4])
