"""`rankwatch compile` as text: what is said once, what is left out because it is nothing, and the chart."""

from __future__ import annotations

import copy

import pytest
from build_compiles import compiled, event, resized, snapshot, told

from rankwatch.report.compile_text import render


def text(doc):
    return " ".join(render(doc).split())


def chart(doc):
    lines = render(doc).partition("When each rank compiled\n")[2].strip("\n").splitlines()
    return [line.partition("|")[2].rstrip("|") for line in lines if "|" in line], lines[-1].split("   ")[-1].strip()


def test_a_frame_that_is_left_to_python_is_no_failure_in_the_chart():
    left = compiled(0, "0/0", ok=False, fail_type="Unsupported", fail_reason="print", graph_ops=0, fingerprint="", at=2.0)
    (lane,), legend = chart(told([left, compiled(0, "1/0", frame="block@model.py:9", at=6.0)], snapshot(1)))
    assert set(lane) == {"-", "#", " "}
    assert lane[0] == "-"
    assert legend == "- left to Python  # compiles"


def test_of_several_marks_in_a_slice_the_gravest_is_shown_and_a_recompiles_backward_is_a_recompile():
    failed = compiled(
        0, "1/0", frame="block@model.py:9", ok=False, fail_type="InductorError", fail_reason="no", graph_ops=0, fingerprint="", fail_at="model.py:9", at=20.0
    )
    first, again = compiled(0, "0/0", at=2.0), resized(0, "0/1", 4, 5, at=19.0)
    backward = event(0, "compile_end", 19.5, compile_kind="backward", compile_id="0/1", frame="forward@model.py:31", duration_s=0.5, ok=True)
    (lane,), legend = chart(told([first, again, backward, failed], snapshot(1)))
    assert lane.replace(" ", "") == "#" * lane.count("#") + "r" * lane.count("r") + "!" * lane.count("!")
    assert legend == "# compiles  r recompiles  ! fails"


def test_waits_of_less_than_a_second_are_not_told():
    assert "waited" not in text(told([compiled(0)], snapshot(1))).partition("Frames")[0]


def test_steps_of_a_job_that_compiles_nothing_are_told_as_such():
    assert "step time, median: 4.2 ms; no step has compiled anything" in text({"steps": {"before_s": 0.0042, "last_compile_step": None}})
    assert "step time, medians: 0.30 s in steps that compiled" in text({"steps": {"during_s": 0.3, "last_compile_step": 4}})


def test_a_bucket_cap_is_told_in_bytes_and_as_the_user_wrote_it_and_a_small_bucket_is_not_nothing():
    group = {"ranks": "0-1", "status": "split", "splits": 2, "cap_bytes": 1_572_864, "buckets": [{"bytes": 4096}, {"bytes": 4_210_688}]}
    assert "ranks 0-1: split, 2 buckets: 0.0041, 4.21 MB, cap 1.57 MB (bucket_cap_mb=1.5)" in text({"ddp": {"groups": [group]}})


def test_the_line_of_a_failure_is_told_where_it_is_not_the_frames_own():
    frame = {"frame": "forward@model.py:31", "failures": [{"type": "ValueError", "reason": "no", "at": "model.py:31", "ranks": "1"}]}
    assert "forward@model.py:31, rank 1: ValueError: no" in text({"frames": [frame]})
    frame["failures"][0]["at"] = "model.py:44"
    assert "forward@model.py:31 at model.py:44, rank 1: ValueError: no" in text({"frames": [frame]})


def test_a_guard_is_told_with_the_line_that_made_it():
    guard = {"class": "value", "text": "self.round == 3", "at": "model.py:40", "ranks": "0-1", "count": 8}
    assert "forward@model.py:31, ranks 0-1: value: self.round == 3 (model.py:40) (8 times)" in text(
        {"frames": [{"frame": "forward@model.py:31", "guards": [guard]}]}
    )


def test_of_a_guard_without_a_found_value_the_earlier_expected_ones_are_told_and_its_count_is_over_ranks():
    guard = {"class": "value", "text": "s.cfg['warm'] == 17.5", "actual": None, "expected_before": ["15.0", "2.5"]}
    guard |= {"ranks": "0-1", "count": 16, "rank_count": 2}
    assert "ranks 0-1: value: s.cfg['warm'] == 17.5, before that 15.0, 2.5 (16 times over 2 ranks)" in text({"frames": [{"frame": "f", "guards": [guard]}]})
    sized = guard | {"class": "tensor_size", "text": "tensor 'x' size mismatch at index 0. expected 5, actual 7", "actual": "7", "expected_before": ["4"]}
    assert "expected 5, actual 7 (16 times over 2 ranks)" in text({"frames": [{"frame": "f", "guards": [sized]}]})


def test_forwards_of_one_bucket_count_no_splits_that_were_compiled_again():
    split = {
        "status": "single_bucket",
        "frame": "forward@model.py:31",
        "mode": "ddp_optimizer",
        "splits": 1,
        "bytes": 10,
        "cap_bytes": 100,
        "fingerprint": "a" * 12,
    }
    both = [event(0, "ddp_split", at, compile_id=f"0/{number}", **split) for number, at in enumerate((1.0, 3.0))]
    doc = told([both[0], compiled(0, "0/0", at=2.0), both[1], resized(0, "0/1", 4, 5, at=4.0)], snapshot(1))
    assert doc["ddp"]["recompiles_x_splits"] == 0
    several = [event_ | {"status": "split", "splits": 3} for event_ in both]
    doc = told([several[0], compiled(0, "0/0", at=2.0), several[1], resized(0, "0/1", 4, 5, at=4.0)], snapshot(1))
    assert doc["ddp"]["recompiles_x_splits"] == 3


