"""Recorders that the job has switched off: the first line says it, and only stacks tell of a hang."""

from __future__ import annotations

import pytest
from build_jobs import MONO, WALL, frames

from rankwatch.launcher.inject import recorder_off
from rankwatch.model import Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread
from rankwatch.monitor.capabilities import capabilities
from rankwatch.monitor.diagnose import State, diagnose, inside
from rankwatch.monitor.policy import Limits

C10D = "@torch/distributed/distributed_c10d.py"
WRAPPER = "@torch/distributed/c10d_logger.py:83:wrapper"
IN_BARRIER = (f"{C10D}:5000:barrier", WRAPPER, "train.py:19:main")
IN_REDUCE = (f"{C10D}:2900:all_reduce", WRAPPER, "train.py:21:step", "train.py:30:main")
IN_BACKWARD = ("@torch/autograd/graph.py:841:_engine_run_backward", "@torch/autograd/__init__.py:354:backward", "train.py:22:step")
ON_A_QUEUE = ("/usr/lib/python3.11/queue.py:171:get", "server.py:40:serve")
IN_RPC = ("@torch/distributed/rpc/api.py:200:_wait_all_workers", "server.py:44:main")


def rank(number, t, lines, every=10.0, cpu=0.0, before=None):
    taken = t - t % every
    samples = [
        Stack(100 + number, MONO + at, (Thread("MainThread", 100 + number, frames(*shown)),)) if at > 0 else None
        for at, shown in ((taken, lines), (taken - every, before or lines))
    ]
    process = Process(100 + number, True, "S", cpu_s=cpu * t, tree_cpu_s=cpu * t)
    group = Group("0", "default_pg", "gloo", (0, 1, 2), 1800.0)
    return RankState(number, process=process, heartbeat_at=MONO + t, groups=(group,), stack=samples[0], earlier_stack=samples[1])


def play(make, seconds, every=1.0):
    state, told, asked = State(), {}, 0
    for look in range(int(seconds / every)):
        t = look * every
        snapshot = JobSnapshot(MONO + t, WALL + t, 3, 0, (NodeReport("", tuple(make(t))),), gap_s=every)
        state, verdicts, wanted = diagnose(state, snapshot, snapshot.now, Limits())
        told[t] = verdicts
        asked += sum(want.kind == "stacks" for want in wanted)
    return told, asked


def words(told):
    return [verdict for verdicts in told.values() for verdict in verdicts]


def test_a_hang_without_recorders_is_told_by_its_stacks_and_blames_nobody():
    told, _ = play(lambda t: [rank(0, t, IN_BARRIER), rank(1, t, IN_REDUCE), rank(2, t, IN_REDUCE)], 150)
    first = next(t for t, verdicts in told.items() if verdicts)
    assert 60.0 <= first <= 110.0
    verdict = words(told)[-1]
    assert {(v.verdict, v.cause, v.culprit_ranks, v.confidence) for v in words(told)} == {("slow", "unknown", (), "partial")}
    assert "ranks 1-2 are in all_reduce, rank 0 is in barrier; no recorder tells of collectives" in verdict.summary
    assert verdict.evidence[0] == "ranks 1-2 are in all_reduce, rank 0 is in barrier"
    assert verdict.evidence[1:] == ("rank 0 is in train.py:19:main", "rank 1 is in train.py:21:step", "rank 2 is in train.py:21:step")
    assert verdict.waiting_ranks == (0, 1, 2)
    assert "TORCH_FR_BUFFER_SIZE" in verdict.advice[-1]


def test_a_rank_elsewhere_is_shown_beside_those_that_wait():
    told, _ = play(lambda t: [rank(0, t, ("train.py:9:wait_for_lock",)), rank(1, t, IN_REDUCE), rank(2, t, IN_BACKWARD)], 150)
    assert words(told)[-1].evidence[0] == "rank 0 is in train.py:9:wait_for_lock, rank 1 is in all_reduce, rank 2 is in backward"


