"""Frontiers, mismatches, cycles, leads, paused clocks and partial views, on snapshots written by hand."""

import random
import time
from dataclasses import replace

import pytest
from build_jobs import MONO, PAGING, WALL, Job, burn, coll, frames, group, handle, init, mark, nap

from rankwatch.model import Collective, CompileActivity, Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose, graph, mismatch
from rankwatch.monitor.diagnose.state import age
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.policy import Limits


def entry(seq, op="all_reduce", size=1436, dtype="Float", at=0.0, done=False, name="0", started=None, timeout=180.0, generation=0):
    sizes, dtypes = (((size,),), (dtype,)) if size else ((), ())
    return Collective(name, generation, seq, op, sizes, sizes, dtypes, WALL + at, timeout, done, started)


def rank(number, *, enq=None, done=None, entries=(), groups=None, read=0.0, world=3, t=0.0, state="S", cpu=1.0, stack=None, earlier=None, beat=None, **more):
    groups = (Group("0", "default_pg", "gloo", tuple(range(world)), 180.0),) if groups is None else groups
    return RankState(
        rank=number,
        node="node05",
        process=Process(100 + number, True, state, cpu, cpu),
        heartbeat_at=MONO + (t if beat is None else beat),
        groups=groups,
        collectives=tuple(entries),
        collectives_at=MONO + read,
        enqueued={} if enq is None else {"0": enq},
        completed={} if done is None else {"0": done},
        stack=stack,
        earlier_stack=earlier,
        **more,
    )


def snap(ranks, t, world=3, gap=0.5, **more):
    return JobSnapshot(MONO + t, WALL + t, world, 0, (NodeReport("node05", tuple(ranks)),), gap_s=gap, **more)


def run(make, until, start=0.0, poll=0.5, world=3, limits=None, gap_at=None):
    """Judges make(t) at each poll; {t: [verdicts]}."""
    state, told, t = State(), {}, start
    while t <= until:
        snapshot = snap(make(t), t, world, gap=gap_at.get(t, poll) if gap_at else poll)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, limits or Limits())
        told[t] = list(verdicts)
        t = round(t + poll, 3)
    return told


def kinds(told):
    return list(dict.fromkeys((v.verdict, v.cause, v.culprit_ranks) for verdicts in told.values() for v in verdicts))


# -- mismatch --------------------------------------------------------------------------------------------------------------


def test_different_sizes_at_one_number_name_the_odd_one():
    found = mismatch.compare({0: entry(11), 1: entry(11), 2: entry(11, size=1435)})
    assert (found.culprits, found.majority, found.differs) == ((2,), True, "number of elements")
    assert found.classes == (("all_reduce of [1436] Float", (0, 1)), ("all_reduce of [1435] Float", (2,)))


def test_two_ranks_that_differ_are_both_named():
    found = mismatch.compare({0: entry(14, "all_gather", 4096), 1: entry(14, size=4160)})
    assert (found.culprits, found.majority, found.differs) == ((0, 1), False, "operation")


def test_dtypes_count_only_where_both_sides_have_one():
    assert mismatch.compare({0: entry(1, dtype="Float"), 1: entry(1, dtype="Half")}).differs == "dtype"
    assert mismatch.compare({0: entry(1), 1: replace(entry(1), dtypes=())}) is None


def test_equal_numbers_of_elements_in_other_shapes_agree():
    assert mismatch.compare({0: replace(entry(1), input_sizes=((4, 8),)), 1: replace(entry(1), input_sizes=((32,),))}) is None


@pytest.mark.parametrize("op", ["alltoall", "all_to_all", "alltoall_base", "scatter", "gather", "all_gather", "barrier", "reduce_scatter"])
def test_uneven_sizes_are_fine_where_the_operation_allows_them(op):
    assert mismatch.compare({0: entry(1, op, 10), 1: entry(1, op, 20)}) is None


def test_the_rank_that_repeats_itself_is_the_hint_with_two_ranks():
    history = tuple(entry(seq, done=True) for seq in range(1, 14))
    assert mismatch.habit(history, entry(14)) == "its last 13 operations in this group hold 13 of this kind and size"
    assert mismatch.habit(history, entry(14, "all_gather", 4096)) == "its last 13 operations in this group hold 0 of this kind and size"


