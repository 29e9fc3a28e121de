"""Events and records of ranks become one document: frames, sums, what runs now, skew, splits, bounds."""

import json

from build_compiles import FRAME, compiled, event, resized, snapshot, told
from build_status import NOW, WALL, job

from rankwatch.model import CompileActivity, Group, Process, Waited
from rankwatch.monitor.compiles.book import MAX_FRAMES_A_RANK, Book
from rankwatch.monitor.compiles.document import MAX_BYTES, document, summary
from rankwatch.monitor.compiles.events import take

RECORD = {
    "frames": 2,
    "recompiles": 1,
    "backward": 1,
    "graphs": 2,
    "library": 3,
    "skipped": 0,
    "graph_breaks": 1,
    "failures": 0,
    "limit_hits": 0,
    "seconds": {"dynamo": 1.0, "inductor": 3.0},
    "phases": {"dynamo": 1.5, "inductor": 2.5},
    "cache": {"fx": {"hit": 1, "miss": 2}},
    "requested": {"count": 1, "first_at": "train.py:31", "backends": ["inductor"]},
    "stance": "",
    "disabled": "",
    "limited": [],
    "by_frame": {FRAME: [2, 4.0, "abc", 2]},
}


def activity(compile_id="0/0", frame=FRAME, elapsed=5.0, at=60.0, **fields):
    fields = {"phase": "inductor", "raw_phase": "Scheduler.codegen", "phase_since": NOW + at - 1, **fields}
    return CompileActivity(compile_id, "forward", frame, started_at=NOW + at - elapsed, **fields)


def only_frame(doc):
    assert len(doc["frames"]) == 1
    return doc["frames"][0]


def test_a_frame_has_the_counts_of_the_rank_with_most_and_the_costs_of_all():
    events = [compiled(0), compiled(1), resized(1, "0/1", 4, 5, at=3.0, duration_s=3.0, cache_size=1)]
    doc = told(events, snapshot(2), (Waited(1, f"recompiling {FRAME}", 7.5), Waited(0, f"compiling {FRAME}", 1.0), Waited(1, "data_loading", 9.0)))
    frame = only_frame(doc)
    assert {key: frame[key] for key in ("frame", "file_line", "ranks", "compiles", "recompiles", "graphs", "ops", "limit", "cache_size")} == {
        "frame": FRAME, "file_line": "model.py:31", "ranks": "0-1", "compiles": 2, "recompiles": 1, "graphs": 2, "ops": 12, "limit": 8, "cache_size": 1,
    }  # fmt: skip
    assert (frame["seconds_sum"], frame["seconds_max"], frame["seconds_max_rank"], frame["lost_rank_s"]) == (7.0, 5.0, 1, 8.5)
    assert frame["phases"] == {"dynamo": 1.5, "inductor": 4.5}
    assert frame["cache"] == {"fx": {"miss": 3}}
    assert doc["totals"]["waited_rank_s"] == 8.5


def test_a_failed_guard_is_told_with_both_values_its_ranks_and_the_key_of_its_text():
    doc = told([compiled(1), resized(1, "0/1", 4, 5, recompile_key="0123456789ab"), resized(1, "0/2", 5, 7)], snapshot(2))
    assert only_frame(doc)["guards"] == [
        {
            "class": "tensor_size",
            "source": "x.size()[0]",
            "text": "tensor 'x' size mismatch at index 0. expected 5, actual 7",
            "words": "x.size()[0]: expected 5, actual 7",
            "at": "",
            "expected": "5",
            "actual": "7",
            "expected_before": ["4"],
            "values": ["5", "7"],
            "ranks": "1",
            "count": 2,
            "rank_count": 1,
            "key": "0123456789ab",
        }
    ]
    assert doc["totals"]["guards"] == {"tensor_size": 2}
    assert only_frame(doc)["last_reason"] == "tensor 'x' size mismatch at index 0. expected 5, actual 7"


def test_the_value_that_a_constant_had_is_learnt_from_the_guard_of_the_next_compile():
    constant = "0/{}: self.k == {}      # y = x * self.k  # model.py:54 in forward"
    events = [compiled(0), compiled(0, "0/1", recompile_reason=constant.format(0, 1)), compiled(0, "0/2", recompile_reason=constant.format(1, 2))]
    guard = only_frame(told(events, snapshot(1)))["guards"][0]
    assert (guard["class"], guard["source"], guard["expected"], guard["values"], guard["at"]) == ("value", "self.k", "2", ["2"], "model.py:54")


