"""Ranks that end badly: the first cause is named, whatever the order in which the ends are seen; planned ends are no incident."""

from dataclasses import replace

import pytest
from build_jobs import MONO, WALL, Job, coll, die, frames, group, init, mark, nap, save

from rankwatch.model import PAGING, Crash, Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.diagnose.ends import first_line
from rankwatch.monitor.policy import Limits

LOST = Crash("RuntimeError", "[pair.cc:537] Read error [127.0.0.1]:37511: Connection reset by peer.", traceback="torch/distributed/distributed_c10d.py")
USER = Crash("ValueError", "bad batch", where="train.py:31:load_batch")
NAMES = {0: "exit 0", 1: "exit 1"}


def steps(count):
    for _ in range(count):
        yield coll()
        yield nap(0.2)


def dying(code, kind="", message="", at_rank=1):
    def script(rank):
        yield init(180)
        yield from steps(8)
        if rank == at_rank:
            yield mark("onset")
            yield die(code, kind, message)
        yield from steps(100)

    return script


@pytest.mark.parametrize(
    ("code", "kind", "message", "cause", "domain"),
    [
        (-9, "", "", "killed", "node"),
        (-11, "", "", "crashed", "unknown"),
        (-7, "", "", "crashed", "node"),
        (-6, "", "", "mismatch", "user_code"),
        (137, "", "", "killed", "node"),
        (1, "ValueError", "bad batch", "crashed", "user_code"),
        (1, "OSError", "[Errno 28] No space left on device: '/ckpt'", "crashed", "storage"),
        (1, "RuntimeError", "CUDA error: uncorrectable ECC error encountered", "crashed", "node"),
        (1, "torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", "crashed", "user_code"),
        (3, "", "", "exited", "user_code"),
    ],
)
def test_the_first_death_is_named_and_its_peers_are_consequences(code, kind, message, cause, domain):
    job = Job(dying(code, kind, message), 3).play(60)
    assert job.kinds() == [("failed", cause, (1,))]
    told = job.first("failed")
    assert told.at - job.marks["onset"] <= 1.0
    assert told.verdict.domain == domain
    (incident,) = job.incidents
    assert incident.final
    assert incident.closed_at is None


def test_a_rank_that_ends_with_code_0_is_the_cause_of_its_peers_connection_errors():
    def script(rank):
        yield init(180)
        yield from steps(8)
        if rank == 2:
            yield mark("onset")
            yield die(0)
        yield from steps(8)

    job = Job(script, 3).play(60)
    assert job.kinds() == [("failed", "exited", (2,))]
    assert "exit code 0" in job.first("failed").verdict.summary


def test_a_rank_that_ends_well_while_another_still_saves_is_no_page_in_an_end_that_only_the_ranks_were_told_of():
    """SIGTERM to the ranks alone: rank 1 ends, rank 0 saves first, rank 2 cannot hear it in its collective."""

    def script(rank):
        yield init(180)
        yield from steps(8)
        if rank == 1:
            yield die(0)
        if rank == 0:
            yield save(9)
            yield mark("saved")
            yield die(0)
        yield from steps(1)

    job = Job(script, 3, nccl=True).play(20)
    (ended_at,) = job.marks.values()
    paged = [told for told in job.history if told.verdict.verdict in PAGING]
    assert all(told.at >= ended_at for told in paged)
    assert job.first("slow").at < ended_at


def test_several_ranks_that_raise_the_same_at_once_are_named_together():
    def script(rank):
        yield init(180)
        yield from steps(3)
        if rank:
            yield die(1, "KeyError", "'lr'")
        yield from steps(3)

    assert Job(script, 4).play(30).kinds()[-1] == ("failed", "crashed", (1, 2, 3))


def test_a_stuck_culprit_that_is_killed_stays_one_incident():
    def script(rank):
        yield init(180)
        yield from steps(5)
        if rank == 1:
            yield nap(60, "train.py:31:load_batch")
            yield die(-9)
        yield from steps(5)

    job = Job(script, 3).play(90)
    (incident,) = job.incidents
    assert [change.verdict for change in incident.history] == ["slow", "stuck", "failed"]


