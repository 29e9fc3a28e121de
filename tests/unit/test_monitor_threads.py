"""How long a thread has slept, and what may be said of the sleep that it is in."""

from rankwatch.model import KernelWait
from rankwatch.monitor.threads import Threads


class Looks:
    """A kernel look of given age and content."""

    def __init__(self, at, **wait):
        self.answer = (at, {7: KernelWait(7, **wait)})

    def of(self, key, tids):
        return self.answer


def put(proc, tid, state, ran):
    place = proc / "7" / "task" / str(tid)
    place.mkdir(parents=True, exist_ok=True)
    (place / "stat").write_text(f"{tid} (python) {state} 1 " + "0 " * 40)
    (place / "schedstat").write_text(f"1 2 {ran}\n")


def test_a_look_from_before_the_present_sleep_says_nothing_of_it(tmp_path):
    threads = Threads()
    put(tmp_path, 7, "S", 10)
    threads.look((7, 1), str(tmp_path), 100.0, Looks(100.0, state="S", call="read", fd=0))
    assert (threads.main.call, threads.main.asleep_s) == ("read", 0.0)
    put(tmp_path, 7, "S", 11)
    threads.look((7, 1), str(tmp_path), 101.0, Looks(100.0, state="S", call="read", fd=0))
    assert (threads.main.call, threads.main.asleep_s) == ("", 0.0)
    threads.look((7, 1), str(tmp_path), 103.0, Looks(102.0, state="S", call="futex"))
    assert (threads.main.call, threads.main.asleep_s) == ("futex", 2.0)


def test_a_look_in_another_state_says_nothing(tmp_path):
    threads = Threads()
    put(tmp_path, 7, "D", 10)
    threads.look((7, 1), str(tmp_path), 100.0, Looks(100.0, state="S", call="read", fd=0))
    assert (threads.main.state, threads.main.call) == ("D", "")


def test_a_main_thread_that_runs_waits_for_nothing(tmp_path):
    threads = Threads()
    put(tmp_path, 7, "R", 10)
    threads.look((7, 1), str(tmp_path), 100.0, Looks(100.0, state="S", call="read", fd=0))
    assert threads.main is None
