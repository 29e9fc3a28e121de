"""Large blocks are given back at once, unless somebody has chosen otherwise or the C library cannot."""

import pytest

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
