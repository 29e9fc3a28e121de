"""init_process_group in which nobody is missing: the wrong world, the wrong address, the store of the attempt before."""

from __future__ import annotations

import pytest
from build_jobs import MONO, WALL

from rankwatch.model import Crash, Group, JobSnapshot, Join, NodeReport, Process, RankState
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.policy import Limits


def join(rank, world_size=2, store="node05:29500", reached=True, ours=True, shared=True, as_rank=None):
    return Join(ours, rank if as_rank is None else as_rank, world_size, store, shared, MONO, reached)


def rank(number, call, stage="joining", **fields):
    agent = "claimed" if call is None or call.ours else "armed"
    process = Process(100 + number, True, "S")
    return RankState(number, node="node05", agent=agent, process=process, stage=stage if agent == "claimed" else "armed", stage_since=MONO, join=call, **fields)


def play(*ranks, seconds=150.0, attempt=0, world=2):
    """Looks every half second; the kinds of verdict in order, and the last verdict."""
    state, kinds, last = State(), [], None
    for look in range(int(seconds * 2)):
        t = look / 2
        snapshot = JobSnapshot(MONO + t, WALL + t, world, attempt, (NodeReport("node05", ranks),), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
        for verdict in verdicts:
            last = verdict
            if (kind := (verdict.verdict, verdict.cause, verdict.culprit_ranks, t)) and kind[:3] not in [known[:3] for known in kinds]:
                kinds.append(kind)
    return kinds, last


def test_a_world_larger_than_torchruns_is_said_with_both_sizes():
    kinds, verdict = play(rank(0, join(0, 3, ours=False)), rank(1, join(1, 3, ours=False)))
    assert [kind[:3] for kind in kinds] == [("slow", "store_wait", (0, 1)), ("stuck", "store_wait", (0, 1))]
    assert verdict.domain == "user_code"
    assert "call init_process_group for a world of 3 ranks and torchrun has started 2: 1 more is waited for" in verdict.summary
    assert "WORLD_SIZE" in verdict.advice[-1]


def test_a_rank_that_calls_itself_another_is_named_with_both_numbers():
    kinds, verdict = play(rank(0, join(0)), rank(1, join(1, as_rank=0, ours=False)))
    assert {kind[2] for kind in kinds} == {(1,)}
    assert verdict.summary.startswith("rank 1 calls init_process_group as rank 0 of 2, while torchrun has started it as rank 1 of 2; for ")


def test_it_is_named_before_a_rank_that_is_only_late():
    kinds, verdict = play(rank(0, join(0, 3)), rank(1, join(1, 3, as_rank=0, ours=False)), rank(2, None, "joined"), world=3)
    assert {kind[2] for kind in kinds} == {(1,)}
    assert verdict.summary.startswith("rank 1 has not joined (it calls it as rank 0 of 3, while torchrun has started it as rank 1 of 3)")


def test_a_world_of_a_ranks_own_is_no_trouble_while_the_others_work():
    working = rank(0, None, "joined", groups=(Group("0", "default_pg", "gloo", (0, 1), 600.0),))
    assert play(working, rank(1, join(1, 5, ours=False)))[0] == []


def test_a_rank_that_was_told_another_address_is_named():
    kinds, verdict = play(rank(0, join(0)), rank(1, join(1, store="node09:29500", reached=False)))
    assert [kind[:3] for kind in kinds] == [("slow", "store_wait", (1,)), ("stuck", "store_wait", (1,))]
    assert "rank 1 does not reach the store at node09:29500" in verdict.summary
    assert "rank 0 has reached it at node05:29500" in verdict.summary
    assert verdict.domain == "user_code"
    assert "MASTER_ADDR" in verdict.advice[-2]


def test_a_rank_that_does_not_reach_the_same_address_is_a_matter_of_the_network():
    _, verdict = play(rank(0, join(0)), rank(1, join(1, reached=False)))
    assert (verdict.culprit_ranks, verdict.domain) == ((1,), "network")


def test_a_store_that_nobody_reaches_is_nobodys_fault():
    _, verdict = play(rank(0, join(0, reached=False)), rank(1, join(1, reached=False)))
    assert (verdict.culprit_ranks, verdict.domain) == ((), "network")
    assert "no rank reaches the store at node05:29500" in verdict.summary


def test_ranks_of_a_later_attempt_that_meet_in_a_shared_store_are_told_of_the_setting():
    kinds, verdict = play(rank(0, join(0)), rank(1, join(1)), attempt=1)
    assert [kind[:3] for kind in kinds] == [("slow", "store_wait", ()), ("stuck", "store_wait", ())]
    assert kinds[-1][3] == 30.0  # nothing has to be waited for as long as for an import
    assert "stale store of the attempt before" in verdict.summary
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in " ".join(verdict.advice)


@pytest.mark.parametrize(("attempt", "shared"), [(0, True), (1, False)])
def test_without_a_shared_store_of_an_attempt_before_nothing_is_said_of_one(attempt, shared):
    kinds, verdict = play(rank(0, join(0, shared=shared)), rank(1, join(1, shared=shared)), attempt=attempt)
    assert kinds[-1][3] == 120.0
    assert "stale" not in verdict.summary
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in " ".join(verdict.advice)


def test_ranks_that_are_not_seen_are_named_as_that_and_nothing_is_paged():
    kinds, verdict = play(rank(0, join(0, 4)), rank(1, join(1, 4)), world=4)
    assert [kind[:3] for kind in kinds] == [("slow", "store_wait", ())]
    assert verdict.confidence == "partial"
    assert "ranks 2-3 are not seen from here" in verdict.summary


REFUSED = Crash("RuntimeError", "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection refused, remote=[127.0.0.1]:55712")


def test_a_join_that_fails_in_the_store_of_the_attempt_before_blames_no_rank():
    failed = RankState(
        1, node="node05", process=Process(101, False, exit_code=1, exited_at=MONO), stage="join_failed", stage_since=MONO, crash=REFUSED, join=join(1)
    )
    state = State()
    for t in (0.0, 0.5, 1.5):
        snapshot = JobSnapshot(MONO + t, WALL + t, 2, 2, (NodeReport("node05", (rank(0, join(0)), failed)),), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    (verdict,) = verdicts
    assert (verdict.verdict, verdict.cause, verdict.domain, verdict.culprit_ranks) == ("failed", "store_wait", "scheduler", ())
    assert "init_process_group of rank 1 failed, most likely of the stale store of the attempt before" in verdict.summary
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in " ".join(verdict.advice)


def test_a_join_that_timed_out_says_who_is_not_seen():
    late = Crash("torch.distributed.DistStoreError", "Timed out after 61 seconds waiting for clients. 2/4 clients joined.")
    ranks = [
        RankState(
            n, node="node05", process=Process(100 + n, False, exit_code=1, exited_at=MONO), stage="join_failed", stage_since=MONO, crash=late, join=join(n, 4)
        )
        for n in (0, 1)
    ]
    state = State()
    for t in (0.0, 1.5):
        snapshot = JobSnapshot(MONO + t, WALL + t, 4, 0, (NodeReport("node05", tuple(ranks)),), gap_s=0.5)
        state, verdicts, _ = diagnose(state, snapshot, snapshot.now, Limits())
    (verdict,) = verdicts
    assert (verdict.cause, verdict.culprit_ranks, verdict.confidence) == ("store_wait", (), "partial")
    assert verdict.summary == "every rank seen had called init_process_group when that of ranks 0-1 timed out; ranks 2-3 are not seen from here"
