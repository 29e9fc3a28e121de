"""Who waits by other means than a collective: an operation posted ahead that nobody sits in, and absent ranks that wait for an absent one that works."""

import pytest
from build_jobs import Job, burn, coll, destroy, die, group, handle, init, mark, nap, stepped

TAPE = "train.py:31:read_tape"


def posted_ahead(tape, steps, then=coll, group_of=(1, 2), beside=None):
    """Rank 0 brings the next block; ranks 1 and 2 have posted its broadcast and train on in a group of their own for `steps` steps of 0.2 s."""

    def script(rank):
        yield init(60)
        yield group("1", group_of, 60)
        for _ in range(5):
            yield coll()
        yield mark("posted")
        if rank == 0:
            yield tape
            yield handle("broadcast")
        else:
            yield handle("broadcast")
            for _ in range(steps):
                if beside is not None:
                    yield beside
                else:
                    yield coll(group="1")
                yield nap(0.2, "train.py:50:step")
        yield then()
        for _ in range(10):
            yield coll()
        yield nap(2)
        yield destroy()

    return script


def pages(job):
    return {(seen.verdict.verdict, seen.verdict.cause, seen.verdict.culprit_ranks) for seen in job.pages()}


def test_nobody_is_paged_while_those_that_have_posted_an_operation_ahead_train_on():
    job = Job(posted_ahead(nap(25, TAPE), 120), 3).play(50)
    assert job.pages() == []
    slow = next(seen.verdict for seen in reversed(job.history) if seen.verdict.culprit_ranks == (0,))
    assert any("the operation was posted ahead, and nobody sits in it yet" in line for line in slow.evidence)


def test_optimizer_steps_show_the_same_where_they_train_alone():
    job = Job(posted_ahead(nap(25, TAPE), 120, beside=stepped()), 3).play(50)
    assert job.pages() == []


def test_the_wait_counts_from_when_they_sit_in_it():
    """As long as any wait may last in this group, 12 s, and no longer."""
    job = Job(posted_ahead(nap(3600, TAPE), 60), 3).play(60)
    page = job.pages()[0]
    assert pages(job) == {("stuck", "not_entered", (0,))}
    assert 12 + 12 <= page.at - job.marks["posted"] <= 12 + 16  # twelve seconds and a bit of steps


def test_one_that_stands_is_enough():
    def script(rank):
        yield from posted_ahead(nap(3600, TAPE), 500 if rank != 3 else 0)(rank)

    job = Job(script, 4).play(40)
    assert pages(job) == {("stuck", "not_entered", (0,))}
    assert job.pages()[0].at - job.marks["posted"] <= 16


def test_what_they_do_together_with_the_absent_rank_shows_nothing():
    """A health check of all ranks may run in a thread of each while the main threads stand."""

    def script(rank):
        yield init(60)
        yield group("1", (0, 1, 2), 60)
        yield coll()
        yield mark("posted")
        if rank:
            yield handle("all_reduce")
        for _ in range(400):
            yield coll(group="1")
            yield nap(0.2, TAPE)

    job = Job(script, 3).play(40)
    assert all("posted ahead" not in line for seen in job.history for line in seen.verdict.evidence)


def test_a_rank_that_has_died_is_told_whatever_goes_on_beside_it():
    job = Job(posted_ahead(nap(2, TAPE), 120), 3)
    job.ranks[0].script = iter([init(60), group("1", (1, 2), 60), *[coll()] * 5, mark("posted"), nap(4, TAPE), die(0)])
    job.play(20)
    assert ("stuck", "exited", (0,)) in pages(job)


# -- absent ranks that wait for an absent one ----------------------------------------------------------------------------------


def polls(work, waits="train.py:20:wait_for_cache", timeout=100.0, seconds=30.0):
    """Rank 0 makes the cache, ranks 1 and 2 look for its file, rank 3 needs none and is in the next all_reduce."""

    def script(rank):
        yield init(timeout)
        for _ in range(5):
            yield coll()
        yield mark("onset")
        if rank == 0:
            yield work(seconds, "train.py:15:tokenize")
        elif rank < 3:
            yield nap(seconds + rank / 2, waits)
        for _ in range(10):
            yield coll()

    return script


def test_ranks_that_look_for_the_file_of_one_that_works_are_not_stuck():
    job = Job(polls(burn), 4).play(60)
    assert job.pages() == []
    assert ("slow", (0, 1, 2)) in {(seen.verdict.verdict, seen.verdict.culprit_ranks) for seen in job.history}


def test_they_are_stuck_with_it_once_it_stands_too():
    job = Job(polls(nap, seconds=3600.0), 4).play(60)
    assert pages(job) == {("stuck", "not_entered", (0, 1, 2))}
    assert 20 <= job.pages()[0].at - job.marks["onset"] <= 23


def test_they_are_stuck_once_it_has_come_and_they_have_not():
    def script(rank):
        yield init(100)
        for _ in range(5):
            yield coll()
        yield mark("onset")
        if rank < 2:
            yield burn(40, "train.py:15:tokenize") if rank == 0 else nap(3600, "train.py:20:wait_for_cache")
        for _ in range(10):
            yield coll()

    job = Job(script, 3).play(65)
    assert pages(job) == {("stuck", "not_entered", (1,))}
    assert 40 + 15 <= job.pages()[0].at - job.marks["onset"] <= 40 + 23  # it has the time of any wait to see that what it waited for is there


def test_all_of_them_are_told_when_the_timeout_is_near():
    job = Job(polls(burn, timeout=100.0, seconds=3600.0), 4).play(95)
    assert {verdict for verdict, _, _ in pages(job)} == {"timeout_imminent"}


@pytest.mark.parametrize("code", [0, 7])
def test_one_that_has_ended_is_told_beside_one_that_works(code):
    def script(rank):
        yield init(100)
        for _ in range(5):
            yield coll()
        if rank == 0:
            yield burn(60, "train.py:15:tokenize")
        if rank == 1:
            yield nap(1)
            yield die(code)
        for _ in range(10):
            yield coll()

    job = Job(script, 3).play(30)
    assert any(1 in culprits and 0 not in culprits for _, _, culprits in pages(job)) or code == 0
