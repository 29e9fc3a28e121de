"""The sum of waiting: long waits by rank and reason, short ones by sampling, all of it bounded."""

import random
from dataclasses import replace

import pytest
from build_jobs import MONO, WALL, Job, coll, compiling, destroy, group, init, load, nap, save, stepped

from rankwatch.model import Collective, Group, JobSnapshot, NodeReport, Process, RankState, Verdict, Waited
from rankwatch.monitor.diagnose import State, diagnose, ledger
from rankwatch.monitor.diagnose.ledger import Blame, Ledger, Pending, Window, explained, rows
from rankwatch.monitor.policy import Limits


def spent(job):
    """{(rank, reason): rank-seconds}, rounded."""
    return {(row.rank, row.reason): round(row.rank_s) for row in ledger.rows(job.state.ledger)}


def steps(count, work_s=0.1):
    for _ in range(count):
        yield nap(work_s)
        yield coll()
        yield stepped()


def test_a_compile_is_charged_with_its_frame():
    def script(rank):
        yield init(600)
        yield from steps(20)
        if rank == 3:
            yield compiling(20, cpu=1.0, phase_s=4.0, frame="block.forward", reason="size of x changed")
        yield from steps(20)

    job = Job(script, 4).play(40)
    assert spent(job) == {(3, "recompiling block.forward"): pytest.approx(60, abs=4)}


def test_the_reason_is_the_best_that_was_seen_of_the_wait():
    def script(rank):
        yield init(600)
        yield from steps(20)
        if rank == 1:
            yield load(12)
        yield from steps(20)
        if rank == 0:
            yield save(15)
        yield from steps(20)

    job = Job(script, 3).play(60)
    assert spent(job) == {
        (1, "data_loading at train.py:22:__getitem__"): pytest.approx(24, abs=3),
        (0, "checkpointing at train.py:20:write"): pytest.approx(30, abs=3),
    }


def test_a_wait_that_ends_with_the_death_it_was_for_is_charged_to_that_death():
    """Nobody had been blamed for it before: it was too young."""
    late = Pending(4.0, {(1,): Blame(2.0, "late", 0)}, frozenset({0, 2}))
    failure = Verdict("k", "failed", "crashed", "user_code", (1,), (0, 2), 0.0, "", at="a.py:3:read")
    told = rows(explained(Ledger(pending={"hang": late}), failure))
    assert told == (Waited(1, "crashed at a.py:3:read", 4.0),)
    known = Pending(4.0, {(1,): Blame(2.0, "compiling f@a.py:3", 2)}, frozenset({0, 2}))
    assert rows(explained(Ledger(pending={"hang": known}), failure)) == (Waited(1, "compiling f@a.py:3", 4.0),)


def test_ranks_that_are_blamed_together_are_each_charged_with_their_own_line():
    blame = Blame(3.0, "mismatch", 1, {0: "mismatch at q.py:12:step", 1: "mismatch at q.py:9:log"})
    assert rows(Ledger(pending={"hang": Pending(6.0, {(0, 1): blame}, frozenset({0, 1}))})) == (
        Waited(0, "mismatch at q.py:12:step", 3.0),
        Waited(1, "mismatch at q.py:9:log", 3.0),
    )


def test_waits_too_short_for_a_notice_are_charged_too():
    def script(rank):
        yield init(600)
        yield from steps(20)
        for _ in range(4):
            if rank == 2:
                yield nap(3.0)
            yield from steps(10)

    job = Job(script, 4).play(40)
    assert job.incidents == ()
    assert spent(job) == {(2, "late"): pytest.approx(36, abs=6)}


def test_a_compile_that_is_too_short_for_a_notice_is_charged_with_its_frame():
    def script(rank):
        yield init(600)
        yield from steps(20)
        if rank == 1:
            yield compiling(3.8, cpu=1.0, frame="forward@model.py:31", reason="size of x changed")
        yield from steps(20)

    job = Job(script, 4).play(30)
    assert job.incidents == ()
    assert spent(job) == {(1, "recompiling forward@model.py:31"): pytest.approx(11, abs=2)}


def test_a_late_start_is_charged_as_start_up():
    def script(rank):
        if rank == 1:
            yield nap(20, "train.py:5:slow_import")
        yield init(600)
        yield from steps(10)

    job = Job(script, 4).play(30)
    assert spent(job) == {(1, "start-up at train.py:5:slow_import"): pytest.approx(60, abs=4)}