def test_a_mismatch_needs_two_looks_and_names_both_sides():
    def make(t):
        calls = [entry(14), entry(14), entry(14, "barrier", None)]
        return [rank(n, enq=14, done=13, entries=[entry(13, done=True), calls[n]], t=t) for n in range(3)]

    told = run(make, 4)
    first = next(t for t, verdicts in told.items() if verdicts)
    assert first == 2.0
    verdict = told[first][0]
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.waiting_ranks) == ("stuck", "mismatch", (2,), (0, 1))
    assert "#14 of default_pg: rank 2 calls barrier" in verdict.evidence


# -- frontiers -------------------------------------------------------------------------------------------------------------


def test_leads_of_an_asynchronous_rank_are_normal():
    """NCCL: 3 to 30 operations are enqueued ahead; while all of them complete in turn nobody waits."""

    def make(t):
        base = int(t * 20)
        return [rank(0, enq=base + 30, done=base, t=t), rank(1, enq=base + 3, done=base - 1, t=t), rank(2, enq=base + 15, done=base, t=t)]

    assert kinds(run(make, 60, start=1.0)) == []


def test_the_first_gap_counts_and_not_the_last_number():
    """Rank 0 is three ahead (756/753), rank 1 has entered 753 only: rank 1 is missing at 754."""

    def make(t):
        return [rank(0, enq=756, done=753, entries=[entry(n) for n in (754, 755, 756)], t=t, world=2), rank(1, enq=753, done=753, t=t, world=2)]

    told = run(make, 10, world=2)
    verdict = told[10.0][0]
    assert (verdict.verdict, verdict.culprit_ranks, verdict.group.seq) == ("slow", (1,), 754)


def test_with_timing_the_rank_whose_device_has_not_started_is_named():
    def make(t):
        groups = (Group("0", "default_pg", "nccl", (0, 1), 60.0),)
        return [
            rank(0, enq=756, done=753, entries=[entry(754, started=True, timeout=60.0)], groups=groups, t=t),
            rank(1, enq=756, done=753, entries=[entry(754, started=False, timeout=60.0)], groups=groups, t=t),
        ]

    told = kinds(run(make, 40, world=2))
    assert told == [("slow", "all_entered", (1,)), ("stuck", "all_entered", (1,))]


def test_a_dropped_handle_that_is_never_retired_is_no_wait():
    def make(t):
        return [rank(n, enq=6, done=6, entries=[entry(5), entry(6, done=True)], t=t) for n in range(3)]

    assert kinds(run(make, 30)) == []


def test_a_stale_status_of_the_last_arriver_is_not_all_entered():
    """The waiter's own numbers are half a second old when the late rank has come and gone."""

    def make(t):
        late = t >= 40
        return [rank(0, enq=26, done=25, entries=[entry(26)], t=t, world=2), rank(1, enq=26 if late else 25, done=26 if late else 25, t=t, world=2)]

    told = run(make, 41, world=2)
    assert all(v.cause == "not_entered" for verdicts in told.values() for v in verdicts)


def test_ranks_that_count_generations_differently_are_still_compared():
    """Rank 1 was no member of one earlier group of this name."""

    def make(t):
        def g(generation):
            return (Group("1", "undefined", "gloo", (0, 1), 180.0, generation, WALL - 20 + 0.01 * generation),)

        a = rank(0, entries=[entry(5, name="1", generation=3)], groups=g(3), t=t)
        b = rank(1, entries=[entry(4, name="1", generation=2, done=True)], groups=g(2), t=t)
        return [a, b]

    assert kinds(run(make, 10, world=2)) == [("slow", "not_entered", (1,))]


def test_a_rank_that_still_has_the_old_group_counts_as_not_come():
    def make(t):
        new = rank(0, entries=[entry(1, generation=1)], groups=(Group("0", "default_pg", "gloo", (0, 1), 180.0, 1, WALL - 1),), t=t)
        old = rank(1, entries=[entry(40, done=True)], groups=(Group("0", "default_pg", "gloo", (0, 1), 180.0, 0, WALL - 100),), t=t)
        return [new, old]

    told = run(make, 12, world=2)
    assert ("slow", "not_entered", (1,)) in kinds(told)