def test_the_only_rank_that_is_not_in_the_call_of_all_the_others_is_named_and_nothing_is_sure():
    on_an_event = ("/usr/lib/python3.11/threading.py:327:wait", "train.py:9:wait_for_augmentation", "train.py:30:main")
    told, _ = play(lambda t: [rank(0, t, IN_REDUCE), rank(1, t, on_an_event), rank(2, t, IN_REDUCE)], 150)
    verdict = words(told)[-1]
    assert {(v.verdict, v.cause, v.culprit_ranks, v.confidence, v.at) for v in words(told)} == {
        ("slow", "not_entered", (1,), "partial", "train.py:9:wait_for_augmentation")
    }
    assert verdict.summary.endswith("; only rank 1 is not in it")
    assert verdict.waiting_ranks == (0, 2)


@pytest.mark.parametrize(
    "lines",
    [("train.py:9:finish", "train.py:30:main"), ("@torch/distributed/rpc/api.py:200:_wait_all_workers", "train.py:9:finish")],
    ids=["may be work.wait()", "elsewhere in torch.distributed"],
)
def test_a_rank_that_may_wait_for_the_others_itself_is_not_named(lines):
    told, _ = play(lambda t: [rank(0, t, IN_REDUCE), rank(1, t, lines), rank(2, t, IN_REDUCE)], 150)
    assert {v.culprit_ranks for v in words(told)} == {()}


def test_others_in_different_calls_name_nobody():
    on_an_event = ("/usr/lib/python3.11/threading.py:327:wait", "train.py:9:wait_for_augmentation")
    told, _ = play(lambda t: [rank(0, t, IN_REDUCE), rank(1, t, on_an_event), rank(2, t, IN_BARRIER)], 150)
    assert {v.culprit_ranks for v in words(told)} == {()}


@pytest.mark.parametrize("lines", [ON_A_QUEUE, IN_RPC])
def test_servers_that_idle_for_hours_are_not_told_and_rarely_looked_at(lines):
    told, asked = play(lambda t: [rank(n, t, lines) for n in range(3)], 4 * 3600, every=2.0)
    assert words(told) == []
    assert asked <= 150  # one in some hundred seconds


def test_ranks_that_compute_between_their_collectives_are_not_told():
    told, _ = play(lambda t: [rank(n, t, IN_REDUCE, cpu=0.3) for n in range(3)], 300)
    assert words(told) == []


def test_ranks_that_move_are_not_told():
    told, _ = play(lambda t: [rank(n, t, IN_REDUCE, before=IN_BARRIER) for n in range(3)], 300)
    assert words(told) == []


def test_the_call_is_the_one_that_the_job_made():
    nested = (f"{C10D}:1:_broadcast", f"{C10D}:2:broadcast_object_list", WRAPPER, "train.py:5:main")
    assert inside.call(Stack(1, 0.0, (Thread("", 1, frames(*nested)),))) == "broadcast_object_list"
    assert inside.call(Stack(1, 0.0, (Thread("", 1, frames("train.py:2:hook", *nested)),))) == ""


# -- the first line --------------------------------------------------------------------------------------------------------

ARMED = RankState(0, probes={"collectives": {"status": "armed"}, "compile": {"status": "armed"}})


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"TORCH_FR_BUFFER_SIZE": "0"}, "off (TORCH_FR_BUFFER_SIZE=0 is set in the job's environment)"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, "off (TORCH_NCCL_TRACE_BUFFER_SIZE=0 is set in the job's environment)"),
        ({"TORCH_FR_BUFFER_SIZE": "8", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, ""),
        ({"TORCH_FR_BUFFER_SIZE": "many"}, ""),
        ({}, ""),
    ],
)
def test_a_recorder_that_the_job_has_switched_off_is_known(environ, says):
    assert recorder_off(environ) == says


def test_what_the_job_has_switched_off_is_not_said_to_be_ok():
    off = recorder_off({"TORCH_FR_BUFFER_SIZE": "0"})
    assert capabilities([ARMED], None, {"collectives": off}) == {"collectives": off, "compile": "ok"}
    assert capabilities([ARMED], None, {"collectives": "off (rank 1)"}) == {"collectives": "ok", "compile": "ok"}
