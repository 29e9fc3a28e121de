"""Ranks in point-to-point calls, which gloo's recorder does not show: who is waited for is found by elimination, or nobody is named."""

import pytest
from build_jobs import PAGING, Job, barrier, burn, coll, compiling, group, handle, init, load, mark, nap, recv, send

ASLEEP = "train.py:31:load_batch"


def pipeline(stop, *more):
    """0 -> 1 by message, 1 and 2 together in group "1". `stop` is what rank 0 does at step 6; more: scripts of further ranks."""

    def script(rank):
        yield init(180)
        yield group("1", (1, 2), 180)
        for step in range(400):
            if rank == 0:
                if step == 6:
                    yield mark("onset")
                    yield stop
                yield nap(0.2)
                yield send(f"m{step}")
            if rank == 1:
                yield recv(f"m{step}")
            if rank in (1, 2):
                yield coll(group="1")
            if rank > 2:
                yield from more[rank - 3](step)

    return script


def named(job):
    return {seen.verdict.culprit_ranks for seen in job.history}


def test_the_only_rank_that_does_not_wait_is_named_behind_a_rank_that_waits_for_its_message():
    job = Job(pipeline(nap(3600, ASLEEP)), 3).play(90)
    assert named(job) <= {(), (0,)}
    page = job.pages()[0]
    assert (page.verdict.cause, page.verdict.culprit_ranks, page.verdict.confidence, page.verdict.at) == ("not_entered", (0,), "partial", ASLEEP)
    assert page.at - job.marks["onset"] <= 45
    assert any("rank 1 waits in recv" in line for line in page.verdict.evidence)
    assert any("the peer of recv" in line for line in page.verdict.missing_evidence)


@pytest.mark.parametrize(("work", "cause"), [(burn(3600), "not_entered"), (compiling(3600, cpu=1.0), "compiling")], ids=["works", "compiles"])
def test_that_rank_is_not_paged_while_it_gets_on(work, cause):
    job = Job(pipeline(work), 3).play(90)
    assert job.pages() == []
    assert (cause, (0,)) in {(seen.verdict.cause, seen.verdict.culprit_ranks) for seen in job.history}


def test_its_cause_is_found_as_for_any_absent_rank():
    job = Job(pipeline(load(3600)), 3).play(90)
    assert {(seen.verdict.cause, seen.verdict.culprit_ranks) for seen in job.pages()} == {("data_loading", (0,))}


def test_two_ranks_outside_all_waits_leave_it_open_who_is_waited_for():
    job = Job(pipeline(nap(3600, ASLEEP), lambda step: [nap(3600, "train.py:80:serve")]), 4).play(120)
    assert named(job) == {()}
    assert {seen.verdict.cause for seen in job.history} == {"unknown"}
    assert {seen.verdict.confidence for seen in job.history} == {"partial"}
    assert job.pages()  # it stands still, whoever it is


def test_a_rank_that_is_not_seen_may_be_the_one():
    job = Job(pipeline(nap(3600, ASLEEP)), 3, seen=(1, 2)).play(120)
    assert named(job) == {()}


def test_the_rank_whose_message_can_come_from_nobody_is_named():
    """All others wait for it in a collective: its own call is the odd one."""

    def script(rank):
        yield init(180)
        for _ in range(6):
            yield coll()
            yield nap(0.2)
        yield mark("onset")
        if rank == 1:
            yield recv("never")
        yield coll()

    job = Job(script, 3).play(90)
    assert named(job) <= {(), (1,)}
    page = job.pages()[0]
    assert (page.verdict.culprit_ranks, page.verdict.confidence, page.verdict.waiting_ranks) == ((1,), "partial", (0, 2))
    assert "none of them can be about to send" in page.verdict.summary


def test_of_two_ranks_that_wait_for_messages_neither_is_named():
    def script(rank):
        yield init(180)
        for _ in range(6):
            yield coll()
            yield nap(0.2)
        if rank in (1, 2):
            yield recv(f"never{rank}")
        yield coll()

    job = Job(script, 4).play(120)
    assert named(job) == {()}
    assert {seen.verdict.cause for seen in job.history} == {"unknown"}


def test_the_last_one_of_a_row_of_ranks_that_wait_for_messages_is_not_named():
    """2 waits in a collective for 1, which waits for a message of 0; that one and 3 wait for each other's, and that is the fault."""
    job = Job(pipeline(recv("of rank 3"), lambda step: [recv("of rank 0") if step == 6 else nap(0.2)]), 4).play(90)
    assert named(job) == {()}
    assert {page.verdict.cause for page in job.pages()} == {"unknown"}


def test_a_rank_that_holds_an_open_handle_and_sleeps_is_not_taken_for_a_waiter():
    def script(rank):
        yield init(180)
        yield group("1", (0, 3), 180)
        yield group("2", (1, 2), 180)
        for _ in range(6):
            if rank in (1, 2):
                yield coll(group="2")
            yield nap(0.2)
        if rank == 0:
            yield handle(group="1")
            yield nap(3600, ASLEEP)
        if rank == 1:
            yield recv("from 0")
        if rank in (1, 2):
            yield coll(group="2")
        if rank == 3:
            yield nap(1)
            yield coll(group="1")
            yield recv("from 0 as well")

    job = Job(script, 4).play(120)
    assert not {ranks for ranks in named(job) if ranks not in ((), (0,))}


def test_a_pipeline_with_bubbles_is_left_alone():
    def script(rank):
        yield init(180)
        yield group("1", (1, 2), 180)
        for step in range(12):
            if rank == 0:
                yield nap(4.0)
                yield send(f"m{step}")
            if rank == 1:
                yield recv(f"m{step}")
            if rank in (1, 2):
                yield coll(group="1")
        yield barrier()

    job = Job(script, 3).play(120)
    assert [seen for seen in job.history if seen.verdict.verdict in PAGING] == []
