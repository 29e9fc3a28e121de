"""Countdowns that are right or say that they are not known, warnings in time under any timeout, and the line that sets the next one."""

import dataclasses

import pytest
from build_jobs import MONO, WALL, Job, barrier, burn, coll, compiling, group, init, mark, nap

from rankwatch.model import Collective, Group, JobSnapshot, Meeting, NodeReport, Process, RankState, Timeouts
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits


def late_at_the_end(timeout_s, work):
    def script(rank):
        yield init(timeout_s)
        for _ in range(3):
            yield coll()
        if rank == 1:
            yield mark("onset")
            yield work
        yield coll()

    return script


KINDS = {
    "asleep": nap(7200, "train.py:31:load_batch"),
    "busy": burn(7200, "train.py:24:evaluate"),
    "compiling": compiling(7200, cpu=1.0, phase_s=5.0, reason="size of x changed"),
}
# seconds after the onset: slow, stuck, timeout_imminent; the last word is due when so many seconds are left
TABLE = [
    ("asleep", 10, 2.5, 5.0, None, 5.0),
    ("busy", 10, 2.5, None, 5.0, 5.0),
    ("compiling", 10, 2.5, None, 5.0, 5.0),
    ("asleep", 60, 5.0, 12.0, None, 30.0),
    ("busy", 60, 5.0, None, 30.0, 30.0),
    ("compiling", 60, 5.0, None, 30.0, 30.0),
    ("asleep", 600, 5.0, 120.0, None, 120.0),
    ("busy", 600, 5.0, None, 480.0, 120.0),
    ("compiling", 600, 5.0, None, 480.0, 120.0),
    ("asleep", 1800, 5.0, 120.0, None, 360.0),
    ("busy", 1800, 5.0, None, 1440.0, 360.0),
]


@pytest.mark.parametrize(("kind", "timeout_s", "slow", "stuck", "imminent", "left"), TABLE)
def test_the_warning_comes_in_time_and_never_first(kind, timeout_s, slow, stuck, imminent, left):
    until = (stuck or imminent) + 8
    job = Job(late_at_the_end(timeout_s, KINDS[kind]), 3, poll=0.5 if timeout_s < 600 else 2.0).play(until)
    onset = job.marks["onset"]
    when = {name: found.at - onset if (found := job.first(name)) else None for name in ("slow", "stuck", "timeout_imminent")}
    assert when["slow"] == pytest.approx(slow, abs=2.1)
    for name, due in (("stuck", stuck), ("timeout_imminent", imminent)):
        assert (when[name] is None) == (due is None), when
        if due is not None:
            assert due - 0.5 <= when[name] <= due + 3.2
            assert timeout_s - when[name] >= left - 3.2
            assert when["slow"] < when[name]
    assert job.history[0].verdict.verdict == "slow"


def test_no_first_word_is_late_under_a_very_short_timeout():
    job = Job(late_at_the_end(4, KINDS["busy"]), 2, poll=0.25).play(12)
    assert [kind[0] for kind in job.kinds()][:2] == ["slow", "timeout_imminent"]


def test_the_advice_of_a_timeout_is_the_line_for_next_time():
    job = Job(late_at_the_end(600, KINDS["compiling"]), 2, poll=2.0).play(500)
    told = job.first("timeout_imminent").verdict
    assert told.advice[0] == (
        "For next time: dist.init_process_group(..., timeout=timedelta(seconds=1200)); it is 600 s, and this wait has lasted "
        f"{600 - told.timeout_left_s:.0f} s. An operation that is under way cannot be extended."
    )
    assert "For next time" not in " ".join(job.first("slow").verdict.advice)


def test_a_sub_group_is_told_by_the_call_that_makes_it():
    def script(rank):
        yield init(1800)
        yield group("1", (0, 1), 20)
        if rank == 1:
            yield burn(100)
        yield barrier("1")

    job = Job(script, 2).play(18)
    told = job.first("timeout_imminent").verdict
    assert told.advice[0].startswith("For next time: dist.new_group(..., timeout=timedelta(seconds=40)) for group 1; it is 20 s, and this wait has lasted ")


# -- hand-made pictures ----------------------------------------------------------------------------------------------------


