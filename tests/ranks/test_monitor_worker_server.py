"""torch's own worker server, asked from outside."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rankwatch.monitor.proc_stat import read_stat
from rankwatch.monitor.worker_server import ServerError, WorkerServer

pytestmark = pytest.mark.ranks

RANK = """
import ctypes, sys, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _WorkerServer
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
server = _WorkerServer(sys.argv[1], -1)
dist.all_reduce(torch.ones(4))
print("ready", flush=True)
sys.stdin.readline()
print("holding", flush=True)
ctypes.PyDLL(None).sleep(60)
"""


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("s") / "rank_0.sock")
    process = subprocess.Popen([sys.executable, "-c", RANK, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process, path
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_rank_answers_also_while_it_holds_the_gil_and_is_silent_when_stopped(rank):
    process, path = rank
    server = WorkerServer(path)
    assert {"ping", "fr_trace_json", "wait_counter_values", "dump_traceback"} <= server.handlers()
    server.ping()
    assert (server.status() or {}).get("pg_status", {}) == {}  # None from a build without NCCL; one with NCCL has no group of it here
    assert b"gloo:all_reduce" in server.recorders()["fr_trace_json"]
    assert "in <module>" in server.traceback()
    assert all("active_count" in counter for counter in server.wait_counters().values())

    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "holding\n"
    server.ping()
    assert b"gloo:all_reduce" in server.recorders()["fr_trace_json"]
    with pytest.raises(ServerError) as caught:
        WorkerServer(path, deadline_s=0.5).traceback()
    assert caught.value.silent

    os.kill(process.pid, signal.SIGSTOP)
    while read_stat(process.pid).state != "T":
        time.sleep(0.01)
    began = time.monotonic()
    with pytest.raises(ServerError) as caught:
        WorkerServer(path, deadline_s=0.5).ping()
    assert caught.value.silent
    assert time.monotonic() - began < 5
    os.kill(process.pid, signal.SIGCONT)
    server.ping()


def test_a_missing_socket_is_no_silence(tmp_path):
    with pytest.raises(ServerError) as caught:
        WorkerServer(str(tmp_path / "none")).ping()
    assert not caught.value.silent
