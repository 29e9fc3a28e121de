"""When nodes are pulled and when a round is over: pure, a clock of the test's own."""

import itertools

import pytest

from rankwatch.monitor.nodes import schedule
from rankwatch.monitor.nodes.turns import Turns


@pytest.fixture(autouse=True)
def many_nodes(monkeypatch) -> None:
    """The few nodes of a test stand for many."""
    monkeypatch.setattr(schedule, "FEW_NODES", 0)


def turns_of(count, workers=32):
    turns = Turns(workers)
    turns.set_nodes(range(count), 0.0)
    return turns


def ask_all(turns, now, failing=(), took_s=0.01):
    """Pull whatever is due, as fast threads would. The nodes, in order."""
    asked = []
    while (node := turns.next(now)) is not None:
        turns.done(node, now + took_s, int(node in failing), 0.0)
        asked.append(node)
    return asked


def run(turns, start, seconds, failing=(), step=0.01, failures=None):
    """A puller's life: [(when, node)] of all pulls, [(when, kind)] of all rounds that were over. failing: fail whenever they are asked."""
    failures = {} if failures is None else failures
    pulls, rounds = [], []
    for tick in range(round(seconds / step) + 1):
        now = start + tick * step
        over, _ = turns.tick(now)
        rounds += [(round(now, 3), each.kind) for each in over]
        while (node := turns.next(now)) is not None:
            failures[node] = failures.get(node, 0) + 1 if node in failing else 0
            turns.done(node, now + 0.002, failures[node], 0.0)
            pulls.append((round(now, 3), node))
    return pulls, rounds


def test_every_node_is_pulled_once_a_round_and_a_round_comes_every_two_seconds():
    pulls, rounds = run(turns_of(4), 0.0, 8.5)
    assert [at for at, node in pulls if node == 3] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert len(rounds) == 5


def test_suspicion_halves_the_period_at_once():
    turns = turns_of(1)
    run(turns, 0.0, 0.9)
    turns.suspected = True
    pulls, _ = run(turns, 0.91, 3.0)
    assert [at for at, _ in pulls] == [1.0, 2.0, 3.0]


def test_a_node_that_fails_is_left_alone_for_longer_and_longer_up_to_ten_seconds():
    pulls, _ = run(turns_of(2), 0.0, 60.0, failing={1})
    times = [at for at, node in pulls if node == 1]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[:4] == [2.0, 4.0, 6.0, 10.0]  # 1, 2, 4, 8 s and then the next round
    assert all(gap <= schedule.BACKOFF_MOST_S + schedule.PERIOD_S for gap in gaps)
    assert [schedule.backoff_s(n) for n in (0, 1, 2, 3, 4, 5, 99)] == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_the_first_pulls_of_2048_nodes_come_in_waves():
    turns = turns_of(2048)
    turns.tick(0.0)
    assert turns.waiting == schedule.WAVE_NODES
    pulls, _ = run(turns, 0.0, 1.9)
    assert len(pulls) == 2048
    at_once = [sum(at == moment for at, _ in pulls) for moment in {at for at, _ in pulls}]
    assert max(at_once) == schedule.WAVE_NODES
    assert max(at for at, _ in pulls) <= schedule.PERIOD_S / 2 + 0.02
    assert schedule.wave_s(31, 256) == 0.0 < schedule.wave_s(32, 256) == schedule.WAVE_S


def test_a_round_is_over_when_all_answers_are_in():
    turns = turns_of(2)
    turns.tick(0.0)
    first, second = turns.next(0.0), turns.next(0.0)
    assert not turns.done(first, 0.1, 0, 0.0)
    assert turns.tick(0.2)[0] == []
    assert turns.done(second, 0.3, 0, 0.0)
    assert [each.kind for each in turns.tick(0.3)[0]] == ["regular"]


def test_a_round_is_over_at_its_deadline_whoever_is_missing():
    turns = turns_of(2)
    turns.tick(0.0)
    turns.done(turns.next(0.0), 0.1, 0, 0.0)
    turns.next(0.0)
    over, wake_at = turns.tick(0.2)
    assert (over, wake_at) == ([], schedule.ROUND_S)
    assert [each.kind for each in turns.tick(schedule.ROUND_S)[0]] == ["regular"]


def test_a_node_that_was_slow_or_failed_does_not_hold_up_the_next_round():
    for failures, took_s in ((1, 0.01), (0, 0.6)):
        turns = turns_of(2)
        turns.tick(0.0)
        turns.done(turns.next(0.0), took_s, failures, 0.0)
        turns.done(turns.next(0.0), 0.01, 0, 0.0)
        turns.tick(0.7)
        turns.tick(2.1)
        assert turns.next(2.1) == 1
        assert turns.done(1, 2.2, 0, 0.0)
        assert [each.kind for each in turns.tick(2.2)[0]] == ["regular"]  # node 0 may still be asked


def test_many_dead_nodes_leave_half_of_the_threads_to_the_living():
    turns = turns_of(20, workers=4)
    failing = set(range(10))
    run(turns, 0.0, 1.0, failing=failing)
    turns.tick(2.0)
    hung = []
    while (node := turns.next(2.0)) is not None and len(hung) < 20:
        if node in failing:
            hung.append(node)  # holds its thread
        else:
            turns.done(node, 2.001, 0, 0.0)
    assert len(hung) == 2


def test_with_a_thread_for_each_node_all_dead_ones_are_asked_at_once():
    turns = turns_of(4)
    run(turns, 0.0, 1.0, failing={0, 1, 2})
    turns.tick(2.0)
    assert {turns.next(2.0) for _ in range(4)} == {0, 1, 2, 3}


