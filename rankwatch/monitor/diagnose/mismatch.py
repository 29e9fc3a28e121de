"""Ranks that call different operations at the same sequence number of the same group."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from rankwatch.model import Collective
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Operations whose ranks must bring equally many elements. all_to_all, gather, scatter and the list forms of all_gather and
# reduce_scatter may be uneven; a barrier has no sizes.
_EQUAL_SIZES = frozenset(
    {
        "all_reduce",
        "allreduce",
        "allreduce_coalesced",
        "all_reduce_coalesced",
        "broadcast",
        "reduce",
        "_all_gather_base",
        "all_gather_into_tensor",
        "_allgather_base",
        "_reduce_scatter_base",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "all_gather_into_tensor_coalesced",
    }
)
_EQUAL_ON_GLOO = frozenset({"all_gather", "allgather", "allgather_coalesced", "reduce_scatter"})
# The list and the tensor form of one operation meet: what they exchange is the same.
FAMILY = {
    "allgather": "all_gather",
    "_all_gather_base": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
}
# Operations that combine element by element: there the shape, beside the number of elements, has to have one meaning.
_REDUCING = frozenset({"all_reduce", "allreduce", "allreduce_coalesced", "all_reduce_coalesced", "reduce", "_reduce_scatter_base", "reduce_scatter_tensor"})
DTYPE_BYTES = {"Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4, "Long": 8, "Double": 8, "ComplexFloat": 8}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """classes: ranks by what they call, the largest first. culprits: all outside the majority, or everybody when there is none."""

    classes: tuple[tuple[str, tuple[int, ...]], ...]
    culprits: tuple[int, ...]
    majority: bool
    differs: str  # "operation" | "number of elements" | "dtype" | "shape" | "members"


def say(entry: Collective) -> str:
    """`all_reduce of [1436] Float`, for people."""
    sizes = ", ".join(str(list(size)) for size in entry.input_sizes[:4]) + (", ..." if len(entry.input_sizes) > 4 else "")
    text = f"{entry.op} of {sizes}" if sizes else entry.op
    kinds = sorted(set(entry.dtypes))
    return f"{text} {'/'.join(kinds)}" if kinds and sizes else text


def elements(entry: Collective) -> int | None:
    """How many elements the rank brings; None where that is not recorded."""
    return sum(prod(size) for size in entry.input_sizes) if entry.input_sizes else None


def signature(entry: Collective) -> tuple[object, ...]:
    """What has to be equal for two calls to be alike: operation, number of elements, dtypes."""
    return (entry.op, elements(entry), tuple(sorted(set(entry.dtypes))))


def size_bytes(entry: Collective) -> int:
    """Bytes that the rank brings, 0 where that is not recorded."""
    return (elements(entry) or 0) * max((DTYPE_BYTES.get(dtype, 4) for dtype in entry.dtypes), default=1)


def kind(entry: Collective) -> Collective:
    """The call without what may differ between ranks or does not tell calls apart: two calls of one kind are alike."""
    if entry.op not in _EQUAL_SIZES:
        return Collective("", 0, 0, entry.op)
    sizes = entry.input_sizes if entry.op in _REDUCING or not entry.input_sizes else ((elements(entry) or 0,),)
    return Collective("", 0, 0, entry.op, sizes, (), tuple(sorted(set(entry.dtypes))))


def compare(entries: Mapping[int, Collective], strict: bool = False, shapes: bool = False) -> Mismatch | None:
    """The disagreement among ranks at one sequence number; None when they agree or nothing can be said.

    Compared in this order: operation, number of elements, dtype where both sides have one. strict: sizes are compared for operations that
    may be uneven on some backends too, as gloo's all_gather may not. shapes: for reductions the shape as well, which makes nothing hang.
    """
    by_op: dict[str, list[int]] = defaultdict(list)
    for rank, entry in entries.items():
        by_op[FAMILY.get(entry.op, entry.op)].append(rank)
    if len(by_op) > 1:
        return _split(by_op.values(), entries, "operation")
    ops = {entry.op for entry in entries.values()}
    if not all(op in _EQUAL_SIZES or (strict and op in _EQUAL_ON_GLOO) for op in ops):
        return None
    by_size: dict[int, list[int]] = defaultdict(list)
    for rank, entry in entries.items():
        if (size := elements(entry)) is not None:
            by_size[size].append(rank)
    if len(by_size) > 1:
        return _split(by_size.values(), entries, "number of elements")
    by_dtype: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, entry in entries.items():
        if entry.dtypes:
            by_dtype[tuple(sorted(set(entry.dtypes)))].append(rank)
    if len(by_dtype) > 1:
        return _split(by_dtype.values(), entries, "dtype")
    return _by_shape(entries) if shapes and ops <= _REDUCING else None


def _by_shape(entries: Mapping[int, Collective]) -> Mismatch | None:
    """Equally many elements in another order of dimensions. A flattened tensor is laid out as the one that it was made of."""
    by_shape: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for rank, entry in entries.items():
        by_shape[entry.input_sizes].append(rank)
    shapes = sorted(by_shape, key=lambda sizes: -len(by_shape[sizes]))
    if len(shapes) < 2 or all(_alike(shapes[0], sizes) for sizes in shapes[1:]):
        return None
    return _split(by_shape.values(), entries, "shape")


def _alike(one: tuple[tuple[int, ...], ...], other: tuple[tuple[int, ...], ...]) -> bool:
    """Whether each tensor of one is that of the other with neighbouring dimensions merged."""
    if len(one) != len(other):
        return True  # as lists of tensors they are laid out one after the other
    pairs = [({prod(a[:n]) for n in range(1, len(a) + 1)}, {prod(b[:n]) for n in range(1, len(b) + 1)}) for a, b in zip(one, other, strict=True)]
    return all(a - {1} <= b or b - {1} <= a for a, b in pairs)


def compare_members(members: Mapping[int, tuple[int, ...]]) -> Mismatch | None:
    """The disagreement about who is in a group that is being made; None when all say the same."""
    by_members: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, ranks in members.items():
        by_members[ranks].append(rank)
    if len(by_members) < 2:
        return None
    parts = sorted(by_members.items(), key=lambda item: (-len(item[1]), item[1]))
    majority = len(parts[0][1]) > len(parts[1][1])
    culprits = sorted(rank for _, part in (parts[1:] if majority else parts) for rank in part)
    return Mismatch(tuple((f"new_group of ranks {compress(ranks)}", tuple(sorted(part))) for ranks, part in parts), tuple(culprits), majority, "members")


def _split(found: Iterable[list[int]], entries: Mapping[int, Collective], differs: str) -> Mismatch:
    parts = sorted((tuple(sorted(ranks)) for ranks in found), key=lambda ranks: (-len(ranks), ranks))
    majority = len(parts[0]) > len(parts[1])
    culprits = sorted(rank for part in (parts[1:] if majority else parts) for rank in part)
    return Mismatch(tuple((say(entries[part[0]]), part) for part in parts), tuple(culprits), majority, differs)


def evidence(found: Mismatch, where: str, habits: Mapping[int, str]) -> tuple[str, ...]:
    """Lines for either side. where: "#26 of default_pg". habits: rank -> what its recent history says about this call ("" for nothing)."""
    lines = [f"{where}: rank{'s' if len(ranks) > 1 else ''} {compress(ranks)} call{'' if len(ranks) > 1 else 's'} {text}" for text, ranks in found.classes[:8]]
    lines += [f"rank {rank}: {text}" for rank, text in sorted(habits.items()) if text][:8]
    if not found.majority:
        lines.append("there is no majority, so either side may be the wrong one")
    return tuple(lines)


_USUAL = 3  # numbers at which a call was seen before


def usual(entry: Collective, histories: Iterable[Iterable[Collective]]) -> bool:
    """Whether calls of this kind, number of elements and dtype are among the earlier ones of its group, at three numbers or more."""
    wanted = signature(entry)
    before = {
        past.seq for history in histories for past in history
        if past.seq < entry.seq and (past.group, past.generation) == (entry.group, entry.generation) and signature(past) == wanted
    }  # fmt: skip
    return len(before) >= _USUAL


def by_habit(found: Mismatch, known: Mapping[int, bool]) -> tuple[int, ...]:
    """The ranks outside the one side whose call is usual, where no other side's is; () when habit says nothing. known: rank -> its call is usual."""
    sides = [(ranks, any(known[rank] for rank in ranks)) for _, ranks in found.classes]
    if sum(is_usual for _, is_usual in sides) != 1:
        return ()
    return tuple(sorted(rank for ranks, is_usual in sides if not is_usual for rank in ranks))


def habit(history: tuple[Collective, ...], entry: Collective) -> str:
    """Whether this call is one that the rank repeats: with two ranks the best hint at the odd one."""
    earlier = [past for past in history if past.group == entry.group and past.generation == entry.generation and past.seq < entry.seq]
    if len(earlier) < 3:
        return ""
    same = sum(past.op == entry.op and past.input_sizes == entry.input_sizes for past in earlier)
    return f"its last {len(earlier)} operations in this group hold {same} of this kind and size"
