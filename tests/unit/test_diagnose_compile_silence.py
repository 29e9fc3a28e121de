"""When a compile that stands still is stuck: 60 s after its last sign of life, wherever in it the others' wait began."""

import pytest
from build_jobs import Job, burn, coll, compiling, init


def script(rank, busy_before_s, cpu=0.0):
    yield init(600)
    yield coll()
    if rank == 0:
        yield burn(busy_before_s)
    else:
        yield compiling(200, cpu=cpu)
    yield coll()


def first_page_s(busy_before_s, cpu=0.0):
    page = Job(lambda rank: script(rank, busy_before_s, cpu), 2).play(150).first("stuck")
    return page.at if page is not None else None


@pytest.mark.parametrize(
    ("busy_before_s", "page_s"),
    [(1, 60), (30, 60), (46, 66), (100, 120)],
    ids=["a wait from the start", "a wait that began half-way", "a wait that began late", "a wait that began after the limit"],
)
def test_silence_counts_from_the_last_sign_of_life_and_a_third_of_it_is_seen_as_a_suspect(busy_before_s, page_s):
    assert first_page_s(busy_before_s) == pytest.approx(page_s, abs=4)


def test_a_compile_that_works_is_never_stuck_however_late_the_wait_began():
    assert first_page_s(46, cpu=0.9) is None
