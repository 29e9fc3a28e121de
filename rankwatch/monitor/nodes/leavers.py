"""What is said of nodes that have left a job that goes on without them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankwatch import shown

BY_SIGNAL = " to the launcher"
MAX_NAMED = 4


def words(leaving: Sequence[tuple[str, str]], nnodes_before: int, world_size: int, nnodes: int) -> str:
    """ "worker-2 has left: SIGTERM to its launcher; the job goes on with 2 ranks on 2 nodes", "" where no fewer nodes go on.

    leaving: (node, why) of each planned end that was heard of, "" where nobody said why; of a node that vanished nothing was.
    """
    gone = nnodes_before - nnodes
    if gone <= 0:
        return ""
    signals = {node: why.removesuffix(BY_SIGNAL) for node, why in leaving if why.endswith(BY_SIGNAL) or not why}
    told = [_left(node, signal) for node, signal in list(signals.items())[: min(gone, MAX_NAMED)]]
    if more := gone - len(told):
        told.append(f"{shown.plural(more, 'more node' if told else 'node')} {'has' if more == 1 else 'have'} left")
    return f"{', '.join(told)}; the job goes on with {shown.plural(world_size, 'rank')} on {shown.plural(nnodes, 'node')}"


def _left(node: str, signal: str) -> str:
    why = f": {shown.one_line(signal)} to its launcher" if signal else ""
    return f"{shown.one_line(node)} has left{why}"
