"""Who lost a peer, by the words of its exception: torch's own, or the job's own error over torch's. An ordinary network error is neither."""

import pytest
from build_jobs import MONO, WALL

from rankwatch.model import Crash, Group, JobSnapshot, NodeReport, Process, RankState
from rankwatch.monitor.diagnose import State, diagnose, victims
from rankwatch.monitor.diagnose.state import Death
from rankwatch.monitor.policy import Limits

GLOO = "[/w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5031"
ENDING = "torchrun stops the workers after rank 1 failed"


def raised_in(*files):
    return "Traceback (most recent call last):\n" + "".join(f'  File "{file}", line 12, in call\n    call()\n' for file in files)


STEP, C10D, SOCKET = "/job/train.py", "/s/site-packages/torch/distributed/distributed_c10d.py", "/usr/lib/python3.11/socket.py"
FROM_TORCH = [
    Crash("RuntimeError", GLOO, traceback=raised_in(STEP)),
    Crash("RuntimeError", "[unbound_buffer.cc:78] Timed out waiting 20000ms for recv operation to complete"),
    Crash("RuntimeError", "Connection reset by peer", traceback=raised_in(STEP, C10D)),
    Crash("torch.distributed.DistNetworkError", "The client socket has timed out after 60000ms while trying to connect to (host, 29500)."),
    Crash("torch.distributed.DistBackendError", "NCCL error in: ../c10d/ProcessGroupNCCL.cpp:2, remote process exited or there was a network error"),
    Crash("RuntimeError", "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 5000 ms"),
    Crash("RuntimeError", "ECONNRESET: connection reset by peer (this error originated at tensorpipe/transport/uv/connection_impl.cc:159)"),
]
OWN = [
    Crash("RuntimeError", "DataLoader timed out after 8 seconds", traceback=raised_in(STEP, "/s/site-packages/torch/utils/data/dataloader.py")),
    Crash("RuntimeError", "shard store 10.0.0.7:9000: connection reset by peer while reading shard 17", traceback=raised_in(STEP)),
    Crash("ConnectionResetError", "[Errno 104] Connection reset by peer", traceback=raised_in(STEP, "/usr/lib/python3.11/http/client.py", SOCKET)),
    Crash("ConnectionRefusedError", "[Errno 111] Connection refused", traceback=raised_in(STEP, "/usr/lib/python3.11/multiprocessing/connection.py")),
    Crash(
        "urllib.error.URLError", "<urlopen error [Errno 111] Connection refused>", traceback=raised_in(STEP, SOCKET, "/usr/lib/python3.11/urllib/request.py")
    ),
    Crash("BrokenPipeError", "[Errno 32] Broken pipe", traceback=raised_in(C10D, STEP)),
    Crash(
        "ConnectionError",
        "Caught it in a worker: connection reset\nOriginal Traceback (most recent call last):\n  File nccl/gloo.py",
        traceback=raised_in(STEP),
    ),
    Crash("torch.distributed.checkpoint.api.CheckpointException", "rank 1: write error of the bucket", traceback=raised_in(STEP, C10D)),
]


@pytest.mark.parametrize("crash", FROM_TORCH, ids=lambda crash: crash.message[:40])
def test_what_torch_says_of_a_peer_makes_a_victim(crash):
    assert victims.speaks_of_peers(crash)


@pytest.mark.parametrize("crash", OWN, ids=lambda crash: crash.type)
def test_a_network_error_of_the_jobs_own_code_is_no_lost_peer(crash):
    assert not victims.speaks_of_peers(crash)
    rank = RankState(rank=1, node="node05", crash=crash)
    assert not victims.is_victim(rank, Death(1, 1, MONO, MONO, False, True)), "not even if its wait was overdue"


WRAPPED = Crash("__main__.TrainingError", "step 31 failed", traceback=raised_in(STEP), chain=(("RuntimeError", GLOO),))


def test_an_error_of_the_jobs_own_over_a_lost_peer_is_a_victims():
    assert victims.speaks_of_peers(WRAPPED)
    assert victims.loss_behind(WRAPPED) == Crash("RuntimeError", GLOO)
    twice = Crash("SystemError", "gave up", chain=(("Retry", "3 times"), ("RuntimeError", GLOO)))
    assert victims.speaks_of_peers(twice)


def test_an_error_that_came_of_an_ordinary_one_is_its_own():
    assert not victims.speaks_of_peers(Crash("TrainingError", "step 31", chain=(("ConnectionResetError", "104, Connection reset by peer"),)))
    assert not victims.speaks_of_peers(Crash("TrainingError", "step 31", chain=(("KeyError", "gloo"),)))


def test_timeouts_are_told_from_broken_connections():
    assert [victims.timed_out(crash) for crash in FROM_TORCH[:3]] == [False, True, False]
    assert victims.timed_out(Crash("TrainingError", "step 31", chain=((FROM_TORCH[1].type, FROM_TORCH[1].message),)))
    assert not victims.timed_out(OWN[0])


def rank(number, code=None, crash=None, at=0.0):
    return RankState(
        rank=number, node="node05", process=Process(100 + number, code is None, "S", exit_code=code, exited_at=None if code is None else MONO + at),
        stage="joined", heartbeat_at=MONO, groups=(Group("0", "default_pg", "gloo", (0, 1, 2), 180.0),), enqueued={"0": 8}, completed={"0": 7}, crash=crash,
    )  # fmt: skip


def judged(*ranks):
    snapshot = JobSnapshot(MONO + 1, WALL + 1, 3, 0, (NodeReport("node05", ranks),), ending=ENDING, gap_s=0.5, final=True)
    return diagnose(State(), snapshot, snapshot.now, Limits())[1]


def told(*ranks):
    return [(verdict.verdict, verdict.cause, verdict.culprit_ranks) for verdict in judged(*ranks)]


@pytest.mark.parametrize("crash", OWN[:5], ids=lambda crash: crash.type)
def test_who_raised_it_is_named_and_who_lost_that_rank_is_not(crash):
    assert told(rank(0, 1, FROM_TORCH[0], 0.3), rank(1, 1, crash), rank(2, 1, FROM_TORCH[0], 0.3)) == [("failed", "crashed", (1,))]
    assert told(rank(0, -15, at=0.5), rank(1, 1, crash), rank(2, -15, at=0.5)) == [("failed", "crashed", (1,))]


def test_all_that_cannot_reach_the_same_host_are_named_together():
    assert told(*(rank(number, 1, OWN[4], number / 10) for number in range(3))) == [("failed", "crashed", (0, 1, 2))]


def test_who_ended_well_is_named_though_its_peers_wrap_what_torch_raised():
    ranks = rank(0, 1, WRAPPED, 0.3), rank(1, 0), rank(2, 1, WRAPPED, 0.3)
    assert told(*ranks) == [("failed", "exited", (1,))]
    assert f"rank 0 is a consequence: __main__.TrainingError: step 31 failed, which came of RuntimeError: {GLOO}" in judged(*ranks)[0].evidence
