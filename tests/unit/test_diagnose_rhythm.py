"""What the history of calls adds to a mismatch: whose turn it was, and who is behind since which step."""

from dataclasses import replace

from build_calls import MONO, WALL, Job
from build_jobs import frames

from rankwatch.model import Collective, JobSnapshot, NodeReport, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

STEP = [("all_reduce", ((100,),)), ("all_reduce", ((200,),)), ("broadcast", ((7,),))]


def in_turn(number):
    return STEP[number % 3]


def stuck_at(number, calls, **more):
    """The verdict on ranks that hang at `number`, where each calls what `calls` says, after a history of in_turn."""
    job = Job([lambda n, rank=rank: calls[rank] if n == number else in_turn(n) for rank in range(len(calls))], rate=20)
    for rank in job.ranks:
        rank.entered, rank.done = number, number - 1
        rank.read(0.0, 20)
    state, verdicts = State(), ()
    for step in range(8):
        t = step / 2
        report = NodeReport("node05", tuple(replace(rank.state(t), **{k: v(rank.rank) for k, v in more.items()}) for rank in job.ranks))
        state, verdicts, _ = diagnose(state, JobSnapshot(MONO + t, WALL + t, len(calls), 0, (report,), gap_s=0.5), MONO + t, Limits())
    return verdicts[0]


def test_a_rank_that_has_left_a_call_out_is_told_by_what_comes_later_in_turn():
    found = stuck_at(30, [in_turn(30), in_turn(31), in_turn(30)])
    assert found.culprit_ranks == (1,)
    assert "the calls of default_pg repeat every 3; next in turn at #30 is all_reduce of [100] Float" in found.evidence
    assert "ranks 0,2 call just that" in found.evidence
    assert "rank 1 calls all_reduce of [200] Float, which comes 1 later in turn" in found.evidence


def test_with_two_ranks_the_one_that_breaks_the_rhythm_with_something_new_is_named():
    found = stuck_at(31, [("barrier", ()), in_turn(31)])
    assert (found.culprit_ranks, found.waiting_ranks, found.confidence) == ((0,), (1,), "likely")
    assert "there is no majority, so either side may be the wrong one" not in found.evidence
    assert "rank 0 calls barrier, which is no part of that" in found.evidence
    assert "rank 1 calls just that" in found.evidence


def test_with_two_ranks_a_call_that_was_made_before_names_both():
    """It may be the turn of either: one has left something out, or the other has done it twice."""
    found = stuck_at(31, [in_turn(32), in_turn(31)])
    assert found.culprit_ranks == (0, 1)
    assert "rank 1 calls just that" in found.evidence


def test_two_that_are_both_named_are_told_each_with_its_own_line():
    line = {0: "q.py:12:step", 1: "q.py:9:log"}
    calls = [in_turn(32), in_turn(31)]
    found = stuck_at(31, calls, stack=lambda rank: Stack(100 + rank, MONO, (Thread("MainThread", 1, frames(line[rank])),)))
    assert (found.at, found.places) == ("", ((0, "q.py:12:step"), (1, "q.py:9:log")))
    assert found.advice[0].startswith("Compare the call sites, first q.py:12:step on rank 0, q.py:9:log on rank 1: ")
    alone = stuck_at(31, [in_turn(31), ("barrier", ())], stack=lambda rank: Stack(100 + rank, MONO, (Thread("MainThread", 1, frames(line[rank])),)))
    assert (alone.culprit_ranks, alone.at, alone.places) == ((1,), "q.py:9:log", ())


def test_a_repeated_call_is_the_one_that_came_just_before():
    found = stuck_at(31, [in_turn(30), in_turn(31), in_turn(31)])
    assert "rank 0 calls all_reduce of [100] Float, which came just before" in found.evidence


def test_calls_that_do_not_repeat_say_nothing_of_turns():
    calls = [("all_reduce", ((5,),)), ("barrier", ()), ("all_reduce", ((5,),))]
    job = [found for found in stuck_at(3, calls).evidence if "repeat" in found]
    assert job == []


def behind(ended_at):
    """Evidence on a hang at #30 in step 40. ended_at: by rank, (the last number before its step 39 ended, seconds from that call to the step's end)."""

    def entries(rank):
        last, gap = ended_at[rank]
        times = {n: WALL - 1.1 - gap if n <= last else WALL - 0.5 for n in range(20, 31)}
        found = [Collective("0", 0, n, "all_reduce", ((5,),), ((5,),), ("Float",), times[n], 600.0, n < 30) for n in times]
        return (*found[:-1], replace(found[-1], op="barrier", input_sizes=(), output_sizes=(), dtypes=())) if rank == 1 else tuple(found)

    calls = [in_turn(30), ("barrier", ()), in_turn(30)]
    found = stuck_at(30, calls, collectives=entries, steps=lambda rank: 39, last_step_at=lambda rank: MONO - 1.1, collectives_at=lambda rank: MONO)
    return [line for line in found.evidence if "had issued" in line]


def test_ranks_that_ended_the_same_step_with_different_numbers_are_told():
    """Rank 1 has left one out before: what it calls since then is paired one too early."""
    assert behind([(29, 0.1), (28, 0.1), (29, 0.1)]) == ["rank 1 had issued 28 collectives of default_pg when its step 39 ended, ranks 0,2 29"]
    assert behind([(29, 0.1), (29, 0.1), (29, 0.1)]) == []


def test_a_collective_close_to_the_end_of_a_step_leaves_its_number_open():
    assert behind([(29, 0.1), (28, 0.001), (29, 0.1)]) == []