def test_a_dropped_node_gives_its_place_back_though_its_pull_is_under_way():
    turns = turns_of(5, workers=2)
    run(turns, 0.0, 1.0, failing={0, 1})
    turns.tick(2.0)
    ask_all_but = [turns.next(2.0) for _ in range(3)]
    for node in ask_all_but:
        turns.done(node, 2.1, 0, 0.0)
    assert turns.next(2.1) == 0
    assert turns.next(2.1) is None
    turns.set_nodes([1, 2, 3, 4], 2.1)
    assert turns.next(2.2) == 1
    turns.done(0, 2.3, 1, 0.0)  # of one that nobody knows any more


def test_a_nudged_node_is_pulled_at_once_in_a_round_of_its_own():
    turns = turns_of(3)
    run(turns, 0.0, 1.0)
    turns.nudge([2], 1.0)
    assert ask_all(turns, 1.0) == [2]
    over, _ = turns.tick(1.02)
    assert [(each.kind, each.members) for each in over] == [("nudged", {2})]


def test_nudges_that_come_together_are_one_round():
    turns = turns_of(200)
    run(turns, 0.0, 1.0)
    for node in range(100, 150):
        turns.nudge([node], 1.1)
    assert sorted(ask_all(turns, 1.1)) == list(range(100, 150))
    assert [len(each.members) for each in turns.tick(1.2)[0]] == [50]


def test_a_nudge_during_a_pull_means_another_pull():
    turns = turns_of(1)
    turns.tick(0.0)
    turns.next(0.0)
    turns.nudge([0], 0.1)
    assert turns.next(0.1) is None
    turns.done(0, 0.2, 0, 0.0)
    assert [each.kind for each in turns.tick(0.2)[0]] == ["regular"]
    assert turns.next(0.2) == 0
    turns.done(0, 0.3, 0, 0.0)
    assert [each.kind for each in turns.tick(0.3)[0]] == ["nudged"]


def test_a_node_that_nudges_without_end_is_pulled_four_times_a_second():
    turns, pulls = turns_of(1), []
    for tick in range(200):
        now = tick * 0.01
        turns.nudge([0], now)
        turns.tick(now)
        pulls += ask_all(turns, now, took_s=0.001)
    assert 6 <= len(pulls) <= 2.0 / schedule.NUDGE_GAP_S + 1


def test_a_node_that_is_left_alone_is_pulled_for_a_nudge_and_not_for_a_want():
    turns = turns_of(1)
    run(turns, 0.0, 1.5, failing={0}, failures={0: 5})
    turns.ask([0], 1.5)
    assert turns.next(1.5) is None
    turns.nudge([0], 1.5)
    assert turns.next(1.5) == 0


def test_an_extra_round_waits_for_pulls_that_began_after_it_was_asked_for():
    turns = turns_of(2)
    turns.tick(0.0)
    turns.next(0.0)
    extra = turns.extra(0.1, 1.0)
    turns.done(0, 0.2, 0, 0.0)  # it began before
    assert set(extra.left) == {0, 1}
    assert set(ask_all(turns, 0.2)) == {0, 1}
    assert not extra.left
    assert {each.kind for each in turns.tick(0.3)[0]} == {"extra", "regular"}


def test_an_extra_round_does_not_wait_for_nodes_that_failed():
    turns = turns_of(3)
    run(turns, 0.0, 1.0, failing={1})
    assert set(turns.extra(1.0, 0.5).left) == {0, 2}


def test_new_nodes_are_pulled_at_once_but_rounds_keep_a_distance():
    turns = turns_of(1)
    run(turns, 0.0, 0.1)
    turns.set_nodes([0, 1], 0.1)
    pulls, _ = run(turns, 0.11, 1.0)
    assert [node for _, node in pulls] == [0, 1]
    assert pulls[0][0] == 0.5


def test_a_round_of_a_dropped_node_is_over_without_it():
    turns = turns_of(2)
    turns.tick(0.0)
    turns.done(turns.next(0.0), 0.1, 0, 0.0)
    turns.set_nodes([0], 0.2)
    assert [each.kind for each in turns.tick(0.2)[0]] == ["regular"]


def test_costly_rounds_come_less_often_but_often_enough():
    assert schedule.period_s(False, 0.1, 100) == schedule.PERIOD_S
    assert schedule.period_s(True, 0.1, 100) == schedule.HURRY_S
    assert schedule.period_s(True, 0.5, 100) == 1.5
    assert schedule.period_s(False, 60.0, 100) == schedule.COSTLY_PERIOD_S < schedule.STALE_S / 2
    turns = turns_of(1)
    turns.tick(0.0)
    turns.next(0.0)
    turns.done(0, 1.0, 0, 1.0)
    turns.tick(1.0)
    pulls, _ = run(turns, 1.01, 3.0)
    assert [at for at, _ in pulls] == [3.0]


def test_without_nodes_there_is_nothing_to_wake_for():
    turns = Turns(4)
    over, wake_at = turns.tick(5.0)
    assert over == []
    assert wake_at > 1000.0
    assert turns.threads == 0
    assert turns_of(3).threads == 3
    assert turns_of(300).threads == 32


def test_few_nodes_are_pulled_twice_as_often(monkeypatch) -> None:
    monkeypatch.undo()
    assert schedule.period_s(False, 0.01, 4) == schedule.PERIOD_S / 2
    assert schedule.period_s(True, 0.01, schedule.FEW_NODES) == schedule.HURRY_S / 2
    assert schedule.period_s(True, 0.01, schedule.FEW_NODES + 1) == schedule.HURRY_S
