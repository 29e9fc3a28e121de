"""Ranks that pair different operations and train on: proved by their own histories, soon, once and for all; a mere lead is nothing."""

from dataclasses import replace

import pytest
from build_calls import MONO, WALL, Job

from rankwatch.model import Collective, Group, JobSnapshot, NodeReport
from rankwatch.monitor.diagnose import State, diagnose, mismatch
from rankwatch.monitor.policy import Limits

STEP = [("all_reduce", ((100,),)), ("all_reduce", ((200,),)), ("broadcast", ((7,),))]


def healthy(number):
    return STEP[number % 3]


def other_from(start, call):
    return lambda number: call if number >= start and number % 3 == 0 else healthy(number)


def fsdp(skip_at=None, layers=5):
    """A step of a sharded model: gathers forward, gathers and reductions backward. From skip_at on one layer's are left out once."""
    step = [("_all_gather_base", ((1000 + layer,),)) for layer in range(layers)]
    for layer in reversed(range(layers)):
        step += [("_all_gather_base", ((1000 + layer,),)), ("_reduce_scatter_base", ((8 * (1000 + layer),),))]

    def program(number):
        return step[(number + (3 if skip_at is not None and number >= skip_at else 0)) % len(step)]

    return program


@pytest.mark.parametrize(
    ("call", "differs"),
    [
        (("reduce", ((100,),)), "operation"),
        (("all_reduce", ((101,),)), "number of elements"),
        (("all_reduce", ((100,),), "Int"), "element type"),
    ],
    ids=["operation", "size", "dtype"],
)
def test_one_wrong_pair_that_completed_is_proof_and_names_the_odd_rank_within_ten_seconds(call, differs):
    job = Job([healthy, healthy, other_from(300, call)], rate=20).play(40)
    at, verdict = job.first()
    assert at - 300 / 20 <= 10
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.waiting_ranks, verdict.confidence) == ("diverged", "mismatch", (2,), (), "certain")
    assert "since #300 without hanging" in verdict.summary
    assert verdict.summary.endswith("results since then are garbage")
    assert any(differs in line for line in verdict.evidence)
    assert any(line.startswith("#300 of default_pg: rank 2 calls") for line in verdict.evidence)


def test_a_single_wrong_pair_is_enough():
    def once(number):
        return ("all_reduce", ((100,),), "Int") if number == 300 else healthy(number)

    job = Job([healthy, once, healthy], rate=20).play(40)
    assert job.kinds_told() == [("diverged", (1,))]
    assert "1 of " in job.first()[1].evidence[0]


def test_shapes_of_equally_many_elements_differ_in_a_reduction_and_need_three_numbers():
    def shaped(*dims):
        return lambda number: ("all_reduce", (dims,))

    def rarely(number):
        return ("all_reduce", ((8, 4),)) if number in (200, 210) else ("all_reduce", ((4, 8),))

    assert Job([shaped(4, 8), shaped(4, 8), shaped(8, 4)], rate=10).play(20).kinds_told() == [("diverged", (2,))]
    assert Job([shaped(4, 8), shaped(4, 8), rarely], rate=10).play(60).kinds_told() == []
    assert Job([shaped(4, 8), shaped(32), shaped(2, 2, 8)], rate=10).play(20).kinds_told() == []  # the same memory, flattened or split


def test_two_ranks_that_differ_are_both_named():
    assert Job([healthy, other_from(100, ("all_reduce", ((5,),)))], rate=20).play(30).kinds_told() == [("diverged", (0, 1))]


def test_what_was_proven_stays_when_the_calls_are_alike_again():
    def for_a_while(number):
        return ("reduce", ((100,),)) if 300 <= number < 360 and number % 3 == 0 else healthy(number)

    job = Job([healthy, healthy, for_a_while], rate=20).play(400)
    assert [v.key for v in job.told[400.0]] == ["a0-diverged-0-0"]
    assert job.told[400.0][0].since == job.first()[1].since


def test_a_new_attempt_begins_anew():
    job = Job([healthy, healthy, other_from(30, ("reduce", ((100,),)))], rate=20).play(20)
    fresh = Job([healthy] * 3, rate=20)
    fresh.play(10)
    report = NodeReport("node05", tuple(rank.state(10.5) for rank in fresh.ranks))
    state, verdicts, _ = diagnose(job.state, JobSnapshot(MONO + 10.5, WALL + 10.5, 3, 1, (report,), gap_s=0.5), MONO + 10.5, Limits())
    assert (verdicts, dict(state.diverged)) == ((), {})