# -- cycles ----------------------------------------------------------------------------------------------------------------


def wait(key, waiters, missing, **more):
    return Wait((key,), "collective", key, (), dict.fromkeys(waiters, 0.0), tuple(missing), (), 0.0, **more)


def test_a_chain_ends_at_its_root():
    found = graph.hangs([wait("a", [0, 1], [2]), wait("b", [2], [3])], lambda rank, each: True)
    assert [(hang.roots, hang.cycle, hang.waiting) for hang in found] == [((3,), (), (0, 1, 2))]


def test_a_cycle_over_two_groups_is_a_deadlock_and_what_hangs_on_it_waits():
    found = graph.hangs([wait("tp", [0], [1]), wait("dp", [1], [0]), wait("pp", [5], [0])], lambda rank, each: True)
    assert [(hang.roots, hang.cycle, hang.waiting) for hang in found] == [((), (0, 1), (0, 1, 5))]


def test_a_longer_cycle_is_found_as_a_whole():
    found = graph.hangs([wait("a", [0], [1]), wait("b", [1], [2]), wait("c", [2], [0])], lambda rank, each: True)
    assert [hang.cycle for hang in found] == [(0, 1, 2)]


def test_a_rank_that_only_holds_a_handle_breaks_the_cycle():
    found = graph.hangs([wait("tp", [0], [1]), wait("dp", [1], [0])], lambda rank, each: rank != 1)
    assert [(hang.roots, hang.cycle) for hang in found] == [((1,), ())]


def test_an_unwaited_handle_of_a_sleeping_rank_is_no_deadlock():
    """Rank 1 issued an asynchronous operation in one group and sleeps; rank 0 waits for it in the other and so is missing in the first."""

    def script(rank):
        yield init(180)
        yield group("1", (0, 1), 180)
        for _ in range(5):
            yield coll()
            yield nap(0.2)
        if rank == 1:
            yield handle(group="1")
            yield nap(3600, "train.py:31:load_batch")
        yield coll()

    job = Job(script, 2).play(60)
    assert job.first("stuck").verdict.culprit_ranks == (1,)
    assert {seen.verdict.cause for seen in job.history} == {"not_entered"}


def test_an_nccl_rank_that_idles_while_its_peers_spin_is_no_part_of_a_deadlock():
    def script(rank):
        yield init(180)
        yield group("1", (0, 1), 180)
        for _ in range(5):
            yield coll()
            yield nap(0.2)
        if rank == 1:
            yield handle(group="1")
            yield nap(3600, "train.py:31:load_batch")
        yield coll()

    job = Job(script, 2, nccl=True).play(80)
    assert job.history[-1].verdict.culprit_ranks == (1,)


# -- clocks ----------------------------------------------------------------------------------------------------------------


def lagging(t):
    return [rank(0, enq=26, done=25, entries=[entry(26)], t=t), rank(1, enq=25, done=25, t=t), rank(2, enq=26, done=25, entries=[entry(26)], t=t)]


def test_after_a_long_pause_ages_restart_and_two_looks_judge_nothing():
    told = run(lambda t: lagging(t), 60, start=50.0, gap_at={50.0: 48.0})
    assert next(t for t, verdicts in told.items() if verdicts) == 55.0


def test_a_short_gap_of_a_slow_monitor_is_taken_off_only():
    assert age(((110.0, 3.0),), 100.0, 112.0) == 9.0
    assert age(((110.0, 30.0),), 100.0, 112.0) == 2.0
    assert age(((90.0, 30.0),), 100.0, 112.0) == 12.0


def test_open_verdicts_stay_through_a_pause():
    told = run(lambda t: lagging(t), 20, gap_at={10.0: 5.0})
    assert told[10.0] == told[9.5]
    assert told[10.5] == told[9.5]
    assert told[11.0][0].verdict == "slow"


