"""Ends in detail: the first exception in time, ends that hang, signals beside older tracebacks, attempts that end alike, handlers that wait."""

from __future__ import annotations

from dataclasses import replace

from build_jobs import MONO, WALL, frames

from rankwatch.model import Collective, Crash, Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.diagnose.stores import call
from rankwatch.monitor.policy import Limits

OWN = "the rank's own exit"
GROUP = Group("0", "default_pg", "gloo", (0, 1, 2), 60.0)


def raised(at_s, kind="KeyError", message="'lr'", where="train.py:40:step", source=OWN):
    return Crash(kind, message, where, source=source, at_wall=WALL + at_s)


def rank(number, code=None, crash=None, ended_s=0.0, stage="joined", waits=True, since_s=0.0, **fields):
    process = Process(100 + number, code is None, "S" if code is None else "", exit_code=code, exited_at=MONO + ended_s if code is not None else None)
    return RankState(
        number, node="node05", process=process, stage=stage, stage_since=MONO + since_s, heartbeat_at=MONO, groups=(GROUP,), enqueued={"0": 8 if waits else 7},
        completed={"0": 7}, crash=crash, **fields,
    )  # fmt: skip


def snap(*ranks, t=0.0, attempt=0, ending=""):
    return JobSnapshot(MONO + t, WALL + t, 3, attempt, (NodeReport("node05", ranks),), gap_s=0.5, ending=ending)


def look(*snapshots, state=None):
    state, verdicts = state or State(), ()
    for snapshot in snapshots:
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    return state, verdicts


def test_the_first_exception_is_named_and_not_the_first_process_to_end():
    """Rank 1 raised first, and its process took four seconds to end."""
    ranks = (rank(0, 1, raised(2.0, "ValueError", "no batch"), 2.1, "exiting"), rank(1, 1, raised(0.5), 4.5, "exiting"), rank(2))
    (verdict,) = look(snap(*ranks, t=5.0))[1]
    assert (verdict.culprit_ranks, verdict.since) == ((1,), MONO + 0.5)
    assert "raised KeyError: 'lr' at train.py:40:step; rank 0 ended after it" in verdict.summary


def test_an_exception_whose_process_still_ends_comes_before_a_later_one():
    ranks = (rank(0, 1, raised(2.0, "ValueError", "no batch"), 2.1, "exiting"), rank(1, crash=raised(0.5), stage="exiting", since_s=0.5), rank(2))
    (verdict,) = look(snap(*ranks, t=2.2))[1]
    assert verdict.culprit_ranks == (1,)
    assert "its process has not ended yet" in verdict.evidence


def test_a_rank_whose_interpreter_shuts_down_says_so_where_no_line_of_the_job_runs():
    groups = {"groups": (GROUP,)}
    late = rank(1, stage="exiting", waits=False, stack=Stack(101, MONO + 6, (Thread("MainThread", 1, ()),), text="<no Python frame>"))
    entries = tuple(Collective("0", 0, 8, "all_reduce", ((5,),), ((5,),), ("Float",), WALL, 60.0) for _ in range(1))
    waiting = [replace(rank(number), collectives=entries, collectives_at=MONO, **groups) for number in (0, 2)]
    state, verdicts = State(), ()
    for number in range(16):
        t = number / 2
        ranks = [replace(each, heartbeat_at=MONO + t) for each in (waiting[0], late, waiting[1])]
        state, verdicts = look(snap(*ranks, t=t), state=state)
    (verdict,) = verdicts
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks) == ("slow", "not_entered", (1,))
    assert "its script has ended and the interpreter is shutting down" in verdict.summary
    assert verdict.advice[0].startswith("The rank has left its script while others still need it")


def test_a_rank_that_hangs_in_its_own_end_is_named_with_what_it_raised():
    ranks = (rank(0), rank(1, crash=raised(0.0), stage="exiting", waits=False), rank(2))
    assert look(snap(*ranks, t=0.5), snap(*ranks, t=2.5))[1] == ()
    (verdict,) = look(snap(*ranks, t=3.0))[1]
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.waiting_ranks) == ("failed", "crashed", (1,), (0, 2))


