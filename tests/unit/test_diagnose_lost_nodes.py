"""A node that is lost as a whole is named, and not the ranks elsewhere that die of their closed connections."""

from dataclasses import replace

import pytest
from build_jobs import MONO, WALL

from rankwatch.model import Crash, Group, JobSnapshot, NodeReport, Process, RankState
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

LOST = Crash("RuntimeError", "[pair.cc:553] Connection closed by peer [10.77.0.2]:25995.", traceback="torch/distributed/distributed_c10d.py")
OWN = Crash("ValueError", "bad batch", where="train.py:31:load_batch")
ENDING = "torchrun stops the workers after rank 0 failed"
REFUSED = "10.77.0.2:4100: connection refused"
DIED = MONO + 1.0  # the moment at which node 1 loses its power


def state(rank, code=None, crash=None, at=None, stage="running"):
    return RankState(
        rank=rank, local_rank=rank % 2, agent="claimed", node=f"node{rank // 2}", stage=stage, heartbeat_at=MONO, crash=crash,
        process=Process(pid=100 + rank, alive=code is None, state="S", exit_code=code, exited_at=at), groups=(Group("0", "", "gloo", (0, 1, 2, 3), 180.0),),
        enqueued={"0": 5}, completed={"0": 4},
    )  # fmt: skip


def node(number, *ranks, **fields):
    return NodeReport(f"node{number}", tuple(ranks), number, **fields)


def gone(t, *ranks, problem=REFUSED, answered=DIED - 0.5, failing=DIED + 0.1):
    """Node 1 at MONO + t: asked in vain."""
    return node(1, *(ranks or (state(2), state(3))), report_age_s=MONO + t - answered, failing_since=failing, problem=problem)


def snap(t, *nodes, ending=ENDING, final=False, world=4):
    return JobSnapshot(MONO + t, WALL + t, world, 0, nodes, ending=ending, gap_s=0.5, final=final)


HERE = node(0, state(0), state(1))
VICTIMS = node(0, state(0, 1, LOST, at=DIED + 0.2), state(1, 1, LOST, at=DIED + 0.3))
BEFORE = (snap(0.0, HERE, node(1, state(2), state(3)), ending=""), snap(0.5, HERE, node(1, state(2), state(3)), ending=""))


def judge(*snapshots):
    """The verdicts of the last look."""
    current, verdicts = State(), ()
    for snapshot in (*BEFORE, *snapshots):
        current, verdicts, _ = diagnose(current, snapshot, snapshot.now, Limits())
    return verdicts, current


def test_the_node_that_does_not_answer_is_named_and_not_its_victims():
    (verdict,), _ = judge(snap(1.4, VICTIMS, gone(1.4)), snap(2.6, VICTIMS, gone(2.6), final=True))
    assert (verdict.verdict, verdict.cause, verdict.domain, verdict.confidence) == ("failed", "killed", "node", "likely")
    assert (verdict.culprit_ranks, verdict.waiting_ranks) == ((2, 3), (0, 1))
    assert verdict.summary.startswith("node1 is lost with ranks 2-3: its launcher does not answer, and ranks 0-1 lost the connection to a peer")
    assert any(REFUSED in line for line in verdict.evidence)


def test_it_is_held_for_a_second_since_who_is_late_answers_by_then():
    verdicts, current = judge(snap(1.4, VICTIMS, gone(1.4)))
    assert verdicts == ()
    assert current.failure_held
    (verdict,), _ = judge(snap(1.4, VICTIMS, gone(1.4)), snap(2.5, VICTIMS, gone(2.5)))
    assert verdict.culprit_ranks == (2, 3)


def test_how_a_node_ended_that_gives_no_sign_at_all_is_not_known():
    (verdict,), _ = judge(snap(2.6, VICTIMS, gone(2.6, problem="10.77.0.2:4100 did not answer in time"), final=True))
    assert (verdict.cause, verdict.domain) == ("unknown", "node")


def test_a_node_that_has_become_silent_meanwhile_is_the_same_one():
    silent = node(1, silent_ranks=(2, 3), report_age_s=11.0, failing_since=DIED + 0.1, problem=REFUSED)
    (verdict,), _ = judge(snap(1.4, VICTIMS, gone(1.4)), snap(11.5, VICTIMS, silent, final=True))
    assert verdict.culprit_ranks == (2, 3)


@pytest.mark.parametrize(
    "there",
    [
        node(1, state(2), state(3), report_age_s=0.2),
        node(1, state(2, 1, OWN, at=DIED), state(3), report_age_s=0.2),
    ],
    ids=["and its ranks live", "and tells of an end of its own"],
)
def test_a_node_that_answers_again_is_not_lost(there):
    verdicts, _ = judge(snap(1.4, VICTIMS, gone(1.4)), snap(2.6, VICTIMS, there, final=True))
    assert all(verdict.culprit_ranks != (2, 3) and "lost" not in verdict.summary.split(" of a ")[0] for verdict in verdicts)


@pytest.mark.parametrize(
    "there",
    [
        gone(2.6, answered=DIED - 9.0),
        gone(2.6, state(2, 1, LOST, at=DIED + 0.1), state(3)),
        gone(2.6, state(2, stage="exiting"), state(3)),
        gone(2.6, state(2, 0, at=DIED), state(3, 0, at=DIED)),
    ],
    ids=["it fell silent long before", "it had told of a crash", "one of its ranks was leaving", "its ranks had ended well"],
)
def test_a_node_that_was_not_well_at_that_moment_is_not_called_lost(there):
    verdicts, _ = judge(snap(2.6, VICTIMS, there, final=True))
    assert not any("is lost with" in verdict.summary for verdict in verdicts)


def test_a_crash_of_its_own_is_the_first_cause_whatever_node_is_silent():
    crashed = node(0, state(0, 1, OWN, at=DIED + 0.2), state(1, 1, LOST, at=DIED + 0.3))
    (verdict,), _ = judge(snap(1.4, crashed, gone(1.4)), snap(2.6, crashed, gone(2.6), final=True))
    assert (verdict.cause, verdict.culprit_ranks) == ("crashed", (0,))


def test_two_nodes_that_are_lost_together_are_named_together_and_partial():
    third = node(2, state(4), state(5))
    other = replace(gone(2.6, state(4), state(5)), node="node2", group_rank=2)
    before = [replace(each, nodes=(*each.nodes, third), world_size=6) for each in BEFORE]
    current = State()
    for snapshot in (*before, snap(1.4, VICTIMS, gone(1.4), other, world=6), snap(2.6, VICTIMS, gone(2.6), other, world=6, final=True)):
        current, verdicts, _ = diagnose(current, snapshot, snapshot.now, Limits())
    assert [(verdict.culprit_ranks, verdict.confidence) for verdict in verdicts] == [((2, 3, 4, 5), "partial")]
    assert verdicts[0].summary.startswith("node1, node2 are lost")


def test_a_node_that_is_not_asked_in_vain_is_never_suspected():
    verdicts, _ = judge(snap(2.6, VICTIMS, node(1, state(2), state(3), report_age_s=2.1), final=True))
    assert not any(verdict.culprit_ranks for verdict in verdicts)
