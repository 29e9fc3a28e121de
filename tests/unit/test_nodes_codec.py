"""RankState -> JSON -> RankState: nothing is lost, times are shifted, and no bytes at all get past the types."""

import json
from dataclasses import fields, replace
from typing import get_args

import pytest
from any_reports import JSON, KINDS, field_values, hints_of, reachable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwatch.model import (
    Calls,
    Collective,
    CompileActivity,
    Crash,
    Frame,
    Gpu,
    Group,
    Join,
    KernelWait,
    Meeting,
    Process,
    RankState,
    Stack,
    Thread,
    Timeouts,
    Watchdog,
)
from rankwatch.monitor.nodes.codec import TIMES, CodecError, Shift, decode_fields, decode_rank, encode_rank
from rankwatch.monitor.nodes.values import Codecs, Record, shifted

STILL = Shift(0.0, 0.0)
SHIFT = Shift(1000.0, -50.0)
FEW = settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def over_the_wire(state: RankState, shift: Shift = STILL) -> RankState:
    return decode_rank(json.loads(json.dumps(encode_rank(state))), shift)


@pytest.mark.parametrize("name", [each.name for each in fields(RankState)])
@FEW
@given(st.data())
def test_every_field_survives_the_wire(name, data):
    state = replace(RankState(5), **{name: data.draw(field_values(name))})
    assert over_the_wire(state) == state


def test_a_state_of_defaults_is_its_rank_alone():
    assert encode_rank(RankState(7)) == {"rank": 7}
    assert over_the_wire(RankState(7)) == RankState(7)


def test_every_float_that_is_reachable_is_classified_and_nothing_else_is():
    def holds_a_float(hint):
        return hint is float or any(holds_a_float(arg) for arg in get_args(hint))

    floats = {f"{cls.__name__}.{each}" for cls in reachable() for each, hint in hints_of(cls).items() if holds_a_float(hint)}
    assert floats == set(TIMES)


def test_a_float_that_is_not_classified_is_refused_by_name():
    with pytest.raises(LookupError, match=r"Stack\.at .* is not classified"):
        Record(Stack, Codecs({}, {}))


def test_times_of_the_monotonic_and_of_the_wall_clock_are_shifted_and_durations_are_not():
    entry = Collective("0", 0, 3, "all_reduce", created_wall_at=500.0, timeout_s=600.0, duration_s=0.25, done=True)
    state = RankState(
        0, stage_since=1.0, heartbeat_at=2.0, collectives_at=3.0, last_step_at=4.0, step_s=5.0,
        process=Process(9, True, cpu_s=7.0, tree_cpu_s=8.0, started_at=-6.0, exited_at=9.0, main_wait=KernelWait(9, "D", asleep_s=3.0)),
        groups=(Group("0", "default_pg", "gloo", (0, 1), 600.0, created_wall_at=400.0),),
        timeouts=Timeouts(join_s=10.0, creation_s=11.0, extensions=((30.0, 700.0), (31.0, 701.0))),
        barrier=Meeting("0", 1, True, since=12.0, timeout_s=13.0), join=Join(True, 0, 2, "", False, since=14.0),
        handling=Crash("E", "", at_wall=15.0), crash=Crash("E", "", at_wall=16.0), collectives=(entry,),
        compiling=(CompileActivity("0/0", "forward", "f", "dynamo", "x", started_at=17.0, phase_since=18.0),),
        gpu=Gpu(0, "u", at=19.0, utilisation_ratio=0.5, sm_clock_hz=1e9, power_w=300.0, temperature_c=60.0, xids=((79, 20.0),)),
        stack=Stack(9, at=21.0, subprocesses=(Stack(10, at=22.0),)), watchdog=Watchdog(True, fired_at=23.0, ends_at=24.0, aborts_at=25.0, aborted_at=26.0),
    )  # fmt: skip
    there = over_the_wire(state, SHIFT)
    assert (there.stage_since, there.heartbeat_at, there.collectives_at, there.last_step_at, there.step_s) == (1001.0, 1002.0, 1003.0, 1004.0, 5.0)
    assert there.process == replace(state.process, started_at=994.0, exited_at=1009.0)
    assert there.groups[0] == replace(state.groups[0], created_wall_at=350.0)
    assert there.timeouts == replace(state.timeouts, extensions=((30.0, 650.0), (31.0, 651.0)))
    assert (there.barrier, there.join) == (replace(state.barrier, since=1012.0), replace(state.join, since=1014.0))
    assert (there.handling.at_wall, there.crash.at_wall) == (-35.0, -34.0)
    assert there.collectives == (replace(entry, created_wall_at=450.0),)
    assert there.compiling == (replace(state.compiling[0], started_at=1017.0, phase_since=1018.0),)
    assert there.gpu == replace(state.gpu, at=1019.0, xids=((79, 1020.0),))
    assert (there.stack.at, there.stack.subprocesses[0].at) == (1021.0, 1022.0)
    assert there.watchdog == Watchdog(True, 1023.0, 1024.0, 1025.0, 1026.0)


