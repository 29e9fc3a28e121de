"""How a compile is named: its frame, its ordinal, its graph's fingerprint, lines of the user's code."""

from __future__ import annotations

import os

try:
    from _sha1 import sha1  # type: ignore[import-not-found]  # without what hashlib's asks of OpenSSL, which costs more than the sum
except ImportError:
    from hashlib import sha1

from rankwatch.agent.sources import is_torch_or_stdlib
from rankwatch.agent.threads import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_FUNCTION_BYTES, _FILE_BYTES = 80, 64


def frame_name(name: str, file: str, line: int) -> str:
    """`forward@model.py:31`; within 160 bytes, so that every event and record has room for it and carries the same."""
    return f"{clean(name, _FUNCTION_BYTES)}@{clean(file.rpartition('/')[2], _FILE_BYTES)}:{line}"


def ordinal(compile_id: str) -> int:
    """How many times this frame was compiled before: C of "F/C" or "!A/F/C"."""
    if compile_id.endswith("/0"):
        return 0
    last = compile_id.rpartition("/")[2]
    return int(last) if last.isdigit() and "/" in compile_id else 0


def users_line(lines: Any, with_function: bool = False) -> str:
    """`model.py:31` (or `model.py:31:forward`) of the innermost of some FrameSummary that is not torch's or the standard library's; "" without one."""
    for line in reversed(lines or ()):
        if not is_torch_or_stdlib(line.filename):
            function = getattr(line, "name", "") if with_function else ""
            return f"{os.path.basename(line.filename)}:{line.lineno}" + (f":{function}" if function else "")
    return ""


def fingerprint(metrics: Mapping[str, Any]) -> str:
    """Equal for equal graphs on every rank: no device index, no cache key."""
    get = metrics.get
    code = get("co_name", ""), str(get("co_filename", "")).rpartition("/")[2], get("co_firstlineno", 0)
    graph = get("graph_op_count"), get("graph_node_count"), get("graph_input_count"), get("guard_count"), get("graph_node_shapes")
    return digest(repr((code, graph)))


def digest(text: str) -> str:
    """12 hexadecimal digits of a text's sha1."""
    whole: str = sha1(text.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()
    return whole[:12]
