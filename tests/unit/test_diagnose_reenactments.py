"""Faults as small jobs: the culprit and the cause are named in time, and the victims are not blamed."""

import pytest
from build_jobs import Job, barrier, burn, coll, compiling, destroy, die, gil, group, hang, init, letter, load, mark, nap, recv, stepped

from rankwatch.monitor.diagnose import words


def steps(count, every=0.2):
    for _ in range(count):
        yield coll()
        yield stepped()
        yield nap(every)


def uneven_batches(rank):
    yield init(180)
    yield from steps(8)
    if rank == 2:
        yield mark("onset")
        yield barrier()
    yield coll()


def save_inside_rank0(rank):
    yield init(180)
    yield from steps(8)
    if rank == 0:
        yield mark("onset")
        yield coll("all_gather", 4096)
    yield coll()


def rank0_eval_long(rank):
    yield init(180)
    yield from steps(10)
    if rank == 0:
        yield mark("onset")
        for _ in range(120):
            yield burn(0.5, "train.py:24:evaluate")
    yield barrier()
    yield destroy()


def compile_skew(rank):
    yield init(180)
    for step in range(12):
        if rank == 1 and step == 6:
            yield mark("onset")
            yield compiling(45, reason="tensor 'x' size mismatch at index 1. expected 32, actual 48")
        yield from steps(1)
    yield destroy()


def compiler_child_hung(rank):
    yield init(180)
    yield from steps(5)
    if rank == 1:
        yield mark("onset")
    yield compiling(14, cpu=0.8, phase_s=1.5, frame="f@train.py:44")
    if rank == 1:
        yield compiling(3600, frame="f@train.py:44")
    yield coll()


def dataloader_fork_lock(rank):
    yield init(180)
    yield from steps(10)
    if rank == 1:
        yield mark("onset")
        yield load(3600)
    yield from steps(10)


def asleep(rank):
    yield init(180)
    yield from steps(10)
    if rank == 1:
        yield mark("onset")
        yield nap(3600, "train.py:31:load_batch")
    yield from steps(10)


def asleep_long_timeout(rank):
    yield init(1800)
    yield from steps(10)
    if rank == 1:
        yield mark("onset")
        yield nap(3600, "train.py:31:load_batch")
    yield from steps(10)


def gil_held(rank):
    yield init(180)
    yield from steps(10)
    if rank == 1:
        yield mark("onset")
        yield gil(3600)
    yield from steps(10)


def stopped(rank):
    yield init(180)
    yield from steps(10)
    if rank == 1:
        yield mark("onset")
        yield letter(3600, "T")
    yield from steps(10)


def uninterruptible(rank):
    yield init(180)
    yield from steps(10)
    if rank == 1:
        yield mark("onset")
        yield letter(3600, "D", "train.py:22:read_shard")
    yield from steps(10)


def group_order(rank):
    yield init(180)
    yield group("1", (0, 1))
    yield group("2", (0, 1))
    yield from steps(10)
    yield mark("onset")
    first, second = ("1", "2") if rank == 0 else ("2", "1")
    yield coll(group=first, at=f"train.py:8{rank}:reduce")
    yield coll(group=second)


def cascade(rank):
    """Rank 3 sleeps; 2 waits for it in a subgroup, 0 and 1 wait for 2 in the default group."""
    yield init(180)
    yield group("1", (2, 3))
    yield from steps(10)
    if rank == 3:
        yield mark("onset")
        yield nap(3600, "train.py:31:load_batch")
    if rank >= 2:
        yield coll(group="1")
    yield from steps(10)


def exits_early_collectives_go_on(rank):
    """Leaves with code 0; the others are in new_group, which no closing socket ends."""
    yield init(180)
    yield from steps(10)
    if rank == 2:
        yield mark("onset")
        yield die(0)
    yield group("1", (0, 1, 2))
    yield from steps(10)


def late_joiner(rank):
    if rank == 2:
        yield mark("onset")
        yield nap(3600, "train.py:10:<module>")
    yield init(180)
    yield from steps(10)


