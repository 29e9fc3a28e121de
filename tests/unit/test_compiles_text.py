"""`rankwatch compile` as text: what is said once, what is left out because it is nothing, and the chart."""

from __future__ import annotations

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
