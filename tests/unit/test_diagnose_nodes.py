"""Many nodes: ranks named right among thousands, nodes that do not answer, and reports that are older than others."""

from dataclasses import replace
from random import Random

import pytest
from build_world import MONO, NODE_RANKS, LargeJob, without

from rankwatch.model import KIND_BYTES, Calls, Collective, CompileActivity, Group, JobSnapshot, NodeReport, Process, RankState
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.diagnose.graph import hangs
from rankwatch.monitor.diagnose.views import fresh_ranks
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.incidents import Book, fold, worst
from rankwatch.monitor.policy import Limits

LIMITS = Limits()
SIZE = 128
CULPRIT = 67  # on node0008
NODE = CULPRIT // NODE_RANKS
ON_NODE = tuple(range(64, 72))


class Judge:
    """Looks at a job as the monitor does, and keeps what was said: (second, verdict)."""

    def __init__(self, job):
        self.job, self.state, self.book, self.said, self.last = job, State(), Book(), [], ()

    def look(self, t, change=lambda snapshot: snapshot):
        snapshot = change(self.job.look(t))
        self.state, self.last, wanted = diagnose(self.state, snapshot, snapshot.now, LIMITS)
        self.book, _ = fold(self.book, self.last, snapshot, snapshot.now, LIMITS)
        self.job.want(wanted, t)
        self.said += [(t, verdict) for verdict in self.last]
        return self.last

    def play(self, until, change=lambda snapshot, t: snapshot, start=-3.0):
        t = start
        while t <= until:
            self.look(t, lambda snapshot, t=t: change(snapshot, t))
            t += 1.0
        return self

    def kinds(self):
        """Distinct (verdict, cause, culprits) in order of appearance."""
        return list(dict.fromkeys((verdict.verdict, verdict.cause, verdict.culprit_ranks) for _, verdict in self.said))


# -- among many ----------------------------------------------------------------------------------------------------------------


def test_one_rank_of_many_nodes_is_named_and_the_others_are_written_as_ranges():
    judge = Judge(LargeJob(SIZE, "asleep", CULPRIT)).play(15)
    assert judge.kinds() == [("slow", "not_entered", (CULPRIT,)), ("stuck", "not_entered", (CULPRIT,))]
    assert "ranks 0-66,68-127 wait" in judge.last[0].summary
    assert judge.last[0].unknown_ranks == ()
    assert "seen" not in judge.last[0].summary


@pytest.mark.parametrize(("fault", "expected"), [("dead", ("failed", "killed")), ("mismatch", ("stuck", "mismatch"))])
def test_what_cannot_heal_is_named_on_another_node(fault, expected):
    judge = Judge(LargeJob(SIZE, fault, CULPRIT)).play(6)
    assert judge.kinds() == [(*expected, (CULPRIT,))]
    assert judge.said[0][0] <= 4.0


# -- nodes that do not answer --------------------------------------------------------------------------------------------------


def test_ranks_of_a_silent_node_are_unknown_and_nothing_is_said_while_the_others_get_on():
    judge = Judge(LargeJob(SIZE)).play(60, lambda snapshot, t: without(snapshot, {NODE: t + 3.0}) if t > 5 else snapshot)
    assert judge.said == []


def test_a_rank_that_is_seen_and_absent_is_to_blame_whatever_node_is_silent():
    """The line says how many ranks are seen, and the silent ones are unknown."""
    judge = Judge(LargeJob(SIZE, "asleep", CULPRIT)).play(15, lambda snapshot, t: without(snapshot, {3: 20.0 + t}))
    assert judge.kinds() == [("slow", "not_entered", (CULPRIT,)), ("stuck", "not_entered", (CULPRIT,))]
    verdict = judge.last[0]
    assert verdict.confidence == "partial"
    assert verdict.unknown_ranks == tuple(range(24, 32))
    assert "(120 of 128 ranks seen)" in verdict.summary
    assert "ranks 0-23,32-66,68-127 wait" in verdict.summary


