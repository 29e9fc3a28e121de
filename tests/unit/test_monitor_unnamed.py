"""gloo's recorder under TORCH_DISTRIBUTED_DEBUG=DETAIL: entries without a name find their group, those of torch's checks are no calls of the job."""

from __future__ import annotations

from rankwatch.agent.groups import numbered
from rankwatch.model import Group
from rankwatch.monitor import unnamed
from rankwatch.monitor.recorder import RecorderView
from rankwatch.monitor.slots import _group
from rankwatch.monitor.worker_server import GENERIC, NCCL

WALL = 1_796_018_525.0
WORLD = Group("0", "default_pg", "gloo", (0, 1, 2), 60.0, checked=(0, 1))
PAIR = Group("2", "undefined", "gloo", (1, 2), 60.0, checked=(2, 3))


def entry(pg_id, seq, op="all_reduce", dtype="Float", names=("", ""), **more):
    return {
        "collective_seq_id": seq, "op_id": seq, "p2p_seq_id": 0, "is_p2p": False, "record_id": more.pop("record_id", 0), "pg_id": pg_id,
        "process_group": list(names), "profiling_name": f"gloo:{op}", "input_sizes": [[4]], "input_dtypes": [dtype], "output_sizes": [[4]],
        "state": "scheduled", "retired": True, "time_created_ns": int(WALL * 1e9), "timeout_ms": 60_000, **more,
    }  # fmt: skip


def check(pg_id, seq):
    return entry(pg_id, seq, "all_gather", "Long")


def status(*counts):
    return {"pg_status": {str(pg_id): {"last_enqueued_collective": str(a), "last_completed_collective": str(b)} for pg_id, (a, b) in enumerate(counts)}}


JOB = [check(1, 3), check(1, 4), entry(0, 1), check(1, 7), check(1, 8), entry(0, 2), check(3, 3), check(3, 4), entry(2, 1, "broadcast")]


def test_the_agent_counts_what_a_process_makes_of_gloo():
    assert numbered("gloo", True, 0) == ([0, 1], 2)
    assert numbered("gloo", False, 2) == ([2], 3)
    assert numbered("cpu:gloo,cuda:gloo", True, 4) == ([4, 5], 6)
    assert numbered("cpu:gloo,cuda:nccl", True, 6) == ([6, 7, 8], 9)
    assert numbered("nccl", True, 9) == ([-1, 9], 10)
    assert numbered("nccl", False, 9) == ([-1], 9)


def test_entries_without_a_name_are_their_groups_and_checks_are_left_out():
    view = RecorderView()
    view.take({GENERIC: {"entries": JOB}}, (WORLD, PAIR), WALL)
    assert [(each.group, each.seq, each.op) for each in view.collectives] == [("0", 1, "all_reduce"), ("2", 1, "broadcast"), ("0", 2, "all_reduce")]
    assert view.names_all(GENERIC, status((2, 2), (8, 8), (1, 1), (4, 4)))
    assert view.numbers(GENERIC, status((3, 2), (14, 14), (1, 1), (4, 4)), (WORLD, PAIR)) == ({"0": 3, "2": 1}, {"0": 2, "2": 1})


def test_checks_that_count_more_on_one_rank_make_no_group_mixed():
    """Rank 0 receives a message of each other rank in every check: its status numbers run ahead there."""
    view = RecorderView()
    ahead = [{**check(1, 3), "op_id": 5}, {**check(1, 4), "op_id": 6}, entry(0, 1)]
    view.take({GENERIC: {"entries": ahead}}, (WORLD,), WALL)
    assert view.mixed(GENERIC, status((1, 1), (6, 6)), (WORLD,)) == {}


def test_numbers_that_do_not_fit_are_not_believed():
    """The job has made a gloo group of its own before: everything is one further than the agent has counted."""
    shifted = [{**each, "pg_id": each["pg_id"] + 1} for each in JOB]
    assert unnamed.told_apart(shifted, unnamed.names((WORLD, PAIR))) is None
    view = RecorderView()
    view.take({GENERIC: {"entries": shifted}}, (WORLD, PAIR), WALL)
    assert {each.group for each in view.collectives} == {""}


def test_a_named_entry_under_the_number_of_another_group_refutes_them():
    known = unnamed.names((WORLD, PAIR))
    assert unnamed.told_apart([entry(2, 1, names=("2", "undefined"))], known) is not None
    assert unnamed.told_apart([entry(2, 1, names=("5", "undefined"))], known) is None
    assert unnamed.told_apart([entry(3, 1, names=("2", "undefined"))], known) is None


def test_two_groups_of_one_number_are_told_apart_by_nothing():
    assert unnamed.names((WORLD, Group("7", "", "gloo", (0, 1), 60.0, checked=(1, 2)))) == {}


def test_nccl_tells_its_names_itself():
    group = Group("0", "default_pg", "nccl", (0, 1), 600.0, checked=(-1, 0))
    view = RecorderView()
    nccl = {**entry(0, 1, names=("0", "default_pg")), "profiling_name": "nccl:all_reduce", "state": "completed"}
    view.take({NCCL: {"entries": [nccl]}, GENERIC: {"entries": [check(0, 3)]}}, (group,), WALL)
    assert [(each.group, each.op) for each in view.collectives] == [("0", "all_reduce")]


def test_a_slot_may_hold_any_numbers():
    record = {"name": "0", "desc": "default_pg", "backend": "gloo", "ranks": "0-2"}
    assert _group(record, 99).checked == ()
    assert _group({**record, "checked": [0, 1]}, 99).checked == (0, 1)
    assert _group({**record, "checked": "no list"}, 99).checked == ()
    assert len(_group({**record, "checked": list(range(1000))}, 99).checked) == 16
    assert unnamed.told_apart([{"pg_id": "x", "process_group": None}], {0: "0"}) == [{"pg_id": "x", "process_group": None}]
