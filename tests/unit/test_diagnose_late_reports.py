"""What is known late, or out of order: reports of other nodes, operations that overtake each other, ranks that end of a hang."""

from dataclasses import replace

import pytest

from rankwatch.model import Collective, Crash, Frame, Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

MONO, WALL = 5_000.0, 1_796_000_000.0
TIMED_OUT = Crash("RuntimeError", "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete")


def stack(at, *lines):
    found = tuple(Frame(name, file, line) for file, line, name in lines)
    return Stack(7, MONO + at, (Thread("MainThread", 7, found),))


def rank(number, t, node="node0", calls=(), timeout=30.0, **how):
    entries = tuple(Collective("0", 0, seq, op, ((4,),), (), ("Float",), WALL, timeout, done) for seq, op, done in calls)
    group = Group("0", "default_pg", "gloo", (0, 1, 2, 3), timeout)
    done = max((seq for seq, _, done in calls if done), default=4)
    numbers = {"enqueued": {"0": max((seq for seq, *_ in calls), default=4)}, "completed": {"0": done}}
    how = {"process": Process(4000 + number, True, "S"), "heartbeat_at": MONO + t, "collectives_at": MONO + 2.0, **numbers, **how}
    return RankState(number, node=node, groups=(group,), collectives=entries, **how)


def look(state, t, ranks, ages=None):
    nodes = {}
    for each in ranks:
        nodes.setdefault(each.node, []).append(each)
    reports = tuple(NodeReport(node, tuple(members), report_age_s=(ages or {}).get(node, 0.0)) for node, members in nodes.items())
    return diagnose(state, JobSnapshot(MONO + t, WALL + t, 4, 0, reports, gap_s=0.5, started_at=MONO - 60), MONO + t, Limits())


def told(verdicts):
    return [(verdict.verdict, verdict.culprit_ranks) for verdict in verdicts]


def test_an_exchange_that_a_member_has_not_entered_is_open_whatever_has_completed_after_it():
    """#6 is a broadcast that needed nobody else: its number says nothing of the all_reduce before it."""
    state, calls = State(), ((5, "all_reduce", False), (6, "broadcast", True))
    for t in (5.0, 5.5, 6.0, 6.5):
        state, verdicts, _ = look(state, t, [rank(0, t), *(rank(number, t, calls=calls) for number in (1, 2, 3))])
    assert [verdict[1] for verdict in told(verdicts)] == [(0,)]
    assert verdicts[0].group.seq == 5


def test_a_dropped_handle_that_all_have_entered_is_no_wait():
    state, calls = State(), ((5, "all_reduce", False), (6, "all_reduce", True))
    for t in (5.0, 5.5, 20.0):
        state, verdicts, _ = look(state, t, [rank(number, t, calls=calls) for number in range(4)])
        assert verdicts == ()


@pytest.mark.parametrize(("age", "expected"), [(0.0, [("stuck", (3,))]), (9.0, [])])
def test_what_a_late_report_shows_does_not_grow_older_with_the_report(age, expected):
    """Rank 3 is 11 s late, or had been 2 s late when its node last reported: then it may be in the collective by now."""
    state, calls = State(), ((5, "all_reduce", False),)
    away = {"stack": stack(4.0, ("/job/train.py", 31, "load")), "earlier_stack": None}
    for step in range(20):
        t = 1.5 + step * 0.5
        waiting = [rank(number, t, calls=calls) for number in (0, 1, 2)]
        late = max(0.0, t - 11.0 + age)
        state, verdicts, _ = look(state, t, [*waiting, rank(3, t - late, "node1", **away)], {"node1": late})
    if expected:
        assert told(verdicts) == expected
    else:
        assert [verdict for verdict in told(verdicts) if verdict[0] != "slow"] == []


def test_ranks_that_end_of_a_hang_are_not_blamed_for_it():
    """Rank 1 times out before anybody has seen the deadline pass, and the others would seem to wait for it."""
    state, calls = State(), ((5, "all_reduce", False),)
    absent = rank(0, 12.0, stack=stack(4.0, ("/job/train.py", 31, "load")))
    for step in range(24):
        t = 1.0 + step * 0.5
        state, verdicts, _ = look(state, t, [replace(absent, heartbeat_at=MONO + t), *(rank(number, t, calls=calls) for number in (1, 2, 3))])
    assert told(verdicts) == [("stuck", (0,))]
    for t in (13.0, 13.5, 14.0):
        ended = rank(1, 13.0, calls=calls, stage="exiting", stage_since=MONO + 12.8, crash=TIMED_OUT)
        ended = replace(ended, process=Process(4001, False, "", exit_code=1, exited_at=MONO + 12.9)) if t > 13.0 else ended
        state, verdicts, _ = look(state, t, [replace(absent, heartbeat_at=MONO + t), ended, *(rank(number, t, calls=calls) for number in (2, 3))])
        assert told(verdicts) == [("stuck", (0,))]
