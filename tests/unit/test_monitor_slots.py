"""What SlotReader makes of a slot's bytes."""

import json
import os
import random
import time

from rankwatch.model import CompileActivity, Group, Join, Meeting
from rankwatch.monitor.slots import SlotReader
from rankwatch.wire import layout


class Slot:
    """Writes a slot file as a rank does."""

    def __init__(self, path, rank=3, attempt=0):
        self.path = str(path)
        self.bytes = bytearray(layout.SLOT_BYTES)
        header = layout.pack_header(rank, attempt)
        self.bytes[: len(header)] = header
        self.seqs = {}
        self.save()

    def put(self, name, payload, mono_ns=1_000_000_000):
        record = layout.RECORDS[name]
        seq = self.seqs[name] = self.seqs.get(name, 0) + 1
        copy = layout.pack(seq, mono_ns, payload if isinstance(payload, bytes) else json.dumps(payload).encode())
        offset = record.offset + (seq % 2) * record.copy_bytes
        self.bytes[offset : offset + len(copy)] = copy
        self.save()

    def event(self, seq, **fields):
        entry = layout.pack(seq, 5_000, json.dumps(fields).encode())
        self.bytes[layout.event_offset(seq) : layout.event_offset(seq) + len(entry)] = entry

    def save(self):
        with open(self.path, "wb") as file:
            file.write(self.bytes)


def thread(texts, started=2_000_000_000, phase=3_000_000_000, split=0, splits=0):
    return layout.THREAD_HEADER.pack(77, started, phase, 1, split, splits) + "\0".join(texts).encode()


def test_a_slot_that_nobody_wrote_is_present_and_empty(tmp_path):
    Slot(tmp_path / "s")
    state = SlotReader(str(tmp_path / "s")).read()
    assert (state.present, state.pid, state.stage, state.heartbeat_at) == (True, None, "", None)


def test_every_record_reaches_the_state(tmp_path):
    slot = Slot(tmp_path / "s")
    slot.put("owner", {"pid": 41, "start_ticks": 9, "state": "claimed", "torch": "2.13.0"})
    barrier = {"group": "0", "calls": 3, "inside": True, "since_mono_ns": 5_000_000_000, "timeout_s": 30.0}
    slot.put("lifecycle", {"stage": "joined", "since_mono_ns": 4_500_000_000, "exception": None, "barrier": barrier})
    slot.put("probes", {"compile": {"status": "armed", "detail": "", "errors": 0}})
    slot.put(
        "groups",
        {
            "creating": "2",
            "creating_ranks": "0,2-3",
            "groups": [
                {"name": "0", "desc": "default_pg", "backend": "gloo", "ranks": "0-2,5", "timeout_s": 1800, "generation": 1, "created_wall_ns": 7_000_000_000}
            ],
        },
    )
    slot.put("heartbeat", {"pg_status": {"0": {"last_enqueued_collective": "4"}}}, mono_ns=6_250_000_000)
    slot.put("steps", {"count": 12, "last_mono_ns": 5_500_000_000, "last_s": 0.25, "explicit": False})
    slot.put("compile", {"frames": 3})
    slot.put("ddp", {"buckets": 2})
    slot.put("cudagraph", {"recordings": 1})
    slot.put("memory", {"allocated": 5})
    slot.put("thread_0", thread(("1/0", "forward", "backend_compile", "forward@model.py:31", "size changed", "x"), split=2, splits=3))
    state = SlotReader(slot.path).read()
    assert state.pid == 41
    assert (state.stage, state.stage_since) == ("joined", 4.5)
    assert state.probes == {"compile": {"status": "armed", "detail": "", "errors": 0}}
    assert state.groups == (Group("0", "default_pg", "gloo", (0, 1, 2, 5), 1800.0, 1, 7.0),)
    assert (state.group_in_creation, state.creation_ranks) == ("2", (0, 2, 3))
    assert state.barrier == Meeting("0", 3, True, 5.0, 30.0)
    assert (state.heartbeat_at, state.recorder_status["pg_status"]["0"]) == (6.25, {"last_enqueued_collective": "4"})
    assert (state.steps, state.last_step_at, state.step_s) == (12, 5.5, 0.25)
    assert (state.compile_totals, state.ddp, state.cudagraph) == ({"frames": 3}, {"buckets": 2}, {"recordings": 1})
    assert state.memory == {"allocated": 5}
    assert state.compiling == (
        CompileActivity(
            "1/0", "forward", "forward@model.py:31", "backend", "backend_compile", 2.0, 3.0, recompile_reason="size changed", split=2, splits=3, detail="x"
        ),
    )


