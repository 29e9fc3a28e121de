"""What is said of nodes that do not report: once when one falls silent, once when it is back; and how many of how many do. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankwatch import shown
from rankwatch.model import NodeReport
from rankwatch.wire.ranks import compress

if TYPE_CHECKING:
    from rankwatch.monitor.nodes.peer import NodeState

MAX_LINES = 8  # at once: a switch that fails takes many nodes with it
MAX_NAMED = 4


class Silences:
    """Nodes that are silent now. One judge's, from the loop's thread."""

    def __init__(self) -> None:
        self._silent: dict[int, float] = {}  # group rank -> the longest silence seen

    def look(self, nodes: Sequence[NodeReport]) -> list[str]:
        """Lines about what has changed since the look before."""
        fell, back = [], []
        for node in nodes:
            if node.silent_ranks:
                if node.group_rank not in self._silent:
                    fell.append(node)
                self._silent[node.group_rank] = node.report_age_s
            elif node.ranks and node.group_rank in self._silent:
                back.append((node, self._silent.pop(node.group_rank)))
        lines = [_silent_words(node) for node in fell[:MAX_LINES]]
        if len(fell) > MAX_LINES:
            lines.append(f"{len(fell) - MAX_LINES} more nodes do not answer; their ranks are unknown")
        lines += [f"{node.node} answers again after {shown.duration(silent_s)}" for node, silent_s in back[:MAX_LINES]]
        if len(back) > MAX_LINES:
            lines.append(f"{len(back) - MAX_LINES} more nodes answer again")
        return lines


def _silent_words(node: NodeReport) -> str:
    several = len(node.silent_ranks) > 1
    ranks = f"its {'ranks' if several else 'rank'} {compress(node.silent_ranks)} {'are' if several else 'is'} unknown"
    why = f" ({node.problem})" if node.problem else ""
    return f"{node.node} has not answered for {shown.duration(node.report_age_s)}{why}: {ranks}; does its launcher run, does a firewall stand between?"


def problem(states: Sequence[NodeState], nnodes: int, directory: str) -> str:
    """ "2 of 4 nodes report: node2: timed out", or "" when all do. directory: why others may not be known at all."""
    reporting = 1 + sum(state.report_age_s is not None and not state.problem for state in states)
    if reporting >= nnodes:
        return ""
    why = [f"{state.node}: {state.problem or 'no report yet'}" for state in states if state.report_age_s is None or state.problem]
    named = why[:MAX_NAMED] + ([f"and {len(why) - MAX_NAMED} more"] if len(why) > MAX_NAMED else [])
    if len(states) + 1 < nnodes:
        named.append(directory or f"{nnodes - 1 - len(states)} not found in torchrun's store")
    return f"{reporting} of {nnodes} nodes report: {', '.join(named)}"
