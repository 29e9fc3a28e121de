"""Slots with anything at all in their records: the launcher's looks go on, within bounds, and what is no number decides nothing."""

from __future__ import annotations

import copy
import json
import math
import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwatch.export.prometheus import Exporter
from rankwatch.model import JobInfo, JobSnapshot, Process, Status
from rankwatch.monitor.compile_watch import CompileWatch
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.numerics import Numerics, records_of
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.reader import Reader
from rankwatch.monitor.slots import SlotReader
from rankwatch.monitor.workers import Worker, Workers
from rankwatch.report import state as state_report
from rankwatch.wire import layout
from rankwatch.wire.env import slot_name
from rankwatch.wire.ranks import MOST_RANKS, compress, expand

PID = 2_000_000_100  # above pid_max: never a real process
GOOD = {
    "owner": {"pid": PID, "start_ticks": 5, "state": "claimed", "rank": 0, "world_size": 2, "attempt": 0, "torch": "2.13.0", "socket": "", "wall_ns": 1},
    "lifecycle": {
        "stage": "joined",
        "since_mono_ns": 10**9,
        "exception": {"type": "ValueError", "message": "m", "where": "t.py:1:f", "traceback": "t", "wall_ns": 1},
        "barrier": {"group": "0", "calls": 2, "inside": True, "since_mono_ns": 10**9, "timeout_s": 30.0},
        "join": {"ours": True, "rank": 0, "world_size": 2, "store": "tcp", "shared": False, "reached": True, "since_mono_ns": 10**9},
    },
    "probes": {"compile": {"status": "armed", "detail": "", "errors": 0}, "collectives": {"status": "armed", "detail": "", "errors": 0}},
    "groups": {
        "creating": "1",
        "creating_ranks": "0-1",
        "creating_timeout_s": 60,
        "join_timeout_s": 60,
        "extensions": [[5.0, 1]],
        "groups": [{"name": "0", "desc": "d", "backend": "gloo", "ranks": "0-1", "timeout_s": 60, "generation": 0, "created_wall_ns": 0}],
    },
    "heartbeat": {
        "pg_status": {"0": {"last_enqueued_collective": "7", "last_started_collective": "-1", "last_completed_collective": "6"}},
        "handling": {"type": "E", "message": "m", "where": "w", "wall_ns": 1},
        "entries": [
            {"record_id": 1, "pg_id": 0, "process_group": ["0", "d"], "collective_seq_id": 1, "profiling_name": "gloo:all_reduce", "input_sizes": [[4]]}
        ],
    },
    "steps": {"count": 3, "last_mono_ns": 10**9, "last_s": 0.5, "explicit": False},
    "compile": {"seconds": {"dynamo": 1.0}, "last": {"frame": "f@m.py:1"}, "cache": {"fx": {"hit": 1}}, "compiles": 1},
    "ddp": {"status": "split", "buckets": 2, "fingerprint": 5, "failures": 0, "not_applied": 0},
    "cudagraph": {"recordings": 1, "rerecords": 0, "skips": 0, "pool_bytes": 5},
    "numerics": {"step": 1, "bad": [], "replicas": []},
    "memory": {"device": 0, "allocated": 5, "reserved": 6, "pools": {"0_1": 1}, "ooms": 1, "oom": {"tried": 2, "where": "t.py:1:f"}},
}
RUBBISH = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 10**30, -(10**400), 2**63, math.nan, math.inf, -math.inf, "0-99999999", "5-1", "x", "", "\ud800", "\u0663"]),
    st.integers(),
    st.text(max_size=8),
    st.recursive(st.integers(-9, 9), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=5),
)