def test_a_killed_rank_that_peers_do_not_notice_is_named_at_once():
    """NCCL peers spin on; no closing socket ends them."""
    job = Job(dying(-9), 3, nccl=True).play(60)
    assert job.kinds()[0] == ("failed", "killed", (1,))


def state(rank, code=None, crash=None, at=None, alive=None, enqueued=8, completed=7, stage="joined"):
    return RankState(
        rank=rank,
        node="node05",
        process=Process(pid=100 + rank, alive=code is None if alive is None else alive, state="S", exit_code=code, exited_at=at),
        stage=stage,
        heartbeat_at=MONO,
        groups=(Group("0", "default_pg", "gloo", (0, 1, 2), 180.0),),
        enqueued={"0": enqueued},
        completed={"0": completed},
        crash=crash,
    )


def snap(ranks, t=0.0, ending="", final=False):
    return JobSnapshot(MONO + t, WALL + t, 3, 0, (NodeReport("node05", tuple(ranks)),), ending=ending, gap_s=0.5, final=final)


def judge(*snapshots):
    current, told = State(), []
    for snapshot in snapshots:
        current, verdicts, _ = diagnose(current, snapshot, snapshot.now, Limits())
        told.append([(v.verdict, v.cause, v.culprit_ranks) for v in verdicts])
    return told


ABORT = [state(2, -6, at=MONO + 0.3)]
VICTIMS = [state(0, 1, LOST, at=MONO + 0.1), state(1, 1, LOST, at=MONO + 0.2)]


def test_an_abort_beats_connection_resets_that_were_seen_at_the_same_look():
    assert judge(snap(VICTIMS + ABORT)) == [[("failed", "crashed", (2,))]]


def test_victims_that_are_seen_first_are_not_named_and_the_abort_that_comes_later_is():
    """The aborting rank still writes its core when the victims have gone; torchrun has begun to stop the workers."""
    told = judge(
        snap([*VICTIMS, state(2)]),
        snap([*VICTIMS, state(2)], 0.5, ending="torchrun stops the workers after rank 0 failed"),
        snap(VICTIMS + ABORT, 1.0, ending="torchrun stops the workers after rank 0 failed", final=True),
    )
    assert told == [[], [], [("failed", "crashed", (2,))]]


def test_the_first_cause_stays_when_torchrun_kills_the_rest():
    told = judge(
        snap([state(0), state(1, 1, USER, at=MONO), state(2)]),
        snap([state(0, -15), state(1, 1, USER, at=MONO), state(2, -9)], 1.0, ending="torchrun stops the workers after rank 1 failed", final=True),
    )
    assert told == [[("failed", "crashed", (1,))], [("failed", "crashed", (1,))]]


def test_victims_alone_are_told_at_the_end_as_a_network_trouble_without_certainty():
    dead = [state(0, 1, LOST, at=MONO + 0.1), state(1, 1, LOST, at=MONO + 0.2), state(2, 1, LOST, at=MONO + 0.3)]
    current, verdicts, _ = diagnose(State(), snap(dead, 1.0, final=True), MONO + 1.0, Limits())
    assert [(v.verdict, v.domain, v.confidence, v.culprit_ranks) for v in verdicts] == [("failed", "network", "partial", ())]
    assert "rank 0 was the first to end" in verdicts[0].evidence
    assert current.failure_weak


def test_a_rank_that_ended_well_and_that_no_node_reports_any_more_is_no_error_of_ours():
    well, lost = state(0, 0, at=MONO), state(1, 1, LOST, at=MONO + 0.2)
    assert judge(snap([well, state(1), state(2)]), snap([lost, state(2)], 0.3))[0] == []


def test_victims_of_a_partial_view_name_nobody():
    verdicts = diagnose(State(), snap(VICTIMS, 1.0, final=True), MONO + 1.0, Limits())[1]
    assert [(v.verdict, v.cause, v.culprit_ranks, v.confidence) for v in verdicts] == [("failed", "unknown", (), "partial")]