def test_a_steady_straggler_is_charged_by_samples():
    """A step takes about 0.5 s, for rank 1 0.2 s more: every other rank waits 0.2 s of each 0.75 s."""
    luck = random.Random(3)
    plan = [luck.uniform(0.3, 0.7) for _ in range(1000)]

    def script(rank):
        yield init(600)
        for seconds in plan:
            yield nap(seconds + (0.2 if rank == 1 else 0.0))
            yield coll()
            yield stepped()

    job = Job(script, 4).play(125)
    ended = ledger.ended(job.state.ledger)
    (row,) = ledger.rows(ended)
    assert (row.rank, row.reason) == (1, "straggling")
    assert row.rank_s == pytest.approx(3 * 0.2 / 0.75 * 120, rel=0.35)


def test_samples_of_a_group_that_is_destroyed_are_charged():
    luck = random.Random(5)
    plan = [luck.uniform(0.3, 0.7) for _ in range(50)]

    def script(rank):
        yield init(600)
        for seconds in plan:
            yield nap(seconds + (0.3 if rank == 1 else 0.0))
            yield coll()
        yield destroy()
        yield nap(5)

    job = Job(script, 4).play(48)
    (row,) = ledger.rows(job.state.ledger)
    assert (row.rank, row.reason) == (1, "straggling")


def test_ranks_that_wait_alike_lose_nothing():
    """Uneven steps that go round, and communication that all share."""
    luck = random.Random(7)
    plan = {rank: [luck.uniform(0.2, 0.5) for _ in range(2000)] for rank in range(4)}

    def script(rank):
        yield init(600)
        for seconds in plan[rank]:
            yield nap(seconds)
            yield coll()
            yield stepped()

    job = Job(script, 4).play(250)
    assert ledger.rows(ledger.ended(job.state.ledger)) == ()


def test_a_chain_of_waits_is_charged_to_its_root():
    """Rank 1 computes, rank 0 waits for it in one group, ranks 2 and 3 wait for rank 0 in another one."""

    def script(rank):
        yield init(600)
        yield group("1", (0, 1))
        yield group("2", (0, 2, 3))
        yield from steps(20)
        if rank == 1:
            yield nap(20, "train.py:77:evaluate")
        if rank in (0, 1):
            yield coll(group="1")
        if rank != 1:
            yield coll(group="2")

    job = Job(script, 4).play(40)
    assert spent(job) == {(1, "not_entered at train.py:77:evaluate"): pytest.approx(60, abs=4)}


def test_a_pause_is_nobodys_loss():
    def script(rank):
        yield init(600)
        yield from steps(20)
        if rank == 1:
            yield nap(60)
        yield from steps(20)

    job = Job(script, 2)
    job.play(12)
    before = sum(row.rank_s for row in ledger.rows(job.state.ledger))
    for rank in job.ranks.values():
        rank.frozen = True
    job.t += 40.0
    job.look(gap=40.0)
    assert sum(row.rank_s for row in ledger.rows(job.state.ledger)) == pytest.approx(before, abs=0.6)


GROUP = Group("0", "default_pg", "gloo", (0, 1), 600.0)


def two_nodes(t, stopped_at=1e9, answers_at=1e9, done_at=1e9):
    """Rank 1 on node 1 waits for rank 0 since second 2; its launcher may be stopped for a while."""
    seen_at = min(t, stopped_at) if t < answers_at else t

    def rank(number, at):
        entered = 6 if at >= done_at or (number == 1 and at >= 2.0) else 5
        done = 6 if at >= done_at else 5
        return RankState(number, node=f"node{number}", process=Process(10 + number, True, "S"), groups=(GROUP,), heartbeat_at=MONO + at,
                         enqueued={"0": entered}, completed={"0": done})  # fmt: skip

    age = t - seen_at
    nodes = (NodeReport("node0", (rank(0, t),)), NodeReport("node1", (rank(1, seen_at),), 1, age, failing_since=MONO + seen_at + 1.0 if age > 1.0 else None))
    return JobSnapshot(MONO + t, WALL + t, 2, 0, nodes, gap_s=0.5, started_at=MONO - 60)


def lost(until, **how):
    state = State()
    for tick in range(int(until * 2) + 1):
        state, _, _ = diagnose(state, two_nodes(tick * 0.5, **how), MONO + tick * 0.5, Limits())
    return {(row.rank, row.reason): row.rank_s for row in ledger.rows(state.ledger)}


def test_a_rank_whose_node_does_not_answer_loses_nothing_that_is_not_seen():
    """Its launcher is stopped in an everyday wait of it, while the job goes on: nobody is blamed for that."""
    assert sum(lost(12.0, stopped_at=2.5, done_at=3.0).values()) <= 0.5
    before = lost(8.0)
    assert sum(lost(15.0, stopped_at=8.0, done_at=8.5).values()) == pytest.approx(sum(before.values()), abs=1.1)