def places(value, path=()):
    """The paths of all values in a JSON document, itself included."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


PLACES = [(name, path) for name, record in GOOD.items() for path in places(record)]


class Slot:
    """A slot file of rank 0 that holds GOOD."""

    def __init__(self, folder):
        self.path = os.path.join(folder, slot_name(0))
        self.seqs = {}
        with open(self.path, "wb") as file:
            file.write(layout.pack_header(0, 0).ljust(layout.SLOT_BYTES, b"\0"))
        for name, record in GOOD.items():
            self.put(name, json.dumps(record).encode())

    def put(self, name, payload):
        record = layout.RECORDS[name]
        payload = payload if len(payload) <= record.payload_bytes else b"[" * 100
        seq = self.seqs[name] = self.seqs.get(name, 0) + 1
        with open(self.path, "r+b") as file:
            file.seek(record.offset + (seq & 1) * record.copy_bytes)
            file.write(layout.pack(seq, time.monotonic_ns(), payload))

    def event(self, seq, payload):
        with open(self.path, "r+b") as file:
            file.seek(layout.event_offset(seq))
            file.write(layout.pack(seq, time.monotonic_ns(), payload))


class Processes:
    def look(self, pid, start_ticks=None, suspect=False):
        return Process(pid, alive=True, state="S")


class Files:
    def compiles(self, document):
        json.dumps(document)

    def compile_text(self, line):
        json.dumps(line)


def changed(record, path, rubbish):
    if not path:
        return rubbish
    record = copy.deepcopy(record)
    holder = record
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = rubbish
    return record


@pytest.fixture(scope="module")
def slot(tmp_path_factory):
    return Slot(str(tmp_path_factory.mktemp("slots")))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(PLACES), RUBBISH), min_size=1, max_size=3))
def test_no_record_of_a_rank_stops_a_look(slot, changes):
    """From the slot to the judgement and the pages: nothing is raised, and no duration is NaN, infinite or negative."""
    for name in GOOD:
        record = GOOD[name]
        for (where, path), rubbish in changes:
            if where == name and (not path or path in set(places(record))):
                record = changed(record, path, rubbish)
        slot.put(name, json.dumps(record).encode())
    worker = Worker(0, 0, PID, "", "", "")
    workers = Workers(0, 0, 2, 1, "host", os.path.dirname(slot.path), "", (worker,))
    reader = Reader(workers, processes=Processes())
    state, compiles, numbers = State(), CompileWatch(Files()), Numerics()
    job = JobInfo("job", "/r", ("x",), "host", 2, 1, 0, {}, {}, 1.0)
    for _ in range(2):
        report = reader.read()
        now = time.monotonic()
        snapshot = JobSnapshot(now, time.time(), 2, 0, (report,), "", 0.5, now - 100, False)
        (rank,) = report.ranks
        durations = [rank.step_s, rank.timeouts.join_s, rank.timeouts.creation_s, *(group.timeout_s for group in rank.groups)]
        assert all(each is None or (math.isfinite(each) and each >= 0) for each in durations)
        state, verdicts, _wants = diagnose(state, snapshot, now, Limits())
        compiles.look(reader.take_events(), snapshot, (0,), Status(job=job, snapshot=snapshot))
        numbers.look(records_of(snapshot.ranks()), now, False)
        status = Status(job=job, snapshot=snapshot, verdicts=verdicts, numerics=numbers.document())
        json.dumps(state_report.to_json(status), default=str)
        Exporter("full").render(status, "")
    reader.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.sampled_from(["kind", "wall_ns", "frame", "rank", "x"]), RUBBISH, max_size=4) | RUBBISH, min_size=1, max_size=4))
def test_every_event_has_a_time_that_is_a_number_or_none(tmp_path_factory, events):
    slot = Slot(str(tmp_path_factory.mktemp("events")))
    for seq, event in enumerate(events, 1):
        slot.event(seq, json.dumps(event).encode())
    reader = SlotReader(slot.path)
    reader.read()
    found = reader.take_events()
    reader.close()
    assert all(isinstance(event.get("wall_ns", 1), (int, float)) for event in found)
    assert len(found) + reader.state.events_lost == len(events)


@pytest.mark.parametrize("payload", ['{"creating":"x","creating_ranks":"0-99999999"}', '{"groups":[{"name":"0","ranks":"0-9999999999999999999"}]}'])
def test_a_range_of_millions_of_ranks_is_refused_before_it_is_built(tmp_path, payload):
    slot = Slot(str(tmp_path))
    reader = SlotReader(slot.path)
    state = reader.read()
    before = (state.group_in_creation, state.creation_ranks, state.groups)
    slot.put("groups", payload.encode())
    began = time.process_time()
    state = reader.read()
    assert time.process_time() - began < 0.5
    assert state.problem.startswith("record groups does not decode: '0-99")
    assert (state.group_in_creation, state.creation_ranks, state.groups) == before


def test_many_groups_of_all_ranks_have_a_limit_together(tmp_path):
    slot = Slot(str(tmp_path))
    reader = SlotReader(slot.path)
    slot.put("groups", json.dumps({"groups": [{"name": str(n), "ranks": f"0-{MOST_RANKS - 1}"} for n in range(100)]}).encode())
    assert "is no range of at most 0 ranks" in reader.read().problem


def test_a_slot_that_became_a_pipe_holds_nothing_up(tmp_path):
    os.mkfifo(tmp_path / slot_name(0))
    assert SlotReader(str(tmp_path / slot_name(0))).read().problem.startswith("slot is not readable: ")


@pytest.mark.parametrize("text", ["0-131072", "131072", "0-131071,5", "1-0", "x", "-1", "1-", "0-\u00b2", "9999999999", "1-2-3"])
def test_what_is_no_set_of_ranks_is_a_value_error(text):
    if text == "1-":
        assert expand(text) == (1,)
        return
    with pytest.raises(ValueError, match="is no"):
        expand(text)


@given(st.sets(st.integers(0, MOST_RANKS - 1), max_size=50))
def test_a_set_of_ranks_survives_its_text(ranks):
    assert expand(compress(ranks)) == tuple(sorted(ranks))