def test_a_skipped_layer_on_nccl_shows_as_a_lead_and_is_proved_by_the_recorders_that_it_makes_be_read():
    """Full entries are not read on a timer there before torch 2.14: the lead is what makes them be read."""
    job = Job([fsdp(), fsdp(skip_at=1501)], rate=75, history_s=None, backend="nccl", lead=lambda rank, t: 3 if t > 20 and rank == 0 else 0).play(60)
    at, verdict = job.first()
    assert at - 1501 / 75 <= 10
    assert (verdict.verdict, verdict.culprit_ranks) == ("diverged", (0, 1))
    assert "since #1501 without hanging" in verdict.summary
    assert "rank 0 stays 3 operations ahead" in verdict.evidence
    shares = [int(word) for word in verdict.evidence[0].split() if word.isdigit()]
    assert 0 < shares[0] < shares[1]


WAVERING = (5, -3, 4, 3, -3, 2, 1, 1, -3, -2, 10, 3, -3, -3, 12, 8)  # rank 1 against rank 0, looks at two H200s that had come apart by a skipped layer


def wavering(rank, t):
    lead = WAVERING[int(t) % len(WAVERING)] if t > 20 else 0
    return max(0, lead if rank == 1 else -lead)


def test_numbers_that_come_apart_are_read_also_where_the_lead_wavers():
    job = Job([fsdp(skip_at=1501), fsdp()], rate=75, history_s=None, backend="nccl", lead=wavering).play(60)
    at, verdict = job.first()
    assert at - 1501 / 75 <= 10
    assert (verdict.verdict, verdict.culprit_ranks) == ("diverged", (0, 1))
    assert not any("stays" in line for line in verdict.evidence)


def test_numbers_that_are_apart_all_day_are_read_again_every_five_minutes_at_least():
    job = Job([fsdp(), fsdp(skip_at=30_000)], rate=75, history_s=None, backend="nccl", lead=lambda rank, t: int(t * 7) % 4 + 3 * rank, skew=8).play(720)
    at, _verdict = job.first()
    assert 400 <= at <= 710
    assert job.reads <= 12


def test_nobody_is_called_late_at_collectives_that_were_paired_wrongly():
    job = Job([healthy, other_from(300, ("reduce", ((100,),)))], rate=20).play(90)
    assert job.kinds_told() == [("diverged", (0, 1))]


def test_a_lead_alone_is_noise_and_makes_the_recorders_be_read_ever_more_rarely():
    job = Job([fsdp(), fsdp()], rate=75, history_s=None, backend="nccl", lead=lambda rank, t: 3 * rank, skew=4).play(300)
    assert job.kinds_told() == []
    assert 2 <= job.reads <= 30


def test_sizes_that_may_differ_by_rank_are_no_divergence():
    def uneven(rank):
        ops = ("all_to_all", "alltoall_base", "all_gather", "reduce_scatter", "gather", "scatter", "_broadcast_oop", "coalesced")
        return lambda number: (ops[number % len(ops)], ((10 + (7 * rank + number) % 5,),))

    assert Job([uneven(rank) for rank in range(4)], rate=20).play(60).kinds_told() == []


def test_the_list_and_the_tensor_form_of_one_operation_meet():
    programs = [lambda number, op=op: (op, ((16,),)) for op in ("all_gather", "_all_gather_base", "all_gather")]
    assert Job(programs, rate=20).play(30).kinds_told() == []