def test_a_wait_that_goes_on_when_the_node_answers_again_is_charged_once():
    assert sum(lost(20.0, stopped_at=8.0, answers_at=14.0).values()) == pytest.approx(18.0, abs=0.6)


def test_no_wait_is_charged_for_longer_than_it_was_seen():
    """A rank's clock says that it has been in there for ten years."""
    state = State()
    for tick in range(20):
        snapshot = two_nodes(tick * 0.5)
        entry = Collective("0", 0, 6, "all_reduce", ((4,),), ((4,),), ("Float",), WALL - 3e8, 600.0)
        nodes = [replace(node, ranks=tuple(replace(rank, collectives=(entry,) if rank.enqueued["0"] == 6 else ()) for rank in node.ranks))
                 for node in snapshot.nodes]  # fmt: skip
        state, _, _ = diagnose(state, replace(snapshot, nodes=tuple(nodes)), snapshot.now, Limits())
    assert 7.0 <= sum(row.rank_s for row in ledger.rows(state.ledger)) <= 13.0


def test_what_is_open_is_charged_when_the_attempt_ends():
    book = Ledger(
        {(1, "late"): 3.0},
        {"a0-hang-1": Pending(10.0, {(0,): Blame(1.0, "late", 0), (1, 2): Blame(4.0, "data_loading", 1)})},
        {("0",): Window(0.0, {0: 20.0, 1: 20.0}, {0: 10.0, 1: 0.0}), ("1",): Window(0.0, {0: 5.0, 1: 5.0}, {0: 5.0, 1: 0.0})},
    )
    assert ledger.ended(book) == Ledger({(1, "late"): 3.0, (1, "data_loading"): 5.0, (2, "data_loading"): 5.0, (1, "straggling"): 10.0})


def test_the_last_samples_count_when_it_is_over():
    book = Ledger({(1, "late"): 3.0}, windows={("0",): Window(0.0, {0: 20.0, 1: 20.0}, {0: 10.0, 1: 0.0})})
    assert [(row.rank, row.reason, row.rank_s) for row in ledger.rows(book)] == [(1, "late", 3.0)]
    assert [(row.rank, row.reason, row.rank_s) for row in ledger.rows(book, over=True)] == [(1, "straggling", 10.0), (1, "late", 3.0)]


def test_noise_names_no_straggler():
    """Shares of 10 % and 15 % over a minute are within what sampling gives by chance."""
    book = Ledger(windows={("0",): Window(0.0, {0: 60.0, 1: 60.0, 2: 60.0}, {0: 9.0, 1: 6.0, 2: 9.5})})
    assert ledger.ended(book).spent == {}


def test_of_many_culprits_none_is_charged_by_itself():
    book = Ledger(pending={"a0-hang-1": Pending(90.0, {tuple(range(9)): Blame(1.0, "late", 0)})})
    assert ledger.rows(book)[0].rank == -1
    assert ledger.rows(book)[0].rank_s == 90.0


def test_the_table_is_bounded_and_its_sum_is_kept():
    book = Ledger({(rank, f"late at train.py:{rank}:x"): 1.0 + rank for rank in range(2000)})
    kept = ledger.ended(book)
    assert len(kept.spent) <= ledger.MAX_ROWS
    assert sum(kept.spent.values()) == pytest.approx(sum(book.spent.values()))
    again = ledger.ended(Ledger({**kept.spent, **{(rank, "x"): 0.5 for rank in range(2000)}}))
    assert sum(again.spent.values()) == pytest.approx(sum(book.spent.values()) + 1000)
    assert ledger.rows(again)[0].reason == "other"


def test_the_ledger_outlives_a_restart():
    job = Job(lambda rank: iter((init(600), *steps(5), nap(10 if rank else 0.1), *steps(500))), 2).play(20)
    before = ledger.rows(job.state.ledger)
    snapshot = job.snapshot()
    fresh = tuple(RankState(rank, stage="starting") for rank in (0, 1))
    snapshot = replace(snapshot, attempt=1, nodes=(replace(snapshot.nodes[0], ranks=fresh),), now=MONO + 30)
    state, _, _ = diagnose(job.state, snapshot, snapshot.now, job.limits)
    assert before
    assert ledger.rows(state.ledger) == ledger.rows(ledger.ended(job.state.ledger))
    assert state.ledger.pending == {}
