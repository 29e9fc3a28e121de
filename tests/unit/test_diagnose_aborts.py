"""gloo aborts the rank with the smaller buffer, most often an innocent one: what the peers called tells who was in the wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from build_jobs import MONO, WALL

from rankwatch.model import Collective, Crash, Group, JobSnapshot, NodeReport, Process, RankState
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits

LOST = Crash("RuntimeError", "[pair.cc:553] Connection closed by peer [127.0.0.1]:5031.", where="train.py:18:step", traceback="torch/distributed/")
ENDING = "torchrun stops the workers after rank 0 failed"


def call(seq: int, size: int = 100, op: str = "all_reduce", dtype: str = "Float", done: bool = True) -> Collective:
    return Collective("0", 0, seq, op, ((size,),) if op != "barrier" else (), dtypes=(dtype,) if op != "barrier" else (), created_wall_at=WALL + seq, done=done)


USUAL = tuple(call(seq) for seq in range(1, 7))


def rank(
    number: int, world: int, last: Collective | None = None, code: int | None = None, before: tuple[Collective, ...] = USUAL, heard: bool = True, t: float = 0.0
) -> RankState:
    """last: what it called when it lost its peer; then it is exiting, and its last words are read when `heard`."""
    ends = last is not None
    return RankState(
        rank=number, node="node05", process=Process(100 + number, code is None, "S", exit_code=code, exited_at=MONO if code is not None else None),
        stage="exiting" if ends else "joined", stage_since=MONO + 0.1 if ends else 0.0, heartbeat_at=MONO + t,
        groups=(Group("0", "default_pg", "gloo", tuple(range(world)), 60.0),),
        collectives=(*before, last) if last is not None and heard else before, collectives_at=MONO + 0.2 if ends and heard else MONO - 5.0,
        enqueued={"0": 6}, completed={"0": 6}, crash=LOST if ends else None,
    )  # fmt: skip


def snap(ranks: list[RankState], t: float = 0.3, ending: str = "", final: bool = False) -> JobSnapshot:
    return JobSnapshot(MONO + t, WALL + t, len(ranks), 0, (NodeReport("node05", tuple(ranks)),), ending=ending, gap_s=0.1, final=final)


def verdict_on(ranks: list[RankState], t: float = 0.3, final: bool = False):
    _, verdicts, _ = diagnose(State(), snap(ranks, t, final=final), MONO + t, Limits())
    return verdicts[0] if verdicts else None


@pytest.mark.parametrize(
    ("aborted", "calls", "culprits", "confidence"),
    [
        pytest.param([0], {1: call(7, 400), 2: call(7)}, (1,), "likely", id="a larger tensor"),
        pytest.param([2], {0: call(7, 400), 1: call(7)}, (0,), "likely", id="a larger tensor on rank 0"),
        pytest.param([0], {1: call(7, dtype="Double"), 2: call(7)}, (1,), "likely", id="another dtype"),
        pytest.param([0], {1: call(7, 400, "all_gather"), 2: call(7, 100, "all_gather")}, (1,), "likely", id="all_gather, which no one called before"),
        pytest.param([1, 2], {0: call(7, 400, "broadcast")}, (0,), "likely", id="the root of a broadcast, all others aborted"),
        pytest.param([1], {0: call(7, 400)}, (0, 1), "partial", id="two ranks: both sides"),
        pytest.param([0], {1: call(7, 400), 2: call(7, 300), 3: call(7, 200)}, (0, 1, 2, 3), "partial", id="nobody agrees with anybody"),
        pytest.param([0], {1: call(7, op="barrier"), 2: call(7)}, (1,), "likely", id="another operation"),
    ],
)
def test_the_rank_that_called_something_else_is_named_and_not_the_aborted_one(aborted, calls, culprits, confidence):
    world = len(aborted) + len(calls)
    verdict = verdict_on([rank(n, world, calls.get(n), -6 if n in aborted else None) for n in range(world)])
    assert (verdict.verdict, verdict.cause, verdict.domain) == ("failed", "mismatch", "user_code")
    assert (verdict.culprit_ranks, verdict.confidence) == (culprits, confidence)
    assert verdict.group.seq == 7
    assert "gloo aborted" in verdict.summary
    if confidence == "likely":
        assert verdict.at == "train.py:18:step"
        assert set(aborted) <= set(verdict.waiting_ranks)


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ({0: call(7, op="barrier"), 2: call(7, op="barrier")}, "a barrier sends nothing that could be too long"),
        ({}, "the peers have nothing open"),
    ],
)
def test_an_aborted_rank_whose_peers_cannot_have_sent_it_too_much_is_the_crashed_one(calls, why):
    verdict = verdict_on([rank(n, 3, calls.get(n), -6 if n == 1 else None) for n in range(3)], final=True)
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.confidence) == ("failed", "crashed", (1,), "likely"), why


def test_an_aborted_rank_whose_peers_all_wait_in_one_equal_call_most_likely_called_something_smaller():
    verdict = verdict_on([rank(n, 3, None if n == 1 else call(7), -6 if n == 1 else None) for n in range(3)])
    assert (verdict.verdict, verdict.cause, verdict.domain, verdict.culprit_ranks, verdict.confidence) == ("failed", "mismatch", "user_code", (1,), "likely")
    assert "rank 1 most likely called something else than the others at #7 of default_pg: ranks 0,2 call all_reduce of [100] Float" in verdict.summary


def test_the_root_of_a_broadcast_may_be_ahead_of_the_call_that_an_aborted_rank_was_in():
    root = replace(rank(0, 3, call(2, 40, "broadcast"), before=(call(1, 100, "broadcast"),)), completed={"0": 1})
    peer = replace(rank(1, 3, call(1, 100, "broadcast"), before=()), completed={"0": 0})
    dead = replace(rank(2, 3, code=-6, before=()), completed={"0": 0}, enqueued={"0": 0})
    verdict = verdict_on([root, peer, dead])
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence, verdict.group.seq) == ("mismatch", (2,), "likely", 1)


@pytest.mark.parametrize("why", ["gloo has no part in it", "a fatal error elsewhere"])
def test_an_abort_that_the_ranks_log_explains_is_a_crash(why):
    said = Crash("std::bad_alloc", "std::bad_alloc", source="log /run/1")
    if why == "a fatal error elsewhere":
        said = Crash("Fatal Python error", "Aborted", where="data.py:9:decode", traceback='File "data.py", line 9, in decode', source="log /run/1")
    dead = replace(rank(1, 3, code=-6), crash=said)
    verdict = verdict_on([rank(0, 3, call(7)), dead, rank(2, 3, call(7))])
    assert (verdict.cause, verdict.culprit_ranks) == ("crashed", (1,))


@pytest.mark.parametrize(
    ("size", "culprits"),
    [pytest.param(100, (0,), id="the peer calls what is not its turn"), pytest.param(1, (1,), id="the peer is in turn")],
)
def test_of_two_ranks_the_one_that_is_out_of_turn_is_named(size, culprits):
    """The sizes take turns, 1 and 100, and #19 is due to be the small one."""
    before = tuple(call(seq, 1 if seq % 2 else 100) for seq in range(1, 19))
    ranks = [rank(0, 2, call(19, size), before=before), replace(rank(1, 2, code=-6, before=before), completed={"0": 18}, enqueued={"0": 18})]
    verdict = verdict_on(ranks)
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence) == ("mismatch", culprits, "partial")