def test_a_silent_node_whose_ranks_alone_are_waited_for_is_the_suspect():
    judge = Judge(LargeJob(SIZE, "silent", CULPRIT)).play(20)
    assert judge.kinds() == [("slow", "unknown", ON_NODE), ("stuck", "unknown", ON_NODE)]
    first, stuck = judge.said[0], next(said for said in judge.said if said[1].verdict == "stuck")
    assert 10.0 <= first[0] <= 12.0
    assert 12.0 <= stuck[0] <= 14.0  # 20 % of the timeout after its last answer
    verdict = judge.last[0]
    assert (verdict.domain, verdict.confidence) == ("node", "partial")
    assert "ranks 64-71 on node0008, which has not answered for 20 s" in verdict.summary
    assert "(120 of 128 ranks seen)" in verdict.summary
    assert "node0008 does not answer (timed out): its last answer is 20 s old" in verdict.evidence
    assert verdict.unknown_ranks == ON_NODE
    assert verdict.missing_evidence == ("state of ranks 64-71",)
    (incident,) = judge.book.open
    assert incident.hosts[64] == "node0008"


def test_a_launcher_that_is_gone_long_before_a_wait_proves_nothing_of_its_ranks():
    """They have gone on without it, so they live: the wait is told, and paged only when its timeout is near."""

    def silent_since_long(snapshot, t):
        return without(snapshot, {NODE: t + 22.0}) if t > -22 else snapshot

    judge = Judge(LargeJob(SIZE, "asleep", CULPRIT)).play(29, silent_since_long, start=-25.0)
    assert judge.kinds() == [("slow", "unknown", ON_NODE)]
    assert "the ranks there may run all the same: the wait began long after its last answer" in judge.last[0].evidence
    assert judge.play(35, silent_since_long, start=30.0).kinds()[-1] == ("timeout_imminent", "unknown", ON_NODE)


def test_a_node_that_has_never_answered_is_a_suspect_and_is_not_called_stuck():
    judge = Judge(LargeJob(SIZE, "asleep", CULPRIT)).play(29, lambda snapshot, t: without(snapshot, {NODE: t + 30.0}))
    assert judge.kinds() == [("slow", "unknown", ON_NODE)]
    assert any("it has never answered" in line for line in judge.last[0].evidence)


def test_ranks_that_nobody_reports_and_no_silent_node_owns_are_not_blamed():
    def hidden(snapshot, _t):
        return replace(snapshot, nodes=tuple(node for node in snapshot.nodes if node.group_rank != NODE))

    assert Judge(LargeJob(SIZE, "asleep", CULPRIT)).play(20, hidden).kinds() == [("slow", "unknown", ())]


def test_nodes_that_fall_silent_together_are_named_together():
    job = LargeJob(SIZE, "silent", CULPRIT)
    judge = Judge(job).play(14, lambda snapshot, t: without(snapshot, {12: t + 0.1}) if t >= 0 else snapshot)
    assert judge.kinds()[-1] == ("stuck", "unknown", (*ON_NODE, *range(96, 104)))
    assert "on node0008, node0012, which have not answered for 14 s or more" in judge.last[0].summary


def test_a_silent_rank_that_had_come_before_is_not_waited_for():
    """Node 12 was in the collective when it was heard last, and node 8 was not."""
    judge = Judge(LargeJob(SIZE, "silent", CULPRIT)).play(14, lambda snapshot, t: without(snapshot, {12: t - 1.0}) if t > 2 else snapshot)
    assert judge.kinds()[-1] == ("stuck", "unknown", ON_NODE)
    assert judge.last[0].unknown_ranks == (*ON_NODE, *range(96, 104))
    judge = Judge(LargeJob(SIZE, "storm")).play(60, lambda snapshot, t: without(snapshot, {12: t - 1.0}) if t > 2 else snapshot)
    assert {verdict.culprit_ranks for _, verdict in judge.said} == {()}


