"""Signs of life of a suspect."""

from dataclasses import replace

import pytest

from rankwatch.model import Frame, KernelWait, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose.progress import observe, silent_since, with_absent_peers
from rankwatch.monitor.diagnose.state import Watch
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


LIB = "/usr/lib/python3.11/"
LOCK = (Frame("report", "train.py", 22), Frame("flush_metrics", "train.py", 18))
LOGGING = (Frame("Handler.acquire", LIB + "logging/__init__.py", 927), Frame("save", "train.py", 22))
EVENT = (Frame("Condition.wait", LIB + "threading.py", 327), Frame("Event.wait", LIB + "threading.py", 629), Frame("save", "train.py", 22))
QUEUE = (Frame("Condition.wait", LIB + "threading.py", 327), Frame("Queue.get", LIB + "queue.py", 171), Frame("batches", "train.py", 22))
JOIN = (Frame("Thread.join", LIB + "threading.py", 1112), Frame("save", "train.py", 22))


def watched(main, threads_ratio, main_ratio=0.0, children_ratio=0.0, letter="S", seconds=30):
    """The watch of a rank in `main`, by looks a second apart and a sample every 10 s; ratios are of a core."""
    watch, earlier, sample = None, None, None
    for t in range(seconds):
        if t % 10 == 4:
            earlier, sample = sample, Stack(1, 100.0 + t, (Thread("MainThread", 1, main),))
        own = (threads_ratio + main_ratio) * t
        process = Process(
            1, True, "S", cpu_s=own, tree_cpu_s=own + children_ratio * t, main_cpu_s=main_ratio * t, main_wait=KernelWait(1, letter) if letter else None
        )
        watch = observe(watch, RankState(1, heartbeat_at=100.0 + t, process=process, stack=sample, earlier_stack=earlier), 100.0 + t, 5.0, Limits())
    return watch


@pytest.mark.parametrize("main", [LOCK, LOGGING, EVENT], ids=["lock", "logging", "event"])
def test_a_thread_that_runs_beside_a_main_thread_that_stands_is_no_progress(main):
    """Two samples show one line: until then it could be anything."""
    assert watched(main, 0.18).last_progress <= 115.0
    assert watched(main, 0.18, main_ratio=0.002).last_progress <= 115.0


@pytest.mark.parametrize("main", [QUEUE, JOIN], ids=["queue", "join"])
def test_a_thread_that_it_waits_for_is_progress(main):
    assert watched(main, 0.18).last_progress >= 125.0


def test_threads_that_work_for_a_native_call_are_progress():
    """A tokenizer's pool: the call returns once all of its threads have done their part."""
    assert watched(LOCK, 0.6).last_progress >= 125.0


def test_a_main_thread_that_works_itself_is_progress_whatever_else_runs():
    assert watched(LOCK, 0.1, main_ratio=0.06, letter="").last_progress >= 125.0
    assert watched(LOCK, 0.1, main_ratio=0.06).last_progress >= 125.0


def test_children_that_work_are_progress_beside_a_main_thread_that_sleeps():
    assert watched(LOCK, 0.1, children_ratio=0.1).last_progress >= 125.0


def test_absent_ranks_of_one_hang_are_silent_together():
    watches = {
        rank: Watch(100.0, 130.0, 0.0, 0, (), last_progress=at, why="its own") for rank, at in ((0, 129.0), (1, 101.0), (2, None), (3, 124.0), (4, None))
    }
    ranks = {rank: RankState(rank) for rank in watches}
    found = with_absent_peers(watches, [(0, 1, 2, 3)], ranks, 130.0, 5.0)
    assert {rank: watch.last_progress for rank, watch in found.items()} == {0: 129.0, 1: 129.0, 2: 129.0, 3: 124.0, 4: None}
    assert (found[3].why, found[1].why) == ("its own", "rank 0 gets on, and it may wait for that one")
    assert with_absent_peers({4: watches[4]}, [(0, 4)], ranks, 130.0, 5.0) == {4: watches[4]}