def of_two(peer_entries: tuple[Collective, ...], *, heard: bool, completed: int = 54) -> tuple[RankState, RankState]:
    """Rank 0 was aborted; the status numbers of both are older than that."""
    peer = rank(1, 2, peer_entries[-1], before=peer_entries[:-1])
    if not heard:  # read before its peer died, as everything that is known of it
        peer = replace(peer, collectives=peer_entries, collectives_at=MONO - 0.2)
    peer = replace(peer, completed={"0": completed}, enqueued={"0": completed})
    return replace(rank(0, 2, code=-6, before=()), completed={"0": completed}, enqueued={"0": completed}), peer


TURNS = tuple(call(seq, 1 if seq % 2 else 100) for seq in range(1, 61))  # 1 and 100 take turns


def test_what_a_rank_called_before_its_peer_died_is_not_what_it_calls():
    """Read at #59, where it was in turn; the disagreement came later, and nobody has said where."""
    ended = replace(TURNS[58], created_wall_at=WALL - 0.21)
    for newest in (ended, replace(ended, done=False)):  # gloo notes an end later than it comes about
        verdict = verdict_on([*of_two((*TURNS[:58], newest), heard=False)], final=True)
        assert (verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.confidence) == ("failed", "mismatch", (0, 1), "partial")
        assert "#" not in verdict.summary
        assert "calls" not in verdict.summary
        assert "either side may be the wrong one" in verdict.evidence


def test_the_call_that_is_out_of_turn_is_found_though_the_numbers_of_the_aborted_rank_are_old():
    """#61 is due to be the small one; gloo ends the rank with the smaller buffer, the other one has its call done."""
    verdict = verdict_on([*of_two((*TURNS, call(61, 100)), heard=True)])
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence, verdict.group.seq) == ("mismatch", (1,), "partial", 61)
    assert "rank 1 calls all_reduce of [100] Float" in verdict.summary


