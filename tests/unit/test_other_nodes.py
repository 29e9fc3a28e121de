"""What the other nodes of a job add to the loop; what they ask and answer is the test's."""

from types import SimpleNamespace

import pytest

from rankwatch.model import JobInfo, JobSnapshot, NodeReport, Process, RankState, Status
from rankwatch.monitor.nodes.questions import Order
from rankwatch.monitor.other_nodes import FAILURE_WAIT_S, OtherNodes

STATUS = Status(JobInfo("job", "/run", (), "host", 4, 2, 0, {}, {}, 1000.0), None, state="running")
REPORT = NodeReport("host", tuple(RankState(n, n, "host", process=Process(100 + n, True)) for n in (0, 1)))
SNAPSHOT = JobSnapshot(10.0, 1010.0, 4, 0, (REPORT,))


class Said:
    """The announcer and the files of a launcher."""

    def __init__(self):
        self.notices, self.spoken, self.events = [], [], []

    def notice(self, text):
        self.notices.append(text)

    def speak(self, speaks, status, anew, ended, last_words):
        self.spoken.append((speaks, ended, last_words))

    def event(self, at, kind, fields):
        self.events.append((kind, fields))


def nodes_of(speaks=True, **together):
    """An OtherNodes, what it has said, and whom its launcher calls. together: what the part in a job of many nodes answers; none: one node."""
    said, taken_over = Said(), []
    cases = SimpleNamespace(speaks=speaks, book=SimpleNamespace(open=()), take_over=taken_over.append)
    made = OtherNodes(cases, said, said, lambda: None, lambda: "")
    if together:
        made.together = SimpleNamespace(**together)
    return made, said, taken_over


def test_in_a_job_of_one_node_there_is_nobody_to_ask_and_this_launcher_speaks():
    nodes, said, _ = nodes_of()
    events = [{"kind": "compiled"}]
    assert nodes.exchange(SNAPSHOT, events, "") == (SNAPSHOT, events)
    assert (nodes.judges, nodes.may_act, nodes.sets_pace, nodes.all_seen(SNAPSHOT)) == (True, True, False, True)
    assert (nodes.capabilities(), nodes.store, nodes.shown(STATUS)) == ({}, (0, 0), STATUS)
    nodes.look_around(SNAPSHOT, "", STATUS)
    nodes.newest(1.0)
    nodes.hand_over(1.0)
    nodes.obey(SNAPSHOT, "", None)
    nodes.end(True, 9.0, True, STATUS)
    nodes.tell_end(True, 1.0)
    nodes.part()
    assert (said.notices, said.spoken, said.events) == ([], [], [])


@pytest.mark.parametrize("acts", [True, False])
def test_the_judges_order_is_obeyed_where_this_launchers_own_command_says_so_else_refused_once(acts):
    order, obeyed = Order("key", (3,), "rank 3 is stuck"), []
    nodes, said, _ = nodes_of(take_order=lambda: order)
    on_stuck = SimpleNamespace(obey=lambda *told: obeyed.append(told)) if acts else None
    for _ in range(2):
        nodes.obey(SNAPSHOT, "", on_stuck)
    assert obeyed == [(0, (3,), "rank 3 is stuck")] * (2 * acts)
    assert len(said.notices) == (not acts)
    assert said.events == [("order", {"end": acts, "ranks": (3,), "why": "rank 3 is stuck"})] * 2


def test_an_order_that_comes_while_the_workers_end_is_taken_and_does_nothing():
    taken = []
    nodes, said, _ = nodes_of(take_order=lambda: taken.append(1) or Order("key", (3,), "why"))
    nodes.obey(SNAPSHOT, "SIGTERM to the launcher", None)
    assert (len(taken), said.notices, said.events) == (1, [], [])


def test_who_is_silent_may_not_act_and_shows_where_the_job_is_judged():
    nodes, _, _ = nodes_of(speaks=False, may_act=True, judge="http://judge:27435")
    assert not nodes.may_act
    assert nodes.shown(STATUS).judge == "http://judge:27435"


def test_a_failure_is_waited_for_no_longer_than_the_launcher_can_wait():
    waits = []
    nodes, _, _ = nodes_of(pull_now=waits.append, hand_over=waits.append)
    for wait_s in (10.0, 0.1):
        nodes.newest(wait_s)
        nodes.hand_over(wait_s)
    assert waits == [FAILURE_WAIT_S] * 2 + [0.1] * 2


def test_stores_of_attempts_that_are_over_are_counted_on():
    nodes, _, _ = nodes_of(store=(3, 100), judge_has_ended=True, judge_node="worker-0", stop=lambda: None)
    nodes.part()
    nodes.together = SimpleNamespace(store=(2, 11))
    assert nodes.store == (5, 111)


@pytest.mark.parametrize(("failed", "gone", "speaks"), [(True, True, True), (True, False, False), (False, True, False)])
def test_a_member_speaks_at_the_end_of_a_failed_job_whose_judge_is_gone(failed, gone, speaks):
    answers = {"hand_over": lambda wait_s: None, "judge_is_gone": lambda since: gone, "judge_has_told": lambda now: False}
    nodes, said, taken_over = nodes_of(speaks=False, judge_has_ended=False, last_words=lambda: ["stuck"], **answers)
    nodes.end(failed, 9.0, True, STATUS)
    assert said.spoken == [(True, False, ["stuck"])] * speaks
    assert len(taken_over) == speaks
