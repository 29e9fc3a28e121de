"""Any values of the model at all, by its type hints: what must survive the way from a node to its judge."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from rankwatch.model import KIND_BYTES, Calls, Collective, RankState, Stack

FINITE = st.floats(-1e12, 1e12)
TEXT = st.text(max_size=6)
WHOLE = st.integers(-(2**63), 2**64 - 1)


def json_of(numbers: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    """Any JSON with such whole numbers."""
    leaves = st.none() | st.booleans() | numbers | FINITE | TEXT
    return st.recursive(leaves, lambda of: st.lists(of, max_size=2) | st.dictionaries(TEXT, of, max_size=2))


JSON = json_of(st.integers(-(2**70), 2**70))
SENT = json_of(WHOLE)
KINDS = {number: Collective("", 0, 0, f"op_{number}", ((number,),)) for number in range(1, 7)}  # 0 and 7 mean nothing that is known


@st.composite
def histories(draw: Any) -> Calls:
    numbers = draw(st.lists(st.integers(0, 7), max_size=8))
    kinds = b"".join(number.to_bytes(KIND_BYTES, "little") for number in numbers)
    return Calls(draw(st.integers(0, 2)), draw(st.integers(0, 5)), kinds, {number: KINDS[number] for number in numbers if number in KINDS})


def values(hint: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is float:
        return FINITE
    if hint in (int, bool, str):
        return {int: WHOLE, bool: st.booleans(), str: TEXT}[hint]
    if hint is Any:
        return SENT
    if hint is Calls:
        return histories()
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of([st.none() if arg is types.NoneType else values(arg, depth) for arg in args])
    if origin is tuple and args[1:] == (...,):
        return st.just(()) if args[0] is Stack and depth > 2 else st.lists(values(args[0], depth), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(arg, depth) for arg in args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1], depth), max_size=3)
    assert is_dataclass(hint), hint
    hints = hints_of(hint)
    return st.builds(hint, **{each.name: values(hints[each.name], depth + 1) for each in fields(hint)})


def hints_of(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, localns={"Mapping": Mapping})


def field_values(name: str) -> st.SearchStrategy[Any]:
    """Values of one field of RankState."""
    return values(hints_of(RankState)[name])


def reachable(cls: Any = RankState) -> set[type]:
    """The dataclasses that a value of cls may hold, itself included."""
    found: set[type] = set()
    waiting = [cls]
    while waiting:
        hint = waiting.pop()
        if is_dataclass(hint) and hint not in found:
            found.add(hint)
            waiting += hints_of(hint).values()
        elif not is_dataclass(hint):
            waiting += get_args(hint)
    return found
