"""The regime of a job as the compile document proves it, and the lines on stderr that follow from it."""

from __future__ import annotations

import pytest

from rankwatch.monitor.compiles.news import news
from rankwatch.monitor.compiles.regime import judge


def doc(**parts):
    """A document of four ranks at step 40 that compiled one frame long ago, with `parts` in place of its own."""
    whole = {
        "run": {"world_size": 4, "ranks_seen": 4, "steps_min": 40, "steps_max": 40},
        "ranks": {"requested": {"0-3": {"count": 1, "first_at": "train.py:20", "backends": ["inductor"]}}, "disabled": {}, "stance": {}},
        "totals": {"frames": 1, "graphs": 1, "library": 0, "skipped": 0, "failures": 0, "recompiles": 0, "graph_breaks": 0, "compile_max_s": 6.2},
        "frames": [frame()],
        "steps": {"since_compile": 39, "last_compile_step": 1},
    }
    return whole | parts


def frame(**fields):
    return {"frame": "forward@model.py:12", "ranks": "0-3", "compiles": 1, "recompiles": 0, "graphs": 1, "seconds_max": 6.2, "limited": ""} | fields


def totals(**fields):
    return doc()["totals"] | fields


@pytest.mark.parametrize(
    ("document", "name", "words"),
    [
        (doc(), "compiled", "1 graph compiled, steady: no compile for 39 steps"),
        (
            doc(steps={"since_compile": 2, "last_compile_step": 1}, run={"world_size": 4, "steps_max": 3}),
            "starting",
            "1 graph so far, still compiling or young",
        ),
        (doc(totals=totals(graph_breaks=2, graphs=3)), "compiled", "3 graphs compiled, cut by 2 graph breaks, steady: no compile for 39 steps"),
        (doc(frames=[], totals=dict.fromkeys(totals(), 0), ranks={"requested": {}}), "not_used", "no rank has asked for torch.compile"),
        (
            doc(
                frames=[],
                totals=dict.fromkeys(totals(), 0),
                ranks={"requested": {"0-3": {"count": 1, "first_at": "train.py:20"}}, "disabled": {"0-3": "TORCHDYNAMO_DISABLE=1"}},
            ),
            "fell_back",
            "torch.compile is asked for at train.py:20, but it is switched off by TORCHDYNAMO_DISABLE=1: everything runs eagerly",
        ),
        (
            doc(
                frames=[],
                totals=dict.fromkeys(totals(), 0),
                ranks={"requested": {"0-3": {"count": 1, "first_at": "train.py:20"}}, "stance": {"0-3": "force_eager"}},
            ),
            "fell_back",
            'torch.compile is asked for at train.py:20, but it is switched off by torch.compiler.set_stance("force_eager"): everything runs eagerly',
        ),
        (
            doc(frames=[], totals=totals(frames=0, graphs=0, library=48)),
            "compiled_nothing",
            "torch.compile was asked for at train.py:20 and not one graph was compiled in 40 steps: everything runs eagerly",
        ),
        (
            doc(frames=[frame(failures=[{"type": "BackendCompilerFailed", "reason": "no kernel", "at": "model.py:14", "ranks": "3", "count": 1}])]),
            "failing",
            "compiling forward@model.py:12 fails on rank 3 at model.py:14: BackendCompilerFailed: no kernel; "
            "the job has caught the error and goes on without that graph",
        ),
        (
            doc(frames=[frame(compiles=8, recompiles=8, limit=8, cache_size=8, limited="2-3", last_reason="k == 1")]),
            "fell_back",
            "forward@model.py:12 has reached the recompile limit of 8 on ranks 2-3 and runs eagerly there for ever",
        ),
        (
            doc(
                frames=[frame(compiles=6, recompiles=5, guards=[{"class": "value", "text": "k == 4", "ranks": "0-3"}])],
                steps={"since_compile": 2, "last_compile_step": 38},
            ),
            "compiles_for_ever",
            "forward@model.py:12 was recompiled 5 times in 40 steps, the last time 2 steps ago: k == 4",
        ),
        (
            doc(frames=[frame(graphs=0, breaks=[{"at": "model.py:15", "reason": "print", "gb": "gb0012", "ranks": "0-3"}]), frame(frame="block@model.py:4")]),
            "fell_back",
            "forward@model.py:12 runs in Python because of a graph break at model.py:15 (print); only what it calls is compiled, piece by piece",
        ),
    ],
    ids=["compiled", "young", "breaks_on_the_way", "not_used", "disabled", "stance", "nothing", "failing", "limit", "storm", "break_in_the_loop"],
)
def test_the_gravest_regime_that_is_proved_is_told(document, name, words):
    found = judge(document)
    assert (found["name"], found["words"]) == (name, words)


def test_a_storm_that_has_stopped_is_no_storm():
    stopped = doc(frames=[frame(compiles=6, recompiles=5)], steps={"since_compile": 30, "last_compile_step": 10})
    assert judge(stopped)["name"] == "compiled"


def test_a_frame_that_is_compiled_anew_at_every_step_is_compiled_for_ever():
    again = frame(compiles=220, steps_compiled=220, last_step=219)
    for over in (False, True):
        told = judge(doc(over=over, run={"steps_max": 220}, frames=[again], steps={"since_compile": 1, "last_compile_step": 219}))
        words = "forward@model.py:12 is compiled anew in the loop, in 220 of 220 steps, the last time in the newest step: "
        assert (told["name"], told["words"]) == ("compiles_for_ever", words + "torch._dynamo.reset() or a fresh torch.compile in the loop")