def test_of_a_constant_the_values_that_were_expected_are_told_newest_first_and_none_as_found():
    again = [compiled(rank, f"0/{n}", recompile_reason=f"0/{n - 1}: self.k == {n - 1}.5") for rank in (0, 1) for n in range(1, 9)]
    guard = only_frame(told([compiled(0), compiled(1), *again], snapshot(2)))["guards"][0]
    assert (guard["expected"], guard["actual"], guard["count"], guard["rank_count"]) == ("7.5", None, 16, 2)
    assert guard["expected_before"] == ["6.5", "5.5", "4.5", "3.5", "2.5"]


def test_the_steps_in_which_a_frame_was_compiled_are_counted():
    frame = only_frame(told([compiled(0, step=step) for step in (0, 0, 3, 7)], snapshot(1)))
    assert (frame["compiles"], frame["recompiles"], frame["steps_compiled"], frame["last_step"]) == (4, 0, 3, 7)


def test_a_compile_that_was_under_way_when_the_process_ended_has_no_end_in_the_timeline():
    book, dead = Book(), Process(1, alive=False)
    for look in (snapshot(1, steps=0, compiling=(activity(),)), snapshot(1, final=True, steps=0, process=dead)):
        book.look(look.ranks(), (0,), look.now, look.wall_at)
    rows = document(book, job(), look, over=True)["timeline"]
    assert [(row["frame"], row["end_wall"]) for row in rows] == [(FRAME, None)]


def test_the_recompile_limit_is_latched():
    events = [
        compiled(0),
        event(0, "recompile_limit", frame=FRAME, limit=8, cache_size=8, last_reason="0/7: tensor 'x' size mismatch at index 0. expected 4, actual 5"),
    ]
    frame = only_frame(told(events, snapshot(2)))
    assert (frame["limited"], frame["limit"], frame["cache_size"]) == ("0", 8, 8)
    record = {**RECORD, "limited": [FRAME], "limit": 8}
    assert only_frame(told([], snapshot(2, compile_totals=record), with_events=()))["limited"] == "0-1"


def test_breaks_are_counted_by_place_and_failures_keep_type_and_place():
    events = [
        event(0, "graph_break", frame=FRAME, at="model.py:33:forward", reason="call to print", gb="gb0059", times=1, key="aaaaaaaaaaaa"),
        event(0, "graph_break", frame=FRAME, at="model.py:33:forward", reason="call to print", gb="gb0059", times=4, key=""),
        event(1, "graph_break", frame=FRAME, at="model.py:33:forward", reason="call to print", gb="gb0059", times=1, key=""),
        compiled(
            1,
            ok=False,
            fail_type="BackendCompilerFailed",
            fail_reason="backend='x' raised: ValueError",
            fail_at="model.py:35",
            fail_key="bbbbbbbbbbbb",
            graph_ops=0,
        ),
        compiled(0, "1/0", frame="skipped@a.py:1", ok=False, fail_type="Unsupported", fail_reason="loop", fail_at=""),
    ]
    doc = told(events, snapshot(2))
    frame = next(row for row in doc["frames"] if row["frame"] == FRAME)
    assert frame["breaks"] == [{"at": "model.py:33:forward", "reason": "call to print", "gb": "gb0059", "ranks": "0-1", "count": 5, "key": "aaaaaaaaaaaa"}]
    assert frame["failures"] == [
        {
            "type": "BackendCompilerFailed",
            "at": "model.py:35",
            "reason": "backend='x' raised: ValueError",
            "gb": "",
            "ranks": "1",
            "count": 1,
            "key": "bbbbbbbbbbbb",
        }
    ]
    assert next(row for row in doc["frames"] if row["frame"] == "skipped@a.py:1")["failures"] == []


def test_sums_are_those_of_the_rank_with_most_and_seconds_are_added():
    records = [
        RECORD,
        {**RECORD, "frames": 3, "seconds": {"dynamo": 2.0, "inductor": 6.0}, "phases": {"dynamo": 1.0, "autotune": 4.0}, "disabled": "TORCHDYNAMO_DISABLE=1"},
    ]
    doc = told([], snapshot(2, compile_totals=records.__getitem__))
    totals = doc["totals"]
    assert (totals["frames"], totals["recompiles"], totals["compile_s"], totals["compile_max_s"], totals["compile_max_rank"]) == (3, 1, 12.0, 8.0, 1)
    assert totals["phases"] == {"dynamo": 1.5, "inductor": 2.5, "autotune": 4.0}
    assert totals["cache"] == {"fx": {"hit": 2, "miss": 4, "bypass": 0, "disabled": 0}}
    assert doc["ranks"]["requested"] == {"0-1": {"count": 1, "first_at": "train.py:31", "backends": ["inductor"]}}
    assert doc["ranks"]["disabled"] == {"1": "TORCHDYNAMO_DISABLE=1"}