def pair(t, entry=None, *, done=5, backend="gloo", group_s=600.0, timeouts=None, set_at="", waits=True, more=(), entered=6):
    """Rank 0 waits in number 6 since 0, rank 1 has not come and works."""
    groups = (Group("0", "default_pg", backend, (0, 1), group_s, set_at=set_at, created_wall_at=WALL - 100),)
    found = []
    for rank in (0, 1):
        inside = rank == 0 and waits
        found.append(
            RankState(
                rank, process=Process(4000 + rank, True, "S", cpu_s=t * rank, tree_cpu_s=t * rank), groups=groups, heartbeat_at=MONO + t,
                enqueued={"0": entered if inside else done}, completed={"0": done}, collectives=(*more, entry) if inside and entry else (),
                collectives_at=MONO + t if entry else None, timeouts=timeouts or Timeouts(),
            )
        )  # fmt: skip
    return found


def call(seq=6, at=0.0, timeout_s=600.0, done=False):
    return Collective("0", 0, seq, "all_reduce", ((4,),), ((4,),), ("Float",), WALL + at, timeout_s, done)


def judge(make, until, start=-2.0, poll=0.5, world=2, wall=lambda t: WALL + t, gap=0.5):
    state, t, told = State(), start, []
    while t <= until:
        ranks = tuple(make(t))
        snapshot = JobSnapshot(MONO + t, wall(t), world, 0, (NodeReport("node05", ranks),), gap_s=gap, started_at=MONO - 100)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
        told += [(t, verdict) for verdict in verdicts]
        t += poll
    return told, state


def test_an_operations_own_timeout_counts_and_not_what_the_group_has_now():
    told, _ = judge(lambda t: pair(t, call(timeout_s=60.0) if t >= 1 else None, waits=t >= 0, group_s=600.0 if t < 3 else 900.0), 40)
    verdict = told[-1][1]
    assert (verdict.verdict, verdict.timeout_s) == ("timeout_imminent", 60.0)
    assert verdict.timeout_left_s == pytest.approx(60 - told[-1][0])
    assert verdict.advice[0].startswith(
        "For next time: dist.init_process_group(..., timeout=timedelta(seconds=120)); it is 60 s for this operation (900 s for the group now), and"
    )


def test_a_timeout_that_is_set_while_the_operation_waits_moves_no_deadline():
    """Before the recorder is read the group's own timeout stands for it: the one that it had when the wait was first seen."""
    told, _ = judge(lambda t: pair(t, waits=t >= 0, group_s=600.0 if t < 2 else 6000.0), 10)
    assert told[-1][1].timeout_s == 600.0
    assert told[-1][1].timeout_left_s == pytest.approx(590, abs=1)


def test_where_the_timeout_is_set_is_said():
    told, _ = judge(lambda t: pair(t, call(timeout_s=60.0), waits=t >= 0, set_at="train.py:12:main", group_s=60.0), 40)
    assert "; it is 60 s, set at train.py:12:main, and this wait has lasted " in told[-1][1].advice[0]


def test_a_backend_that_tells_no_timeout_has_an_unknown_countdown():
    told, _ = judge(lambda t: pair(t, call(timeout_s=None), waits=t >= 0, group_s=None), 8)
    verdict = told[-1][1]
    assert (verdict.verdict, verdict.timeout_left_s, verdict.timeout_known) == ("slow", None, False)
    assert verdict.missing_evidence[-1] == "the timeout of default_pg: neither the group nor its operations tell it"
    assert verdict.summary.endswith("when the timeout comes is not known")


EXTENDED = Timeouts(extensions=((300.0, WALL - 1.0),))


def test_the_first_operation_after_an_extension_has_all_of_it():
    before = call(seq=5, at=-3.0, done=True)
    told, _ = judge(lambda t: pair(t, call(), more=(before,), waits=t >= 0, backend="nccl", timeouts=EXTENDED if t >= -1 else None), 10)
    verdict = told[-1][1]
    assert verdict.timeout_known
    assert (verdict.timeout_s, verdict.timeout_left_s) == (900.0, pytest.approx(900 - told[-1][0]))


def test_a_later_operation_may_have_it_or_not_so_no_countdown_is_told():
    """Number 6 was the first one after it and is done now: whether it was when number 7 was issued, nobody can tell."""
    before = (call(seq=5, at=-3.0, done=True), call(seq=6, at=-0.5, done=True))
    told, state = judge(
        lambda t: pair(t, call(seq=7), more=before, done=6 if t >= 0 else 5, waits=t >= 0, entered=7, backend="nccl", timeouts=EXTENDED if t >= -1 else None),
        10,
    )
    verdict = told[-1][1]
    assert (verdict.timeout_left_s, verdict.timeout_known, verdict.timeout_s) == (None, False, 600.0)
    assert verdict.missing_evidence[-1] == (
        "when the timeout of default_pg comes: torch has extended it by up to 300 s, and no recorder tells for which operations"
    )
    assert state.troubles[0].deadline == MONO + 900, "what follows the end waits for the latest one"