def test_numbers_that_are_not_behind_all_ranks_prove_nothing():
    """A different call at the number that the ranks hang at is a hang's matter, not a divergence."""
    job = Job([healthy, healthy, other_from(291, ("all_reduce", ((101,),)))], rate=20)
    for rank in job.ranks:
        rank.entered, rank.done = 291, 290
    job.read(range(3), 14.5)
    state = State()
    for step in range(20):
        t = 14.5 + step / 2
        snapshot = JobSnapshot(MONO + t, WALL + t, 3, 0, (NodeReport("node05", tuple(rank.state(t) for rank in job.ranks)),), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    assert [(v.verdict, v.cause, v.culprit_ranks) for v in verdicts] == [("stuck", "mismatch", (2,))]
    for rank in job.ranks:  # and stays one when a handler goes on after the timeout
        rank.entered = rank.done = 295
    job.read(range(3), 24.5)
    for step in range(6):
        t = 24.5 + step / 2
        snapshot = JobSnapshot(MONO + t, WALL + t, 3, 0, (NodeReport("node05", tuple(rank.state(t) for rank in job.ranks)),), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    assert not [v for v in verdicts if v.verdict == "diverged" and "#291" in v.summary]


# -- groups that only look alike ---------------------------------------------------------------------------------------------


def judged(job, t=20.0, looks=4):
    state = State()
    for step in range(looks):
        now = t + step / 2
        snapshot = JobSnapshot(MONO + now, WALL + now, len(job.ranks), 0, (NodeReport("node05", tuple(r.state(now) for r in job.ranks)),), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    return [(v.verdict, v.culprit_ranks) for v in verdicts]


def standing(programs, groups_of, numbers=290):
    """A job at one moment: every rank has done `numbers` calls in its group."""
    job = Job(programs, rate=20)
    for rank in job.ranks:
        rank.groups = groups_of(rank.rank)
        rank.entered = rank.done = numbers
        rank.read(14.5, 20)
    return job


def test_two_groups_of_one_name_are_not_compared():
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    programs = [healthy, healthy, *[lambda number: ("reduce", ((5,),))] * 2]
    assert judged(standing(programs, lambda rank: (Group("1", "tp", "gloo", pairs[rank], 600.0),))) == []


def test_a_group_that_one_rank_has_made_anew_already_is_not_compared_with_the_old_one():
    def groups(rank):
        made = WALL - 30 if rank == 0 else WALL - 31
        return (Group("0", "default_pg", "gloo", (0, 1, 2), 600.0, 1 if rank == 0 else 0, made),)

    assert judged(standing([lambda number: ("reduce", ((5,),)), healthy, healthy], groups)) == []


def test_a_sub_group_counts_in_the_world_that_it_was_made_in():
    """Rank 1 is in the second world already; its group "1" is not the one of the first world, though both are its first of that name."""

    def groups(rank):
        world = Group("0", "default_pg", "gloo", (0, 1, 2), 600.0, 1 if rank == 1 else 0, WALL - 30)
        return (Group("1", "undefined", "gloo", (0, 1, 2), 600.0, 0, WALL - 30), world)

    assert judged(standing([healthy, lambda number: ("reduce", ((5,),)), healthy], groups)) == []
    same = standing([healthy, lambda number: ("reduce", ((5,),)), healthy], lambda rank: (groups(0)[0], groups(0)[1]))
    assert judged(same) == [("diverged", (1,))]


def test_numbers_that_were_never_read_are_left_out():
    """The recorder has forgotten what lies between two readings."""
    job = Job([healthy, healthy, healthy], rate=2000, history_s=5.0).play(60)
    assert job.kinds_told() == []
    late = Job([healthy, healthy, other_from(40_000, ("reduce", ((100,),)))], rate=2000, history_s=5.0).play(40)
    assert late.kinds_told() == [("diverged", (2,))]
    assert "or earlier" in late.first()[1].summary or "#40002" in late.first()[1].summary


def test_ranks_that_are_not_seen_make_it_partial():
    job = Job([healthy, healthy, other_from(30, ("reduce", ((100,),))), healthy], rate=20).play(20)
    reports = tuple(rank.state(20.5) for rank in job.ranks[:3])
    snapshot = JobSnapshot(MONO + 20.5, WALL + 20.5, 4, 0, (NodeReport("node05", reports),), gap_s=0.5)
    _, verdicts, _ = diagnose(State(), snapshot, snapshot.now, Limits())
    assert [(v.verdict, v.culprit_ranks, v.confidence, v.unknown_ranks) for v in verdicts] == [("diverged", (2,), "partial", (3,))]


def test_a_rank_that_differs_in_both_of_its_groups_of_a_mesh_is_named_alone_and_once():
    """2 x 2: every group has two ranks, so that only both groups together tell who is odd."""
    job = Job([healthy] * 3 + [lambda number: ("reduce", ((9,),))], rate=20)
    state = State()
    names = {("tp", (0, 1)): "1", ("tp", (2, 3)): "2", ("dp", (0, 2)): "3", ("dp", (1, 3)): "4"}
    meshes = {rank: [key for key in names if rank in key[1]] for rank in range(4)}
    states = {}
    for rank in job.ranks:
        calls, numbers = {}, {}
        groups = tuple(Group(names[key], key[0], "gloo", key[1], 600.0) for key in meshes[rank.rank])
        for group in groups:
            rank.groups, rank.log, rank.entered, rank.done = (group,), type(rank.log)(job.kinds), 90, 90
            rank.read(14.5, 20)
            calls |= rank.log.calls((group,))
            numbers[group.name] = 90
        states[rank.rank] = replace(rank.state(15.0), groups=groups, calls=calls, enqueued=numbers, completed=numbers)
    for step in range(3):
        t = 15.0 + step / 2
        snapshot = JobSnapshot(MONO + t, WALL + t, 4, 0, (NodeReport("node05", tuple(states.values())),), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    assert [(v.verdict, v.culprit_ranks) for v in verdicts] == [("diverged", (3,))]
    assert "rank 3 is in every group that differs" in verdicts[0].summary


def test_flattened_and_merged_dimensions_are_laid_out_alike():
    def calls(*shapes):
        return {rank: replace(mismatch.kind(ENTRY), input_sizes=(shape,)) for rank, shape in enumerate(shapes)}

    assert mismatch.compare(calls((4, 8), (32,)), shapes=True) is None
    assert mismatch.compare(calls((2, 3, 8), (6, 8)), shapes=True) is None
    assert mismatch.compare(calls((1, 32), (32, 1)), shapes=True) is None
    assert mismatch.compare(calls((4, 8), (4, 8), (8, 4)), shapes=True).culprits == (2,)
    assert mismatch.compare(calls((4, 8), (8, 4))) is None


ENTRY = Collective("0", 0, 1, "all_reduce", ((32,),), ((32,),), ("Float",))
