"""How far a node's clocks are from the judge's, by questions and answers."""

import math

import pytest

from rankwatch.monitor.nodes.clock import Offset
from rankwatch.monitor.nodes.codec import Shift

WALL = 1_796_000_000.0


class World:
    """A judge, and a node whose monotonic and wall clocks differ by `mono` and `wall` seconds."""

    def __init__(self, mono: float = -4000.0, wall: float = 2.0) -> None:
        self.offset, self.now, self.mono, self.wall = Offset(), 5000.0, mono, wall

    def ask(self, there_s: float = 0.001, back_s: float = 0.001) -> None:
        sent, written = self.now, self.now + there_s
        self.offset.add(sent, written + back_s, WALL + sent, written + self.mono, WALL + written + self.wall)
        self.now += 2.0


def test_nothing_is_known_before_the_first_answer():
    offset = Offset()
    assert offset.shift is None
    assert math.isinf(offset.error_s)


def test_the_shift_turns_the_nodes_times_into_the_judges():
    world = World()
    world.ask()
    assert world.offset.shift == pytest.approx(Shift(4000.0, -2.0)) or (world.offset.shift.mono_s, world.offset.shift.wall_s) == pytest.approx((4000.0, -2.0))
    assert world.offset.error_s == pytest.approx(0.001)


def test_an_answer_that_takes_long_one_way_is_off_by_no_more_than_the_error():
    world = World()
    world.ask(there_s=0.0, back_s=0.8)
    assert world.offset.error_s == pytest.approx(0.4)
    assert abs(world.offset.shift.mono_s - 4000.0) <= world.offset.error_s + 1e-9


def test_the_shortest_round_trip_wins():
    world = World()
    for there_s, back_s in ((0.3, 0.001), (0.0005, 0.0005), (0.001, 0.5)):
        world.ask(there_s, back_s)
    assert (world.offset.shift.mono_s, world.offset.shift.wall_s) == pytest.approx((4000.0, -2.0))
    assert world.offset.error_s == pytest.approx(0.0005)


def test_a_short_round_trip_is_forgotten_after_sixteen_others():
    world = World()
    world.ask(0.0001, 0.0001)
    for _ in range(16):
        world.ask(0.01, 0.01)
    assert world.offset.error_s == pytest.approx(0.01)


def test_clocks_that_drift_are_followed():
    world = World()
    for _ in range(2000):
        world.ask(0.002, 0.002)
        world.mono += 2.0 * 1e-4
        world.wall -= 2.0 * 1e-4
    assert abs(world.offset.shift.mono_s + world.mono) < 0.01
    assert abs(world.offset.shift.wall_s + world.wall) < 0.01


@pytest.mark.parametrize("clock", ["mono", "wall"])
def test_a_clock_that_was_set_is_believed_at_once(clock):
    world = World()
    for _ in range(16):
        world.ask(0.0005, 0.0005)
    setattr(world, clock, getattr(world, clock) + 30.0)
    world.ask(0.01, 0.01)
    assert (world.offset.shift.mono_s, world.offset.shift.wall_s) == pytest.approx((-world.mono, -world.wall), abs=0.011)
    assert world.offset.error_s == pytest.approx(0.01)


def test_a_slow_answer_does_not_pass_for_a_clock_that_was_set():
    world = World()
    world.ask(0.0005, 0.0005)
    world.ask(0.0, 1.4)
    assert world.offset.error_s == pytest.approx(0.0005)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(5))
def test_times_that_are_no_numbers_are_let_go(place, wrong):
    times = [1.0, 2.0, WALL, 1.0, WALL]
    times[place] = wrong
    offset = Offset()
    offset.add(*times)
    assert offset.shift is None


def test_an_answer_before_its_question_is_let_go():
    offset = Offset()
    offset.add(2.0, 1.0, WALL, 1.0, WALL)
    assert offset.shift is None
