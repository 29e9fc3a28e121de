"""gloo's recorder under TORCH_DISTRIBUTED_DEBUG=DETAIL, where no entry names its group: which number is whose. Pure.

torch then wraps each backend, and hands the group's name to the wrapper alone. Beside each backend it makes a gloo group of its own, in which it
checks the collectives before they start: a barrier of messages, then two all_gathers of whole numbers. Those are no calls of the job. Which number a
group has is what the agent counts; it holds as long as nobody but torch makes gloo groups, and that is seen from what the checks' numbers hold.
Run on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rankwatch.model import Group

_CHECKS = "gloo:all_gather"


def names(groups: Sequence[Group]) -> dict[int, str]:
    """Number in gloo's recorder -> name of the group, "" for one that only checks; {} where two groups claim one number."""
    found: dict[int, str] = {}
    for group in groups:
        for place, number in enumerate(group.checked):
            if number < 0:
                continue
            if number in found:
                return {}
            found[number] = "" if place else group.name
    return found


def told_apart(entries: Sequence[Mapping[str, Any]], known: Mapping[int, str]) -> list[Mapping[str, Any]] | None:
    """The entries with their groups' names, without the checks'; None where they do not fit those numbers. known: of `names`.

    Entries of numbers that are not known stay as they are: their groups are gone.
    """
    if not known:
        return list(entries)
    if not all(_fits(entry, known) for entry in entries):
        return None
    kept: list[Mapping[str, Any]] = []
    for entry in entries:
        name = known.get(_number(entry)) if _unnamed(entry) else None
        if name is None:
            kept.append(entry)
        elif name:
            kept.append({**entry, "process_group": [name, ""]})
    return kept


def _fits(entry: Mapping[str, Any], known: Mapping[int, str]) -> bool:
    name = known.get(_number(entry))
    if name is None:
        return True
    if not _unnamed(entry):
        return bool(name) and entry["process_group"][0] == name
    return bool(name) or (entry.get("profiling_name") == _CHECKS and set(_dtypes(entry)) <= {"Long"})


def _unnamed(entry: Mapping[str, Any]) -> bool:
    of = entry.get("process_group")
    return not (isinstance(of, list) and of and of[0])


def _dtypes(entry: Mapping[str, Any]) -> Iterable[str]:
    dtypes = entry.get("input_dtypes")
    return map(str, dtypes) if isinstance(dtypes, list) else ()


def _number(entry: Mapping[str, Any]) -> int:
    try:
        return int(entry.get("pg_id", -1))
    except (TypeError, ValueError, OverflowError):
        return -1