def test_a_jump_of_the_wall_clock_does_not_age_a_wait():
    """NTP or a suspend moves wall time by an hour; the start of the wait was fixed before."""
    state = State()
    for step in range(16):
        t = step * 0.5
        snapshot = snap(lagging(t), t)
        if t >= 4:
            snapshot = replace(snapshot, wall_at=snapshot.wall_at + 3600)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    assert [v.verdict for v in verdicts] == ["slow"]
    assert verdicts[0].timeout_left_s == pytest.approx(172.5)


def test_a_nodes_clock_offset_is_taken_into_account():
    """The other node's clock is 1000 s behind; its entries are not older for that."""
    state = State()
    for step in range(12):
        t = step * 0.5
        near = NodeReport("a", (rank(0, enq=25, done=25, t=t, world=2),))
        far = NodeReport("b", (rank(1, enq=26, done=25, entries=[entry(26, at=-1000.0)], t=t, world=2),), clock_offset_s=1000.0)
        snapshot = JobSnapshot(MONO + t, WALL + t, 2, 0, (near, far), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    assert [(v.verdict, v.culprit_ranks) for v in verdicts] == [("slow", (0,))]
    assert verdicts[0].since == pytest.approx(MONO)


def test_ranks_of_a_node_that_went_silent_are_unknown():
    state = State()
    for step in range(100):
        t = step * 0.5
        near = NodeReport("a", (rank(0, enq=26, done=25, entries=[entry(26)], t=t, world=2),))
        far = NodeReport("b", (rank(1, enq=25, done=25, t=0, world=2),), report_age_s=60.0)
        snapshot = JobSnapshot(MONO + t, WALL + t, 2, 0, (near, far), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    assert [(v.verdict, v.cause, v.culprit_ranks, v.unknown_ranks) for v in verdicts] == [("slow", "unknown", (), (1,))]


# -- causes ----------------------------------------------------------------------------------------------------------------


def waiting_for(make_culprit, until=60, poll=0.5):
    def make(t):
        others = [rank(n, enq=26, done=25, entries=[entry(26, at=0.0)], t=t) for n in (0, 2)]
        return [others[0], make_culprit(t), others[1]]

    return run(make, until, poll=poll)


def stack(*lines, at=4.0, native=False):
    return Stack(101, MONO + at, (Thread("MainThread", 1, frames(*lines)),), native=native)


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (("train.py:31:load_batch",), "not_entered"),
        (("@torch/utils/data/dataloader.py:1291:_MultiProcessingDataLoaderIter._try_get_data", "train.py:34:epoch"), "data_loading"),
        (("@torch/utils/data/dataloader.py:1690:_MultiProcessingDataLoaderIter._shutdown_workers", "train.py:34:epoch"), "data_loading"),
        (("@torch/serialization.py:1220:_save", "train.py:30:save_checkpoint"), "checkpointing"),
        (("@torch/distributed/checkpoint/state_dict_saver.py:150:save", "train.py:30:save_checkpoint"), "checkpointing"),
        (("@safetensors/torch.py:286:save_file", "train.py:30:save_checkpoint"), "checkpointing"),
        (("@botocore/httpsession.py:465:send", "train.py:30:upload"), "external_io"),
        (("@torch/_inductor/async_compile.py:500:wait", "@torch/_dynamo/convert_frame.py:700:compile_inner", "train.py:30:step"), "compiling"),
        (("@torch/_dynamo/eval_frame.py:800:compile_wrapper", "train.py:30:step"), "not_entered"),
        (("<stdlib>/pdb.py:300:interaction", "train.py:30:step"), "debugger"),
    ],
)
def test_a_stack_tells_the_cause(lines, cause):
    told = waiting_for(lambda t: rank(1, enq=25, done=25, t=t, stack=stack(*lines)), 8)
    assert kinds(told) == [("slow", cause, (1,))]


def test_an_old_stack_of_before_the_wait_tells_nothing():
    told = waiting_for(lambda t: rank(1, enq=25, done=25, t=t, stack=stack("@torch/serialization.py:1220:_save", at=-30.0)), 8)
    assert kinds(told) == [("slow", "not_entered", (1,))]


