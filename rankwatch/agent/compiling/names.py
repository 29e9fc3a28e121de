"""How a compile is named: its frame, its ordinal, its graph's fingerprint, lines of the user's code."""

from __future__ import annotations

import hashlib
import os

from rankwatch.agent.sources import is_torch_or_stdlib
from rankwatch.agent.threads import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FUNCTION_BYTES, _FILE_BYTES = 80, 64


def frame_name(name: str, file: str, line: int) -> str:
    """`forward@model.py:31`; within 160 bytes, so that every event and record has room for it and carries the same."""
    return f"{clean(name, _FUNCTION_BYTES)}@{clean(os.path.basename(file), _FILE_BYTES)}:{line}"


def ordinal(compile_id: str) -> int:
    """How many times this frame was compiled before: C of "F/C" or "!A/F/C"."""
    last = compile_id.rpartition("/")[2]
    return int(last) if last.isdigit() and "/" in compile_id else 0


def users_line(lines: Any, with_function: bool = False) -> str:
    """`model.py:31` (or `model.py:31:forward`) of the innermost of some FrameSummary that is not torch's or the standard library's; "" without one."""
    for line in reversed(lines or ()):
        if not is_torch_or_stdlib(line.filename):
            function = getattr(line, "name", "") if with_function else ""
            return f"{os.path.basename(line.filename)}:{line.lineno}" + (f":{function}" if function else "")
    return ""


def fingerprint(metrics: Any) -> str:
    """Equal for equal graphs on every rank: no device index, no cache key."""
    fields = ("graph_op_count", "graph_node_count", "graph_input_count", "guard_count", "graph_node_shapes")
    parts = [getattr(metrics, "co_name", ""), os.path.basename(str(getattr(metrics, "co_filename", ""))), getattr(metrics, "co_firstlineno", 0)]
    parts += [getattr(metrics, field, None) for field in fields]
    return digest(repr(parts))


def digest(text: str) -> str:
    """12 hexadecimal digits of a text's sha1."""
    return hashlib.sha1(text.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:12]
