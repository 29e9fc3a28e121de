"""Many process groups at once: meshes, chains, cycles, hangs beside each other. One trouble is one incident, and only its root is named."""

import pytest
from build_jobs import MONO, PAGING, WALL, Job, barrier, coll, compiling, group, handle, init, mark, nap

from rankwatch.model import Collective, Group, JobSnapshot, NodeReport, Process, RankState
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

ASLEEP = "train.py:31:load_batch"


def pages(job):
    return {(seen.verdict.cause, seen.verdict.culprit_ranks) for seen in job.pages()}


def named(job):
    return {seen.verdict.culprit_ranks for seen in job.history if seen.verdict.culprit_ranks}


def opened(job):
    return [change.incident.verdict.culprit_ranks for _, change in job.changes if change.kind == "opened"]


def axes(shape):
    """All groups of a mesh along each of its axes, as (name, ranks), in the order in which every rank makes them."""
    world = 1
    for length in shape:
        world *= length
    found, stride = [], 1
    for length in reversed(shape):
        lines = {}
        for rank in range(world):
            lines.setdefault(rank - (rank // stride % length) * stride, []).append(rank)
        found += [tuple(ranks) for ranks in lines.values()]
        stride *= length
    return [(str(number + 1), ranks) for number, ranks in enumerate(found)]


def mesh(shape, stops, steps=400):
    """A step is an all_reduce along each axis. stops: {rank: what it does at step 5}."""
    groups = axes(shape)

    def script(rank):
        yield init(180)
        for name, ranks in groups:
            yield group(name, ranks, 180)
        for step in range(steps):
            if step == 5:
                yield mark("onset")
                if rank in stops:
                    yield stops[rank]
            for name, ranks in groups:
                if rank in ranks:
                    yield coll(group=name, size=len(ranks))
            yield nap(0.1)

    return script


@pytest.mark.parametrize(("shape", "culprit"), [((2, 2), 3), ((2, 2), 0), ((2, 2, 2), 5), ((4, 2), 2)])
def test_in_a_mesh_the_sleeping_rank_is_the_only_one_named_and_everything_else_waits_behind(shape, culprit):
    job = Job(mesh(shape, {culprit: nap(3600, ASLEEP)}), shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1)).play(70)
    assert named(job) == {(culprit,)}
    assert pages(job) == {("not_entered", (culprit,))}
    assert opened(job) == [(culprit,)]
    assert job.book.open[0].verdict.waiting_ranks == tuple(rank for rank in range(job.world) if rank != culprit)
    assert any("more group" in line for line in job.book.open[0].verdict.evidence)


def test_a_mesh_that_waits_for_a_compiling_rank_is_not_paged():
    job = Job(mesh((2, 2), {1: compiling(60, cpu=1.0)}), 4).play(90)
    assert pages(job) == set()
    assert {(seen.verdict.verdict, seen.verdict.cause, seen.verdict.culprit_ranks) for seen in job.history} == {("slow", "compiling", (1,))}
    assert len(opened(job)) == 1


def test_two_ranks_that_sleep_in_one_group_are_named_together_and_in_two_groups_apart():
    beside = Job(mesh((2, 2), {1: nap(3600, ASLEEP), 2: nap(3600, ASLEEP)}), 4).play(70)
    assert pages(beside) == {("not_entered", (1,)), ("not_entered", (2,))}
    assert len(opened(beside)) == 2
    together = Job(mesh((1, 4), {1: nap(3600, ASLEEP), 2: nap(3600, ASLEEP)}), 4).play(70)
    assert pages(together) == {("not_entered", (1, 2))}
    assert len(opened(together)) == 1


def pairs(world):
    return [(str(first + 1), (first, first + 1)) for first in range(world - 1)]


def chain(world, stop):
    def script(rank):
        yield init(180)
        for name, ranks in pairs(world):
            yield group(name, ranks, 180)
        for step in range(400):
            if step == 5 and rank == world - 1:
                yield stop
            for name, ranks in reversed(pairs(world)):
                if rank in ranks:
                    yield coll(group=name)

    return script


@pytest.mark.parametrize("world", [3, 12])
def test_at_the_end_of_a_chain_stands_one_root_and_one_incident(world):
    job = Job(chain(world, nap(3600, ASLEEP)), world).play(70)
    assert named(job) == {(world - 1,)}
    assert len(opened(job)) == 1
    assert job.book.open[0].verdict.waiting_ranks == tuple(range(world - 1))


def test_a_chain_behind_a_compiling_rank_is_slow_from_end_to_end():
    job = Job(chain(6, compiling(3600, cpu=1.0)), 6).play(100)
    assert {(seen.verdict.verdict, seen.verdict.cause, seen.verdict.culprit_ranks) for seen in job.history} == {("slow", "compiling", (5,))}


def test_two_hangs_of_disjoint_groups_are_two_incidents():
    def script(rank):
        yield init(180)
        for name, ranks in (("1", (0, 1)), ("2", (2, 3))):
            yield group(name, ranks, 180)
        for step in range(400):
            if step == 5 and rank == 1:
                yield nap(3600, ASLEEP)
            if step == 20 and rank == 3:
                yield nap(3600, "train.py:77:evaluate")
            yield coll(group="1" if rank < 2 else "2")
            yield nap(0.2)

    job = Job(script, 4).play(90)
    assert named(job) == {(1,), (3,)}
    assert sorted(opened(job)) == [(1,), (3,)]
    assert pages(job) == {("not_entered", (1,)), ("not_entered", (3,))}


@pytest.mark.parametrize("size", [3, 4, 6])
def test_a_cycle_over_any_number_of_groups_is_named_as_a_whole(size):
    members = tuple(range(size))

    def script(rank):
        yield init(180)
        for n in members:
            yield group(str(n + 1), tuple(sorted((n, (n + 1) % size))), 180)
        for step in range(400):
            mine = sorted({rank + 1, (rank - 1) % size + 1}) if step < 5 else [rank + 1, (rank - 1) % size + 1]
            for number in mine:
                yield coll(group=str(number))
            yield nap(0.1)

    job = Job(script, size).play(40)
    assert pages(job) == {("group_order_deadlock", members)}
    assert len(opened(job)) == 1


def test_what_hangs_on_a_cycle_is_not_named():
    def script(rank):
        yield init(180)
        for name, ranks in (("1", (0, 1)), ("2", (0, 1)), ("3", (1, 2)), ("4", (2, 3))):
            yield group(name, ranks, 180)
        for step in range(400):
            if rank in (0, 1):
                for name in ("1", "2") if rank == 0 or step < 5 else ("2", "1"):
                    yield coll(group=name)
            for name, ranks in (("3", (1, 2)), ("4", (2, 3))):
                if rank in ranks:
                    yield coll(group=name)

    job = Job(script, 4).play(40)
    assert pages(job) == {("group_order_deadlock", (0, 1))}
    assert len(opened(job)) == 1
    assert job.book.open[0].verdict.waiting_ranks == (0, 1, 2, 3)


def test_ranks_outside_a_group_are_never_missing_in_it():
    def script(rank):
        yield init(180)
        yield group("1", (0, 2, 3), 180)
        for step in range(400):
            if rank == 1:
                yield nap(3600, "serve.py:10:serve")
            if rank == 3 and step == 5:
                yield nap(3600, ASLEEP)
            yield coll(group="1")

    job = Job(script, 4).play(60)
    assert named(job) == {(3,)}


# -- an extra call, one left out, two in another order ------------------------------------------------------------------------


ROUND = ("all_reduce", "broadcast", "reduce")


def rounds(change, world_odd=2):
    """Steps of three calls; at step 8 rank `world_odd` makes `change(calls)` of them."""

    def script(rank):
        yield init(180)
        for step in range(60):
            calls = list(ROUND)
            if step == 8 and rank == world_odd:
                calls = change(calls)
            for op in calls:
                yield coll(op)
            yield nap(0.1)
        yield barrier()

    return script


CHANGES = {
    "extra": lambda calls: [calls[0], "all_gather", *calls[1:]],
    "left out": lambda calls: [calls[0], calls[2]],
    "swapped": lambda calls: [calls[1], calls[0], calls[2]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_of_three_ranks_the_odd_one_is_named(change):
    job = Job(rounds(CHANGES[change]), 3).play(40)
    assert pages(job) == {("mismatch", (2,))}
    assert job.pages()[0].verdict.waiting_ranks == (0, 1)
    assert len(opened(job)) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_of_two_ranks_both_are_named(change):
    job = Job(rounds(CHANGES[change], 1), 2).play(40)
    assert pages(job) == {("mismatch", (0, 1))}


def test_a_call_more_of_the_same_kind_comes_out_at_the_end_of_the_loop_and_names_the_rank_that_is_not_at_the_barrier():
    def script(rank):
        yield init(180)
        for step in range(30):
            yield coll()
            if rank == 1 and step == 8:
                yield coll()
            yield nap(0.1)
        yield barrier()

    assert pages(Job(script, 3).play(40)) == {("mismatch", (1,))}


def test_a_rank_that_is_late_decides_who_is_in_the_minority():
    """Two ranks differ, the third comes two seconds later and agrees with one of them: that one was never paged."""

    def script(rank):
        yield init(180)
        for _ in range(6):
            yield coll()
            yield nap(0.1)
        if rank == 2:
            yield nap(2.2)
        yield coll("broadcast" if rank == 1 else "all_reduce")

    assert pages(Job(script, 3).play(40)) == {("mismatch", (1,))}


def test_a_mismatch_in_one_group_is_the_root_of_what_waits_in_the_others():
    groups = axes((2, 2))

    def script(rank):
        yield init(180)
        for name, ranks in groups:
            yield group(name, ranks, 180)
        for step in range(400):
            for name, ranks in groups:
                if rank in ranks:
                    yield coll("reduce" if (rank, step, name) == (3, 5, "2") else "all_reduce", group=name)
            yield nap(0.1)

    job = Job(script, 4).play(40)
    assert pages(job) == {("mismatch", (2, 3))}  # a pair has no majority
    assert len(opened(job)) == 1
    assert job.book.open[0].verdict.waiting_ranks == (0, 1, 2, 3)


# -- what is not known --------------------------------------------------------------------------------------------------------


def test_in_a_mesh_a_rank_that_is_not_seen_is_never_named_and_nobody_else_is():
    job = Job(mesh((2, 2), {3: nap(3600, ASLEEP)}), 4, seen=(0, 1, 2)).play(90)
    assert named(job) == set()
    assert {seen.verdict.confidence for seen in job.history} == {"partial"}


def test_a_handle_that_nobody_waits_for_is_no_link_of_a_chain():
    """Rank 1 holds an open handle in the group with rank 2, and both are asleep: only rank 1 keeps anybody waiting."""

    def script(rank):
        yield init(180)
        yield group("1", (0, 1), 180)
        yield group("2", (1, 2), 180)
        for _ in range(5):
            yield coll()
            yield nap(0.1)
        if rank == 1:
            yield handle(group="2")
            yield nap(3600, ASLEEP)
        if rank == 2:
            yield nap(8, "train.py:90:save")
            yield coll(group="2")
        if rank == 0:
            yield coll(group="1")

    job = Job(script, 3).play(70)
    assert pages(job) == {("not_entered", (1,))}


@pytest.mark.parametrize("poll", [0.1, 0.25, 0.5, 1.0])
def test_a_rank_that_does_its_part_late_and_exits_at_once_is_not_missed(poll):
    """Its last numbers are those of a beat before, and so are the waiters' for a moment."""

    def script(rank):
        yield init(180)
        for _ in range(6):
            yield coll()
        if rank == 1:
            yield nap(8.23, "train.py:90:save")
        yield coll()
        if rank != 1:
            yield nap(5)

    job = Job(script, 3, poll=poll).play(60)
    assert pages(job) == set()


def entry(seq, op="all_reduce", name="0", at=0.0, done=False, size=10):
    return Collective(name, 0, seq, op, ((size,),), ((size,),), ("Float",), WALL + at, 180.0, done)


def state(rank, enqueued, done, entries=(), t=0.0, **more):
    groups = (Group("0", "default_pg", "gloo", (0, 1, 2), 180.0),)
    return RankState(
        rank=rank, node="node05", process=Process(100 + rank, True, "S", 1.0, 1.0), heartbeat_at=MONO + t, groups=groups, collectives=tuple(entries),
        collectives_at=MONO + t, enqueued={"0": enqueued}, completed={"0": done}, **more,
    )  # fmt: skip


def run(make, until):
    before, told, t = State(), [], 0.0
    while t <= until:
        report = NodeReport("node05", tuple(make(t)))
        before, verdicts, _ = diagnose(before, JobSnapshot(MONO + t, WALL + t, 3, 0, (report,), gap_s=0.5), MONO + t, Limits())
        told += [(v.verdict, v.cause, v.culprit_ranks) for v in verdicts]
        t += 0.5
    return list(dict.fromkeys(told))


def test_entries_that_the_recorder_has_lost_accuse_nobody():
    """Rank 1's entry at the frontier is gone: whether it is in it is not known, so it is neither a mismatch nor missing, and "all are in" is not said."""

    def make(t):
        return [
            state(0, 26, 25, [entry(26)], t),
            state(1, 90, 25, [entry(seq) for seq in range(60, 91)], t, lost_collectives=300),
            state(2, 26, 25, [entry(26)], t),
        ]

    assert {(cause, ranks) for _, cause, ranks in run(make, 60)} == {("unknown", ())}


def test_the_root_of_a_broadcast_is_ahead_and_accuses_nobody():
    """gloo's root has done its part when the message is on its way."""

    def make(t):
        return [state(0, 27, 26, [entry(26, "broadcast", done=True), entry(27)], t), *[state(n, 26, 25, [entry(26, "broadcast")], t) for n in (1, 2)]]

    assert {ranks for _, _, ranks in run(make, 60)} <= {()}


def test_numbers_that_are_one_beat_old_are_no_absence_of_long():
    """Rank 1's status lags by half a second throughout: nobody waits for long, nobody is named."""

    def make(t):
        base = int(t * 4)
        return [state(0, base + 1, base, t=t), state(1, base - 1, base - 1, t=t), state(2, base + 1, base, t=t)]

    assert run(make, 25) == []


def test_healthy_meshes_are_left_alone():
    job = Job(mesh((2, 2, 2), {}, steps=120), 8).play(90)
    assert [seen for seen in job.history if seen.verdict.verdict in PAGING] == []