def test_a_debugger_is_slow_until_the_timeout_is_near():
    told = waiting_for(lambda t: rank(1, enq=25, done=25, t=t, state="t", stack=stack("train.py:31:load_batch")), 140)
    assert kinds(told) == [("slow", "debugger", (1,))]


def test_a_checkpoint_has_half_of_the_timeout():
    told = waiting_for(lambda t: rank(1, enq=25, done=25, t=t, stack=stack("@torch/serialization.py:1220:_save", "train.py:30:save")), 100)
    first = next(t for t, verdicts in told.items() if any(v.verdict == "stuck" for v in verdicts))
    assert first == 90.0


def test_moving_stacks_are_progress_and_equal_ones_are_not():
    def moving(t):
        line = 30 + int(t // 10)
        return rank(
            1, enq=25, done=25, t=t, stack=stack(f"train.py:{line}:evaluate", at=t), earlier=stack(f"train.py:{line - 1}:evaluate", at=max(0.0, t - 10))
        )

    def still(t):
        return rank(1, enq=25, done=25, t=t, stack=stack("train.py:30:evaluate", at=t), earlier=stack("train.py:30:evaluate", at=max(0.0, t - 10)))

    assert kinds(waiting_for(moving, 100)) == [("slow", "not_entered", (1,))]
    assert ("stuck", "not_entered", (1,)) in kinds(waiting_for(still, 50))


def test_a_native_sample_beside_a_python_one_is_no_movement():
    def make(t):
        return rank(
            1,
            enq=25,
            done=25,
            t=t,
            stack=stack("libc.so:0:nanosleep", "train.py:30:evaluate", at=t, native=True),
            earlier=stack("train.py:30:evaluate", at=t - 5),
        )

    assert ("stuck", "not_entered", (1,)) in kinds(waiting_for(make, 50))


def test_library_lines_that_flicker_are_no_movement():
    def make(t):
        number = 200 + int(t * 2) % 7
        return rank(1, enq=25, done=25, t=t, stack=stack(f"<stdlib>/selectors.py:{number}:select", "train.py:34:epoch", at=t),
                    earlier=stack("<stdlib>/selectors.py:415:select", "train.py:34:epoch", at=max(0.0, t - 1)))  # fmt: skip

    assert ("stuck", "not_entered", (1,)) in kinds(waiting_for(make, 50))


def test_a_stop_that_does_not_last_is_no_page():
    told = waiting_for(lambda t: rank(1, enq=25, done=25, t=t, state="T" if 6 <= t < 9 else "S"), 20)
    assert ("stuck", "stopped", (1,)) not in kinds(told)


def test_a_rank_stopped_inside_the_collective_is_named_though_all_have_entered():
    def make(t):
        return [rank(n, enq=26, done=25, entries=[entry(26)], t=t, state="T" if n == 1 else "S") for n in range(3)]

    assert kinds(run(make, 10)) == [("stuck", "stopped", (1,))]


def test_a_stale_heartbeat_of_a_rank_that_waits_is_not_the_gil():
    def make(t):
        return [rank(n, enq=26, done=25, entries=[entry(26)], t=t, beat=0.0) for n in range(3)]

    assert {v.cause for verdicts in run(make, 30).values() for v in verdicts} == {"all_entered"}


def test_a_compile_seen_only_by_torchs_own_counters_is_likely():
    told = waiting_for(lambda t: rank(1, enq=25, done=25, t=t, compile_witness=True), 8)
    verdict = told[8.0][0]
    assert (verdict.cause, verdict.confidence) == ("compiling", "likely")


def test_a_compile_that_has_just_ended_keeps_its_frame():
    """Torch's counters were read a moment before the probe said that the compile is over: nothing is missing."""
    probes = {"compile": {"status": "armed"}}
    totals = {"last": {"frame": "block@model.py:31"}}
    told = waiting_for(lambda t: rank(1, enq=25, done=25, t=t, compile_witness=True, probes=probes, compile_totals=totals), 8)
    verdict = told[8.0][0]
    assert (verdict.cause, verdict.at, verdict.missing_evidence) == ("compiling", "model.py:31:block", ())
    assert "it has just compiled block@model.py:31" in verdict.summary


def test_a_compile_with_cpu_in_its_workers_is_never_stuck():
    def make(t):
        activity = CompileActivity("0/1", "forward", "forward@model.py:31", "inductor", "Scheduler.__init__", MONO, MONO)
        return replace(rank(1, enq=25, done=25, t=t, cpu=1.0), process=Process(101, True, "S", 1.0, 1.0 + t), compiling=(activity,))

    assert kinds(waiting_for(make, 140)) == [("slow", "compiling", (1,))]


def test_a_compile_without_phases_and_cpu_is_stuck_after_a_minute():
    def make(t):
        return rank(1, enq=25, done=25, t=t, compiling=(CompileActivity("0/1", "forward", "forward@model.py:31", "inductor", "Scheduler", MONO, MONO),))

    told = waiting_for(make, 70)
    first = next(t for t, verdicts in told.items() if any(v.verdict == "stuck" for v in verdicts))
    assert first == 60.0


def test_the_most_severe_of_several_absent_ranks_is_named_and_the_rest_is_evidence():
    def make(t):
        return [
            rank(0, enq=26, done=25, entries=[entry(26)], t=t),
            rank(1, enq=25, done=25, t=t, state="T"),
            rank(2, enq=25, done=25, t=t, stack=stack("train.py:30:evaluate")),
        ]

    told = run(make, 8)
    verdict = told[8.0][0]
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks) == ("stuck", "stopped", (1,))
    assert any("rank 2 has not come either" in line for line in verdict.evidence)