def test_a_time_that_is_not_known_stays_unknown():
    state = RankState(0, groups=(Group("0", "", "gloo", (0,), None, created_wall_at=0.0),), join=Join(True, 0, 2, "", False, since=0.0))
    assert over_the_wire(state, SHIFT) == state


def test_times_in_a_ranks_own_records_are_shifted_by_their_names():
    record = {"last": {"wall_ns": 100_000_000_000, "seconds": 3.0}, "frames": [{"started_mono_ns": 5}], "oom": {"wall_ns": 0}, "ok": None}
    assert shifted(record, SHIFT) == {
        "last": {"wall_ns": 50_000_000_000, "seconds": 3.0}, "frames": [{"started_mono_ns": 1_000_000_000_005}], "oom": {"wall_ns": 0}, "ok": None,
    }  # fmt: skip
    assert over_the_wire(RankState(0, ddp=record), SHIFT).ddp == shifted(record, SHIFT)


def test_the_same_fields_can_be_decoded_twice():
    document = json.loads(json.dumps(encode_rank(RankState(0, ddp={"last": {"wall_ns": 7}}, heartbeat_at=3.0))))
    assert decode_rank(document, SHIFT) == decode_rank(document, SHIFT)


def test_members_of_a_group_are_written_as_ranges_and_equal_ones_are_one_object():
    world = tuple(range(16384))
    state = RankState(0, groups=(Group("0", "default_pg", "nccl", world, None),), creation_ranks=world)
    document = encode_rank(state)
    assert document["groups"][0]["ranks"] == document["creation_ranks"] == "0-16383"
    first, second = over_the_wire(state), over_the_wire(replace(state, rank=1))
    assert first.groups[0].ranks is second.groups[0].ranks is first.creation_ranks
    assert over_the_wire(replace(state, creation_ranks=(3, 1, 1))).creation_ranks == (3, 1, 1)


def test_entries_say_once_what_many_have_in_common():
    entries = tuple(Collective("0", 0, seq, "all_reduce", ((4096, 1024),), ((4096, 1024),), ("Float",), 1e9 + seq, 600.0, seq < 60) for seq in range(64))
    document = encode_rank(RankState(0, collectives=entries))["collectives"]
    assert len(document["forms"]) == 1
    assert "took" not in document
    assert len(json.dumps(document)) < 64 * 40
    there = over_the_wire(RankState(0, collectives=entries)).collectives
    assert there == entries
    assert len({id(entry.input_sizes) for entry in there}) == 1


def test_a_history_brings_the_meaning_of_the_numbers_that_it_holds_and_no_other():
    history = Calls(0, 5, bytes([1, 0, 0, 0, 2, 0, 0, 0]), KINDS)
    there = over_the_wire(RankState(0, calls={"0": history})).calls["0"]
    assert there == replace(history, known={1: KINDS[1], 2: KINDS[2]})
    assert there.last == 6


def test_fields_of_a_newer_node_are_left_alone():
    document = {**encode_rank(RankState(3)), "aura": {"colour": 1}, "process": {"pid": 1, "alive": True, "mood": "good"}}
    assert decode_rank(document, STILL) == RankState(3, process=Process(1, True))


