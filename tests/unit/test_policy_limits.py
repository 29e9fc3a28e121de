"""The table of numbers: defaults, overrides, and the rules made of them."""

import dataclasses

import pytest

from rankwatch.monitor.policy import Limits


@pytest.mark.parametrize(("timeout_s", "stuck_s"), [(12, 5), (20, 5), (60, 12), (180, 36), (600, 120), (1800, 120), (7200, 120), (None, 120)])
def test_silence_is_stuck_after_a_fifth_of_the_timeout_within_bounds(timeout_s, stuck_s):
    assert Limits().stuck_after_s(timeout_s) == stuck_s


@pytest.mark.parametrize(("timeout_s", "stuck_s"), [(12, 6), (60, 30), (100, 30), (180, 36), (600, 120)])
def test_the_first_collective_of_a_group_has_a_higher_floor_but_at_most_half_of_the_timeout(timeout_s, stuck_s):
    assert Limits().stuck_after_s(timeout_s, first=True) == stuck_s


@pytest.mark.parametrize(("timeout_s", "left_s"), [(12, 6), (40, 20), (60, 30), (100, 30), (600, 120), (1800, 360)])
def test_a_timeout_is_imminent_below_30_s_or_a_fifth_but_at_most_half(timeout_s, left_s):
    assert Limits().imminent_left_s(timeout_s) == left_s


def test_input_and_output_may_take_half_of_the_timeout():
    assert Limits().io_after_s(1800) == 900


def test_stuck_after_fixes_the_limit_whatever_the_timeout():
    limits = Limits.from_options(45.0)
    assert [limits.stuck_after_s(timeout) for timeout in (60, 180, 1800, None)] == [45, 45, 45, 45]


def test_overrides_change_single_numbers():
    limits = Limits.from_options(None, {"notice_s": 8, "agree_polls": 3})
    assert (limits.notice_s, limits.agree_polls) == (8.0, 3)
    assert limits.imminent_s == 30.0


@pytest.mark.parametrize(
    ("stuck_after_s", "overrides", "words"),
    [
        (None, {"notice": 3}, "limit notice is 3: there is no limit notice (did you mean notice_s?)"),
        (None, {"notice_s": 0}, "limit notice_s is 0"),
        (None, {"notice_s": float("nan")}, "limit notice_s is nan"),
        (None, {"notice_s": "5"}, "limit notice_s is '5'"),
        (-1.0, {}, "limit stuck_after_s is -1.0"),
        (None, {"stuck_ratio": 50.0}, "limit stuck_ratio is 50.0: it takes a share above 0 and not above 1, such as 0.2"),
        (None, {"notice_s": -4.0}, "limit notice_s is -4.0: it takes seconds above 0 and not negative, such as 5, 90s, 1.5m"),
        (None, {"agree_polls": 2.5}, "limit agree_polls is 2.5: it takes a whole number from 1 on"),
        (None, {"idle_factor": 0}, "limit idle_factor is 0: it takes a number above 0"),
        (None, {"stuck_min_s": 500}, "stuck_min_s (500) is above stuck_max_s (120)"),
    ],
)
def test_a_bad_number_is_refused_with_its_name_and_value(stuck_after_s, overrides, words):
    with pytest.raises(ValueError) as caught:
        Limits.from_options(stuck_after_s, overrides)
    assert words in str(caught.value)


def test_every_number_says_what_it_decides():
    meanings = Limits.meanings()
    assert meanings["notice_s"] == "a wait this long is named (slow); shorter ones are everyday skew"
    assert list(meanings) == [field.name for field in dataclasses.fields(Limits)]
    assert all(meanings.values())