def test_a_rank_that_ends_slowly_by_an_exception_while_nobody_waits_is_left_to_torchrun():
    ranks = [rank(number, crash=raised(0.0) if number == 1 else None, stage="exiting" if number == 1 else "joined", waits=False) for number in range(3)]
    assert look(snap(*ranks, t=5.0))[1] == ()


def test_a_signal_is_not_explained_by_an_older_traceback_of_the_log():
    caught = raised(0.0, "TimeoutError", "retry 1", source="log /run/rank_1")
    (verdict,) = look(snap(rank(0), rank(1, -11, caught), rank(2)))[1]
    assert (verdict.cause, verdict.at) == ("crashed", "")
    assert verdict.summary.startswith("rank 1 failed first: died of SIGSEGV")
    assert "the last traceback in its log is of TimeoutError: retry 1" in verdict.evidence
    assert "PYTHONFAULTHANDLER=1" in verdict.advice[0]


def test_a_fatal_signal_is_told_with_the_line_that_faulthandler_has_written():
    fatal = Crash("Fatal Python error", "Segmentation fault", "train.py:12:decode_image", source="log /run/rank_1")
    (verdict,) = look(snap(rank(0), rank(1, -11, fatal), rank(2)))[1]
    assert verdict.summary.startswith("rank 1 failed first: died of SIGSEGV at train.py:12:decode_image")
    assert verdict.at == "train.py:12:decode_image"


def test_the_advice_for_a_rank_that_alone_was_sent_a_signal_speaks_of_that_signal():
    early, ending = snap(rank(0), rank(1, -15), rank(2)), "torchrun stops the workers after rank 1 failed"
    ranks = (rank(0), rank(1, -15), rank(2))
    (verdict,) = look(early, snap(*ranks, t=0.5, ending=ending), snap(*ranks, t=1.5, ending=ending))[1]
    assert (verdict.cause, verdict.domain, verdict.confidence) == ("killed", "scheduler", "likely")
    assert verdict.advice[0].startswith("SIGTERM was sent to this rank alone")


def test_a_signal_that_others_were_sent_as_well_is_a_planned_end():
    """Ctrl-C in a terminal goes to the ranks too; torchrun sees the first of them and ends the others."""
    early, ending = snap(rank(0, -2, raised(0.0, "KeyboardInterrupt", "")), rank(1), rank(2)), "torchrun stops the workers after rank 0 failed"
    late = rank(1, crash=raised(0.4, "KeyboardInterrupt", ""), stage="exiting")
    both = (early.ranks()[0], late, rank(2, -15))
    assert look(early, snap(*both, t=0.5, ending=ending), snap(*both, t=2.0, ending=ending))[1] == ()


def test_a_rank_that_alone_was_interrupted_was_sent_a_signal():
    early, ending = snap(rank(0, -2, raised(0.0, "KeyboardInterrupt", "")), rank(1), rank(2)), "torchrun stops the workers after rank 0 failed"
    ranks = (early.ranks()[0], rank(1, -15), rank(2, -15))
    (verdict,) = look(early, snap(*ranks, t=0.5, ending=ending), snap(*ranks, t=2.0, ending=ending))[1]
    assert (verdict.cause, verdict.culprit_ranks, verdict.advice[0][:6]) == ("killed", (0,), "SIGINT")


# -- attempts --------------------------------------------------------------------------------------------------------


def test_attempts_that_end_at_the_same_line_are_said_as_that():
    state, summaries, advice = State(), [], ()
    for attempt in range(3):
        start = 10.0 * attempt
        crash = raised(start, message=f"'key {attempt}'")
        state, verdicts = look(snap(rank(0), rank(1, 1, crash, start), rank(2), t=start, attempt=attempt), state=state)
        summaries.append(verdicts[0].summary)
        advice = verdicts[0].advice
    assert "ended of the same" not in summaries[0]
    assert summaries[1].endswith("; the attempt before ended of the same")
    assert summaries[2].endswith("; the 2 attempts before ended of the same")
    assert advice[-1].startswith("Restarts do not help")


def test_an_attempt_that_ends_elsewhere_begins_to_count_anew():
    state = State()
    for attempt, where in enumerate(("train.py:40:step", "train.py:50:save", "train.py:40:step")):
        state, verdicts = look(snap(rank(0), rank(1, 1, raised(0.0, where=where)), rank(2), t=float(attempt), attempt=attempt), state=state)
        assert "of the same" not in verdicts[0].summary


