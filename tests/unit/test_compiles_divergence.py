"""Same program, different compiles: who differs, in what, and when that may be said."""

import pytest
from build_compiles import FRAME, compiled, event, resized, snapshot, told
from build_status import WALL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwatch.model import CompileActivity, Group, Waited
from rankwatch.wire.ranks import compress, expand


def found(events, look, **how):
    return told(events, look, **how)["divergence"]


def kinds(events, look, **how):
    return [(one["kind"], one["frame"], one["ordinal"], [group["ranks"] for group in one["groups"]]) for one in found(events, look, **how)]


EVERYBODY = [compiled(rank) for rank in range(4)]
ALONE = [*EVERYBODY, resized(1, "0/1", 4, 5, at=3.0, step=10)]


def test_a_rank_that_recompiles_alone_is_told_with_its_guard_and_both_values():
    assert found(ALONE, snapshot(4), waiting=(Waited(1, f"recompiling {FRAME}", 12.0),)) == [
        {
            "kind": "lone_recompile",
            "frame": FRAME,
            "ordinal": 1,
            "groups": [{"ranks": "0,2-3", "what": "no recompile"}, {"ranks": "1", "what": "guard x.size()[0]: expected 4, actual 5"}],
            "words": f"rank 1 alone recompiled {FRAME}: x.size()[0]: expected 4, actual 5; ranks 0,2-3 did not",
            "since_wall": WALL + 3.0,
            "correlated": True,
        }
    ]


def test_many_recompiles_of_the_same_ranks_are_one_divergence():
    storm = [resized(1, f"0/{ordinal}", ordinal + 3, ordinal + 4, step=ordinal) for ordinal in range(1, 7)]
    one = found([*EVERYBODY, *storm], snapshot(4))
    assert [(row["kind"], row["ordinal"], row["correlated"]) for row in one] == [("lone_recompile", 1, False)]
    assert one[0]["words"] == f"rank 1 alone recompiled {FRAME} 6 times: x.size()[0]: expected 9, actual 10; ranks 0,2-3 did not"


@pytest.mark.parametrize(("steps", "said"), [(10, False), (12, False), (13, True)])
def test_the_others_must_have_gone_on_without_it(steps, said):
    assert bool(kinds(ALONE, snapshot(4, steps=steps))) is said


def test_at_the_end_one_step_without_it_suffices():
    assert kinds(ALONE, snapshot(4, steps=10), over=True) == []
    assert kinds(ALONE, snapshot(4, steps=11), over=True) == [("lone_recompile", FRAME, 1, ["0,2-3", "1"])]


def test_without_steps_a_time_must_pass():
    assert kinds(ALONE, snapshot(4, at=20.0, steps=0)) == []
    assert kinds(ALONE, snapshot(4, at=40.0, steps=0)) == [("lone_recompile", FRAME, 1, ["0,2-3", "1"])]


def test_a_rank_that_compiles_the_frame_now_is_waited_for():
    busy = CompileActivity("0/1", "forward", FRAME, "aot", "aot_", 0.0, 0.0)
    assert kinds(ALONE, snapshot(4, compiling=lambda rank: (busy,) if rank == 2 else ())) == []


def test_a_rank_of_which_events_were_lost_is_never_said_not_to_have_compiled():
    assert kinds([compiled(0), compiled(1), resized(1, "0/1", 4, 5)], snapshot(2, events_lost=lambda rank: 3 * (rank == 0))) == []
    assert kinds(ALONE, snapshot(4, events_lost=lambda rank: 3 * (rank == 0))) == [("lone_recompile", FRAME, 1, ["2-3", "1"])]


def test_a_later_recompile_proves_the_earlier_ones():
    events = [compiled(0), compiled(1), resized(0, "0/1", 4, 5), resized(0, "0/2", 5, 6), resized(1, "0/2", 5, 6)]
    assert kinds(events, snapshot(2)) == []


def test_a_frame_that_only_some_ranks_ever_run_is_no_divergence():
    assert kinds([*EVERYBODY, compiled(0, "1/0", frame="log@train.py:9"), compiled(0, "1/1", frame="log@train.py:9")], snapshot(4)) == []


