"""A rank's own totals of its compiles (the `compile` record, see agent/probes/compile.py) in known types, read once each time that it changes. Pure."""

from __future__ import annotations

import json
from typing import Any

from rankwatch import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

COUNTS = ("frames", "recompiles", "backward", "graphs", "library", "skipped", "graph_breaks", "failures", "limit_hits")
STATES = ("hit", "miss", "bypass", "disabled")
MAX_PHASES = 16


class Told:
    """counts: as in COUNTS; seconds: spent compiling; requested: calls of torch.compile, and `requested_key`, equal for equal ones; "" for none.

    suppresses: compiles that fail fall back to Python.
    """

    __slots__ = ("caches", "counts", "disabled", "phases", "requested", "requested_key", "seconds", "stance", "suppresses")

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.counts = tuple(int(number(record.get(name))) for name in COUNTS)
        spent = table(record.get("seconds"))
        self.seconds = sum(number(value) for value in spent.values())
        self.phases = {str(phase): number(value) for phase, value in list((table(record.get("phases")) or spent).items())[:MAX_PHASES]}
        self.caches: dict[tuple[str, str], int] = {}  # (layer, state) -> lookups
        for layer, states in list(table(record.get("cache")).items())[:4]:
            for state in STATES:
                if count := int(number(table(states).get(state))):
                    self.caches[str(layer)[:8], state] = count
        asked = table(record.get("requested"))
        self.requested: dict[str, Any] = {}
        self.requested_key = ""
        if asked.get("count"):
            self.requested = {key: shown.public_line(value)[:160] if isinstance(value, str) else value for key, value in list(asked.items())[:8]}
            self.requested_key = json.dumps(self.requested, sort_keys=True, default=str)
        why, stance = record.get("disabled"), record.get("stance")
        self.disabled = (shown.public_line(why)[:160] if isinstance(why, str) else "torch.compile is switched off") if why else ""
        self.suppresses = record.get("suppress_errors") is True
        self.stance = shown.public_line(stance)[:80] if isinstance(stance, str) else ""


def number(value: object) -> float:
    """0.0 for what is no finite number."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else 0.0


def whole(value: object) -> int:
    """0 for what is no number."""
    return int(number(value))


def table(value: object) -> Mapping[str, Any]:
    """{} for what is no JSON object."""
    return value if isinstance(value, dict) else {}
