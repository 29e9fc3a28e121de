"""What the agent tells from inside real ranks on gloo, read from outside as the launcher reads it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from one_rank import Node, go_on, printed, until

from rankwatch.wire import env, layout

pytestmark = pytest.mark.ranks

TELL = "import os, sys, json\ndef tell(**what): print(json.dumps({'pid': os.getpid(), **what}), flush=True)\n"
JOIN = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
HOLD = "sys.stdin.readline()\n"


def test_a_recompile_is_seen_while_it_runs_with_frame_phase_and_reason(tmp_path: Path) -> None:
    code = (
        TELL
        + "import torch\n"
        + """
def backend(gm, inputs):
    backend.calls += 1
    if backend.calls == 2:
        sys.stdin.readline()
    return gm.forward
backend.calls = 0
@torch.compile(backend=backend, dynamic=False)
def block(x):
    return torch.relu(x * 2).sum(0)
block(torch.ones(4, 32))
tell()
block(torch.ones(4, 48))
tell()
"""
        + HOLD
    )
    with Node(tmp_path) as node:
        process = node.start(code)
        printed(process)
        line = code[: code.index("def block")].count("\n")
        live = until(lambda: next((t for t in node.threads() if t["phase"] == "backend_compile" and t["reason"]), None), process)
        assert (live["compile_id"], live["kind"], live["frame"]) == ("0/1", "forward", f"block@script_0.py:{line}")
        assert live["reason"] == "0/0: tensor 'x' size mismatch at index 1. expected 32, actual 48"
        assert live["depth"] >= 3
        assert live["started_ns"] <= live["phase_ns"] <= time.monotonic_ns()
        go_on(process)
        printed(process)
        assert node.threads() == []
        totals = node.record("compile")
        assert (totals["frames"], totals["recompiles"], totals["failures"]) == (2, 1, 0)
        ends = node.events(kind="compile_end")
        assert [(end["compile_id"], end["ok"]) for end in ends] == [("0/0", True), ("0/1", True)]
        assert ends[1]["recompile_reason"] == live["reason"]


DDP = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()
def backend(gm, inputs):
    backend.calls += 1
    if backend.calls == 2:
        sys.stdin.readline()
    return gm.forward
backend.calls = 0
def train(cap, steps, **options):
    model = torch.compile(DDP(Net(), bucket_cap_mb=cap), backend=backend, dynamic=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepping = torch.compile(optimizer.step, backend="eager") if options else optimizer.step
    for n in range(steps):
        model(torch.ones(2, 512)).backward()
        stepping()
"""


def test_ddp_splits_and_steps(tmp_path: Path) -> None:
    """Split k of n live, the record afterwards, a bucket cap that DDPOptimizer refuses, and steps of eager and compiled optimizers."""
    code = (
        TELL
        + JOIN
        + DDP
        + """
train(1, 3)
tell()
torch._dynamo.reset()
try:
    train(0.5, 1)
except AssertionError as error:
    tell(error=str(error))
torch._dynamo.reset()
backend.calls = 10
train(1, 4, compiled_step=True)
tell()
"""
    )
    with Node(tmp_path) as node:
        process = node.start(code)
        live = until(lambda: next((t for t in node.threads() if t["split"] == 2), None), process)
        assert (live["splits"], live["phase"], live["kind"]) == (3, "backend_compile", "forward")
        assert live["frame"].startswith("forward@script_0.py:")
        go_on(process)
        printed(process)
        record = node.record("ddp")
        assert (record["status"], record["splits"], record["mode"]) == ("split", 3, "ddp_optimizer")
        assert [bucket["bytes"] for bucket in record["buckets"]] == [1050624, 1050624, 1050624]
        assert node.record("steps")["count"] == 3
        assert "First bucket should be smaller" in printed(process)["error"]
        assert (node.record("ddp")["status"], node.record("ddp")["failures"]) == ("init_failed", 1)
        printed(process)
        assert node.record("steps")["count"] == 3 + 3  # a new optimizer's first step still belongs to the round before
        assert {probe: state["errors"] for probe, state in node.record("probes").items()} == dict.fromkeys(
            ("collectives", "compile", "ddp", "steps", "cudagraph", "memory"), 0
        )
        _out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err


