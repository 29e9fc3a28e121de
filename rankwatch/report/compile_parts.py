"""Parts of a compile document that may be of any age, cut, edited or another program's: what is of a wrong type is an empty part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FAR = 1e15  # no seconds, bytes, counts or ranks are beyond that


def finite(value: object) -> float | None:
    """The value as a float; None for what is no number, no finite one, or out of all bounds."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and -_FAR < value < _FAR else None


def number(part: Mapping[str, Any], key: str) -> float:
    """0.0 without one."""
    return finite(part.get(key)) or 0.0


def table(part: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; empty without one."""
    value = part.get(key)
    return value if isinstance(value, Mapping) else {}


def listed(part: Mapping[str, Any], key: str) -> tuple[Any, ...]:
    """The items of a list; none without one."""
    value = part.get(key)
    return tuple(value) if isinstance(value, (list, tuple)) else ()


def rows(part: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """The objects in a list."""
    return [row for row in listed(part, key) if isinstance(row, Mapping)]