def test_a_restart_without_a_failure_breaks_no_chain_and_makes_none():
    state, _ = look(snap(rank(0), rank(1, 1, raised(0.0)), rank(2)))
    state, _ = look(snap(rank(0), rank(1), rank(2), t=1.0, attempt=1), state=state)
    _, verdicts = look(snap(rank(0), rank(1, 1, raised(2.0), 2.0), rank(2), t=2.0, attempt=2), state=state)
    assert verdicts[0].summary.endswith("; the attempt before ended of the same")


# -- handlers and the store ------------------------------------------------------------------------------------------


def sample(*lines, at=9.0, native=False):
    return Stack(101, MONO + at, (Thread("MainThread", 101, frames(*lines)),), native=native)


def waiting(handling=None, stack=None, native_stack=None, t=8.0):
    """Ranks 0 and 2 wait in #8 since MONO, rank 1 is elsewhere."""
    call_ = Collective("0", 0, 8, "all_reduce", ((4,),), ((4,),), ("Float",), created_wall_at=WALL, timeout_s=60.0)
    done = tuple(replace(call_, seq=seq, done=True) for seq in range(1, 8))
    away = replace(rank(1, waits=False), stack=stack, handling=handling, native_stack=native_stack)
    others = [replace(rank(number), collectives=(*done, call_), collectives_at=MONO + 1) for number in (0, 2)]
    ranks = [others[0], replace(away, collectives=done, collectives_at=MONO + 1), others[1]]
    return [snap(*(replace(each, heartbeat_at=MONO + at) for each in ranks), t=at) for at in (0.0, 0.5, 2.0, 5.5, 6.0, t, t + 8.0)]


HANDLED = Crash("ValueError", "sample 17 has no label", "train.py:31:load_batch")


def test_a_rank_that_waits_in_its_error_handler_is_told_with_the_exception_that_no_log_shows():
    held = replace(HANDLED, at_wall=WALL + 0.2)
    (verdict,) = look(*waiting(held, sample("train.py:60:close_writer", "train.py:70:<module>")))[1]
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks) == ("stuck", "not_entered", (1,))
    assert "(it is in train.py:60:close_writer while it handles ValueError: sample 17 has no label (raised at train.py:31:load_batch))" in verdict.summary
    assert "The error comes first" in " ".join(verdict.advice)


def test_an_exception_that_is_handled_since_long_before_explains_nothing():
    held = replace(HANDLED, at_wall=WALL - 60.0)
    (verdict,) = look(*waiting(held, sample("train.py:60:close_writer", "train.py:70:<module>")))[1]
    assert "ValueError" not in verdict.summary


NATIVE = "c10d::PrefixStore::get"


def in_store(*lines):
    found = sample(*lines, native=True)
    inner = tuple(replace(found.main[0], name=name, file="/venv/lib/libtorch_cpu.so", line=0) for name in ("poll", "c10d::TCPStore::doWait", NATIVE))
    return replace(found, threads=(replace(found.threads[0], frames=(*inner, *found.main)),))


def test_a_rank_that_waits_for_a_key_is_told_once_a_native_sample_shows_it():
    lines = ("train.py:60:path_of_data", "train.py:70:<module>")
    (verdict,) = look(*waiting(None, sample(*lines), in_store(*lines)))[1]
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks) == ("stuck", "store_wait", (1,))
    assert "(it waits in get() of the store, called from train.py:60:path_of_data)" in verdict.summary


def test_a_native_sample_of_another_line_says_nothing_of_this_one():
    (verdict,) = look(*waiting(None, sample("train.py:60:path_of_data"), in_store("train.py:61:other")))[1]
    assert verdict.cause == "not_entered"


def test_the_call_of_a_store_is_read_from_native_and_from_python_frames():
    assert call(in_store("train.py:60:main")) == "get()"
    assert call(sample("@torch/distributed/elastic/utils/store.py:190:barrier", "train.py:60:main")) == "barrier()"
    assert call(sample("train.py:60:get")) == ""
    assert call(None) == ""
