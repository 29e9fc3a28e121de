"""The flight recorder's JSON as collectives."""

import json

from rankwatch.model import Collective, Group
from rankwatch.monitor.recorder import KEEP_PER_GROUP, RecorderView, collective_of, tail, twins
from rankwatch.monitor.worker_server import GENERIC, NCCL

WALL = 1_796_018_525.0
DEFAULT = Group("0", "default_pg", "gloo", (0, 1), 1800.0)


def entry(seq, pg_id=0, name="0", retired=False, state="scheduled", created=WALL, op="gloo:all_reduce", timeout_ms=1_800_000, record_id=None, **more):
    return {
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "record_id": seq - 1 if record_id is None else record_id,
        "pg_id": pg_id,
        "process_group": [name, "default_pg"],
        "profiling_name": op,
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "state": state,
        "retired": retired,
        "time_created_ns": int(created * 1e9),
        "timeout_ms": timeout_ms,
        **more,
    }


def status(**counts):
    return {
        "pg_status": {
            pg.removeprefix("pg"): {"last_enqueued_collective": str(a), "last_started_collective": "-1", "last_completed_collective": str(b)}
            for pg, (a, b) in counts.items()
        }
    }


def test_a_gloo_entry_is_done_when_retired_and_never_tells_whether_it_started():
    found = collective_of(entry(6, retired=True), GENERIC, 0)
    assert found == Collective("0", 0, 6, "all_reduce", ((4,),), ((4,),), ("Float",), WALL, 1800.0, done=True, started=None)
    assert collective_of(entry(6), GENERIC, 0).done is False


def test_an_nccl_entry_goes_by_its_state():
    assert collective_of(entry(1, state="completed", retired=True, op="nccl:broadcast"), NCCL, 0).done is True
    timed_out = collective_of(entry(1, state="started", retired=True), NCCL, 0)
    assert (timed_out.done, timed_out.started) == (False, True)
    assert collective_of(entry(1), NCCL, 0, timed=False).started is None
    assert collective_of(entry(1), NCCL, 0, timed=True).started is False


def test_point_to_point_counts_apart():
    found = collective_of(entry(9, is_p2p=True, p2p_seq_id=3), NCCL, 0)
    assert (found.seq, found.is_p2p) == (3, True)


def test_only_the_current_generation_of_a_group_counts():
    view = RecorderView()
    again = Group("0", "default_pg", "gloo", (0, 1), 1800.0, generation=1, created_wall_at=WALL + 10)
    view.take({GENERIC: {"entries": [entry(7, retired=True), entry(1, pg_id=1, created=WALL + 11)]}}, (again,), WALL + 12)
    assert [(c.generation, c.seq) for c in view.collectives] == [(1, 1)]
    assert view.numbers(GENERIC, status(pg0=(7, 7), pg1=(1, 0)), (again,)) == ({"0": 1}, {"0": 0})


def test_numbers_of_a_group_that_is_gone_are_not_those_of_its_successor():
    view = RecorderView()
    view.take({GENERIC: {"entries": [entry(7, retired=True)]}}, (DEFAULT,), WALL)
    again = Group("0", "default_pg", "gloo", (0, 1), 1800.0, generation=1, created_wall_at=WALL + 10)
    assert view.current((again,)) == ()
    assert view.entry_numbers((again,)) == ({}, {})
    assert view.numbers(GENERIC, status(pg0=(7, 7)), (again,)) == ({"0": 0}, {"0": 0})
    assert view.numbers(GENERIC, status(pg0=(7, 7), pg1=(1, 0)), (again,)) == ({}, {})
    assert RecorderView().numbers(GENERIC, status(pg0=(7, 7)), (again,)) == ({}, {})


def test_a_stepped_clock_does_not_hide_the_entries_of_a_first_generation():
    view = RecorderView()
    view.take({GENERIC: {"entries": [entry(1, created=WALL - 3600)]}}, (Group("0", "", "gloo", (0, 1), None, 0, WALL),), WALL)
    assert [c.seq for c in view.collectives] == [1]


def test_the_names_of_counted_groups_are_learnt_from_entries():
    view = RecorderView()
    groups = (DEFAULT, Group("1", "tp", "gloo", (0, 1), None))
    counts = status(pg0=(6, 5), pg4=(2, 2))
    assert view.names_all(GENERIC, counts) is False
    assert view.numbers(GENERIC, counts, groups) == ({}, {})
    view.take({GENERIC: {"entries": [entry(6), entry(2, pg_id=4, name="1", record_id=6)]}}, groups, WALL)
    assert view.names_all(GENERIC, counts) is True
    assert view.numbers(GENERIC, counts, groups) == ({"0": 6, "1": 2}, {"0": 5, "1": 2})


