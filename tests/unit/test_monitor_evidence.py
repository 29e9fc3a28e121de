"""How often stacks are taken and which of them are kept."""

import pytest

from rankwatch.model import Frame, NodeReport, RankState, Stack, Thread
from rankwatch.monitor.evidence import Evidence
from rankwatch.monitor.pool import Job
from rankwatch.monitor.stacks import SelfTest, Target


class FakeCapture:
    """Answers when `finish` is called."""

    def __init__(self):
        self.jobs = []
        self.tests = []

    def start(self, target, native=False):
        job = Job(lambda: None)
        self.jobs.append((target.rank, native, job))
        return job

    def start_self_test(self, pid):
        result = self.tests.pop(0)
        job = Job(lambda: result)
        job.run()
        return job

    def finish(self, at, name="f"):
        for rank, native, job in self.jobs:
            threads = (Thread("MainThread", rank, (Frame(name, "a.py", 1),)),)
            job._function = lambda rank=rank, native=native, threads=threads: Stack(rank, at, threads, "native text" if native else "python text", native)
            job.run()
        started, self.jobs = [(rank, native) for rank, native, _job in self.jobs], []
        return started


@pytest.fixture
def clock():
    return [100.0]


@pytest.fixture
def capture():
    return FakeCapture()


@pytest.fixture
def evidence(capture, clock):
    return Evidence(capture, clock=lambda: clock[0])


def test_a_rank_is_not_dumped_again_while_a_dump_is_under_way_or_within_a_second(evidence, capture, clock):
    evidence.request([Target(1, 11)])
    evidence.request([Target(1, 11)])
    assert capture.finish(100.1) == [(1, False)]
    assert list(evidence.collect()) == [1]
    clock[0] = 100.5
    evidence.request([Target(1, 11)])
    assert capture.finish(100.5) == []
    clock[0] = 101.1
    evidence.request([Target(1, 11)])
    assert capture.finish(101.1) == [(1, False)]


def test_an_urgent_request_does_not_wait(evidence, capture):
    evidence.request([Target(1, 11)])
    capture.finish(100.1)
    evidence.collect()
    evidence.request([Target(1, 11)], at_once=True)
    assert capture.finish(100.2) == [(1, False)]


def test_after_ten_dumps_they_come_every_five_seconds(evidence, capture, clock):
    taken = []
    for second in range(30):
        clock[0] = 100.0 + second
        evidence.request([Target(1, 11)])
        if capture.finish(clock[0]):
            taken.append(second)
        evidence.collect()
    assert taken == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 14, 19, 24, 29]


def test_the_newest_two_samples_reach_the_report(evidence, capture, clock):
    for at in (100.0, 102.0, 104.0):
        clock[0] = at
        evidence.request([Target(1, 11)])
        capture.finish(at)
        evidence.collect()
    report = evidence.into(NodeReport("n", (RankState(0), RankState(1))))
    assert report.ranks[0].stack is None
    assert (report.ranks[1].stack.at, report.ranks[1].earlier_stack.at) == (104.0, 102.0)


def test_only_samples_of_the_wait_belong_to_an_incident(evidence, capture):
    evidence.request([Target(1, 11)])
    capture.finish(100.0)
    evidence.collect()
    assert evidence.latest((0, 1), not_before=100.5) == {}
    assert list(evidence.latest((0, 1), not_before=99.0)) == [1]


def test_a_native_dump_is_taken_once_and_shown_below_the_python_frames(evidence, capture, clock):
    evidence.request([Target(1, 11)])
    evidence.request([Target(1, 11)], native=True)
    assert evidence.pending
    assert capture.finish(100.0) == [(1, False), (1, True)]
    evidence.collect()
    stack = evidence.latest((1,), 99.0)[1]
    assert stack.native
    assert stack.main == (Frame("f", "a.py", 1),)
    assert stack.text == "python text\n-- with native frames\nnative text"
    evidence.request([Target(1, 11)], native=True)
    assert capture.finish(101.0) == []
    clock[0] = 111.0
    evidence.forget_native((1,))
    evidence.request([Target(1, 11)], native=True)
    assert capture.finish(102.0) == [(1, True)]
    assert not evidence.into(NodeReport("n", (RankState(1),))).ranks[0].stack.native


def test_a_native_dump_that_an_incident_was_opened_by_is_kept_for_it(evidence, capture, clock):
    evidence.request([Target(1, 11)], native=True)
    assert capture.finish(100.0) == [(1, True)]
    evidence.collect()
    clock[0] = 102.0
    evidence.forget_native((1,))
    assert evidence.into(NodeReport("n", (RankState(1),))).ranks[0].native_stack.native


def test_a_later_wait_has_a_native_dump_of_its_own(evidence, capture, clock):
    taken = []
    for second in range(0, 70, 5):
        clock[0] = 100.0 + second
        evidence.request([Target(1, 11)], native=True)
        taken += [second for _ in capture.finish(clock[0])]
        evidence.collect()
    assert taken == [0, 30, 60]


def test_the_self_test_is_tried_on_other_ranks_before_it_fails(evidence, capture):
    capture.tests = [SelfTest(False, "no"), SelfTest(False, "no"), SelfTest(False, "refused")]
    targets = [Target(0, 10), Target(1, 11)]
    results = []
    for _ in range(5):
        evidence.test(targets)
        results.append(evidence.self_test)
    assert results == [None, None, SelfTest(False, "refused"), SelfTest(False, "refused"), SelfTest(False, "refused")]


def test_the_first_good_self_test_counts(evidence, capture):
    capture.tests = [SelfTest(False, "no"), SelfTest(True, "ok")]
    evidence.test([Target(0, 10)])
    evidence.test([Target(0, 10)])
    assert evidence.self_test == SelfTest(True, "ok")