def test_the_warning_comes_before_the_earliest_end():
    before = (call(seq=5, at=-3.0, done=True), call(seq=6, at=-0.5, done=True))

    def make(t):
        return pair(t, call(seq=7), more=before, done=6 if t >= 0 else 5, waits=t >= 0, entered=7, backend="nccl", timeouts=EXTENDED if t >= -1 else None)

    told, _ = judge(make, 700, poll=2.0)
    first = next(t for t, verdict in told if verdict.verdict == "timeout_imminent")
    assert first == pytest.approx(480, abs=3)
    assert told[-1][1].verdict == "timeout_imminent", "at 700 s it may still come: nothing is over"


def test_an_extension_that_is_used_up_changes_nothing():
    """An operation issued after it has completed, as a look has shown, before the one that waits was issued."""
    told, _ = judge(
        lambda t: pair(t, call(at=0.0), done=5 if t >= -5 else 4, waits=t >= 0, backend="nccl", timeouts=Timeouts(extensions=((300.0, WALL - 9.0),))),
        10, start=-10.0,
    )  # fmt: skip
    assert (told[-1][1].timeout_s, told[-1][1].timeout_known) == (600.0, True)


def test_gloo_knows_no_extensions():
    told, _ = judge(lambda t: pair(t, call(), waits=t >= 0, timeouts=EXTENDED), 10)
    assert (told[-1][1].timeout_s, told[-1][1].timeout_known) == (600.0, True)


def starting(t, timeouts, creating=None):
    groups = (Group("0", "default_pg", "gloo", (0, 1), 600.0, created_wall_at=WALL - 100),) if creating else ()
    ranks = []
    for rank in (0, 1):
        here = rank == 0
        stage = "joined" if creating else "joining" if here else "armed"
        ranks.append(
            RankState(
                rank, process=Process(4000 + rank, True, "R", cpu_s=t * rank, tree_cpu_s=t * rank), stage=stage, stage_since=MONO, groups=groups,
                group_in_creation="1" if creating and here and t >= 0 else None, heartbeat_at=MONO + t, timeouts=timeouts if here else Timeouts(),
            )
        )  # fmt: skip
    return ranks


def test_the_countdown_of_init_process_group_is_its_own_timeout():
    told, _ = judge(lambda t: starting(t, Timeouts(join_s=40.0, join_set_at="train.py:9:main")), 25)
    assert [verdict.verdict for _, verdict in told][:1] == ["slow"]
    verdict = told[-1][1]
    assert (verdict.verdict, verdict.timeout_s) == ("timeout_imminent", 40.0)
    assert verdict.advice[0].startswith(
        "For next time: dist.init_process_group(..., timeout=timedelta(seconds=80)); it is 40 s, set at train.py:9:main, and this wait has lasted 25 s."
    )


def test_the_countdown_of_new_group_is_that_groups_timeout():
    told, _ = judge(lambda t: starting(t, Timeouts(creation_s=30.0), creating=True), 20)
    verdict = told[-1][1]
    assert (verdict.verdict, verdict.timeout_s) == ("timeout_imminent", 30.0)
    assert verdict.advice[0].startswith("For next time: dist.new_group(..., timeout=timedelta(seconds=60)) for new_group (group 1); it is 30 s")


def test_a_start_whose_timeout_nobody_told_has_an_unknown_countdown():
    told, _ = judge(lambda t: starting(t, Timeouts()), 14)
    assert (told[-1][1].timeout_left_s, told[-1][1].timeout_known) == (None, False)


def test_the_countdown_of_a_monitored_barrier_is_its_own_timeout():
    def make(t):
        ranks = pair(t, waits=False)
        return [dataclasses.replace(ranks[0], barrier=Meeting("0", 1, True, MONO, 20.0)), ranks[1]]

    told, _ = judge(make, 14, start=0.0)
    verdict = told[-1][1]
    assert (verdict.verdict, verdict.timeout_s) == ("timeout_imminent", 20.0)
    assert verdict.advice[0].startswith("For next time: dist.monitored_barrier(..., timeout=timedelta(seconds=40)); it is 20 s")
