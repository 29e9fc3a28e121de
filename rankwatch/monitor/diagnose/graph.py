"""From waits to their roots. A rank that waits for nobody is a root; what waits behind it is a consequence and is not blamed.

Nodes are ranks and waits; a wait points to its missing ranks, or to the silent nodes that it is for, a rank to the waits it sits in. Strongly
connected parts without a way out are the causes: one rank, one silent node, one wait that cannot be explained by either, or a cycle over two or
more groups.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from rankwatch.monitor.diagnose.waits import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Node = tuple[str, int]  # ("rank", number), ("wait", index) or ("silent", place of a node)


@dataclass(frozen=True, slots=True)
class Hang:
    """One trouble: its roots, the waits that lead to them (indices), and every rank that waits for it."""

    roots: tuple[int, ...]  # ranks that are absent
    hung: tuple[int, ...]  # waits (indices) that are themselves the trouble: mismatch, all entered, absent ranks unknown
    cycle: tuple[int, ...]  # ranks of a wait cycle
    waits: tuple[int, ...]
    waiting: tuple[int, ...]
    silent: tuple[int, ...] = ()  # nodes that do not answer, whose ranks are waited for


def hangs(waits: Sequence[Wait], blocked: Callable[[int, Wait], bool]) -> list[Hang]:
    """The independent troubles behind these waits. blocked(rank, wait): whether the rank really sits in it (an un-waited handle does not)."""
    edges: dict[Node, list[Node]] = {}
    for index, wait in enumerate(waits):
        node = ("wait", index)
        # ranks that disagree on the operation are a cause by themselves
        edges[node] = [] if wait.mismatch else [("rank", rank) for rank in wait.missing] or [("silent", place) for place in wait.silent]
        for rank in wait.waiters:
            if blocked(rank, wait):
                edges.setdefault(("rank", rank), []).append(node)
            else:
                edges.setdefault(("rank", rank), [])
        for rank in wait.missing:
            edges.setdefault(("rank", rank), [])
        for place in wait.silent:
            edges.setdefault(("silent", place), [])
    component, members = _components(edges)
    leaves = {number for number, nodes in members.items() if all(component[target] == number for node in nodes for target in edges[node])}
    backward: dict[Node, list[Node]] = defaultdict(list)
    for node, targets in edges.items():
        for target in targets:
            backward[target].append(node)
    # absent ranks that the same wait points to are one trouble
    parent: dict[int, int] = {number: number for number in leaves}

    def find(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for index in range(len(waits)):
        here = [component[target] for target in edges[("wait", index)] if component[target] in leaves]
        for other in here[1:]:
            parent[find(other)] = find(here[0])
    groups: dict[int, list[int]] = defaultdict(list)
    for number in sorted(leaves):
        groups[find(number)].append(number)
    found = [_hang([node for number in numbers for node in members[number]], waits, backward, members, component) for numbers in groups.values()]
    return [hang for hang in found if hang is not None]


def _hang(
    causes: list[Node], waits: Sequence[Wait], backward: Mapping[Node, list[Node]], members: Mapping[int, list[Node]], component: Mapping[Node, int]
) -> Hang | None:
    reached, queue = set(causes), list(causes)
    while queue:
        for node in backward.get(queue.pop(), ()):
            if node not in reached:
                reached.add(node)
                queue.append(node)
    behind = {index for kind, index in reached if kind == "wait"}
    if not behind:
        return None
    cycle = tuple(sorted(index for kind, index in causes if kind == "rank" and len(members[component[(kind, index)]]) > 1))
    roots = tuple(sorted(index for kind, index in causes if kind == "rank" and index not in cycle))
    hung = tuple(sorted(index for kind, index in causes if kind == "wait" and len(members[component[(kind, index)]]) == 1))
    silent = tuple(sorted(place for kind, place in causes if kind == "silent"))
    waiting = sorted({rank for index in behind for rank in waits[index].waiters} - set(roots))
    return Hang(roots, hung, cycle, tuple(sorted(behind)), tuple(waiting), silent)


def _components(edges: Mapping[Node, list[Node]]) -> tuple[dict[Node, int], dict[int, list[Node]]]:
    """Tarjan's strongly connected components, without recursion."""
    order: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    on_stack: set[Node] = set()
    component: dict[Node, int] = {}
    members: dict[int, list[Node]] = {}
    for start in edges:
        if start in order:
            continue
        work = [(start, iter(edges[start]))]
        order[start] = low[start] = len(order)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in order:
                    order[target] = low[target] = len(order)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(edges[target])))
                    break
                if target in on_stack:
                    low[node] = min(low[node], order[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    number = len(members)
                    members[number] = []
                    while True:
                        top = stack.pop()
                        on_stack.discard(top)
                        component[top] = number
                        members[number].append(top)
                        if top == node:
                            break
    return component, members
