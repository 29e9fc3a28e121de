"""What ranks tell of their CUDA graphs is joined; a frame that is recorded for every new size is named while it grows, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
from build_compiles import snapshot, told
from build_status import WALL

from rankwatch.monitor.compiles import advice, regime
from rankwatch.report.compile_text import render

FRAME = "forward@model.py:31"


def frame(sizes: int, first: float = -100.0, newest: float = 50.0, **fields: Any) -> dict[str, Any]:
    """Times are seconds from the start; the picture is of second 60."""
    ordinary = {"recordings": sizes, "rerecords": 0, "sizes": sizes, "seconds": 0.4, "pool_bytes": 0, "first_step": 1, "new_step": 40, "shape": "[64, 2048]"}
    return {**ordinary, "first_wall": WALL + first, "new_wall": WALL + newest, **fields}


def graphs(**fields: Any) -> dict[str, Any]:
    return {"recordings": 20, "rerecords": 0, "warmups": 18, "skips": 0, "captures": 0, "eager": 0, "seconds": 1.5, "pool_bytes": 163_577_856, **fields}


def doc(world: int = 2, over: bool = False, **fields: Any) -> dict[str, Any]:
    """The whole document of a job whose ranks have this `cudagraph` record; a field that is a function is asked with the rank's number."""

    def record(rank: int) -> dict[str, Any]:
        return graphs(**{key: value(rank) if callable(value) else value for key, value in fields.items()})

    made = told([], snapshot(world, cudagraph=record), over=over)
    made["regime"] = regime.judge(made)
    made["advice"] = advice.give(made)
    return made


def of(made: dict[str, Any], about: str) -> dict[str, Any]:
    return next(one for one in made["advice"] if one["key"].startswith(about))


def test_a_frame_that_still_meets_new_sizes_grows_and_the_cost_is_told():
    made = doc(frames={FRAME: frame(12, pool_bytes=64_000_000)}, pool_first_bytes=98_566_144)
    row = made["cudagraphs"]["frames"][0]
    assert (row["growing"], row["growing_ranks"], row["sizes"]) == (True, "0-1", 12)
    found = of(made, "graphs grow")
    assert found["ranks"] == "0-1"
    assert found["setting"] == "torch._dynamo.mark_dynamic(x, 0)"
    assert "pad its inputs to a few sizes" in found["words"]
    assert found["evidence"] == [
        f"{FRAME} was recorded 12 times for 12 sizes, the newest [64, 2048] at step 40; 0.4 s; the pools grew by 64.00 MB with it, 5.33 MB a recording"
    ]
    text = render(made)
    assert f"{FRAME} GROWS: recorded 12 times" in text
    assert "private pools 163.58 MB on rank 0, 98.57 MB after the first" in text


def test_dynamic_sizes_are_cured_by_skipping_graphs_for_them():
    """12 sizes with dynamic=True on two GPUs: 12 recordings, and pools that stay as they are."""
    made = doc(frames={FRAME: frame(12, shape="[384, 2048]; sizes 384")})
    found = of(made, "graphs grow")
    assert found["setting"] == "torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = True"
    assert "the pools did not grow with it (163.58 MB)" in found["evidence"][0]


@pytest.mark.parametrize(
    ("row", "over"),
    [
        (frame(8), False),  # as many as torch lets pass without a word
        (frame(12, first=-5000.0, newest=-4000.0), False),  # all of them in the first minutes, none since
        (frame(12), True),
        (frame(1, rerecords=30), False),
        ({"sizes": float("inf"), "first_wall": "x"}, False),
    ],
)
def test_few_sizes_or_ones_that_have_all_come_do_not_grow(row, over):
    made = doc(over=over, frames={FRAME: row})
    assert not made["cudagraphs"]["frames"][0]["growing"]
    assert not [one for one in made["advice"] if one["key"].startswith("graphs grow")]


def test_only_the_ranks_on_which_it_grows_are_named():
    made = doc(4, frames=lambda rank: {FRAME: frame(12 if rank == 2 else 3)})
    assert of(made, "graphs grow")["ranks"] == "2"


def test_re_recordings_are_put_down_to_memory_that_moves():
    made = doc(rerecords=5, frames={FRAME: frame(1, recordings=6, rerecords=5)})
    found = of(made, "graphs moved")
    assert found["setting"].endswith("cudagraph_unexpected_rerecord_limit")
    assert found["evidence"] == [f"{FRAME} was recorded again 5 times because memory of its graph had moved"]
    assert not [one for one in doc(frames={FRAME: frame(1, rerecords=2)})["advice"] if one["key"].startswith("graphs moved")]


def test_reasons_against_a_recording_are_joined_with_line_frame_and_ranks():
    row = {"reason": "skipping cudagraphs due to mutated inputs (1 instances)", "at": "model.py:33", "frame": FRAME}
    made = doc(3, skips=2, skip_reasons=lambda rank: [{**row, "count": rank}] if rank else [])
    assert made["cudagraphs"]["skip_reasons"] == [{**row, "count": 2, "ranks": "1-2"}]
    assert "this line writes into an input" in of(made, "graphs skip")["words"]
    assert f"{FRAME} at model.py:33: skipping cudagraphs due to mutated inputs (1 instances) (2 times)" in render(made)


def test_captures_by_hand_are_listed_and_steps_that_nobody_sees_are_asked_for():
    sites = [{"at": "train.py:31:capture", "via": "graph", "count": 1}]
    assert "captured by hand at train.py:31:capture (graph): 1 time" in render(doc(captures=1, capture_sites=sites))
    assert not [one for one in doc(captures=1, capture_sites=sites)["advice"] if one["key"] == "graphs steps"]
    made = told([], snapshot(2, cudagraph=graphs(captures=1, capture_sites=sites), steps=0))
    made["regime"] = regime.judge(made)
    assert [one["setting"] for one in advice.give(made)] == ["rankwatch.step()"]


def test_a_job_without_cuda_graphs_has_no_such_part():
    made = told([], snapshot(2))
    assert made["cudagraphs"] == {}
    assert "CUDA graphs" not in render({**made, "regime": regime.judge(made)})


@pytest.mark.parametrize(
    "rubbish", [{"frames": [1], "skip_reasons": {"a": 1}, "capture_sites": "x", "pool_bytes": "y"}, {"frames": {"f": 3}}, {"recordings": float("nan")}]
)
def test_records_of_wrong_types_are_empty_parts(rubbish):
    made = told([], snapshot(1, cudagraph=rubbish))
    assert made["cudagraphs"]["frames"] == []
    render(made)