def test_different_graphs_of_one_frame_are_told():
    events = [compiled(0), compiled(1), compiled(2, graph_ops=9, fingerprint="beef"), compiled(3)]
    assert found(events, snapshot(4))[0] == {
        "kind": "different_graph",
        "frame": FRAME,
        "ordinal": 0,
        "groups": [{"ranks": "0-1,3", "what": "12 operations, 3 inputs, 8 guards"}, {"ranks": "2", "what": "9 operations, 3 inputs, 8 guards"}],
        "words": f"compiled different graphs of {FRAME}: ranks 0-1,3: 12 operations, 3 inputs, 8 guards; rank 2: 9 operations, 3 inputs, 8 guards",
        "since_wall": WALL,
        "correlated": False,
    }


def test_graphs_of_equal_counts_differ_in_sizes_where_a_size_has_failed_a_guard():
    events = [compiled(0, fingerprint="aa"), compiled(1, fingerprint="bb")]
    resizes = [resized(0, "0/1", 8, 9, fingerprint="cc"), resized(1, "0/1", 9, 7, fingerprint="dd")]
    sized, unknown = found([*events, *resizes], snapshot(2))[0], found(events, snapshot(2))[0]
    counts = "12 operations, 3 inputs, 8 guards"
    assert (sized["kind"], sized["cause"]) == ("different_graph", "sizes")
    assert sized["words"].startswith(f"compiled graphs for other sizes of {FRAME}: rank 0: {counts}, graph aa; rank 1: {counts}, graph bb")
    assert (unknown["kind"], unknown["cause"]) == ("different_graph", "sizes_or_branch")
    assert unknown["words"].startswith(f"compiled graphs of equal counts that differ of {FRAME}: rank 0: {counts}, graph aa")


def test_the_same_graphs_in_another_order_are_the_same_program():
    """The two sides of a branch: code of one name, met in another order by each rank."""
    events = [
        compiled(0, "1/0", fingerprint="aa"), compiled(0, "2/0", fingerprint="bb"), compiled(1, "1/0", fingerprint="bb"), compiled(1, "2/0", fingerprint="aa"),
    ]  # fmt: skip
    assert kinds(events, snapshot(2)) == []
    assert kinds(events[:3], snapshot(2)) == [("different_graph", FRAME, 0, ["0", "1"])]


def test_compile_ids_are_not_compared():
    assert kinds([compiled(0, "3/0"), compiled(1, "9/0"), resized(0, "3/1", 4, 5), resized(1, "9/1", 4, 5)], snapshot(2)) == []


def test_recompiles_for_different_guards_are_told_and_other_values_of_one_guard_are_not():
    flag = {"recompile_reason": "0/0: G['FLAG'] == True  # if FLAG:  # train.py:3 in step", "fingerprint": "cc"}
    events = [compiled(0), compiled(1), resized(0, "0/1", 4, 5), compiled(1, "0/1", **flag)]
    one = found(events, snapshot(2))
    assert [(row["kind"], [group["what"] for group in row["groups"]]) for row in one] == [
        ("different_guard", ["guard x.size()[0]: expected 4, actual 5", "guard G['FLAG']: expected True"])
    ]
    assert kinds([compiled(0), compiled(1), resized(0, "0/1", 4, 5), resized(1, "0/1", 4, 9)], snapshot(2)) == []


def test_a_compile_that_fails_on_one_rank_only_is_told():
    failure = {"ok": False, "fail_type": "LoweringException", "fail_reason": "no kernel", "fail_at": "model.py:35", "graph_ops": 0, "fingerprint": ""}
    assert [(row["kind"], row["words"]) for row in found([compiled(0), compiled(1, **failure)], snapshot(2))] == [
        ("failed_alone", f"rank 1 failed to compile {FRAME}: LoweringException: no kernel; rank 0 compiled it")
    ]
    assert kinds([compiled(0, **failure), compiled(1, **failure)], snapshot(2)) == []


def test_a_cache_that_is_cold_on_one_rank_is_told_once_for_all_frames():
    events = []
    for number in range(5):
        events += [compiled(rank, f"{number}/0", frame=f"block{number}@model.py:3", cache={"fx": "miss" if rank == 1 else "hit"}) for rank in range(3)]
    one = found(events, snapshot(3))
    assert [(row["kind"], row["groups"]) for row in one] == [("cache", [{"ranks": "0,2", "what": "fx hit"}, {"ranks": "1", "what": "fx miss"}])]
    assert one[0]["words"] == "rank 1 missed the FX graph cache for block0@model.py:3, ranks 0,2 hit it; 4 more alike"


SPLIT = {"status": "split", "mode": "ddp_optimizer", "frame": FRAME, "compile_id": "0/0", "splits": 2, "cap_bytes": 2_000_000, "error": "", "reason": ""}


