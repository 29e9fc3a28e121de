"""A rank without torch: a real slot file and real agent objects, for probes that are fed by hand. Fakes raise on what they do not know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from one_rank import decode_thread

from rankwatch.agent.rank import Rank
from rankwatch.agent.slot import RankSlot
from rankwatch.wire import env, layout


class FakeRank:
    """A Rank that owns a slot in `folder`, and what a reader sees in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / env.slot_name(0)
        self.path.write_bytes(layout.pack_header(0, 0).ljust(layout.SLOT_BYTES, b"\0"))
        self.rank = Rank(RankSlot(str(self.path)), {env.SLOT_DIR: str(folder), "RANK": "0", "WORLD_SIZE": "1"})
        assert self.rank.take_provisionally()

    def record(self, name: str) -> dict[str, Any]:
        found = layout.read_record(self.path.read_bytes(), layout.RECORDS[name])
        return json.loads(found[2]) if found and found[2] else {}

    def threads(self) -> list[dict[str, Any]]:
        data = self.path.read_bytes()
        found = [layout.read_record(data, layout.RECORDS[f"thread_{n}"]) for n in range(layout.THREADS)]
        return [decode_thread(entry[2]) for entry in found if entry and entry[2]]

    def events(self, kind: str) -> list[dict[str, Any]]:
        data = self.path.read_bytes()
        found = [layout.unpack(data[layout.event_offset(n) :][: layout.EVENT_BYTES]) for n in range(layout.EVENT_SLOTS)]
        events = [json.loads(payload) for _seq, _mono_ns, payload in sorted(entry for entry in found if entry)]
        return [event for event in events if event["kind"] == kind]


class Strict:
    """An object with the given attributes; any other one is a mistake of the code under test."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nobody may touch {name!r}")
