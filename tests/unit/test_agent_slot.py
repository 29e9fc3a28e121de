"""The writer of a slot: what it leaves in the bytes, and who may write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rankwatch.agent.slot import RankSlot, fit
from rankwatch.wire import env, layout


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / env.slot_name(3)
    path.write_bytes(layout.pack_header(3, 1).ljust(layout.SLOT_BYTES, b"\0"))
    return path


def take(path: Path, pid: int = 1, clear: bool = False) -> RankSlot:
    slot = RankSlot(str(path))
    slot.take({"pid": pid, "start_ticks": 5, "state": "armed"}, clear=clear)
    return slot


def record(path: Path, name: str) -> bytes | None:
    found = layout.read_record(path.read_bytes(), layout.RECORDS[name])
    return found[2] if found else None


def events(path: Path) -> list[tuple[int, dict[str, object]]]:
    data = path.read_bytes()
    found = [layout.unpack(data[layout.event_offset(n) :][: layout.EVENT_BYTES]) for n in range(layout.EVENT_SLOTS)]
    return [(seq, json.loads(payload)) for seq, _mono_ns, payload in sorted(entry for entry in found if entry)]


def test_a_slot_knows_its_rank_and_attempt(path: Path) -> None:
    slot = RankSlot(str(path))
    assert (slot.rank, slot.attempt) == (3, 1)


def test_a_missing_slot_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RankSlot(str(tmp_path / "rank_0.slot"))
    assert list(tmp_path.iterdir()) == []


def test_a_slot_of_another_size_is_refused_and_stays_as_it_is(path: Path) -> None:
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="slot has 5 bytes"):
        RankSlot(str(path))
    assert path.read_bytes() == b"short"


def test_a_slot_of_another_layout_is_refused(path: Path) -> None:
    path.write_bytes(b"\0" * layout.SLOT_BYTES)
    with pytest.raises(ValueError, match="not a rankwatch slot"):
        RankSlot(str(path))


def test_the_newest_write_is_read(path: Path) -> None:
    slot = take(path)
    for count in (1, 2, 3):
        slot.write_json("steps", {"count": count})
    assert record(path, "steps") == b'{"count":3}'


def test_a_torn_copy_leaves_the_one_before(path: Path) -> None:
    """A process that dies in the middle of a write spoils one copy; the other is the last whole state."""
    slot = take(path)
    for count in (1, 2):
        slot.write_json("steps", {"count": count})
    data = bytearray(path.read_bytes())
    steps = layout.RECORDS["steps"]
    newest = max((layout.unpack(bytes(data[at : at + steps.copy_bytes]))[0], at) for at in (steps.offset, steps.offset + steps.copy_bytes))[1]  # type: ignore[index]
    data[newest + layout.RECORD_HEADER.size] ^= 0xFF
    path.write_bytes(data)
    assert record(path, "steps") == b'{"count":1}'


def test_text_that_is_too_long_is_cut_so_that_json_stays_whole(path: Path) -> None:
    slot = take(path)
    slot.write_json("lifecycle", {"stage": "exiting", "exception": {"message": "x" * 9000, "traceback": "y" * 9000}})
    payload = record(path, "lifecycle")
    assert payload is not None
    assert len(payload) <= layout.RECORDS["lifecycle"].payload_bytes
    shown = json.loads(payload)
    assert shown["stage"] == "exiting"
    assert shown["exception"]["message"].startswith("xxx")
    assert shown["exception"]["message"].endswith("...")


def test_a_long_list_loses_its_end(path: Path) -> None:
    groups = [{"name": f"group{n}", "ranks": "0-7"} for n in range(5000)]
    data = fit({"creating": None, "groups": groups}, 24000)
    shown = json.loads(data)["groups"]
    assert len(data) <= 24000
    assert shown == groups[: len(shown)]
    assert len(groups) == 5000


def test_a_record_that_cannot_be_shortened_becomes_empty() -> None:
    assert fit({str(n): n for n in range(1000)}, 100) == b"{}"


def test_raw_bytes_are_cut_at_the_end(path: Path) -> None:
    slot = take(path)
    slot.write("heartbeat", b"z" * 10_000)
    assert record(path, "heartbeat") == b"z" * layout.RECORDS["heartbeat"].payload_bytes


def test_the_fast_paths_write_what_the_layout_says(path: Path) -> None:
    slot = take(path)
    slot.put(slot.cursors["steps"], b"abc", 42)
    assert layout.read_record(path.read_bytes(), layout.RECORDS["steps"]) == (1, 42, b"abc")
    slot.put_thread(slot.cursors["thread_0"], 43, 7, 11, 12, 3, 2, 5, b"0/0\0forward\0dynamo\0f@a.py:1\0\0")
    seq, mono_ns, payload = layout.read_record(path.read_bytes(), layout.RECORDS["thread_0"]) or (0, 0, b"")
    assert (seq, mono_ns) == (1, 43)
    assert layout.THREAD_HEADER.unpack_from(payload) == (7, 11, 12, 3, 2, 5)
    assert payload[layout.THREAD_HEADER.size :].split(b"\0") == [b"0/0", b"forward", b"dynamo", b"f@a.py:1", b"", b""]


def test_the_ring_keeps_the_newest_events_and_numbers_them(path: Path) -> None:
    slot = take(path)
    for n in range(layout.EVENT_SLOTS + 10):
        slot.event("compile_end", frame=f"f{n}")
    kept = events(path)
    assert [seq for seq, _event in kept] == list(range(11, layout.EVENT_SLOTS + 11))
    assert kept[-1][1]["kind"] == "compile_end"
    assert kept[-1][1]["frame"] == f"f{layout.EVENT_SLOTS + 9}"


def test_an_event_with_long_texts_fits_its_entry(path: Path) -> None:
    slot = take(path)
    slot.event("graph_break", reason="r" * 5000, at="model.py:3")
    assert events(path)[0][1]["at"] == "model.py:3"


def test_nothing_is_written_before_the_slot_is_taken(path: Path) -> None:
    slot = RankSlot(str(path))
    before = path.read_bytes()
    slot.write_json("steps", {"count": 1})
    slot.write("heartbeat", b"{}")
    slot.event("compile_end")
    slot.put(slot.cursors["steps"], b"x", 1)
    slot.put_thread(slot.cursors["thread_0"], 1, 1, 1, 1, 1, 0, 0, b"")
    assert path.read_bytes() == before


def test_the_former_owner_of_a_taken_slot_writes_no_more(path: Path) -> None:
    first = take(path, pid=1)
    first.write_json("steps", {"count": 1})
    second = take(path, pid=2)
    first.write_json("steps", {"count": 99})
    first.put(first.cursors["steps"], b"99", 1)
    first.event("late")
    assert (first.owned, second.owned) == (False, True)
    assert record(path, "steps") == b'{"count":1}'
    assert events(path) == []
    assert second.owner()["pid"] == 2


def test_a_takeover_with_clear_empties_what_was_written_and_numbers_go_on(path: Path) -> None:
    """A reader compares numbers, so they only grow; an empty payload means that there is nothing now."""
    first = take(path, pid=1)
    first.write_json("steps", {"count": 7})
    first.event("old")
    second = take(path, pid=2, clear=True)
    found = layout.read_record(path.read_bytes(), layout.RECORDS["steps"])
    assert found is not None
    assert found[0] > 1
    assert found[2] == b""
    assert layout.read_record(path.read_bytes(), layout.RECORDS["groups"]) is None  # never written: not touched
    second.event("new")
    assert [(seq, event["kind"]) for seq, event in events(path)] == [(1, "old"), (2, "new")]


def test_a_rewritten_owner_record_stays_owned(path: Path) -> None:
    slot = take(path)
    slot.rewrite_owner({"pid": 1, "socket": "rank_3.sock"})
    slot.write_json("steps", {"count": 1})
    assert slot.owner() == {"pid": 1, "socket": "rank_3.sock"}
    assert record(path, "steps") == b'{"count":1}'


def test_a_disowned_slot_writes_no_more(path: Path) -> None:
    slot = take(path)
    slot.disown()
    slot.write_json("steps", {"count": 1})
    assert record(path, "steps") is None


def test_a_symbolic_link_is_no_slot(path: Path) -> None:
    link = path.parent / "rank_4.slot"
    os.symlink(path, link)
    with pytest.raises(OSError):
        RankSlot(str(link))