def split(rank, *megabytes, **fields):
    buckets = [{"bytes": int(size * 1e6), "n_params": 2} for size in megabytes]
    return event(rank, "ddp_split", **{**SPLIT, "splits": len(megabytes), "buckets": buckets, "fingerprint": str(megabytes), **fields})


def test_different_splits_are_told_at_once_and_first():
    events = [split(0, 1.05, 2.1), split(1, 1.05, 1.05, 1.05), split(2, 1.05, 2.1), compiled(0), compiled(1, cache={"fx": "hit"}), compiled(2)]
    one = found(events, snapshot(3, steps=0))
    assert [row["kind"] for row in one] == ["different_split", "cache"]
    assert one[0]["groups"] == [{"ranks": "0,2", "what": "2 buckets: 1.05, 2.10 MB"}, {"ranks": "1", "what": "3 buckets: 1.05, 1.05, 1.05 MB"}]


def test_different_modes_are_told():
    record = {"status": "", "mode": "no_optimization"}
    events = [split(0, 1.05, 2.1), compiled(0), compiled(1)]
    assert kinds(events, snapshot(2, ddp=lambda rank: record if rank == 1 else {})) == [("split_mode", "", None, ["0", "1"])]


def test_stages_of_a_pipeline_are_not_compared():
    events = [
        *(compiled(rank, f"{number}/0", frame=f"first{number}@a.py:1") for rank in (0, 1) for number in range(4)),
        *(compiled(rank, f"{number}/0", frame=f"last{number}@b.py:1") for rank in (2, 3) for number in range(4)),
        *(compiled(rank, "9/0", frame="loss@c.py:1", fingerprint="aa" if rank < 2 else "bb") for rank in range(4)),
    ]
    doc = told(events, snapshot(4))
    assert doc["divergence"] == []
    assert doc["ranks"]["compared"] == ["0-1", "2-3"]


def test_what_differs_along_the_jobs_own_groups_is_by_design():
    def groups(rank):
        side = (0, 1) if rank < 2 else (2, 3)
        return (Group("0", "default_pg", "gloo", (0, 1, 2, 3), 600.0), Group("1", "dp", "gloo", side, 600.0))

    halves = [compiled(rank, fingerprint="aa" if rank < 2 else "bb") for rank in range(4)]
    assert kinds(halves, snapshot(4, groups=groups)) == []
    assert kinds(halves, snapshot(4)) == [("different_graph", FRAME, 0, ["0-1", "2-3"])]
    odd = [compiled(rank, fingerprint="bb" if rank == 3 else "aa") for rank in range(4)]
    assert kinds(odd, snapshot(4, groups=groups)) == [("different_graph", FRAME, 0, ["0-2", "3"])]


def test_ranks_that_are_known_by_their_records_are_compared_by_their_hash():
    def record(rank):
        return {"by_frame": {FRAME: [2, 4.0, "bbbb" if rank == 2 else "aaaa", 1]}}

    assert kinds([], snapshot(3, compile_totals=record), with_events=()) == [("different_graph", FRAME, None, ["0-1", "2"])]


rank_events = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2), st.sampled_from(["aa", "bb"]), st.sampled_from(["hit", "miss"])),
    max_size=16,
    unique_by=lambda row: row[:3],
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rank_events, st.permutations(range(5)))
def test_permuting_ranks_permutes_the_sets_of_ranks(rows, order):
    """No rank is special: renamed ranks give the same document about renamed ranks."""

    def events(name):
        made = [
            compiled(name[rank], f"{number}/{ordinal}", frame=f"f{number}@m.py:1", fingerprint=graph, cache={"fx": cache})
            for rank, number, ordinal, graph, cache in sorted(rows)
        ]
        return sorted(made, key=lambda one: one["rank"])

    def sets(doc, name):
        def renamed(text):
            return compress(name[rank] for rank in expand(text))

        frames = {(row["frame"], renamed(row["ranks"]), row["compiles"], row["recompiles"], row["seconds_sum"]) for row in doc["frames"]}
        differences = {
            (one["kind"], one["frame"], one["ordinal"], frozenset((renamed(group["ranks"]), group["what"]) for group in one["groups"]))
            for one in doc["divergence"]
        }
        return frames, differences

    same = list(range(5))
    assert sets(told(events(same), snapshot(5)), order) == sets(told(events(order), snapshot(5)), same)