def test_what_a_seen_rank_explains_is_not_laid_on_a_silent_node():
    """The world waits for rank 67; ranks of silent node 3 wait in their other groups, where nobody sees it."""
    job = LargeJob(SIZE, "asleep", CULPRIT)

    def with_waits_for_node_3(snapshot, t):
        changed = [
            replace(rank, enqueued={**rank.enqueued, group.name: rank.enqueued[group.name] + 1})
            for node in snapshot.nodes for rank in node.ranks for group in rank.groups
            if t >= 0 and group.desc == "dp" and set(group.ranks) & set(range(24, 32)) and rank.rank != CULPRIT
        ]  # fmt: skip
        by_rank = {rank.rank: rank for rank in changed}
        nodes = tuple(replace(node, ranks=tuple(by_rank.get(rank.rank, rank) for rank in node.ranks)) for node in snapshot.nodes)
        return without(replace(snapshot, nodes=nodes), {3: t + 0.1}) if t >= 0 else snapshot

    judge = Judge(job).play(15, with_waits_for_node_3)
    assert {verdict.culprit_ranks for _, verdict in judge.said if verdict.verdict == "stuck"} == {(CULPRIT,)}
    assert not any(set(verdict.culprit_ranks) & set(range(24, 32)) for _, verdict in judge.said)


def test_a_node_that_was_compiling_when_it_fell_silent_has_longer():
    job = LargeJob(SIZE, "silent", CULPRIT, timeout_s=300.0)
    activity = CompileActivity("0/1", "forward", "forward@model.py:31", "inductor", "codegen", MONO - 5.0, MONO - 5.0)

    def compiling(snapshot, _t):
        nodes = [
            replace(node, ranks=tuple(replace(rank, compiling=(activity,)) if rank.rank == CULPRIT else rank for rank in node.ranks))
            for node in snapshot.nodes
        ]  # fmt: skip
        return replace(snapshot, nodes=tuple(nodes))

    judge = Judge(job).play(100, compiling)
    assert {verdict.verdict for _, verdict in judge.said} == {"slow"}
    assert f"rank {CULPRIT} was compiling forward@model.py:31 when it was seen last" in judge.last[0].evidence


def test_an_answer_that_comes_again_ends_the_suspicion():
    judge = Judge(LargeJob(SIZE, "silent", CULPRIT)).play(15)
    healthy = LargeJob(SIZE)
    judge.job = healthy
    judge.play(20, start=16.0)
    assert judge.last == ()


def test_waits_for_one_silent_node_in_several_groups_are_one_trouble():
    waits = [
        Wait(("w", 0), "collective", "dp", (0, 8), {0: 0.0}, (), (8,), 0.0, silent=(1,)),
        Wait(("w", 1), "collective", "dp", (1, 9), {1: 0.0}, (), (9,), 0.0, silent=(1,)),
        Wait(("w", 2), "collective", "tp", (0, 1, 2), {2: 0.0}, (0, 1), (), 0.0),
    ]
    (hang,) = hangs(waits, lambda rank, wait: True)
    assert (hang.silent, hang.roots, hang.waits, hang.waiting) == ((1,), (), (0, 1, 2), (0, 1, 2))


def test_a_rank_that_has_ended_stays_so_in_a_report_of_any_age():
    snapshot = LargeJob(16, "dead", 11).look(30.0)
    old = replace(snapshot, nodes=(snapshot.nodes[0], replace(snapshot.nodes[1], report_age_s=29.0)))
    assert set(fresh_ranks(old, LIMITS.report_stale_s)[0]) == {*range(8), 11}


def failing(snapshot, t, since):
    """Node 8 was heard last at `since`: its report is kept for ten seconds, then its ranks are silent ones."""
    if t - since > 10.0:
        return without(snapshot, {NODE: t - since})
    nodes = [replace(node, report_age_s=t - since, failing_since=MONO + since + 1.0, problem="timed out") if node.group_rank == NODE else node
             for node in snapshot.nodes]  # fmt: skip
    return replace(snapshot, nodes=tuple(nodes))