def test_the_only_group_needs_no_entry_to_be_known_and_an_unused_one_counts_zero():
    view = RecorderView()
    assert view.numbers(GENERIC, status(pg0=(6, 5)), (DEFAULT,)) == ({"0": 6}, {"0": 5})
    assert view.numbers(GENERIC, {"pg_status": {}}, (DEFAULT,)) == ({"0": 0}, {"0": 0})
    assert view.numbers(GENERIC, status(pg0=(-1, -1)), (DEFAULT,)) == ({"0": 0}, {"0": 0})


def test_entries_that_fell_out_of_the_ring_are_counted():
    view = RecorderView()
    view.take({GENERIC: {"entries": [entry(1), entry(2)]}}, (DEFAULT,), WALL)
    view.take({GENERIC: {"entries": [entry(12), entry(13)]}}, (DEFAULT,), WALL)
    assert view.lost == 9


def test_a_recorder_that_was_reset_loses_nothing():
    view = RecorderView()
    view.take({GENERIC: {"entries": [entry(50)]}}, (DEFAULT,), WALL)
    view.take({GENERIC: {"entries": [entry(3, record_id=2)]}}, (DEFAULT,), WALL)
    assert view.lost == 0


def test_only_the_newest_entries_of_each_group_are_kept():
    view = RecorderView()
    rare = [entry(1, pg_id=1, name="1", record_id=0)]
    view.take({GENERIC: {"entries": rare + [entry(n) for n in range(2, 500)]}}, (DEFAULT,), WALL)
    assert len(view.collectives) == KEEP_PER_GROUP + 1
    assert view.entry_numbers((DEFAULT,))[0] == {"0": 499, "1": 1}


def test_an_operation_that_gloo_retires_at_its_timeout_did_not_complete():
    view = RecorderView()
    view.take({GENERIC: {"entries": [entry(5, timeout_ms=10_000)]}}, (DEFAULT,), WALL + 1)
    view.take({GENERIC: {"entries": [entry(5, timeout_ms=10_000, retired=True)]}}, (DEFAULT,), WALL + 10.1)
    assert view.collectives[0].done is False
    view.take({GENERIC: {"entries": [entry(5, timeout_ms=10_000, retired=True)]}}, (DEFAULT,), WALL + 20)
    assert view.collectives[0].done is False


def test_gloo_beside_nccl_in_one_group_is_a_group_of_its_own():
    both = Group("0", "default_pg", "cpu:gloo,cuda:nccl", (0, 1), 600.0)
    assert [group.name for group in twins((both,))] == ["0", "0:gloo"]
    assert twins((DEFAULT,)) == (DEFAULT,)
    view = RecorderView()
    view.take({GENERIC: {"entries": [entry(2)]}, NCCL: {"entries": [entry(9, op="nccl:all_reduce")]}}, (both,), WALL)
    assert view.entry_numbers((DEFAULT,))[0] == {"0:gloo": 2, "0": 9}


def test_both_recorders_of_one_process_may_number_their_groups_alike():
    """pg_id 0 is a gloo group in one recorder and an NCCL group in the other: a group is (recorder, pg_id)."""
    groups = (DEFAULT, Group("1", "cpu group", "gloo", (0, 1), 600.0), Group("2", "dp", "nccl", (0, 1), 600.0))
    view = RecorderView()
    view.take({GENERIC: {"entries": [entry(7, name="1", retired=True)]}, NCCL: {"entries": [entry(30, name="2", state="completed")]}}, groups, WALL)
    assert view.numbers(GENERIC, status(pg0=(8, 7)), groups[1:2]) == ({"1": 8}, {"1": 7})
    assert view.numbers(NCCL, status(pg0=(31, 30)), groups[2:]) == ({"2": 31}, {"2": 30})


def test_before_its_first_collective_nccls_answer_has_no_entries_and_counts_no_group():
    group = Group("0", "default_pg", "nccl", (0, 1), 600.0)
    view = RecorderView()
    empty = {"comm_lib_version": "2.28.9", "nccl_comm_state": {}, "pg_config": {}, "pg_status": {}, "version": "2.10"}
    view.take({NCCL: empty}, (group,), WALL)
    assert (view.collectives, view.lost) == ((), 0)
    assert view.numbers(NCCL, empty, (group,)) == ({"0": 0}, {"0": 0})
    counted = {"pg_status": {"0": {"last_enqueued_collective": "1", "last_started_collective": "-1", "last_completed_collective": "-1"}}}
    assert view.numbers(NCCL, counted, (group,)) == ({"0": 1}, {"0": 0})


