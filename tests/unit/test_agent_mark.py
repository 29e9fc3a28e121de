"""The mark of a process that has not imported torch, and what the last process removes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rankwatch.agent import mark, orphan, ownership
from rankwatch.agent.slot import RankSlot
from rankwatch.wire import env, layout

ME = {"pid": os.getpid(), "start_ticks": ownership.start_ticks(os.getpid())}
DEAD = {"pid": 2**22 + 1, "start_ticks": 1}


class Place:
    """A slot directory with rank 3's slot."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / env.slot_name(3)
        self.path.write_bytes(layout.pack_header(3, 0).ljust(layout.SLOT_BYTES, b"\0"))
        self.environ = {"RANK": "3", env.SLOT_DIR: str(folder)}

    def owner(self) -> dict[str, Any]:
        found = layout.read_record(self.path.read_bytes(), layout.RECORDS["owner"])
        return json.loads(found[2]) if found else {}

    def owned_by(self, record: dict[str, Any]) -> None:
        RankSlot(str(self.path)).take(record, clear=False)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_first_process_leaves_its_mark(place: Place) -> None:
    assert mark.leave(place.environ) is not None
    owner = place.owner()
    assert {**owner, "wall_ns": 0} == {**ME, "state": "loaded", "rank": 3, "wall_ns": 0}


@pytest.mark.parametrize(
    ("owner", "takes"),
    [
        pytest.param({**DEAD, "state": "loaded"}, True, id="the mark of a dead process"),
        pytest.param({**ME, "state": "loaded"}, False, id="the mark of a living one"),
        pytest.param({**DEAD, "state": "armed"}, False, id="a dead process that had torch: its records are there"),
        pytest.param({**DEAD, "state": "claimed"}, False, id="a dead rank"),
    ],
)
def test_who_gives_way_to_a_mark(place: Place, owner: dict[str, Any], takes: bool) -> None:
    place.owned_by(owner)
    assert (mark.leave(place.environ) is not None) is takes
    assert place.owner()["pid"] == (ME["pid"] if takes else owner["pid"])


def test_a_mark_is_found_and_replaced_by_the_same_process_when_torch_comes(place: Place) -> None:
    mark.leave(place.environ)
    slot = RankSlot(str(place.path))
    assert slot.owner()["state"] == "loaded"
    assert ownership.may_arm(slot.owner(), os.getpid(), False)
    slot.take({**ME, "state": "armed"}, clear=True)
    assert slot.owned
    assert place.owner()["state"] == "armed"


@pytest.mark.parametrize("spoil", ["absent", "short", "magic", "rank"])
def test_what_is_no_slot_of_this_rank_stays_as_it_is(place: Place, spoil: str) -> None:
    data = place.path.read_bytes()
    changed = {"absent": b"", "short": data[:100], "magic": b"other" + data[5:], "rank": layout.pack_header(4, 0) + data[layout.HEADER_BYTES :]}[spoil]
    place.path.write_bytes(changed)
    if spoil == "absent":
        place.path.unlink()
    assert mark.leave(place.environ) is None
    assert not place.path.exists() or place.path.read_bytes() == changed


def test_the_base_goes_only_when_it_is_ours_and_nothing_else_is_in_it(tmp_path: Path) -> None:
    def left(base: str, *others: str) -> list[str]:
        folder = tmp_path / base
        for path in ("a0/rank_3.slot", "a0/rank_3.sock", "owner.json", *others):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).touch()
        orphan.remove(str(folder / "a0"), 3)
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else ["gone"]

    assert left("rankwatch.abcdefgh") == ["gone"]
    assert left("another") == ["owner.json"]
    assert left("rankwatch.b", "mine.txt") == ["mine.txt", "owner.json"]
    assert left("rankwatch.c", "a1/rank_3.slot") == ["a1", "a1/rank_3.slot", "owner.json"]
    assert left("rankwatch.d", "a0/rank_4.slot") == ["a0", "a0/rank_4.slot", "owner.json"]


def test_a_launcher_is_gone_once_it_does_not_run_any_more() -> None:
    assert not orphan.Launcher(os.getpid()).gone()
    assert not orphan.Launcher(0).gone()
    assert not orphan.Launcher(2**22 + 1).gone()  # it was none to begin with


def lifecycle(place: Place) -> dict[str, Any]:
    found = layout.read_record(place.path.read_bytes(), layout.RECORDS["lifecycle"])
    return json.loads(found[2]) if found and found[2] else {}


def raised() -> ValueError:
    try:
        raise ValueError("boo")
    except ValueError as error:
        return error


def test_an_exception_before_torch_is_told_and_the_next_process_forgets_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    left = mark.leave(place.environ)
    assert left is not None
    left.exits()
    assert lifecycle(place) == {}
    monkeypatch.setattr(sys, "last_value", raised(), raising=False)
    left.exits()
    record = lifecycle(place)
    assert (record["stage"], record["exception"]["type"], record["exception"]["message"]) == ("exiting", "ValueError", "boo")
    assert record["exception"]["where"].startswith("test_agent_mark.py:")
    place.owned_by({**DEAD, "state": "loaded"})
    assert mark.leave(place.environ) is not None
    assert lifecycle(place) == {}


def test_the_exception_of_a_process_with_torch_is_left_to_its_rank(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    left = mark.leave(place.environ)
    assert left is not None
    place.owned_by({**ME, "state": "claimed"})
    monkeypatch.setattr(sys, "last_value", raised(), raising=False)
    left.exits()
    assert lifecycle(place) == {}


def test_the_end_of_a_process_never_fails(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is gone, the pid cannot be asked, the exception cannot be printed: the job's own end goes on."""
    left = mark.leave(place.environ)
    assert left is not None

    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    monkeypatch.setattr(sys, "last_value", Odd(), raising=False)
    left.exits()
    assert lifecycle(place)["exception"]["message"] == "<exception str() failed>"
    place.path.unlink()
    left.exits()

    def broken() -> int:
        raise RuntimeError

    monkeypatch.setattr(mark, "getpid", broken)
    left.exits()