def test_victims_of_a_partial_view_whom_torchrun_restarts_are_no_incident():
    """A node has left an elastic job: its own launcher knows why."""
    ended = replace(snap(VICTIMS, 5.0), ending="torchrun stops the workers after rank 0 failed")
    assert judge(ended, replace(ended, now=ended.now + 1, final=True, restarting=True)) == [[], []]


@pytest.mark.parametrize(("others", "named"), [(143, []), (-9, [(0,)])])
def test_ranks_that_all_end_by_their_handlers_were_all_asked_to(others, named):
    """They save one after the other; torchrun takes the first one for a failure."""
    ending = "torchrun stops the workers after rank 0 failed"
    told = judge(
        snap([state(0, 143, at=MONO), state(1), state(2)]),
        snap([state(0, 143, at=MONO), state(1), state(2)], 0.5, ending=ending),
        snap([state(0, 143, at=MONO), state(1, others, at=MONO + 2), state(2, others, at=MONO + 4)], 5.0, ending=ending, final=True),
    )
    assert [[culprits for _, _, culprits in each] for each in told] == [[], [], named]


def test_a_download_error_of_the_jobs_own_code_is_no_victim():
    own = Crash("ConnectionResetError", "[Errno 104] Connection reset by peer", where="train.py:12:download", traceback="urllib/request.py")
    assert judge(snap([state(0), state(1, 1, own, at=MONO), state(2)])) == [[("failed", "crashed", (1,))]]


@pytest.mark.parametrize("code", [-15, -2, 143, 130])
def test_workers_that_end_by_a_planned_signal_are_no_incident(code):
    told = judge(
        snap([state(0, code), state(1, code), state(2)]),
        snap([state(0, code), state(1, code), state(2, code)], 0.5, ending="SIGTERM to the launcher"),
        snap([state(0, code), state(1, code), state(2, code)], 1.0, ending="SIGTERM to the launcher", final=True),
    )
    assert told == [[], [], []]


def test_what_crashes_during_a_planned_end_is_no_incident():
    """Ctrl-C: one rank raises KeyboardInterrupt, others lose their peer, one handler exits 1."""
    ending = "Ctrl-C"
    interrupted = Crash("KeyboardInterrupt", "")
    told = judge(
        snap([state(0), state(1), state(2)]),
        snap([state(0), state(1), state(2)], 0.5, ending=ending),
        snap([state(0, 1, interrupted), state(1, 1, LOST), state(2, 1)], 1.0, ending=ending),
        snap([state(0, 1, interrupted), state(1, 1, LOST), state(2, 1)], 1.5, ending=ending, final=True),
    )
    assert told == [[], [], [], []]


def test_one_rank_alone_terminated_from_outside_is_told_once_torchrun_calls_it_a_failure():
    ending = "torchrun stops the workers after rank 1 failed"
    told = judge(
        snap([state(0), state(1, -15, at=MONO), state(2)]),
        snap([state(0), state(1, -15, at=MONO), state(2)], 0.5, ending=ending),
        snap([state(0, -15), state(1, -15, at=MONO), state(2, -15)], 1.0, ending=ending, final=True),
    )
    assert told == [[], [("failed", "killed", (1,))], [("failed", "killed", (1,))]]


def test_a_new_attempt_begins_with_a_clean_state():
    first = snap([state(0), state(1, -9, at=MONO), state(2)])
    current, verdicts, _ = diagnose(State(), first, first.now, Limits())
    assert verdicts
    again = JobSnapshot(MONO + 5, WALL + 5, 3, 1, (NodeReport("node05", (state(0), state(1), state(2))),), gap_s=0.5)
    current, verdicts, _ = diagnose(current, again, again.now, Limits())
    assert verdicts == ()
    assert current.failure is None


def test_an_open_hang_stays_as_it_was_while_a_planned_end_is_under_way():
    def script(rank):
        yield init(180)
        yield from steps(5)
        if rank == 1:
            yield nap(3600, "train.py:31:load_batch")
        yield from steps(5)

    job = Job(script, 3).play(60)
    before = job.history[-1].verdict
    job.t += 0.5
    job.look(ending="SIGTERM to the launcher")
    assert job.history[-1].verdict == before
    assert len(job.incidents) == 1


