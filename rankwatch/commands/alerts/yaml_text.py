"""Maps, lists and texts as YAML that any reader takes: enough for a rule file, and not a line more. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./:-]*[A-Za-z0-9_]|[A-Za-z]")
_QUOTED = re.compile(r'[\x20-\x7e]*["\\][\x20-\x7e]*')  # what would be full of backslashes between double quotes
_NO_TEXT = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
_BLOCK = re.compile(r"[\x21-\x7e][\x20-\x7e]*(?:\n(?:[\x20-\x7e]*[\x21-\x7e])?)*")  # first line not indented, last one not blank, ASCII without tabs


def dump(value: Mapping[str, Any]) -> str:
    """The document, one trailing newline. Values are texts, non-empty lists of maps, and maps; TypeError for another."""
    return "\n".join(_lines(value)) + "\n"


def scalar(text: str) -> str:
    """One text on one line: bare where every reader takes that for a text, else between quotes."""
    if _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXT:
        return text
    if _QUOTED.fullmatch(text):
        return "'" + text.replace("'", "''") + "'"
    return re.sub(r"[^\x20-\x7e]", lambda odd: f"\\U{ord(odd[0]):08x}", json.dumps(text, ensure_ascii=False))


def _lines(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _entry(f"{scalar(key)}:", below)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" if line else "" for line in rest)
    else:
        raise TypeError(f"{type(value).__name__} has no place in a rule file")


def _entry(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, str):
        yield key
        yield from (f"  {line}" if line else "" for line in _lines(value))
    elif "\n" in value and not value.endswith("\n") and _BLOCK.fullmatch(value):
        yield f"{key} |-"
        yield from (f"  {line}" if line else "" for line in value.split("\n"))
    else:
        yield f"{key} {scalar(value)}"