def test_whether_starts_are_timed_is_known_from_the_environment_until_something_has_completed():
    group = Group("0", "default_pg", "nccl", (0, 1), 600.0)

    def started(timed, last_started, last_completed):
        view = RecorderView(timed)
        counts = {"last_enqueued_collective": "9", "last_started_collective": last_started, "last_completed_collective": last_completed}
        view.take({NCCL: {"pg_status": {"0": counts}, "entries": [entry(9, op="nccl:all_reduce")]}}, (group,), WALL)
        return view.collectives[0].started

    assert started(True, "-1", "-1") is False  # the first of its group is behind other work
    assert started(False, "-1", "-1") is None
    assert started(True, "-1", "8") is None  # the job has switched it off by itself
    assert started(False, "8", "8") is False


def test_odd_documents_raise_nothing():
    view = RecorderView()
    for document in (
        {},
        {"entries": None},
        {"entries": [7, None, {}]},
        {"pg_status": [1]},
        {"entries": [entry(1, process_group=None, input_sizes="x", timeout_ms="y")]},
    ):
        view.take({GENERIC: document, NCCL: document}, (DEFAULT,), WALL)
        view.numbers(GENERIC, document, (DEFAULT,))
        view.names_all(GENERIC, document)


def test_last_words_join_what_was_read_and_replace_entries_of_the_same_number():
    view = RecorderView()
    view.take({GENERIC: {"entries": [entry(1, retired=True), entry(2)]}}, (DEFAULT,), WALL)
    view.add(GENERIC, {"entries": [entry(2, retired=True), entry(3, op="gloo:barrier")]}, (DEFAULT,))
    assert [(c.seq, c.op, c.done) for c in view.collectives] == [(1, "all_reduce", True), (2, "all_reduce", True), (3, "barrier", False)]


def test_last_words_of_an_older_group_of_that_name_are_left_out():
    view = RecorderView()
    again = Group("0", "default_pg", "gloo", (0, 1), 1800.0, generation=1, created_wall_at=WALL + 10)
    view.add(GENERIC, {"entries": [entry(7), entry(1, created=WALL + 11), "odd"]}, (again,))
    assert [(c.generation, c.seq) for c in view.collectives] == [(1, 1)]


def test_a_document_is_cut_to_its_newest_entries_as_text():
    whole = json.dumps({"comm_lib_version": "", "entries": [entry(n) for n in range(1, 9)], "pg_status": {"0": {}}}, separators=(",", ":")).encode()
    assert [found["collective_seq_id"] for found in json.loads(tail(whole, 3))["entries"]] == [6, 7, 8]
    assert json.loads(tail(whole, 3))["pg_status"] == {"0": {}}
    assert tail(whole, 8) == whole
    assert tail(whole, 20) == whole
    assert tail(b"{}", 3) == b"{}"


def test_what_a_cut_document_leaves_out_stays_known():
    view = RecorderView()
    rare, late = entry(1, pg_id=1, name="1", record_id=0), entry(7, timeout_ms=10_000)
    view.take({GENERIC: {"entries": [rare, *[entry(n, retired=True) for n in range(2, 7)], late]}}, (DEFAULT,), WALL)
    view.take({GENERIC: {"entries": [entry(7, timeout_ms=10_000, retired=True), entry(8)]}}, (DEFAULT,), WALL + 1, whole=False)
    assert [(c.group, c.seq, c.done) for c in view.collectives if c.group == "1"] == [("1", 1, False)]
    assert [(c.seq, c.done) for c in view.collectives if c.group == "0"] == [(2, True), (3, True), (4, True), (5, True), (6, True), (7, True), (8, False)]
    view.take({GENERIC: {"entries": [entry(n, retired=True) for n in range(200, 300)]}}, (DEFAULT,), WALL + 2, whole=False)
    assert len([c for c in view.collectives if c.group == "0"]) == KEEP_PER_GROUP


def test_numbers_that_were_read_in_part_are_not_lost():
    view = RecorderView()
    view.take({GENERIC: {"entries": [entry(1), entry(2)]}}, (DEFAULT,), WALL)
    view.saw(GENERIC, 2, 900)
    view.take({GENERIC: {"entries": [entry(n) for n in range(902, 910)]}}, (DEFAULT,), WALL)
    assert view.lost == 0
