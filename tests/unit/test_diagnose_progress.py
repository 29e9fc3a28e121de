"""Signs of life of a suspect."""

from rankwatch.model import RankState
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