@pytest.mark.parametrize(
    "fields",
    [
        {"compiles": 48, "steps_compiled": 1, "last_step": 0},
        {"compiles": 4, "steps_compiled": 4, "last_step": 9},
        {"compiles": 3, "steps_compiled": 3, "last_step": 39},
    ],
    ids=["many blocks of one name", "long ago", "few"],
)
def test_pieces_of_one_name_that_were_each_compiled_once_are_no_storm(fields):
    assert judge(doc(frames=[frame(**fields)], steps={"since_compile": 1, "last_compile_step": 39}))["name"] == "starting"


def test_a_storm_of_one_frame_that_has_stopped_is_not_told_for_the_late_compile_of_another():
    old, late = frame(compiles=6, recompiles=5, steps_compiled=6, last_step=10), frame(frame="evaluate@train.py:50", steps_compiled=1, last_step=38)
    assert judge(doc(frames=[old, late], steps={"since_compile": 2, "last_compile_step": 38}))["name"] == "starting"


@pytest.mark.parametrize(
    ("since", "words"),
    [
        (0, "1 graph compiled; the run has ended right after its last compile"),
        (1, "1 graph compiled; the run has ended in the step of its last compile"),
        (2, "1 graph compiled; the run has ended one step after its last compile"),
        (4, "1 graph compiled; the run has ended 3 steps after its last compile"),
        (5, "1 graph compiled, steady: no compile for 5 steps"),
    ],
)
def test_a_run_that_ended_soon_after_a_compile_is_not_called_steady(since, words):
    told = judge(doc(over=True, steps={"since_compile": since, "last_compile_step": 40 - since}))
    assert (told["name"], told["words"]) == ("compiled", words)


@pytest.mark.parametrize(
    ("timeline", "steps", "words"),
    [
        ([], 0, "ended before a graph was compiled"),
        ([{"rank": 0, "frame": "forward@model.py:12", "end_wall": None}], 0, "ended while compiling forward@model.py:12"),
        ([{"rank": 0, "frame": "forward@model.py:12", "end_wall": None}], 40, "ended while compiling forward@model.py:12"),
    ],
    ids=["no step", "in the first compile", "in a compile after eager steps"],
)
def test_a_job_that_was_stopped_in_its_first_compile_has_not_compiled_nothing(timeline, steps, words):
    told = judge(doc(over=True, frames=[], totals=dict.fromkeys(totals(), 0), timeline=timeline, run={"steps_max": steps}, steps={}))
    assert (told["name"], told["words"]) == ("starting", words)


def test_nothing_compiled_is_not_told_before_a_step_or_while_something_compiles():
    nothing = totals(frames=0, graphs=0, library=3)
    assert judge(doc(frames=[], totals=nothing, run={"world_size": 4, "steps_max": 0}))["name"] == "starting"
    assert judge(doc(frames=[], totals=nothing, now=[{"rank": 0}]))["name"] != "compiled_nothing"


def test_an_empty_document_makes_no_regime_up():
    assert judge({})["name"] == "not_used"


def test_a_job_that_compiles_and_runs_steadily_makes_no_news():
    assert list(news(doc() | {"regime": judge(doc())})) == []


def test_a_limit_is_news_and_the_regime_that_follows_from_it_is_not_said_again():
    document = doc(frames=[frame(compiles=8, recompiles=8, limit=8, limited="2-3", last_reason="k == 1")])
    (found,) = news(document | {"regime": judge(document)})
    assert (found.kind, found.frame, found.ranks) == ("recompile_limit", "forward@model.py:12", "2-3")
    assert found.words == "compiled 8 times, now it runs eagerly for ever; the last guard: k == 1"


NO_KERNEL = [{"type": "BackendCompilerFailed", "reason": "no kernel", "at": "model.py:14", "ranks": "3", "count": 1}]


@pytest.mark.parametrize(
    ("parts", "steps", "words"),
    [
        ({"suppress_errors": "0-3"}, 0, "BackendCompilerFailed: no kernel; torch._dynamo.config.suppress_errors is on, so it runs eagerly; 1 more fail"),
        ({}, 3, "BackendCompilerFailed: no kernel; the job has caught the error and goes on without that graph; 1 more fail"),
        ({}, 2, None),
    ],
    ids=["suppressed", "caught", "may end the job yet"],
)
def test_a_failure_that_the_job_outlives_is_news_once(parts, steps, words):
    failing = [frame(failures=NO_KERNEL, last_step=1), frame(frame="block@model.py:4", failures=NO_KERNEL, last_step=0)]
    document = doc(frames=failing[: 1 + bool(words)], ranks=parts, run={"world_size": 4, "steps_min": steps, "steps_max": 40})
    told = [(one.key, one.kind, one.frame, one.ranks, one.words) for one in news(document | {"regime": judge(document)})]
    assert told == ([("failing", "failing", "forward@model.py:12", "3", words)] if words else [])


def test_a_frame_that_fails_anew_in_each_step_ends_no_job():
    document = doc(frames=[frame(failures=NO_KERNEL, last_step=40, steps_compiled=3)])
    assert [one.kind for one in news(document)] == ["failing"]


def test_different_splits_are_an_alarm_and_a_cold_cache_is_none():
    split = {"kind": "different_split", "words": "ranks 0-2 have 4 buckets, rank 3 has 3", "groups": [{"ranks": "0-2"}, {"ranks": "3"}]}
    cold = {"kind": "cache", "words": "rank 1 misses", "groups": []}
    (found,) = news(doc(divergence=[cold, split]))
    assert (found.kind, found.ranks, found.words) == ("different_split", "0-2,3", "ranks 0-2 have 4 buckets, rank 3 has 3")
