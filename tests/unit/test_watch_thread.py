"""The monitor's thread: calls in their order, looks when they are due, errors that end nothing."""

import threading

import pytest

from rankwatch.monitor import watch_thread
from rankwatch.monitor.watch_thread import ERRORS_IN_A_ROW, WatchThread

WAIT_S = 20.0


class Watched:
    """A thread whose looks the test sees. poll_s: until the next one."""

    def __init__(self, poll_s=3600.0):
        self.seen, self.errors, self.pending = [], [], False
        self.looked, self.taken = threading.Semaphore(0), threading.Event()
        self.thread = WatchThread(self.look, lambda: poll_s, lambda: self.pending, self.taken.set, lambda text, last: self.errors.append((text, last)))

    def look(self):
        self.seen.append("look")
        self.looked.release()


@pytest.fixture
def watched():
    made = Watched()
    yield made
    made.thread.stop()
    made.thread.send(lambda: None)  # the thread sees that it is over


def test_calls_are_done_in_their_order_after_the_first_look(watched):
    for name in "abc":
        watched.thread.send(lambda name=name: watched.seen.append(name))
    watched.thread.start()
    watched.thread.send(lambda: None, WAIT_S)
    assert watched.seen == ["look", "a", "b", "c"]


def test_several_calls_for_a_look_are_one_until_it_is_made(watched):
    watched.thread.start()
    assert watched.looked.acquire(timeout=WAIT_S)
    goes_on = threading.Event()
    watched.thread.send(lambda: goes_on.wait(WAIT_S))
    for _ in range(3):
        watched.thread.look_now()
    goes_on.set()
    watched.thread.send(lambda: None, WAIT_S)
    watched.thread.look_now()
    watched.thread.send(lambda: None, WAIT_S)
    assert watched.seen == ["look"] * 3


def test_evidence_that_is_on_its_way_is_taken_between_two_looks(watched, monkeypatch):
    monkeypatch.setattr(watch_thread, "POLL_EVIDENCE_S", 0.01)
    watched.pending = True
    watched.thread.start()
    assert watched.taken.wait(WAIT_S)
    assert watched.seen == ["look"]


def test_nobody_waits_for_a_thread_that_was_not_started(watched):
    watched.thread.send(lambda: watched.seen.append("late"), 3600.0)
    assert watched.seen == []


def test_an_error_is_told_with_its_place_and_what_follows_is_done(watched):
    watched.thread.guarded(lambda: {}["key"])
    watched.thread.guarded(lambda: watched.seen.append("next"))
    ((text, last),) = watched.errors
    assert text.startswith("KeyError: 'key' (test_watch_thread.py:")
    assert (last, watched.seen, watched.thread.off) == (False, ["next"], False)


def test_after_many_errors_in_a_row_it_is_off_which_is_told_once(watched):
    def fails():
        raise ValueError("no")

    for _ in range(ERRORS_IN_A_ROW - 1):
        watched.thread.guarded(fails)
    watched.thread.guarded(lambda: None)
    for _ in range(ERRORS_IN_A_ROW + 1):
        watched.thread.guarded(fails)
    assert [last for _, last in watched.errors].count(True) == 1
    assert watched.errors[-2][1] is True
    assert watched.thread.off
