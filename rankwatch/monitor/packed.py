"""What a closed incident keeps in memory, packed: up to fifty of them would be 5 MB of frames and phases that nobody may ever ask for again.

Measured on four ranks: an incident of 100-180 kB of objects becomes 3-6 kB. Only our own values of this process are packed and read back.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

from rankwatch.model import Incident
from rankwatch.report import incident as incident_report

K = TypeVar("K")
V = TypeVar("V")
SMALL_BYTES = 256
"""What pickles shorter stays as it is."""


class Packed(Mapping[K, V], Generic[K, V]):
    """A mapping whose values are compressed one by one; each look at a large one unpacks a new copy of it (about 0.1 ms)."""

    __slots__ = ("_packed", "_plain")

    def __init__(self, values: Mapping[K, V]) -> None:
        self._plain: dict[K, V] = {}
        self._packed: dict[K, bytes | None] = {}  # in the order of `values`; None: it is plain
        for key, value in values.items():
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
            self._packed[key] = zlib.compress(data) if len(data) > SMALL_BYTES else None
            if len(data) <= SMALL_BYTES:
                self._plain[key] = value

    def __getitem__(self, key: K) -> V:
        data = self._packed[key]
        if data is None:
            return self._plain[key]
        value: V = pickle.loads(zlib.decompress(data))
        return value

    def __iter__(self) -> Iterator[K]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def packed(incident: Incident) -> Incident:
    """The closed incident with all that its document needs, small; the same one where that has been done."""
    if isinstance(incident.kept, Packed):
        return incident
    kept = {**incident.kept, "stack_groups": incident_report.stack_groups(incident)}
    return replace(incident, stacks=Packed(incident.stacks), kept=Packed(kept), stack_groups=())