def test_an_nccl_waiter_that_aborts_after_its_timeout_is_a_victim():
    """SIGABRT of the innocent rank, as the NCCL watchdog does: the hang about rank 1 stays, rank 0 is not blamed."""

    def script(rank):
        yield init(60)
        yield from steps(5)
        if rank == 1:
            yield nap(3600, "train.py:31:load_batch")
        yield coll()

    job = Job(script, 2, nccl=True).play(70)
    job._end(job.ranks[0], -6)
    job.t += 0.5
    job.look()
    job.t += 0.5
    job.look(final=True, ending="torchrun stops the workers after rank 0 failed")
    assert {kind[2] for kind in job.kinds()} == {(1,)}
    assert [kind for kind in job.kinds() if kind[0] == "failed"] == []


def test_a_rank_in_a_group_that_others_wait_for_is_exited_only_if_they_wait():
    def script(rank):
        yield init(180)
        yield group("1", (0, 1))
        yield from steps(3)
        if rank == 2:
            yield die(0)
        for _ in range(40):
            yield coll(group="1")
            yield nap(0.3)

    assert Job(script, 3).play(60).kinds() == []


def test_a_rank_killed_when_its_cgroup_ran_out_of_memory_says_so():
    dead = state(1, -9, at=MONO)
    dead = replace(dead, process=replace(dead.process, oom_killed=True))
    verdict = diagnose(State(), snap([state(0), dead, state(2)]), MONO, Limits())[1][0]
    assert (verdict.verdict, verdict.cause, verdict.domain, verdict.culprit_ranks) == ("failed", "oom_killed", "node", (1,))
    assert "memory cgroup" in verdict.summary
    assert verdict.advice[0].startswith("Its memory cgroup was full: ")
    dead = replace(dead, process=replace(dead.process, oom_note="kernel: Out of memory: Killed process 101"))
    verdict = diagnose(State(), snap([state(0), dead, state(2)]), MONO, Limits())[1][0]
    assert "the node had no memory left" in verdict.summary
    assert verdict.advice[0].startswith("The host ran out of memory: ")


def test_a_rank_killed_while_the_count_of_its_cgroup_stood_still_is_not_laid_to_the_out_of_memory_killer_of_the_cgroup():
    dead = state(1, -9, at=MONO)
    unread = diagnose(State(), snap([state(0), dead, state(2)]), MONO, Limits())[1][0]
    assert "most often the out-of-memory killer" in unread.advice[0]
    dead = replace(dead, process=replace(dead.process, oom_note="memory.events of the memory cgroup /job: oom_kill did not rise"))
    verdict = diagnose(State(), snap([state(0), dead, state(2)]), MONO, Limits())[1][0]
    assert verdict.cause == "killed"
    assert [line.partition(":")[0] for line in verdict.advice] == ["It was not its memory cgroup that killed it"]


def test_a_rank_that_ended_well_is_named_as_soon_as_a_peer_says_that_it_lost_it():
    """The peer still takes down torch, which takes seconds; its exception is in the slot."""
    told = judge(snap([state(0), state(1, 0, at=MONO), state(2)]), snap([replace(state(0, crash=LOST), stage="exiting"), state(1, 0, at=MONO), state(2)], 0.5))
    assert told == [[], [("failed", "exited", (1,))]]


def test_a_peer_that_raises_something_of_its_own_does_not_put_the_blame_on_a_rank_that_ended_well():
    told = judge(snap([replace(state(0, crash=USER), stage="exiting"), state(1, 0, at=MONO, enqueued=7), state(2)], 0.5))
    assert told == [[]]


def test_a_victim_is_not_named_by_those_that_wait_for_it_while_its_own_loss_is_unexplained():
    """A rank lost a peer and is dead, nobody else is: the rest waits for it, and the first cause may be seen in a moment."""
    told, current = [], State()
    for t in (0.0, 0.5, 1.0, 2.0, 2.5, 4.0):
        ranks = [state(0, 1, LOST, at=MONO + 0.1, enqueued=7), state(1), state(2)]
        current, verdicts, _ = diagnose(current, snap(ranks, t), MONO + t, Limits())
        told.append([(v.verdict, v.cause, v.culprit_ranks, v.confidence) for v in verdicts])
    assert told[:5] == [[], [], [], [], []]
    assert told[5] == [("failed", "unknown", (), "partial")]


