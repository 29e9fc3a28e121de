"""One node of a job is ended as planned: that explains the deaths that follow from it, and none once the job has gone on without that node."""

import pytest
from build_jobs import MONO, WALL

from rankwatch.model import Crash, Group, JobSnapshot, NodeReport, Process, RankState
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

BAD_BATCH = Crash("ValueError", "bad batch", where="train.py:31:load_batch")
LOST = Crash("RuntimeError", "[pair.cc:537] Read error [127.0.0.1]:37511: Connection reset by peer.", traceback="torch/distributed/distributed_c10d.py")
FOLLOWS_S = 120  # so long `Together.merge` shows the other node's end
HERE, THERE = (0, 1), (2, 3)


class Job:
    """Ranks 0 and 1 here, 2 and 3 on the node that is ended at t=10; each node's ranks have a group of their own. One look every two seconds."""

    def __init__(self, works_until=10_000):
        self.state, self.t, self.told = State(), 0.0, []
        self.codes, self.crashes = {}, {}
        self.works_until = works_until

    def look(self, ending="", leaving=()):
        nodes = tuple(NodeReport(f"node{place}", tuple(map(self._rank, ranks)), place) for place, ranks in enumerate((HERE, THERE)))
        snapshot = JobSnapshot(MONO + self.t, WALL + self.t, 4, 0, nodes, ending=ending, gap_s=2.0, leaving=frozenset(leaving))
        self.state, verdicts, _ = diagnose(self.state, snapshot, snapshot.now, Limits())
        self.told += [(v.verdict, v.cause, v.culprit_ranks) for v in verdicts if v.verdict == "failed"]

    def _rank(self, number):
        group = Group("0", "default_pg", "gloo", HERE if number in HERE else THERE, 1800.0)
        worked = int(min(self.t, self.works_until)) if number in HERE else 10
        code = self.codes.get(number)
        process = Process(100 + number, code is None, "S", exit_code=code)
        return RankState(
            number, number % 2, f"node{number // 2}", process=process, stage="joined", heartbeat_at=MONO + self.t, groups=(group,), steps=worked,
            enqueued={"0": worked}, completed={"0": worked}, crash=self.crashes.get(number),
        )  # fmt: skip

    def play(self, until, codes=None, leaving=THERE):
        """To `until`; what dies does at once. codes: rank -> exit code."""
        self.codes |= codes or {}
        while self.t < until:
            self.t += 2.0
            ended = self.t > 10
            self.look("SIGTERM to the launcher" if ended and self.t <= 10 + FOLLOWS_S else "", leaving if ended else ())
        return self


def ended_there(**how):
    """The job after the other node's end and all that it explains."""
    return Job(**how).play(12).play(20, {2: -15, 3: -9}).play(10 + FOLLOWS_S)


def test_a_death_long_after_one_nodes_planned_end_is_named_where_the_job_has_gone_on():
    job = ended_there().play(200)
    job.crashes[1] = BAD_BATCH
    job.play(210, {1: 1})
    assert set(job.told) == {("failed", "crashed", (1,))}


def test_the_deaths_of_the_node_that_was_ended_are_never_named():
    """A rank there that cannot be interrupted ends minutes later."""
    job = Job().play(20, {2: -15}).play(200).play(210, {3: -9}).play(400)
    assert job.told == []


def test_what_its_loss_has_done_to_others_meanwhile_is_not_named():
    job = Job().play(14, {2: -15, 3: -15})
    job.crashes[1] = LOST
    assert job.play(20, {1: 1}).play(400).told == []


@pytest.mark.parametrize(("code", "crash"), [(-6, None), (1, BAD_BATCH)])
def test_where_nothing_has_moved_since_no_death_is_named(code, crash):
    """It has waited for the ranks that were ended, and its watchdog ends it."""
    job = ended_there(works_until=10).play(600)
    job.crashes[1] = crash
    assert job.play(700, {1: code}).told == []


def test_who_loses_a_peer_later_is_no_culprit():
    job = ended_there().play(200)
    job.crashes[1] = LOST
    assert job.play(300, {1: 1}).told == []


def test_the_end_of_this_launcher_explains_all_that_follows():
    job = ended_there().play(200)
    for ranks in ({0: -15}, {1: 1}):
        job.t += 60
        job.codes |= ranks
        job.look("SIGTERM to the launcher", THERE)
    assert job.told == []


def test_a_node_that_has_finished_before_the_others_excuses_no_crash_of_theirs():
    job = Job().play(20, {2: 0, 3: 0}).play(200)
    job.crashes[0] = BAD_BATCH
    assert set(job.play(210, {0: 1}).told) == {("failed", "crashed", (0,))}


def test_who_loses_a_node_that_has_finished_is_silent():
    job = Job().play(20, {2: 0, 3: 0}).play(200)
    job.crashes[0] = job.crashes[1] = LOST
    assert job.play(300, {0: 1, 1: 1}).told == []


def test_a_later_failure_ends_the_job_as_one():
    """torchrun's answer to it is no planned end, though ranks have ended badly before."""
    job = ended_there().play(200)
    job.t += 0.5
    job.codes |= {1: 3}
    job.look("torchrun stops the workers after rank 1 failed", THERE)
    assert job.told == [("failed", "exited", (1,))]
