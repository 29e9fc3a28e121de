"""Signs of life of a suspect."""

from dataclasses import replace

from rankwatch.model import Frame, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose.progress import observe, silent_since
from rankwatch.monitor.policy import Limits


def test_python_threads_that_run_again_after_a_held_gil_are_progress():
    watch = None
    for now in range(100, 121):
        beat_at = 100.0 if now < 120 else 119.8
        watch = observe(watch, RankState(1, heartbeat_at=beat_at), float(now), 5.0, Limits())
    assert watch.last_progress == 120.0
    assert watch.why == "its Python threads run again"
    assert silent_since(watch, 100.0) == 120.0


def test_a_steady_heartbeat_is_no_progress_by_itself():
    watch = None
    for now in range(100, 121):
        watch = observe(watch, RankState(1, heartbeat_at=now - 0.2), float(now), 5.0, Limits())
    assert watch.last_progress is None


def test_what_our_own_question_costs_a_rank_is_no_progress():
    """Without py-spy the rank's worker server writes the stack into a temporary file: 8 KiB of blocks a question."""
    before = RankState(1, process=Process(1, True, disk_bytes=0), stack=None)
    stacks = [Stack(1, at, (Thread("MainThread", 1, (Frame("f", "t.py", 1),)),), text="x" * 300, asked=True) for at in (101.0, 103.0)]
    watch = observe(None, before, 100.0, 5.0, Limits())
    after = replace(before, process=Process(1, True, disk_bytes=16384), stack=stacks[1], earlier_stack=stacks[0])
    assert observe(watch, after, 105.5, 5.0, Limits()).last_progress is None
    by_pyspy = replace(after, stack=replace(stacks[1], asked=False), earlier_stack=replace(stacks[0], asked=False))
    assert "MB moved" in observe(watch, by_pyspy, 105.5, 5.0, Limits()).why
    writes = replace(after, process=Process(1, True, disk_bytes=16384 + 60_000))
    assert "MB moved" in observe(watch, writes, 105.5, 5.0, Limits()).why