def test_a_compile_that_ends_leaves_the_state(tmp_path):
    slot = Slot(tmp_path / "s")
    reader = SlotReader(slot.path)
    slot.put("thread_1", thread(("0/0", "forward", "dynamo", "f@a.py:1")))
    assert len(reader.read().compiling) == 1
    slot.put("thread_1", b"")
    assert reader.read().compiling == ()


def test_the_exception_of_a_rank_is_a_crash(tmp_path):
    slot = Slot(tmp_path / "s")
    slot.put(
        "lifecycle", {"stage": "exiting", "since_mono_ns": 1, "exception": {"type": "ValueError", "message": "bad", "where": "t.py:3:f", "traceback": "..."}}
    )
    crash = SlotReader(slot.path).read().crash
    assert (crash.type, crash.message, crash.where, crash.chain) == ("ValueError", "bad", "t.py:3:f", ())
    links = [{"type": "RuntimeError", "message": "closed by peer"}, "no link", {"type": 7}, {}, {"type": "the fifth"}]
    slot.put("lifecycle", {"stage": "exiting", "since_mono_ns": 1, "exception": {"type": "ValueError", "message": "bad", "chain": links}})
    assert SlotReader(slot.path).read().crash.chain == (("RuntimeError", "closed by peer"), ("7", ""), ("", ""))


def test_the_call_of_init_process_group_that_is_under_way_is_told(tmp_path):
    slot = Slot(tmp_path / "s")
    call = {"ours": False, "rank": 0, "world_size": 3, "store": "node05:29500", "shared": True, "since_mono_ns": 5_000_000_000, "reached": False}
    slot.put("lifecycle", {"stage": "armed", "since_mono_ns": 4_000_000_000, "exception": None, "barrier": None, "join": call})
    reader = SlotReader(str(tmp_path / "s"))
    assert reader.read().join == Join(False, 0, 3, "node05:29500", True, 5.0, False)
    slot.put("lifecycle", {"stage": "joined", "since_mono_ns": 6_000_000_000, "exception": None, "barrier": None, "join": None})
    assert reader.read().join is None


def test_what_the_main_thread_handles_comes_with_the_beat(tmp_path):
    slot = Slot(tmp_path / "s")
    handled = {"type": "ValueError", "message": "no label", "where": "train.py:31:load_batch", "wall_ns": 2_000_000_000}
    slot.put("heartbeat", {"handling": handled, "pg_status": {}})
    state = SlotReader(str(tmp_path / "s")).read()
    held = state.handling
    assert (held.type, held.message, held.where, held.at_wall) == ("ValueError", "no label", "train.py:31:load_batch", 2.0)
    assert state.recorder_status == {"pg_status": {}}
    slot.put("heartbeat", {"pg_status": {}})
    reader = SlotReader(str(tmp_path / "s"))
    assert reader.read().handling is None


def test_the_last_state_is_readable_after_the_file_is_gone(tmp_path):
    slot = Slot(tmp_path / "s")
    slot.put("steps", {"count": 1})
    reader = SlotReader(slot.path)
    reader.read()
    with open(slot.path, "r+b") as file:
        record = layout.RECORDS["steps"]
        file.seek(record.offset)
        file.write(layout.pack(2, 1, b'{"count": 2}'))
        os.unlink(slot.path)
    assert reader.read().steps == 2