def test_a_node_that_falls_silent_during_an_incident_does_not_end_it():
    """Its launcher is stopped just after the first word: what is known of the wait is at the limit of being told, and must not flicker."""
    judge = Judge(LargeJob(SIZE, "asleep", CULPRIT))
    for tick in range(-6, 41):
        t = tick * 0.5
        judge.job.ages = {NODE: min(t - 5.2, 9.9) if t > 5.5 else 0.25}
        judge.look(t, lambda snapshot, t=t: failing(snapshot, t, 5.19) if t > 5.5 else snapshot)
    assert judge.book.closed == ()
    (incident,) = judge.book.open
    assert [(change.verdict, change.cause) for change in incident.history] == [("slow", "not_entered"), ("slow", "unknown"), ("stuck", "unknown")]
    assert "which has not answered for 15 s" in incident.verdict.summary
    judge.job.ages = {}
    judge.play(22.0, start=20.5)
    (incident,) = judge.book.open
    assert "answered" not in incident.verdict.summary
    assert incident.verdict.cause == "not_entered"
    ending = replace(judge.job.look(22.5), ending="torchrun stops the workers after rank 0 failed", final=True)
    judge.look(22.5, lambda _: ending)
    (incident,) = judge.book.open
    assert "answered" not in incident.verdict.summary, "the last word is of what is seen"
    assert worst(incident) == "stuck"


def test_a_wait_of_which_all_waiters_are_out_of_sight_has_not_recovered():
    """Ranks 64-71 wait for rank 67 of their own group; their node falls silent, and all others go on."""
    job = LargeJob(16, "storm")
    tensor = job.look(5.0).nodes[1]

    def one_node(snapshot, t):
        healthy = LargeJob(16).look(-1.0).nodes[0]
        rank = replace(tensor.ranks[3], enqueued=tensor.ranks[3].completed, collectives=())
        report = replace(tensor, ranks=(*tensor.ranks[:3], rank, *tensor.ranks[4:]))
        snapshot = replace(snapshot, nodes=(healthy, report))
        return without(snapshot, {1: t - 8.0}) if t > 18 else snapshot

    judge = Judge(job).play(17.0, one_node, start=0.0)
    assert [verdict.culprit_ranks for verdict in judge.last] == [(11,)]
    judge.play(40.0, one_node, start=18.0)
    assert judge.book.closed == ()
    assert [incident.verdict.culprit_ranks for incident in judge.book.open] == [(11,)]
    judge.job = LargeJob(16)
    judge.play(43.0, start=41.0)
    assert judge.book.open == ()


# -- reports of different ages -------------------------------------------------------------------------------------------------


def ages(rng, nodes, before, every_s):
    """Each node's age at the next look: a newer report has come, or the same one is older."""
    found = {}
    for node in range(1, nodes):
        older = before.get(node, 0.0) + every_s
        found[node] = rng.uniform(0.0, min(4.0, older)) if older > 4.0 or rng.random() < 0.4 else older
    return found


@pytest.mark.parametrize("seed", range(3))
def test_reports_of_different_ages_make_no_verdict_in_a_job_that_is_well(seed):
    rng, job = Random(seed), LargeJob(SIZE)
    judge = Judge(job)
    for step in range(80):
        job.ages = ages(rng, job.nodes, job.ages, 0.5)
        judge.look(-3.0 + 0.5 * step)
    assert judge.said == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", ["asleep", "mismatch", "dead"])
def test_reports_of_different_ages_name_the_same_rank(fault, seed):
    rng, job = Random(seed), LargeJob(SIZE, fault, CULPRIT)
    judge = Judge(job)
    for step in range(50):
        job.ages = ages(rng, job.nodes, job.ages, 0.5)
        judge.look(-3.0 + 0.5 * step)
    assert {verdict.culprit_ranks for _, verdict in judge.said} == {(CULPRIT,)}
    assert judge.last[0].verdict == ("failed" if fault == "dead" else "stuck")