def test_a_wait_that_lasted_when_it_was_read_is_what_the_rank_calls():
    waits = replace(call(61, 100, done=False), created_wall_at=WALL - 3.0)
    verdict = verdict_on([*of_two((*TURNS, waits), heard=False, completed=60)], final=True)
    assert (verdict.cause, verdict.culprit_ranks, verdict.group.seq) == ("mismatch", (1,), 61)


def test_of_more_ranks_the_aborted_one_is_named_though_nobody_has_said_what_was_called():
    before = tuple(replace(each, created_wall_at=WALL - 60 + each.seq) for each in USUAL)
    dead = replace(rank(1, 3, code=-6, before=()), completed={"0": 6})
    peers = [replace(rank(number, 3, call(7), before=before, heard=False), collectives=before) for number in (0, 2)]
    verdict = verdict_on([peers[0], dead, peers[1]], final=True)
    assert (verdict.verdict, verdict.cause, verdict.culprit_ranks, verdict.confidence) == ("failed", "mismatch", (1,), "partial")
    assert "a failure in native code of its own ends a process alike" in verdict.evidence


def test_of_two_ranks_without_an_order_of_calls_either_may_be_wrong():
    before = tuple(call(seq, size) for seq, size in enumerate((1, 100, 100, 1, 1, 100, 7, 100, 100, 1), 1))
    ranks = [rank(0, 2, call(11, 100), before=before), replace(rank(1, 2, code=-6, before=before), completed={"0": 10}, enqueued={"0": 10})]
    verdict = verdict_on(ranks)
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence) == ("mismatch", (0, 1), "partial")


def test_an_aborted_rank_whose_log_speaks_of_sizes_while_its_peers_agree_is_the_odd_one():
    said = Crash("gloo::EnforceNotMet", "[enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 944 vs 940. Received data size", source="log /run/1")
    dead = replace(rank(1, 3, code=-6), crash=said)
    verdict = verdict_on([rank(0, 3, call(7)), dead, rank(2, 3, call(7))])
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence) == ("mismatch", (1,), "likely")
    assert any("944 vs 940" in line for line in verdict.evidence)


def test_a_lone_peer_in_a_new_operation_does_not_take_the_blame_for_a_crash():
    """Two ranks: the peer waits in its first barrier for a rank that crashed on its own."""
    verdict = verdict_on([rank(0, 2, call(7, op="barrier")), rank(1, 2, code=-6)])
    assert (verdict.cause, verdict.culprit_ranks) == ("crashed", (1,))


def test_nobody_is_named_until_the_peers_have_spoken():
    """First the abort is seen, then what the peers called: no verdict names the innocent aborted rank in between."""
    state, told = State(), []
    calls = {1: call(7, 400, done=False), 2: call(7, done=False)}
    for t, ends, heard, ending in ((0.0, False, False, ""), (0.1, True, False, ""), (0.4, True, True, ENDING)):
        ranks = [rank(n, 3, calls.get(n) if ends else None, -6 if n == 0 else None, heard=heard, t=t) for n in range(3)]
        state, verdicts, wanted = diagnose(state, snap(ranks, t, ending), MONO + t, Limits())
        told.append([(verdict.cause, verdict.culprit_ranks) for verdict in verdicts])
        if not verdicts:
            assert state.failure_held
            assert {rank_ for want in wanted for rank_ in want.ranks} == {1, 2}
    assert told == [[], [], [("mismatch", (1,))]]


def test_peers_that_never_speak_are_not_waited_for():
    silent = [rank(0, 3, code=-6), rank(1, 3), rank(2, 3)]
    state, verdicts, _ = diagnose(State(), snap(silent, 0.0), MONO, Limits())
    assert verdicts == ()
    _, verdicts, _ = diagnose(state, snap(silent, 1.3), MONO + 1.3, Limits())
    assert [(verdict.cause, verdict.culprit_ranks) for verdict in verdicts] == [("crashed", (0,))]
    assert verdict_on(silent, final=True).cause == "crashed"


def test_an_abort_with_a_python_exception_or_in_nccl_is_named_at_once():
    own = Crash("ValueError", "bad batch", where="train.py:31:load_batch")
    peers = [rank(1, 2)]
    raised = replace(rank(0, 2, code=-6), crash=own)
    nccl = replace(rank(0, 2, code=-6), groups=(Group("0", "default_pg", "nccl", (0, 1), 60.0),))
    for dead in (raised, nccl):
        verdict = verdict_on([dead, *peers], t=0.0)
        assert (verdict.cause, verdict.culprit_ranks) == ("crashed", (0,))