def test_groups_generations_and_stages_of_two_ranks(tmp_path: Path) -> None:
    code = (
        TELL
        + """
import datetime, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
for generation in range(2):
    prefix = dist.PrefixStore(str(generation), store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=77))
    sub = dist.new_group([1], timeout=datetime.timedelta(seconds=33))
    dist.all_reduce(torch.ones(1))
    tell()
    sys.stdin.readline()
    dist.destroy_process_group()
    tell()
    sys.stdin.readline()
"""
    )
    with Node(tmp_path, ranks=2) as node:
        processes = [node.start(code, rank=rank) for rank in range(2)]

        def both() -> None:
            for process in processes:
                printed(process)

        def both_go_on() -> None:
            for process in processes:
                go_on(process)

        for generation in range(2):
            both()
            for rank in range(2):
                assert node.record("lifecycle", rank)["stage"] == "joined"
                listed = node.record("groups", rank)
                assert listed["creating"] is None
                shown = [(g["desc"], g["backend"], g["ranks"], g["timeout_s"], g["generation"]) for g in listed["groups"]]
                sub = [("undefined", "gloo", "1", 33.0, generation)] if rank == 1 else []
                assert shown == [("default_pg", "gloo", "0-1", 77.0, generation), *sub]
            both_go_on()
            both()
            for rank in range(2):
                assert node.record("lifecycle", rank)["stage"] == "left"
                assert node.record("groups", rank)["groups"] == []
            both_go_on()
        for process in processes:
            _out, err = process.communicate(timeout=30)
            assert process.returncode == 0, err
        assert [node.record("owner", rank)["rank"] for rank in range(2)] == [0, 1]


def test_a_rank_that_cannot_join_says_that_it_joins(tmp_path: Path) -> None:
    with Node(tmp_path, ranks=2) as node:
        process = node.start(TELL + JOIN, rank=0)
        lifecycle = until(lambda: node.record("lifecycle").get("stage") == "joining" and node.record("lifecycle"), process)
        assert lifecycle["since_mono_ns"] <= time.monotonic_ns()
        assert node.record("owner")["state"] == "claimed"


def test_a_rank_whose_join_failed_says_so_and_why(tmp_path: Path) -> None:
    """Until it tries again; a join that then succeeds leaves nothing of it."""
    code = (
        TELL
        + """
import datetime, torch.distributed as dist
try:
    dist.init_process_group("gloo", init_method="env://", world_size=-1, rank=-1, store=dist.HashStore())
except Exception:
    tell()
sys.stdin.readline()
dist.init_process_group("gloo")
tell()
"""
        + HOLD
    )
    with Node(tmp_path) as node:
        process = node.start(code)
        printed(process)
        lifecycle = node.record("lifecycle")
        assert lifecycle["stage"] == "join_failed"
        exception = lifecycle["exception"]
        assert (exception["type"], exception["where"]) == ("AssertionError", "script_0.py:6:<module>")
        assert exception["message"].startswith("Cannot specify both init_method and store")
        assert "/rankwatch/agent/" not in exception["traceback"]
        go_on(process)
        printed(process)
        assert (node.record("lifecycle")["stage"], node.record("lifecycle")["exception"]) == ("joined", None)
        assert node.record("probes")["collectives"]["errors"] == 0


