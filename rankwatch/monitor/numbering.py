"""gloo's two ways to count, and how to come from one to the other. Pure.

The status counts sends and receives as well, and shows them at the next collective; the recorder has no entry of them, and counts collectives
alone. Only the latter numbers mean the same on every rank. Each entry holds both: op_id is the status's number. Where they differ the group is
"mixed": a number beyond the entries that were read tells that more was called, not how much. Run on torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KEEP = 64


class Numbering:
    """One process's gloo groups, by their numbers in it. mixed: (status's number, collective) of the newest entries read, oldest first."""

    def __init__(self) -> None:
        self.mixed: dict[int, list[tuple[int, int]]] = {}

    def learn(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Entries of gloo's recorder as they were read, oldest first. A group that is mixed stays so."""
        read: dict[int, list[tuple[int, int]]] = {}
        for entry in entries:
            op_id, seq, pg_id = entry.get("op_id"), entry.get("collective_seq_id"), entry.get("pg_id")
            if isinstance(op_id, int) and isinstance(seq, int) and isinstance(pg_id, int) and op_id > 0 and not entry.get("is_p2p"):
                read.setdefault(pg_id, []).append((op_id, seq))
        for pg_id, pairs in read.items():
            if pairs[-1][0] > pairs[-1][1]:
                self.mixed[pg_id] = pairs[-KEEP:]

    def collectives(self, pg_id: int, entered: int, done: int) -> tuple[int, int]:
        """The status's numbers as collectives; of a mixed group at least so many."""
        pairs = self.mixed.get(pg_id)
        if pairs is None:
            return entered, done
        finished = _at_least(pairs, done)
        return max(_at_least(pairs, entered), finished + (entered > done)), finished

    def behind(self, pg_id: int, entered: int) -> bool:
        """Whether more was called in this mixed group than was read."""
        return entered > self.mixed[pg_id][-1][0]


def _at_least(pairs: list[tuple[int, int]], number: int) -> int:
    if number > pairs[-1][0]:
        return pairs[-1][1] + 1  # the number of a collective: a send or receive alone does not move the status
    return max((seq for op_id, seq in pairs if op_id <= number), default=0)