def test_a_torn_copy_leaves_the_copy_before_it(tmp_path):
    slot = Slot(tmp_path / "s")
    slot.put("steps", {"count": 1})
    slot.put("steps", {"count": 2})
    record = layout.RECORDS["steps"]
    slot.bytes[record.offset + layout.RECORD_HEADER.size] ^= 0xFF
    slot.save()
    assert SlotReader(slot.path).read().steps == 1


def test_missing_empty_short_and_foreign_files_give_a_reason(tmp_path):
    assert SlotReader(str(tmp_path / "none")).read().problem == "slot is not readable: No such file or directory"
    (tmp_path / "empty").write_bytes(b"")
    assert SlotReader(str(tmp_path / "empty")).read().problem == f"slot has 0 bytes, want {layout.SLOT_BYTES}"
    (tmp_path / "zero").write_bytes(bytes(layout.SLOT_BYTES))
    assert SlotReader(str(tmp_path / "zero")).read().problem == "not a rankwatch slot (magic differs)"
    assert SlotReader(str(tmp_path)).read().present is False


def test_no_bytes_raise(tmp_path):
    dice = random.Random(7)
    slot = Slot(tmp_path / "s")
    reader = SlotReader(slot.path)
    for _ in range(40):
        slot.bytes[layout.HEADER_BYTES :] = dice.randbytes(layout.SLOT_BYTES - layout.HEADER_BYTES)
        slot.save()
        reader.read()
    payloads = [
        b"[]",
        b"null",
        b'"x"',
        b"{",
        b'{"groups": 7}',
        b'{"groups": [{"ranks": "a-b"}]}',
        b'{"count": "x"}',
        b'{"exception": []}',
        b"[" * 2000,
        b"\xff",
        b'{"pg_status": [1]}',
    ]
    for payload in payloads:
        for name in layout.JSON_RECORDS:
            if len(payload) <= layout.RECORDS[name].payload_bytes:
                slot.seqs[name] = slot.seqs.get(name, 0) + 2
                slot.put(name, payload)
        reader.read()
        list(reader.take_events())


def test_events_come_once_and_in_order(tmp_path):
    slot = Slot(tmp_path / "s")
    reader = SlotReader(slot.path)
    slot.event(1, kind="a")
    slot.event(2, kind="b")
    slot.save()
    reader.read()
    assert reader.take_events() == [{"kind": "a", "mono_ns": 5000}, {"kind": "b", "mono_ns": 5000}]
    slot.event(3, kind="c")
    slot.save()
    reader.read()
    assert [event["kind"] for event in reader.take_events()] == ["c"]
    assert reader.take_events() == []


def test_overwritten_events_are_counted(tmp_path):
    slot = Slot(tmp_path / "s")
    reader = SlotReader(slot.path)
    for seq in range(1, layout.EVENT_SLOTS + 11):
        slot.event(seq, n=seq)
    slot.save()
    state = reader.read()
    events = reader.take_events()
    assert state.events_lost == 10
    assert [event["n"] for event in events] == list(range(11, layout.EVENT_SLOTS + 11))


def test_reading_eight_unchanged_slots_takes_little_cpu(tmp_path):
    readers = []
    for rank in range(8):
        slot = Slot(tmp_path / f"s{rank}")
        slot.put("groups", {"groups": [{"name": str(n), "ranks": "0-7"} for n in range(50)]})
        readers.append(SlotReader(slot.path))
    for reader in readers:
        reader.read()
    began = time.process_time()
    for _ in range(20):
        for reader in readers:
            reader.read()
    each_s = (time.process_time() - began) / 160
    assert each_s < 0.005  # an order of magnitude above what it takes: this catches a parse of every record at every poll, not a busy machine