def test_a_blind_rank_is_unknown_and_never_missing():
    def make(t):
        blind = RankState(rank=1, agent="silent", process=Process(101, True, "S"), stage="starting")
        return [rank(0, enq=26, done=25, entries=[entry(26)], t=t), blind, rank(2, enq=26, done=25, entries=[entry(26)], t=t)]

    assert kinds(run(make, 60)) == [("slow", "unknown", ())]


# -- size and chance ---------------------------------------------------------------------------------------------------------


def test_a_diagnosis_of_16384_ranks_stays_in_proportion():
    """Ten times the ranks take about ten times as long, not a hundred times."""

    def cost(world):
        members = tuple(range(world))
        groups = (Group("0", "default_pg", "nccl", members, 600.0),)
        states = [
            rank(n, enq=754 if n != 7 else 753, done=753, entries=[entry(753, done=True)] + ([entry(754)] if n != 7 else []), groups=groups, read=1.0)
            for n in range(world)
        ]
        state, best = State(), 1e9
        for step in range(4):
            snapshot = snap(states, 6.0 + step * 0.5, world)
            began = time.process_time()
            state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
            best = min(best, time.process_time() - began)
        assert verdicts[0].culprit_ranks == (7,)
        assert len(verdicts[0].waiting_ranks) == world - 1
        return best

    assert cost(16384) < 40 * max(cost(1638), 0.002)


@pytest.mark.parametrize("seed", range(12))
def test_random_healthy_jobs_never_page_and_random_sleepers_are_the_only_ones_blamed(seed):
    """Random work on random ranks; in odd seeds one rank falls asleep for good."""
    chance = random.Random(seed)
    world = chance.randint(2, 6)
    sleeper = chance.randrange(world) if seed % 2 else -1
    plan = [[chance.random() * 1.5 for _ in range(60)] for _ in range(world)]
    subgroup = tuple(sorted(chance.sample(range(world), chance.randint(2, world))))

    def script(number):
        yield init(180)
        yield group("1", subgroup, 180)
        for step in range(60):
            yield burn(plan[number][step]) if chance.random() < 0.5 else nap(plan[number][step])
            if number == sleeper and step == 30:
                yield mark("onset")
                yield nap(3600, "train.py:31:load_batch")
            yield coll()
            if number in subgroup and step % 3 == 0:
                yield coll(group="1", size=10)

    job = Job(script, world).play(180)
    if sleeper < 0:
        assert job.pages() == []
    else:
        assert {kind[2] for kind in job.kinds() if kind[0] in PAGING} == {(sleeper,)}
        assert job.first("stuck").at - job.marks["onset"] <= 45