def test_a_rank_that_compiles_is_told_with_what_peers_took_and_what_is_left():
    def compiling(rank):
        return (activity("7/0", elapsed=5.0, detail="kernels 3/12"),) if rank == 2 else ()

    doc = told([compiled(0, duration_s=10.0), compiled(1, duration_s=20.0)], snapshot(3, compiling=compiling))
    assert doc["now"] == [
        {
            "rank": 2, "frame": FRAME, "kind": "forward", "compile_id": "7/0", "phase": "inductor", "elapsed_s": 5.0, "phase_s": 1.0, "detail": "kernels 3/12",
            "reason": "", "eta_s": 10.0, "peers_took_s": 15.0, "peers": "0-1",
        }
    ]  # fmt: skip
    assert doc["timeline"][-1]["end_wall"] is None
    assert doc["timeline"][-1]["start_wall"] == WALL + 55.0


def test_library_frames_and_compiles_that_nobody_else_did_have_no_estimate():
    library = activity("1/0", frame="inner@external_utils.py:5", detail="library frame")
    doc = told([compiled(0)], snapshot(2, compiling=lambda rank: (library, activity("0/1")) if rank == 1 else ()))
    assert [(row["frame"], row["eta_s"], row["peers"]) for row in doc["now"]] == [(FRAME, None, "")]


def test_skew_counts_from_when_the_first_of_the_others_had_nothing_to_compile():
    book = Book()
    take(book, [compiled(0, at=10.0), compiled(1, at=20.0)])
    for at in (30.0, 40.0, 50.0):
        look = snapshot(3, at=at, compiling=lambda rank, at=at: (activity(elapsed=at, at=at),) if rank == 2 and at < 50 else ())
        book.look(look.ranks(), range(3), look.now, look.wall_at)
        doc = document(book, job(), look)
        assert doc["skew"]["now_s"] == {30.0: 20.0, 40.0: 30.0, 50.0: 0.0}[at]
    assert doc["skew"] == {
        "now_s": 0.0, "smallest_timeout_s": 600.0, "ranks": "", "others": "", "worst_s": 30.0, "worst_frame": FRAME, "worst_ranks": "2",
        "worst_at": WALL + 40.0,
    }  # fmt: skip


def test_timeouts_are_remembered_when_the_groups_are_gone():
    book = Book()
    for groups in ((Group("0", "default_pg", "nccl", (0, 1), 30.0),), ()):
        look = snapshot(2, groups=groups)
        book.look(look.ranks(), range(2), look.now, look.wall_at)
    run = document(book, job(), look)["run"]
    assert (run["smallest_timeout_s"], run["backend"], run["steps_min"], run["steps_max"]) == (30.0, "nccl", 50, 50)


def test_ranks_without_events_are_known_by_their_records_and_named():
    doc = told([compiled(0), compiled(1)], snapshot(4, compile_totals=lambda rank: RECORD if rank > 1 else {}), with_events=(0, 1))
    assert only_frame(doc)["ranks"] == "0-3"
    assert (doc["ranks"]["with_events"], doc["ranks"]["by_record"]) == ("0-1", "2-3")


def test_what_was_lost_makes_it_incomplete_and_the_record_helps():
    look = snapshot(2, events_lost=lambda rank: 5 * rank, compile_totals=lambda rank: {**RECORD, "by_frame": {FRAME: [4, 9.0, "abc", 3]}})
    doc = told([compiled(0), compiled(1)], look)
    assert (doc["ranks"]["events_lost"], doc["ranks"]["events_lost_ranks"], doc["ranks"]["incomplete"]) == (
        5,
        "1",
        "5 events of rank 1 lost before they were read",
    )
    assert (only_frame(doc)["compiles"], only_frame(doc)["seconds_max_rank"], only_frame(doc)["seconds_max"]) == (4, 1, 9.0)


def test_a_frame_of_few_ranks_is_said_to_be_theirs():
    doc = told([compiled(rank) for rank in range(4)] + [compiled(0, "1/0", frame="log@train.py:9")], snapshot(4))
    assert {row["frame"]: row["note"] for row in doc["frames"]} == {FRAME: "", "log@train.py:9": "only rank 0 runs it"}


def test_probes_that_are_off_are_named():
    doc = told(
        [], snapshot(3, agent=lambda rank: "silent" if rank == 2 else "claimed", probes=lambda rank: {"compile": {"status": "off"}} if rank == 0 else {})
    )
    assert doc["ranks"]["no_probe"] == "0,2"