# script, world, onset, verdict, cause, culprits, at, within seconds of the onset, forbidden verdicts
FAULTS = [
    (uneven_batches, 3, "stuck", "mismatch", (2,), 5.0, ()),
    (save_inside_rank0, 2, "stuck", "mismatch", (0, 1), 5.0, ()),
    (rank0_eval_long, 3, "slow", "not_entered", (0,), 10.0, ("stuck", "failed", "timeout_imminent")),
    (compile_skew, 3, "slow", "compiling", (1,), 10.0, ("stuck", "failed", "timeout_imminent")),
    (compiler_child_hung, 2, "stuck", "compiling", (1,), 90.0, ()),
    (dataloader_fork_lock, 2, "stuck", "data_loading", (1,), 45.0, ()),
    (asleep, 3, "slow", "not_entered", (1,), 10.0, ()),
    (asleep, 3, "stuck", "not_entered", (1,), 45.0, ()),
    (asleep_long_timeout, 2, "slow", "not_entered", (1,), 10.0, ()),
    (asleep_long_timeout, 2, "stuck", "not_entered", (1,), 125.0, ()),
    (gil_held, 3, "slow", "gil_held", (1,), 10.0, ()),
    (gil_held, 3, "stuck", "gil_held", (1,), 45.0, ()),
    (stopped, 3, "stuck", "stopped", (1,), 6.0, ()),
    (uninterruptible, 3, "stuck", "uninterruptible", (1,), 45.0, ()),
    (group_order, 2, "stuck", "group_order_deadlock", (0, 1), 6.0, ()),
    (cascade, 4, "slow", "not_entered", (3,), 10.0, ()),
    (cascade, 4, "stuck", "not_entered", (3,), 45.0, ()),
    (exits_early_collectives_go_on, 3, "stuck", "exited", (2,), 6.0, ()),
    (late_joiner, 3, "slow", "store_wait", (2,), 15.0, ("stuck",)),
]


@pytest.mark.parametrize(
    ("script", "world", "verdict", "cause", "culprits", "within_s", "forbidden"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_fault_is_named_in_time(script, world, verdict, cause, culprits, within_s, forbidden):
    job = Job(script, world).play(150 if script is asleep_long_timeout else 100)
    seen = next((s for s in job.history if (s.verdict.verdict, s.verdict.cause, s.verdict.culprit_ranks) == (verdict, cause, culprits)), None)
    assert seen is not None, job.kinds()
    assert seen.at - job.marks["onset"] <= within_s
    assert seen.at >= job.marks["onset"]
    wrong = [kind for kind in job.kinds() if not set(kind[2]) <= set(culprits)]
    assert wrong == []
    assert [kind for kind in job.kinds() if kind[0] in forbidden] == []


@pytest.mark.parametrize("script", [asleep, gil_held, dataloader_fork_lock, compiler_child_hung, cascade])
def test_one_hang_is_one_incident(script):
    """slow and stuck, the cause before and after the stack is known: one incident, with its history."""
    job = Job(script, 4 if script is cascade else 3 if script in (asleep, gil_held) else 2).play(100)
    (incident,) = job.incidents
    verdicts = [change.verdict for change in incident.history]
    assert verdicts[0] == "slow"
    assert verdicts[-1] == "stuck"
    assert [change.kind for _, change in job.changes].count("opened") == 1
    assert [change.kind for _, change in job.changes].count("escalated") == 1


def test_the_summary_says_rank_place_line_waiters_and_countdown():
    job = Job(asleep, 3).play(20)
    told = job.first("slow")
    assert told.verdict.summary == (
        "rank 1 has not entered all_reduce #11 of default_pg (it is in train.py:31:load_batch) for 5 s; ranks 0,2 wait; the group's timeout comes in 175 s"
    )
    assert told.verdict.at == "train.py:31:load_batch"
    assert told.verdict.waiting_ranks == (0, 2)
    assert told.verdict.timeout_s == 180
    assert told.verdict.group.op == "all_reduce"
    assert told.verdict.group.seq == 11
    assert told.verdict.advice[0] == "Start at train.py:31:load_batch on rank 1."


def test_the_compile_notice_says_frame_phase_and_reason():
    job = Job(compile_skew, 3).play(20)
    told = job.first("slow", "compiling").verdict
    assert told.at == "train.py:31:block"
    assert "torch.compile of block@train.py:31 [0/1]" in told.summary
    assert "phase backend" in told.summary
    assert "expected 32, actual 48" in told.summary
    assert told.waiting_ranks == (0, 2)


def test_peers_times_for_the_same_frame_are_told():
    def script(rank):
        yield init(600)
        yield from steps(2)
        yield compiling(4 if rank == 0 else 6 if rank == 2 else 40, cpu=0.9, phase_s=1.0)
        yield from steps(2)

    job = Job(script, 3).play(30)
    told = [s.verdict for s in job.history if s.verdict.culprit_ranks == (1,)][-1]
    assert any(line.startswith("peers took 4.") and "6." in line for line in told.evidence)


def test_a_deadlock_of_groups_says_where_each_rank_is():
    told = Job(group_order, 2).play(40).first("stuck").verdict
    assert (told.at, told.places) == ("", ((0, "train.py:80:reduce"), (1, "train.py:81:reduce")))
    assert told.advice == (
        "Issue the collectives of these groups in the same order on every rank: see train.py:80:reduce on rank 0, train.py:81:reduce on rank 1.",
    )


def test_a_stopped_rank_is_continued_by_its_pid():
    told = Job(stopped, 3).play(40).first("stuck").verdict
    assert told.advice == ("The process was stopped by a signal. `kill -CONT 4001` continues it; find out who sent SIGSTOP.",)


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (
            "4/0: rounds == 2 # for _ in range(rounds): # model.py:192 in block",
            "It recompiles because of the guard `rounds == 2`: a Python number or string that the graph has built in changes: ",
        ),
        (
            "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 5",
            "It recompiles because of the guard `tensor 'x' size mismatch at index 0. expected 4, actual 5`: a size changes from call to call: ",
        ),
        ("", "A rank that compiles alone has come to other code or other inputs than its peers: "),
    ],
)
def test_what_helps_against_a_compile_is_said_of_its_own_guard(reason, advice):
    def script(rank):
        yield init(180)
        yield from steps(10)
        if rank == 1:
            yield compiling(25, phase_s=2.0, reason=reason)
        yield from steps(10)

    told = Job(script, 3).play(60).first("slow").verdict
    assert told.cause == "compiling"
    assert told.advice[0] == words.NEAR_TIMEOUT
    assert told.advice[1].startswith(advice)