def test_a_stderr_that_nobody_reads_costs_the_server_and_blocks_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 512)
    except BlockingIOError:
        os.set_blocking(writer, True)
    (tmp_path / "full.py").write_text(TELL + JOIN + "dist.all_reduce(torch.ones(3))\ntell()\n")
    with Node(tmp_path) as node:
        command = [sys.executable, str(tmp_path / "full.py")]
        done = subprocess.run(command, env=node.environ(), stdout=subprocess.PIPE, stderr=writer, timeout=60)
        assert done.returncode == 0
        assert node.record("probes")["collectives"]["detail"].startswith("no worker server: it writes a line to stderr when it starts")
        assert "pg_status" in node.record("heartbeat")
        assert node.record("owner")["socket"] == ""
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(("end", "status"), [("", 0), ("json.loads('{')", 1)], ids=["end of the script", "exception"])
def test_clients_of_the_server_hold_no_end_up(tmp_path: Path, end: str, status: int) -> None:
    """One is silent, one is in the middle of its request, one reads no answer, some wait for the GIL."""
    code = TELL + JOIN + "dist.all_reduce(torch.ones(3))\ntell()\nsys.stdin.readline()\n" + end
    with Node(tmp_path) as node:
        process = node.start(code)
        printed(process)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(8)]
        for n, client in enumerate(clients):
            client.connect(str(tmp_path / env.socket_name(0)))
            handler = b"fr_trace_json" if n == 2 else b"dump_traceback"
            client.sendall((b"", b"POST /handler/pi")[n] if n < 2 else b"POST /handler/%s HTTP/1.1\r\nContent-Length: 0\r\n\r\n" % handler)
        go_on(process)
        _out, err = process.communicate(timeout=20)
        assert process.returncode == status, err
        assert "terminate called" not in err
        assert "Server shutting down" not in err
        assert not (tmp_path / env.socket_name(0)).exists()
        for client in clients:
            client.close()


def test_a_rank_that_holds_the_gil_answers_and_its_heart_does_not_beat(tmp_path: Path) -> None:
    code = TELL + JOIN + "dist.all_reduce(torch.ones(3))\ntell()\nsys.stdin.readline()\nimport ctypes\nctypes.PyDLL(None).sleep(60)\n"

    def beat() -> int:
        found = layout.read_record(node.slot(), layout.RECORDS["heartbeat"])
        return found[1] if found else 0

    with Node(tmp_path) as node:
        process = node.start(code)
        printed(process)
        until(lambda: node.record("heartbeat").get("pg_status"), process)
        first = beat()
        until(lambda: beat() > first, process)
        go_on(process)
        until(lambda: time.monotonic_ns() - beat() > 2e9, process)
        entries = json.loads(node.ask("fr_trace_json"))["entries"]
        assert [entry["profiling_name"] for entry in entries] == ["gloo:all_reduce"]


def test_the_exception_that_ends_a_rank_is_kept_and_printed_as_ever(tmp_path: Path) -> None:
    """Also when the script has replaced sys.excepthook after joining."""
    code = TELL + JOIN + "sys.excepthook = lambda *a: print('mine', a[0].__name__, file=sys.stderr)\ndef load():\n    json.loads('{')\nload()\n"
    with Node(tmp_path) as node:
        status, _out, err = node.run(code)
        assert status == 1
        assert "mine JSONDecodeError" in err
        lifecycle = node.record("lifecycle")
    assert lifecycle["stage"] == "exiting"
    assert (lifecycle["exception"]["type"], lifecycle["exception"]["where"]) == ("json.decoder.JSONDecodeError", "script_0.py:7:load")
    assert lifecycle["exception"]["traceback"].rstrip().splitlines()[-1].startswith("json.decoder.JSONDecodeError")