def test_splits_are_grouped_and_recompiles_are_multiplied_by_them():
    split = {
        "status": "split", "mode": "ddp_optimizer", "frame": FRAME, "splits": 2, "bytes": 3_000_000, "cap_bytes": 2_000_000, "first_cap_bytes": 1_048_576,
        "buckets": [{"bytes": 1_000_000, "n_params": 2, "first_param": "a.weight", "last_param": "a.bias", "extended_ops": 0}, {"bytes": 2_000_000}],
        "fingerprint": "aa", "error": "", "calls": 2, "not_applied": 0,
    }  # fmt: skip
    events = [event(rank, "ddp_split", compile_id=compile_id, **split) for rank in (0, 1) for compile_id in ("0/0", "0/1")]
    ddp = told(events, snapshot(2))["ddp"]
    assert ddp["mode"] == {"0-1": "ddp_optimizer"}
    assert [(group["ranks"], group["status"], group["splits"], len(group["buckets"])) for group in ddp["groups"]] == [("0-1", "split", 2, 2)]
    assert (ddp["calls"], ddp["forwards"], ddp["recompiles_x_splits"], ddp["not_applied"]) == (2, 2, 2, 0)


def test_texts_come_whole_once_and_without_secrets():
    book = Book()
    part = {"what": "recompile", "key": "0123456789ab", "parts": 2, "frame": FRAME, "compile_id": "0/1"}
    take(
        book,
        [
            event(0, "text", part=2, text="= x*k", **part),
            event(1, "text", part=1, text="other", **part),
            event(0, "text", part=1, text="api_key=hunter2 y ", **part),
        ],
    )
    take(book, [event(1, "text", part=2, text="rank's", **part)])
    assert [(line["key"], line["rank"], line["frame"], line["text"]) for line in book.texts.take()] == [("0123456789ab", 0, FRAME, "api_key=*** y = x*k")]
    assert book.texts.take() == []


def test_a_summary_keeps_counts_for_the_attempts_that_follow():
    doc = told([compiled(0), resized(0, "0/1", 4, 5)], snapshot(1, compile_totals=RECORD))
    assert summary({**doc, "regime": {"name": "compiled"}}) == {
        "attempt": 0, "as_of": WALL + 60.0, "steps_max": 50, "frames": 2, "recompiles": 1, "backward": 1, "graphs": 2, "library": 3, "skipped": 0,
        "graph_breaks": 1, "failures": 0, "limit_hits": 0, "compile_s": 4.0, "frames_compiled": 1, "limited": 0, "divergence": {}, "regime": "compiled",
    }  # fmt: skip


def test_garbage_from_a_rank_is_no_error():
    junk = [None, "x", -1, 1e400, [], {}, True]
    events = [
        {
            "rank": 0,
            "kind": kind,
            **dict.fromkeys(("wall_ns", "mono_ns", "frame", "compile_id", "duration_s", "phases", "cache", "buckets", "recompile_reason"), value),
        }
        for kind in ("compile_end", "recompile_limit", "graph_break", "ddp_split", "text", "unknown")
        for value in junk
    ]
    look = snapshot(1, compile_totals={"by_frame": {"f": "x", "g": [1]}, "seconds": [], "cache": 3, "requested": "no", "limited": {}}, ddp={"buckets": 7})
    json.dumps(told([*events, {"kind": "compile_end"}, {"rank": "0", "kind": "compile_end"}], look))


def test_a_document_stays_small_at_any_number_of_ranks_and_frames():
    names = [f"forward_of_a_model_with_a_long_name_{number}@some_module_of_the_model.py:{number}" for number in range(260)]
    events = [
        resized(rank, f"{number}/1", 4, rank + 5, frame=name, fingerprint=f"{rank % 2}", cache={"fx": "miss" if rank % 2 else "hit"})
        for rank in range(24)
        for number, name in enumerate(names)
        if (rank + number) % 3
    ]
    doc = told(events, snapshot(24))
    assert len(json.dumps(doc)) <= MAX_BYTES
    assert doc["frames_left_out"] == 60
    many = told([], snapshot(16_384, groups=(), compile_totals=lambda rank: {**RECORD, "by_frame": {FRAME: [2, 4.0, str(rank % 2), 1]}}), with_events=())
    assert len(json.dumps(many)) <= MAX_BYTES
    assert many["run"]["ranks_seen"] == 16_384
    assert many["divergence"][0]["groups"][0]["ranks"].endswith(",...(8192)")


def test_frames_of_a_rank_and_compiles_of_a_frame_are_bounded_and_said_to_be():
    book = Book()
    take(book, (compiled(0, f"{number}/0", frame=f"f@m.py:{number}") for number in range(MAX_FRAMES_A_RANK + 5)))
    take(book, (resized(0, f"0/{ordinal}", 4, 5, frame="f@m.py:0") for ordinal in range(1, 100)))
    look = snapshot(1)
    book.look(look.ranks(), (0,), look.now, look.wall_at)
    assert len(book.frames) == 1024
    assert len(book.frames["f@m.py:0"].compiled) == 64
    assert document(book, job(), look)["ranks"]["incomplete"] == "41 facts beyond what is kept of a rank or a frame"
