"""Recorder entries as columns: each is of a form, which says what many entries have in common, and has a few numbers of its own. Pure.

of: form; seq; at: created_wall_at; state: done and started; took: duration_s, absent where no entry has one. A long column is packed into base64, which
is read six times as fast as so many numbers in JSON; a rank has hundreds of entries, and a judge tens of thousands of ranks.
"""

from __future__ import annotations

import base64
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from math import isfinite, isnan, nan
from operator import attrgetter
from typing import Any

from rankwatch.model import Collective
from rankwatch.monitor.frozen import constructor
from rankwatch.monitor.nodes.values import LEAST_INT, MOST_INT, Shift

MAX_ROWS = 1 << 16  # of one rank
PACK_FROM = 16
MAX_SHARED = 1 << 14
Form = tuple[Any, ...]
"""group, generation, op, input_sizes, output_sizes, dtypes, timeout_s, is_p2p."""
form_of = attrgetter("group", "generation", "op", "input_sizes", "output_sizes", "dtypes", "timeout_s", "is_p2p")
_own = attrgetter("seq", "created_wall_at", "duration_s")
_state = attrgetter("done", "started")
_STATES = ((False, None), (False, False), (False, True), (True, None), (True, False), (True, True))
_STATE_OF = {state: number for number, state in enumerate(_STATES)}
_WIDTHS = {"I": 4, "q": 8, "d": 8, "B": 1}
_make = constructor(Collective)
_shared: dict[Any, Any] = {}  # sizes and element types that ranks of many nodes have in common


def plain(entry: Collective) -> Collective:
    """The entry that stands for its form on the wire."""
    return replace(entry, seq=0, created_wall_at=0.0, done=False, started=None, duration_s=None)


def shared_form(entry: Collective) -> Form:
    """A form that has come, its values one copy for all ranks that have them."""
    if len(_shared) > MAX_SHARED:
        _shared.clear()
    group, generation, op, given, got, dtypes, timeout_s, is_p2p = form_of(entry)
    given, got, dtypes = (_shared.setdefault(value, value) for value in (given, got, dtypes))
    return sys.intern(group), generation, sys.intern(op), given, got, dtypes, timeout_s, is_p2p


def encode_rows(entries: Sequence[Collective], forms: Sequence[int]) -> dict[str, Any]:
    """The columns of these entries. forms: the number of the form of each."""
    seq, at, took = zip(*map(_own, entries), strict=True) if entries else ((), (), ())
    states = [_STATE_OF[state] for state in map(_state, entries)]
    columns = {"of": _pack(forms, "I"), "seq": _pack(seq, "q"), "at": _pack(at, "d"), "state": _pack(states, "B")}
    if any(each is not None for each in took):
        columns["took"] = _pack([nan if each is None else each for each in took], "d") if len(took) >= PACK_FROM else took
    return columns


def decode_rows(value: Mapping[str, Any], shift: Shift, forms: Mapping[int, Form]) -> list[Collective]:
    """The entries of these columns. Raises what values.WRONG holds for anything else."""
    of, seq, at, state = _unpack(value["of"], "I"), _unpack(value["seq"], "q"), _unpack(value["at"], "d"), _unpack(value["state"], "B")
    took = None
    if "took" in value:
        took = [None if each is None or isnan(each) else each for each in _unpack(value["took"], "d", (int, float, type(None)))]
        if not all(map(isfinite, filter(None, took))):
            raise ValueError("a duration is out of range")
    if not all(map(isfinite, at)):
        raise ValueError("a time is out of range")
    if not len(of) == len(seq) == len(at) == len(state) or (took is not None and len(took) != len(of)):
        raise ValueError("columns are of different lengths")
    if not of:
        return []
    group, generation, op, given, got, dtypes, timeout_s, is_p2p = zip(*[forms[form] for form in of], strict=True)
    done, started = zip(*[_STATES[how] for how in state], strict=True)
    wall_s = shift.wall_s
    wall_at = [made + wall_s if made else 0.0 for made in at]
    return list(map(_make, group, generation, seq, op, given, got, dtypes, wall_at, timeout_s, done, started, is_p2p, took or repeat(None)))


def _pack(column: Sequence[Any], code: str) -> Any:
    """The column as it is where it is short, or holds a number that is too large."""
    if len(column) >= PACK_FROM:
        try:
            return base64.b64encode(struct.pack(f"<{len(column)}{code}", *column)).decode("ascii")
        except struct.error:
            pass
    return list(column)


def _unpack(column: Any, code: str, wanted: tuple[type, ...] = ()) -> Sequence[Any]:
    if type(column) is str and len(column) <= 2 * MAX_ROWS * _WIDTHS[code]:
        data = base64.b64decode(column, validate=True)
        return struct.unpack(f"<{len(data) // _WIDTHS[code]}{code}", data)
    if type(column) is not list or len(column) > MAX_ROWS:
        raise ValueError(f"a column of at most {MAX_ROWS} is wanted")
    if not set(wanted or ((int, float) if code == "d" else (int,))).issuperset(map(type, column)) or (code == "B" and column and min(column) < 0):
        raise ValueError("numbers are wanted in a column")
    if column and code != "d" and not LEAST_INT <= min(column) <= max(column) <= MOST_INT:
        raise ValueError("numbers of at most 64 bits are wanted in a column")
    return column
