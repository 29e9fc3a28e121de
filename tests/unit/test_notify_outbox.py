"""The box of one target: bounded, the newest state of a key, tried again, and nobody waits for it."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from rankwatch.notify import outbox
from rankwatch.notify.outbox import DROPPED, FAILED, MAX_AGE_S, OK, Message, Outbox, pause_s, put
from rankwatch.notify.post import NotTaken


def message(key, critical=False):
    return Message(key, lambda: key.encode(), critical)


def keys(waiting):
    return [each.key for each in waiting]


def filled(*criticals):
    return tuple(message(str(number), critical) for number, critical in enumerate(criticals))


# -- what waits --------------------------------------------------------------------------------------------------------


def test_a_newer_state_takes_the_place_of_the_older_one():
    newer = message("0")
    waiting, dropped = put(filled(False, False), newer)
    assert waiting[0] is newer
    assert (keys(waiting), dropped) == (["0", "1"], 0)


def test_a_full_box_drops_the_oldest_that_is_not_critical():
    waiting, dropped = put(filled(True, False, False), message("new"), limit=3)
    assert (keys(waiting), dropped) == (["0", "2", "new"], 1)


def test_a_full_box_of_critical_ones_drops_the_oldest_for_a_critical_one_alone():
    full = filled(True, True)
    assert keys(put(full, message("new", critical=True), limit=2)[0]) == ["1", "new"]
    assert put(full, message("new"), limit=2) == (full, 1)


def test_pauses_grow_to_half_a_minute():
    assert [pause_s(failures) for failures in (1, 2, 3, 6, 1000)] == [1, 2, 4, 30, 30]


# -- the thread --------------------------------------------------------------------------------------------------------


class Other:
    """The other side: answers as the test says, one answer an attempt; the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.taken = []
        self.attempts = 0
        self.attempted = threading.Condition()

    def __call__(self, body):
        with self.attempted:
            self.attempts += 1
            self.attempted.notify_all()
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise answer
        self.taken.append(body)

    def after(self, attempts):
        with self.attempted:
            assert self.attempted.wait_for(lambda: self.attempts >= attempts, 10)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(outbox, "FIRST_PAUSE_S", 0.001)


def box_for(other, said=None, clock=lambda: 0.0):
    return Outbox("webhook https://chat", other, (said if said is not None else []).append, clock)


def test_messages_arrive_in_their_order():
    other = Other(None)
    box = box_for(other)
    for key in "abc":
        box.put(key, key.encode)
    assert box.empty(10)
    assert other.taken == [b"a", b"b", b"c"]
    assert box.counts[OK] == 3


@pytest.mark.usefixtures("quick")
def test_what_was_not_taken_is_tried_again_and_said_once():
    other, said = Other(NotTaken("HTTP 503"), NotTaken("HTTP 503"), None), []
    box = box_for(other, said)
    box.put("a", lambda: b"a")
    assert box.empty(10)
    assert other.taken == [b"a"]
    assert said == ["webhook https://chat has not taken a message: HTTP 503; tried again", "webhook https://chat takes messages again"]
    assert box.counts == Counter({FAILED: 2, OK: 1, DROPPED: 0})


def test_what_will_never_be_taken_is_given_up():
    other, said = Other(NotTaken("HTTP 400: bad labels", again=False)), []
    box = box_for(other, said)
    box.put("a", lambda: b"a")
    assert box.empty(10)
    assert said == ["webhook https://chat has not taken a message: HTTP 400: bad labels; it is given up"]
    assert box.counts == Counter({FAILED: 1, DROPPED: 1})


def test_what_is_too_old_is_given_up():
    times = iter([0.0, MAX_AGE_S + 1])
    box = box_for(Other(NotTaken("HTTP 503")), clock=lambda: next(times))
    box.put("a", lambda: b"a")
    assert box.empty(10)
    assert box.counts[DROPPED] == 1


def test_a_message_that_cannot_be_made_keeps_no_other_from_being_sent(quick):
    other = Other(None)
    box = box_for(other)
    box.put("a", lambda: b"%d" % ())
    box.put("b", lambda: b"b")
    assert box.empty(10)
    assert other.taken == [b"b"]


def test_at_the_end_what_waits_for_its_next_attempt_gets_it_now(monkeypatch):
    monkeypatch.setattr(outbox, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(outbox, "LONGEST_PAUSE_S", 1000.0)
    other = Other(NotTaken("HTTP 503"), None)
    box = box_for(other)
    box.put("a", lambda: b"a")
    other.after(1)
    assert not box.empty(0.0)
    box.hurry()
    assert box.empty(10)
    assert other.taken == [b"a"]


def test_a_state_that_is_newer_than_the_one_on_its_way_is_sent_too():
    under_way, go_on = threading.Event(), threading.Event()
    taken = []

    def slow(body):
        under_way.set()
        assert go_on.wait(10)
        taken.append(body)

    box = box_for(slow)
    box.put("alerts", lambda: b"old")
    assert under_way.wait(10)
    box.put("alerts", lambda: b"new")
    go_on.set()
    assert box.empty(10)
    assert taken == [b"old", b"new"]