def test_frames_that_the_document_has_no_room_for_are_counted():
    frames = [{"frame": f"fn_{number}@gen.py:1"} for number in range(200)]
    assert "... and 280 more: rankwatch compile --json has the 200 that cost most" in text({"frames": frames, "frames_left_out": 100})
    assert text({"frames": frames}).endswith("... and 180 more: rankwatch compile --json")


def test_after_a_restart_it_is_told_which_attempt_this_is_and_what_the_one_before_compiled():
    before = {"attempt": 0, "frames_compiled": 2, "recompiles": 1, "compile_s": 4.2, "steps_max": 10}
    doc = {"run": {"attempt": 1}, "attempts": [before]}
    words = "attempt 1, whose compiles alone are told here; attempt 0: 2 frames compiled, 1 recompile in 4.20 s over all ranks, up to step 10"
    assert words in text(doc)
    assert f"{words} (1 more before it: rankwatch compile --json)" in text({**doc, "attempts": [{}, before]})
    assert "attempt 1, whose compiles alone are told here; none before it compiled anything" in text({"run": {"attempt": 1}})
    assert "attempt" not in text({"run": {"attempt": 0}, "attempts": []})


FRAME = {
    "frame": "forward@model.py:31", "ranks": "0-1", "compiles": 2, "recompiles": 1, "seconds_sum": 2.0, "seconds_max": 1.5, "seconds_max_rank": 1,
    "lost_rank_s": 3.0, "limit": 8, "limited": "1", "graphs": 1, "cache": {"fx": {"hit": 1, "miss": 2}},
    "guards": [{"class": "value", "text": "x == 3", "at": "m.py:4", "ranks": "0", "count": 3, "rank_count": 2, "expected_before": ["4"]}],
    "breaks": [{"at": "m.py:3", "reason": "print", "gb": "gb0001", "ranks": "0", "count": 1}],
    "failures": [{"type": "E", "reason": "no", "at": "m.py:9", "ranks": "1", "count": 1}],
}  # fmt: skip
WHOLE = {
    "as_of": 100.0, "over": False, "run": {"id": "r", "world_size": 2, "ranks_seen": 1, "attempt": 1, "torch": "2.9", "steps_max": 9},
    "regime": {"name": "compiled", "words": "w"}, "ranks": {"events_lost": 3}, "attempts": [{"attempt": 0, "compile_s": 1.0, "recompiles": 1}],
    "totals": {"compile_s": 4.0, "compile_max_s": 3.0, "compile_max_rank": 1, "waited_rank_s": 2.0, "phases": {"inductor": 2.0}},
    "skew": {"worst_s": 4.0, "smallest_timeout_s": 600.0, "worst_ranks": "1", "worst_frame": "f"}, "steps": {"before_s": 0.1, "during_s": 2.0, "after_s": 0.2},
    "advice": [{"words": "w", "setting": "s", "evidence": ["e"]}], "frames": [FRAME], "frames_left_out": 1,
    "now": [
        {"rank": 1, "frame": "f", "compile_id": "0/1", "phase": "p", "elapsed_s": 3.0, "eta_s": 2.0, "peers_took_s": 5.0, "peers": "0",
         "detail": "d", "reason": "r"}
    ],
    "divergence": [{"kind": "cache", "words": "w", "groups": [{"ranks": "0", "what": "hit"}, {"ranks": "1", "what": "miss"}, {"ranks": "2", "what": "x"}]}],
    "ddp": {"groups": [{"ranks": "0", "status": "split", "splits": 2, "buckets": [{"bytes": 5}], "cap_bytes": 9, "error": "e"}], "recompiles_x_splits": 2},
    "numerics": {"words": ["w"]},
    "timeline": [{"rank": 0, "start_wall": 90.0, "end_wall": 95.0, "compile_id": "0/1", "ok": True},
                 {"rank": 1, "start_wall": 91.0, "end_wall": None, "ok": None}],
}  # fmt: skip
RUBBISH = (None, [], {}, "x", "\x1b[31mRED\x1b[0m\n[rankwatch] STUCK", -1, 10**400, float("nan"), float("inf"), True, [None], {"a": None}, "\ud800")


def places(part, path=()):
    if path:
        yield path
    for key in part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ():
        yield from places(part[key], (*path, key))


@pytest.mark.parametrize("value", RUBBISH, ids=[f"rubbish{number}" for number in range(len(RUBBISH))])
def test_a_part_of_a_wrong_type_is_an_empty_part_and_writes_no_line_of_its_own(value):
    for *above, last in places(WHOLE):
        doc = part = copy.deepcopy(WHOLE)
        for key in above:
            part = part[key]
        part[last] = value
        written = render(doc)
        assert "\n[rankwatch]" not in written
        assert "\x1b" not in written
        written.encode()