def test_ranks_that_were_killed_in_the_same_moment_are_named_together_however_late_each_is_seen():
    told = judge(
        snap([state(0, -9, at=MONO), state(1), state(2)]),
        snap([state(0, -9, at=MONO), state(1, -9, at=MONO + 0.1), state(2)], 0.5),
        snap([state(0, -9, at=MONO), state(1, -9, at=MONO + 0.1), state(2, -9, at=MONO + 0.2)], 1.0, ending="torchrun stops the workers after rank 0 failed"),
    )
    assert told == [[("failed", "killed", (0,))], [("failed", "killed", (0, 1))], [("failed", "killed", (0, 1, 2))]]


def test_ranks_that_are_killed_later_or_by_torchrun_do_not_join_the_first():
    told = judge(
        snap([state(0, -9, at=MONO), state(1), state(2)]),
        snap([state(0, -9, at=MONO), state(1, -9, at=MONO + 1.5), state(2)], 1.5),
        snap([state(0, -9, at=MONO), state(1, -9, at=MONO + 1.5), state(2, -9)], 2.0, ending="torchrun stops the workers after rank 0 failed", final=True),
    )
    assert told == [[("failed", "killed", (0,))]] * 3


@pytest.mark.parametrize(("code", "words"), [(3, "sys.exit(3)"), (0, "a handler that ends the process with code 0")])
def test_the_advice_for_a_rank_that_exited_fits_its_code(code, words):
    ranks = [replace(state(0, crash=LOST), stage="exiting"), state(1, code, at=MONO), state(2)]
    verdict = diagnose(State(), snap(ranks, 0.5), MONO + 0.5, Limits())[1][0]
    assert (verdict.cause, verdict.culprit_ranks) == ("exited", (1,))
    (line,) = verdict.advice
    assert words in line
    assert ("code 0" in line) == (code == 0)


@pytest.mark.parametrize(
    ("problem", "summary", "advice"),
    [
        ("train.py does not exist in /job", "Python could not start the script: train.py does not exist in /job", "Correct the script's path"),
        ("", "ended with exit code 2 before torch was imported", "or the script refuses its arguments"),
    ],
)
def test_exit_code_2_before_torch_was_imported_is_of_python_or_of_the_arguments(problem, summary, advice):
    never_began = [replace(state(number, 2, stage="starting"), agent="silent", script_problem=problem) for number in (0, 1, 2)]
    (found,) = diagnose(State(), snap(never_began), MONO, Limits())[1]
    assert (found.cause, found.culprit_ranks, found.summary) == ("exited", (0, 1, 2), f"ranks 0-2 failed first: {summary}")
    assert advice in found.advice[0]


def test_the_place_of_a_rank_that_ended_in_a_library_is_empty():
    in_library = '  File "/venv/lib/python3.11/site-packages/torch/library.py", line 665, in _del_library\n'
    crash = Crash("KeyError", "'op'", where="library.py:665:_del_library", traceback=in_library)
    assert diagnose(State(), snap([state(0), state(1, 1, crash, at=MONO), state(2)]), MONO, Limits())[1][0].at == ""
    stack = Stack(101, MONO - 1, (Thread("MainThread", 101, frames("@torch/library.py:665:_del_library")),))
    ended = replace(state(1, 3, at=MONO), stack=stack)
    verdict = diagnose(State(), snap([state(0), ended, state(2)]), MONO, Limits())[1][0]
    assert (verdict.cause, verdict.at) == ("exited", "")


def test_a_long_message_is_cut_between_words():
    assert first_line("some words here", 14) == "some words..."
    assert first_line("some words her", 14) == "some words her"
    assert first_line("x" * 30, 14) == "x" * 11 + "..."
    assert first_line("\n  one\ntwo") == "one"