def test_the_data_loader_workers_line_is_the_place():
    job = Job(dataloader_fork_lock, 2).play(60)
    told = job.first("stuck").verdict
    assert any("child pid 9 is asleep in train.py:22:__getitem__" in line for line in told.evidence)
    assert told.at == "train.py:22:__getitem__"
    assert told.advice[0] == "Start at train.py:22:__getitem__ on rank 1."
    assert "its worker 9 is in train.py:22:__getitem__" in told.summary


def test_a_cascade_blames_the_root_and_lists_the_rest_as_waiting():
    told = Job(cascade, 4).play(60).first("stuck").verdict
    assert told.culprit_ranks == (3,)
    assert told.waiting_ranks == (0, 1, 2)
    assert told.group.name == "1"


def test_two_unrelated_hangs_are_two_incidents():
    def script(rank):
        yield init(180)
        yield group("1", (0, 1), 180)
        yield group("2", (2, 3), 180)
        yield from steps(5)
        if rank in (1, 3):
            yield nap(3600, f"train.py:3{rank}:load_batch")
        yield coll(group="1" if rank < 2 else "2")

    job = Job(script, 4).play(60)
    assert sorted(incident.verdict.culprit_ranks for incident in job.incidents) == [(1,), (3,)]
    assert {incident.verdict.verdict for incident in job.incidents} == {"stuck"}


def test_the_next_stall_of_the_same_rank_is_a_new_incident():
    def script(rank):
        yield init(600)
        for _ in range(3):
            yield from steps(10)
            if rank == 1:
                yield nap(9, "train.py:31:load_batch")
        yield from steps(10)
        yield destroy()

    job = Job(script, 2).play(100)
    assert len(job.incidents) == 3
    assert len({incident.id for incident in job.incidents}) == 3
    assert all(incident.verdict.verdict == "recovered" and incident.closed_at for incident in job.incidents)


def test_progress_that_stops_gets_a_silent_period_of_its_own():
    """A busy rank stays slow; once it falls asleep it is stuck after 36 s (20 % of 180 s) of silence, not at once."""

    def script(rank):
        yield init(180)
        yield from steps(5)
        if rank == 0:
            yield burn(50, "train.py:24:evaluate")
            yield mark("asleep")
            yield nap(3600, "train.py:25:evaluate")
        yield barrier()

    job = Job(script, 2).play(120)
    late = job.first("stuck").at - job.marks["asleep"]
    assert 30 <= late <= 42


def test_a_progressing_culprit_is_slow_until_the_timeout_is_near():
    def script(rank):
        yield init(60)
        yield from steps(5)
        if rank == 0:
            yield mark("onset")
            yield burn(3600, "train.py:24:evaluate")
        yield barrier()

    job = Job(script, 3).play(70)
    told = job.first("timeout_imminent")
    assert told.at - job.marks["onset"] == pytest.approx(30, abs=1.5)
    assert job.first("stuck") is None
    assert told.verdict.culprit_ranks == (0,)


def test_after_the_watchdog_fired_nothing_counts_as_recovery_and_no_victim_is_blamed():
    """The waiters raise and die of the timeout: the incident about rank 0 stays, and no failure of theirs is told."""

    def script(rank):
        yield init(60)
        yield from steps(5)
        if rank == 0:
            yield burn(80, "train.py:24:evaluate")
        yield barrier()

    job = Job(script, 3).play(120)
    assert [kind for kind in job.kinds() if kind[0] == "failed"] == []
    (incident,) = job.incidents
    assert incident.closed_at is None
    assert incident.final
    assert incident.verdict.verdict == "timeout_imminent"
    assert incident.verdict.culprit_ranks == (0,)


