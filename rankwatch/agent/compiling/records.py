"""What torch's record of a finished compile (torch._dynamo.utils.CompilationMetrics) says, and how a compile has ended."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

SECONDS = {
    "dynamo": "dynamo_cumulative_compile_time_us",
    "aot": "aot_autograd_cumulative_compile_time_us",
    "inductor": "inductor_cumulative_compile_time_us",
    "triton": "triton_compile_time_us",
    "autotune": "runtime_triton_autotune_time_us",
}
_INNERMOST_FIRST = ("triton", "inductor", "aot", "dynamo")  # each contains the ones before
_LIMIT_REASON = "Dynamo recompile limit exceeded"


def fields_of(metrics: Any) -> Mapping[str, Any]:
    """A record's fields by name; those of other versions of torch are not there. To be read only."""
    try:
        found: Mapping[str, Any] = metrics.__dict__
    except AttributeError:  # a class with slots
        found = {name: getattr(metrics, name, None) for name in getattr(metrics, "__dataclass_fields__", ())}
    return found


def seconds_of(fields: Mapping[str, Any]) -> dict[str, float]:
    """torch's times of a compile, without those that are 0. They contain each other: dynamo > aot > inductor > triton."""
    get = fields.get
    return {name: spent / 1e6 for name, field in SECONDS.items() if (spent := get(field))}


def own_seconds(times: dict[str, float], seconds: float) -> dict[str, float]:
    """seconds_of without what is inside each, where that is not 0; seconds: of the whole compile, for one that failed early."""
    if not times:
        return {"dynamo": seconds}
    own = {"autotune": times["autotune"]} if "autotune" in times else {}
    inside = 0.0
    for name in _INNERMOST_FIRST:
        whole = times.get(name, 0.0)
        if whole > inside:
            own[name] = whole - inside
            inside = whole
    return own


def outcome_of(fail_type: str | None, fail_reason: str, one_graph: bool) -> str:
    """ "" for a compile that worked, limit, skipped (the frame is left to Python), or failures (the program gets an exception)."""
    if fail_type is None and not fail_reason:
        return ""
    if fail_reason.startswith(_LIMIT_REASON) and not one_graph:
        return "limit"
    if fail_type in ("Unsupported", "SkipFrame") and not (one_graph and fail_type == "Unsupported"):
        return "skipped"
    return "" if fail_type is None else "failures"


def first_words(reason: str) -> str:
    """First line of a failure; with the next one where it ends in a colon: `backend='x' raised: ValueError: ...`."""
    first, _, rest = reason.strip().partition("\n")
    return f"{first} {rest.strip()}" if first.endswith(":") else first


def fail_at(fields: Mapping[str, Any], frame: str) -> str:
    """`model.py:31`, the user's line of a failure; where torch knows none, as when a backend fails, the first line of the frame."""
    file, line = fields.get("fail_user_frame_filename"), fields.get("fail_user_frame_lineno")
    return f"{os.path.basename(str(file))}:{line}" if file else frame.partition("@")[2]