def test_what_json_cannot_say_does_not_leave_the_node():
    state = RankState(0, step_s=float("nan"), stage_since=float("inf"))
    assert over_the_wire(state) == RankState(0, step_s=0.0, stage_since=0.0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rank": "0"}, "rank: int is wanted, found str"),
        ({"steps": True}, "steps: int is wanted, found bool"),
        ({"steps": 1.5}, "steps: int is wanted, found float"),
        ({"heartbeat_at": "now"}, "heartbeat_at: a finite number is wanted, found 'now'"),
        ({"heartbeat_at": float("nan")}, "heartbeat_at: a finite number"),
        ({"step_s": float("inf")}, "step_s: a finite number"),
        ({"step_s": 10**400}, "step_s: "),
        ({"stage": "asleep"}, "stage: one of starting, armed"),
        ({"stage": ["joined"]}, "stage: one of"),
        ({"process": 3}, "process: an object is wanted, found int"),
        ({"process": {"pid": 1}}, "process: missing 1 required"),
        ({"process": {"pid": 1, "alive": True, "main_wait": {"tid": "x", "state": "S"}}}, "process.main_wait.tid: int is wanted, found str"),
        ({"groups": {"0": 1}}, "groups: a list is wanted, found dict"),
        ({"groups": [{"name": "0", "desc": "", "backend": "", "ranks": "0-99999999", "timeout_s": None}]}, "groups.ranks: "),
        ({"creation_ranks": 3}, "creation_ranks: a text like 0-15 is wanted"),
        ({"gpu": {"index": 0, "uuid": "", "at": 1.0, "xids": [[79]]}}, "gpu.xids: "),
        ({"enqueued": [1]}, "enqueued: an object is wanted, found list"),
        ({"calls": {"0": {"generation": 0, "first": 0, "kinds": "AAA=", "known": {}}}}, "calls: 2 bytes are no numbers of 4"),
        ({"calls": {"0": {"generation": 0, "first": 0, "kinds": "!", "known": {}}}}, "calls: "),
        ({"calls": {"0": []}}, "calls: "),
        ({"collectives": []}, "collectives: "),
        ({"collectives": {"forms": {}, "of": [0], "seq": [1], "at": [0.0], "state": [0]}}, "collectives: "),
        ({"collectives": {"forms": {}, "of": [], "seq": [1], "at": [], "state": []}}, "collectives: "),
        ({"collectives": {"forms": {}, "of": [-1], "seq": [1], "at": [1.0], "state": [0]}}, "collectives: "),
        ({"collectives": {"forms": {}, "of": [0], "seq": [1], "at": [float("nan")], "state": [0]}}, "collectives: "),
        ({"stack": {"pid": 1, "at": 1.0, "threads": [{"name": "", "native_id": 1, "frames": [{"name": 1}]}]}}, "stack.threads.frames.name: str is wanted"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_its_field(wrong, said):
    with pytest.raises(CodecError) as refused:
        decode_fields(wrong, STILL)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("wrong", [None, [], "rank", {}])
def test_what_is_no_rank_is_refused(wrong):
    with pytest.raises(CodecError, match="a rank: "):
        decode_rank(wrong, STILL)


def test_a_value_nested_without_end_is_refused():
    deep: dict = {"pid": 1, "at": 1.0}
    for _ in range(3000):
        deep = {"pid": 1, "at": 1.0, "subprocesses": [deep]}
    with pytest.raises(CodecError):
        decode_fields({"stack": deep}, STILL)


@settings(FEW, max_examples=80)
@given(
    st.sampled_from([each.name for each in fields(RankState)]), JSON | st.dictionaries(st.sampled_from(["pid", "kinds", "of", "0", "rank"]), JSON, max_size=3)
)
def test_any_json_is_taken_or_refused_with_the_name_of_its_field(name, value):
    said = name
    try:
        decode_fields({name: value}, STILL)
    except CodecError as error:
        said = str(error)
    assert said.startswith(name)


def test_a_stack_with_threads_survives_the_wire():
    stack = Stack(4, 5.0, (Thread("MainThread", 4, (Frame("f", "/job/train.py", 31),), True, True),), "text", subprocesses=(Stack(5, 6.0, error="gone"),))
    assert over_the_wire(RankState(0, stack=stack)).stack == stack