def test_a_rank_in_recv_is_not_blamed_beside_one_that_sleeps():
    def script(rank):
        yield init(180)
        yield from steps(5)
        if rank == 1:
            yield recv("never")
        if rank == 2:
            yield nap(3600, "train.py:31:load_batch")
        yield coll()

    job = Job(script, 3).play(60)
    assert job.first("stuck").verdict.culprit_ranks == (2,)


def test_silent_point_to_point_waits_give_no_page():
    def script(rank):
        yield init(180)
        yield recv("never")

    job = Job(script, 3).play(120)
    assert job.kinds() == [("slow", "unknown", ())]
    assert job.pages() == []
    told = job.first("slow")
    assert told.at >= 30
    assert told.verdict.confidence == "partial"
    assert told.verdict.waiting_ranks == (0, 1, 2)
    assert "rank 0 is in train.py:52:main" in told.verdict.evidence


def test_no_step_and_nothing_open_is_told_as_slow_and_partial_after_a_minute():
    def script(rank):
        yield init(180)
        yield from steps(30)
        yield recv("never") if rank else nap(3600, "train.py:31:wait_input")

    job = Job(script, 3).play(150)
    told = job.first("slow")
    assert told.verdict.cause == "unknown"
    assert told.verdict.confidence == "partial"
    assert told.verdict.culprit_ranks == (0,)
    assert job.pages() == []


def test_all_entered_names_nobody_when_every_rank_is_in():
    def script(rank):
        yield init(180)
        yield from steps(5)
        yield hang() if rank == 9 else coll("all_reduce", 1000 + (rank == 0) * 0)

    job = Job(script, 3)
    job._complete_original = job._complete

    def complete():
        if max((r.entered.get("0", 0) for r in job.ranks.values()), default=0) < 6:
            job._complete_original()

    job._complete = complete
    job.play(80)
    assert job.kinds()[0] == ("slow", "all_entered", ())
    told = job.first("stuck")
    assert (told.verdict.cause, told.verdict.culprit_ranks, told.verdict.domain) == ("all_entered", (), "network")


def test_evidence_is_asked_for_suspects_first_and_rarely():
    job = Job(asleep, 3).play(60)
    stacks = [(t, want.ranks) for t, want in job.wants if want.kind == "stacks"]
    onset = job.marks["onset"]
    assert stacks[0][1] == (1,)
    assert stacks[0][0] - onset <= 5
    before_stuck = [ranks for t, ranks in stacks if t < job.first("stuck").at]
    assert set(before_stuck) == {(1,)}
    assert len(before_stuck) <= 5
    assert [want.ranks for _, want in job.wants if want.kind == "native_stack"] == [(1,)]
    assert len([1 for _, want in job.wants if want.kind == "recorder"]) <= 5


def test_the_two_incidents_of_partial_views_never_name_unseen_ranks():
    """Two of four ranks are seen; the sleeping one is not among them: slow, nobody named, no page before the timeout is near."""
    job = Job(asleep, 4, seen=(0, 2)).play(80)
    assert job.kinds() == [("slow", "unknown", ())]
    told = job.history[-1].verdict
    assert told.confidence == "partial"
    assert told.unknown_ranks == (1, 3)
    assert "(2 of 4 ranks seen)" in told.summary


def test_a_partial_view_that_holds_the_culprit_names_it_as_partial():
    told = Job(asleep, 4, seen=(0, 1)).play(80).first("stuck").verdict
    assert told.culprit_ranks == (1,)
    assert told.confidence == "partial"


def test_all_entered_is_not_said_of_a_partial_view():
    def script(rank):
        yield init(180)
        yield from steps(5)
        yield hang() if rank == 2 else coll()

    assert Job(script, 3, seen=(0, 1)).play(60).kinds() == [("slow", "unknown", ())]


@pytest.mark.parametrize("busy", [nap(3600, "train.py:31:load_batch"), load(3600)])
def test_a_rank_that_is_somewhere_else_is_named_as_likely_and_a_stopped_one_for_certain(busy):
    """Under a short timeout a long sleep is told as stuck; whether it would end by itself is not known."""

    def script(rank):
        yield init(60)
        yield from steps(5)
        if rank == 1:
            yield busy
        yield coll()

    assert Job(script, 2).play(40).first("stuck").verdict.confidence == "likely"
    assert Job(stopped, 3).play(40).first("stuck").verdict.confidence == "certain"