def test_the_same_report_again_is_no_second_witness():
    """What does not match is known from one report of that node: only a newer one makes it a page."""
    job = LargeJob(SIZE, "mismatch", CULPRIT)
    judge = Judge(job).play(2)
    for t in (2.5, 3.0, 3.5, 4.0, 4.5):
        job.ages = {NODE: t - 2.0}
        judge.look(t)
    assert [verdict.verdict for _, verdict in judge.said if verdict.verdict != "slow"] == []
    assert [trouble.agree for trouble in judge.state.troubles] == [1]
    job.ages = {NODE: 0.2}
    assert [verdict.verdict for verdict in judge.look(5.0)] == ["stuck"]
    job.ages = {NODE: 0.7}
    assert [verdict.verdict for verdict in judge.look(5.5)] == ["stuck"]  # what was agreed on stays so


def test_a_stopped_rank_is_counted_once_a_report():
    job = LargeJob(16)

    def stopped(snapshot):
        node = snapshot.nodes[1]
        rank = replace(node.ranks[0], process=replace(node.ranks[0].process, state="T"))
        return replace(snapshot, nodes=(snapshot.nodes[0], replace(node, ranks=(rank, *node.ranks[1:]))))

    judge = Judge(job)
    for t, age in ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0), (1.5, 0.2)):
        job.ages = {1: age}
        judge.look(t, stopped)
    assert judge.state.letters[8][2] == 2


def test_a_look_at_progress_is_as_long_as_the_time_between_the_reports():
    """An old report shows no CPU since the last look, which is no sign of standing still."""
    job = LargeJob(16, "asleep", 11)
    judge = Judge(job)
    for t in range(-3, 8):
        job.ages = {1: max(0.0, t - 3.0)}
        judge.look(float(t))
    watch = judge.state.watches[11]
    assert watch.looks == 0
    assert watch.look_at <= MONO + 3.0


def test_a_report_without_ranks_that_is_only_new_is_no_silence():
    def joining(snapshot, _t):
        return replace(snapshot, nodes=tuple(NodeReport(node.node, (), node.group_rank, 3.0) if node.group_rank == NODE else node for node in snapshot.nodes))

    assert Judge(LargeJob(SIZE, "asleep", CULPRIT)).play(14, joining).said == []


def test_who_is_odd_among_two_is_left_open_until_the_other_nodes_histories_are_there():
    """Node 0 has two of three ranks, and their calls differ: whose are wrong is known once the third rank's are read, or is said of both after a while."""

    def rank(number, kinds):
        group = Group("0", "default_pg", "nccl", (0, 1, 2), 600.0)
        known = {kind: Collective("", 0, 0, "all_reduce", ((kind,),), (), ("Float",)) for kind in (1, 2)}
        calls = {"0": Calls(0, 1, b"".join(kind.to_bytes(KIND_BYTES, "little") for kind in kinds), known)} if kinds else {}
        numbers = {"enqueued": {"0": 40}, "completed": {"0": 40}}
        return RankState(number, node=f"node{number // 2}", process=Process(number, True, "S"), groups=(group,), calls=calls, collectives_at=MONO, **numbers)

    def look(state, t, third):
        ranks = [rank(0, (1,) * 20), rank(1, (1,) * 10 + (2,) * 10), rank(2, third)]
        nodes = (NodeReport("node0", tuple(ranks[:2])), NodeReport("node1", (ranks[2],), 1))
        return diagnose(state, JobSnapshot(MONO + t, 1.8e9 + t, 3, 0, nodes, gap_s=0.5, started_at=MONO - 60), MONO + t, LIMITS)

    state, verdicts, wanted = look(State(), 0.0, ())
    assert verdicts == ()
    assert [want.ranks for want in wanted if want.why == "which side most are on"] == [(2,)]
    assert [verdict.culprit_ranks for verdict in look(state, 2.0, (1,) * 20)[1]] == [(1,)]
    for t in range(1, 23):  # it never comes, and the two that are read are read again
        state, verdicts, _ = look(state, float(t), ())
        assert [verdict.culprit_ranks for verdict in verdicts] == ([(0, 1)] if t >= 20 else [])