def test_a_planned_end_keeps_its_exit_code_and_no_exception(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        status, out, err = node.run("import torch, sys, atexit\natexit.register(print, 'last words')\nsys.exit(3)\n")
        assert (status, out, err) == (3, "last words\n", "")
        assert (node.record("lifecycle")["stage"], node.record("lifecycle")["exception"]) == ("exiting", None)


def test_signals_and_hooks_are_as_without_us(tmp_path: Path) -> None:
    """SIGPIPE's disposition in the kernel, a thread list without strangers, and wrapped functions that look like torch's."""
    code = (
        TELL
        + """
import signal, threading, inspect, pickle
def dispositions():
    lines = [line.split() for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
    return {name: int(mask, 16) & 0x7fffffff for name, mask in lines}  # 32 and 33 are the C library's own, for threads
import torch, torch.distributed as dist
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
before = dispositions()
dist.init_process_group("gloo")
tell(
    before=before, after=dispositions(), sigpipe=signal.getsignal(signal.SIGPIPE) is signal.SIG_DFL, threads=threading.active_count(),
    signature=str(inspect.signature(dist.init_process_group))[:20], name=dist.init_process_group.__qualname__,
    pickled=pickle.loads(pickle.dumps(dist.init_process_group)) is dist.init_process_group,
    path=[p for p in sys.path if p.endswith("agent/site")],
)
"""
        + HOLD
    )

    def answers() -> bytes:
        try:
            return node.ask("fr_trace_json")
        except BlockingIOError:  # those that hung up still stand in the queue
            return b""

    with Node(tmp_path) as node:
        process = node.start(code)
        told = printed(process)
        assert told["after"] == told["before"]
        assert (told["sigpipe"], told["threads"], told["pickled"], told["path"]) == (True, 1, True, [])
        assert (told["name"], told["signature"]) == ("init_process_group", "(backend: str | None")
        for _ in range(20):  # a reader that hangs up in the middle of an answer must not end a rank that dies of SIGPIPE
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / env.socket_name(0)))
                client.sendall(b"POST /handler/fr_trace_json HTTP/1.1\r\nContent-Length: 0\r\n\r\n")
        assert until(answers, process)
        _out, err = process.communicate("\n", timeout=30)
        assert process.returncode == 0, err


def test_a_storm_of_ctrl_c_comes_out_as_keyboard_interrupt_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Wherever the signal falls, also inside a hook; the probes count no error and no compile is left open."""
    code = (
        TELL
        + """
import signal, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
def interrupted(error):
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
def compile_once():
    torch._dynamo.reset()
    try:
        torch.compile(lambda x: x * 2 + 1, backend="eager")(torch.ones(2))
    except Exception as error:  # an earlier signal may have left one of torch's own modes on (a fake tensor mode, seen on 2.13)
        if interrupted(error) or "FakeTensor" not in str(error):
            raise
compile_once()
caught = 0
while caught < 12:
    try:
        tell(caught=caught)
        while True:
            compile_once()
    except BaseException as error:
        if not interrupted(error):
            raise
        caught += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
compile_once()
tell(caught=caught)
"""
        + HOLD
    )
    with Node(tmp_path) as node:
        process = node.start(code)
        for expected in range(12):
            assert printed(process)["caught"] == expected
            process.send_signal(signal.SIGINT)
        assert printed(process)["caught"] == 12
        assert node.threads() == []
        assert node.record("probes")["compile"]["errors"] == 0
        _out, err = process.communicate("\n", timeout=30)
        assert process.returncode == 0, err


@pytest.mark.slow_ranks
def test_probes_that_are_switched_off_stay_off(tmp_path: Path) -> None:
    code = TELL + JOIN + "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))\n"
    with Node(tmp_path) as node:
        status, _out, err = node.run(code, **{env.NO_PROBES: "compile,collectives"})
        assert status == 0, err
        assert "Server listening" not in err
        probes = node.record("probes")
        assert (probes["compile"]["status"], probes["collectives"]["status"], probes["steps"]["status"]) == ("off", "off", "armed")
        assert node.record("owner")["state"] == "claimed"
        assert (node.record("compile"), node.record("groups"), node.record("heartbeat")) == ({}, {}, {})
        assert node.record("lifecycle")["stage"] == "exiting"


def test_a_socket_path_that_is_too_long_costs_the_socket_only(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    with Node(folder) as node:
        status, _out, err = node.run(JOIN)
        assert status == 0, err
        detail = node.record("probes")["collectives"]["detail"]
        assert detail.startswith("no worker server: the socket path has ")
        assert "takes 107" in detail
        assert node.record("owner")["socket"] == ""


def test_a_slot_of_nobody_leaves_the_rank_alone(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        os.unlink(tmp_path / env.slot_name(0))
        status, out, err = node.run(JOIN + "import sys; print([m for m in sys.modules if m.startswith('rankwatch.agent.probes')])")
        assert (status, out) == (0, "[]\n"), err
        assert "Server listening" not in err
        (tmp_path / env.slot_name(0)).touch()
