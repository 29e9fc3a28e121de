"""Large blocks are given back at once, unless somebody has chosen otherwise or the C library cannot."""

import gc

import pytest

from rankwatch.monitor import heap
from rankwatch.monitor.heap import LARGE_BYTES, keep_large_apart


class Glibc:
    def __init__(self):
        self.asked = []

    def mallopt(self, option, value):
        self.asked.append((option, value))
        return 1


def test_the_threshold_that_glibc_starts_with_is_made_to_stay():
    libc = Glibc()
    assert keep_large_apart({}, libc) is True
    assert libc.asked == [(-3, LARGE_BYTES)]


@pytest.mark.parametrize("set_by_hand", [{"MALLOC_MMAP_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}])
def test_a_threshold_that_the_user_has_set_is_left_alone(set_by_hand):
    libc = Glibc()
    assert keep_large_apart(set_by_hand, libc) is False
    assert libc.asked == []


def test_a_c_library_without_such_a_call_is_none_to_complain_about():
    assert keep_large_apart({}, object()) is False


def test_the_judge_of_many_ranks_looks_for_cycles_less_often(monkeypatch):
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        heap.collect_less_often()
        assert gc.get_threshold() == (heap.MANY_OBJECTS, 50, 100)
        gc.set_threshold(500_000, 200, 200)
        heap.collect_less_often()
        assert gc.get_threshold() == (500_000, 200, 200)
        gc.set_threshold(0, 10, 10)
        heap.collect_less_often()
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
