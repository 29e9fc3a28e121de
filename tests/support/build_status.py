"""Realistic pictures of a job for tests of everything that is shown. Times are fixed: nothing here reads a clock."""

from __future__ import annotations

import dataclasses
from typing import Any

from rankwatch.model import (
    Change,
    Collective,
    CompileActivity,
    Crash,
    Frame,
    Group,
    Incident,
    JobInfo,
    JobSnapshot,
    MonitorHealth,
    NodeReport,
    Process,
    RankState,
    Stack,
    StackGroup,
    Status,
    Thread,
    Verdict,
    WaitedOn,
)

NOW = 5000.0
WALL = 1796008364.0  # 2026-11-30 03:12:44Z
PROBES: dict[str, dict[str, Any]] = {name: {"status": "armed", "detail": "", "errors": 0} for name in ("collectives", "compile", "cudagraph", "ddp", "steps")}

COMPILE: dict[str, Any] = {
    "frames": 3,
    "library": 4,
    "backward": 3,
    "runtime": 1,
    "recompiles": 1,
    "failures": 0,
    "graphs": 3,
    "graph_breaks": 2,
    "last_break": "call to print",
    "limit_hits": 0,
    "limited": [],
    "seconds": {"dynamo": 4.1, "aot": 9.0, "inductor": 40.5, "triton": 7.1, "autotune": 0.5},
    "cache": {"fx": {"hit": 2, "miss": 1}, "aot": {"miss": 3}},
    "by_frame": {"forward@model.py:31": [2, 55.0, "9f2c"]},
    "last": {
        "compile_id": "0/1",
        "frame": "forward@model.py:31",
        "kind": "forward",
        "seconds": 21.0,
        "ok": True,
        "recompile_reason": "size of x changed",
        "wall_ns": 1,
    },
    "disabled": False,
}
DDP: dict[str, Any] = {
    "status": "split",
    "compile_id": "0/0",
    "frame": "forward@model.py:31",
    "mode": "ddp_optimizer",
    "splits": 4,
    "bytes": 6300000,
    "fingerprint": "0123456789ab",
    "sizes": [1050000, 2100000, 2100000, 1050000],
    "error": "",
    "calls": 1,
    "failures": 0,
    "not_applied": 0,
}
CUDAGRAPH: dict[str, Any] = {
    "warmups": 2,
    "recordings": 4,
    "rerecords": 1,
    "eager": 0,
    "skips": 1,
    "captures": 0,
    "pool_bytes": 268435456,
    "last": None,
    "skip_reasons": {},
}

LOAD = (
    Frame("load_batch", "/home/alice/proj/train.py", 31),
    Frame("train_step", "/home/alice/proj/train.py", 58),
    Frame("main", "/home/alice/proj/train.py", 74),
    Frame("<module>", "/home/alice/proj/train.py", 90),
)
WAIT = (
    Frame("_engine_run_backward", "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", 841),
    Frame("backward", "/venv/lib/python3.11/site-packages/torch/autograd/__init__.py", 354),
    Frame("backward", "/venv/lib/python3.11/site-packages/torch/_tensor.py", 625),
    Frame("train_step", "/home/alice/proj/train.py", 61),
    Frame("main", "/home/alice/proj/train.py", 74),
    Frame("<module>", "/home/alice/proj/train.py", 90),
)
INDUCTOR = (
    Frame("codegen", "/venv/lib/python3.11/site-packages/torch/_inductor/scheduler.py", 5120),
    Frame("compile_to_module", "/venv/lib/python3.11/site-packages/torch/_inductor/graph.py", 2401),
    Frame("fx_codegen_and_compile", "/venv/lib/python3.11/site-packages/torch/_inductor/compile_fx.py", 1577),
    Frame("_compile", "/venv/lib/python3.11/site-packages/torch/_dynamo/convert_frame.py", 1288),
    Frame("train_step", "/home/alice/proj/train.py", 59),
    Frame("main", "/home/alice/proj/train.py", 74),
    Frame("<module>", "/home/alice/proj/train.py", 90),
)


def stack(pid: int, frames: tuple[Frame, ...], at: float = NOW - 1) -> Stack:
    """A stack as py-spy gives it, with its text."""
    lines = [f"Thread {pid} (idle): MainThread", *(f"    {frame.name} ({frame.file}:{frame.line})" for frame in frames)]
    return Stack(pid=pid, at=at, threads=(Thread("MainThread", pid, frames),), text=f"Process {pid}: python3 -u train.py\n" + "\n".join(lines) + "\n")


def job(**changes: Any) -> JobInfo:
    """Eight ranks on node05."""
    base = JobInfo(
        job_id="48213",
        run_dir="/scratch/alice/rankwatch-runs/20261130T030300Z-48213",
        command=("rankwatch", "torchrun", "--nproc-per-node", "8", "train.py", "--lr", "3e-4", "--hub-token", "hf_abcdef0123456789"),
        node="node05",
        world_size=8,
        nnodes=1,
        attempt=0,
        versions={"rankwatch": "0.1.0", "python": "3.11.2", "torch": "2.13.0", "cuda": "", "nccl": ""},
        set_environment={"TORCH_FR_BUFFER_SIZE": "2000", "MY_API_TOKEN": "hunter2"},
        started_wall_at=WALL - 584,
        status_url="http://127.0.0.1:27435",
        capabilities={"compile": "ok", "ddp": "ok", "collectives": "ok", "stacks": "ok"},
    )
    return dataclasses.replace(base, **changes)


def rank_state(rank: int, **changes: Any) -> RankState:
    """A rank that trains in step with the others, every field filled."""
    world = changes.pop("world", 8)
    pid = 21106 + rank
    base = RankState(
        rank=rank,
        local_rank=rank,
        node="node05",
        agent="claimed",
        process=Process(
            pid=pid, alive=True, state="S", cpu_s=312.5 + rank, tree_cpu_s=340.0, io_bytes=123456, rss_bytes=2_400_000_000, started_at=NOW - 580, name="python3"
        ),
        stage="joined",
        stage_since=NOW - 560,
        heartbeat_at=NOW - 0.4,
        ping_ok=True,
        groups=(
            Group("0", "default_pg", "gloo", tuple(range(world)), 600.0, 0, WALL - 560),
            Group("1", "tp", "gloo", (rank // 2 * 2, rank // 2 * 2 + 1), 600.0, 0, WALL - 559),
        ),
        collectives=(Collective("0", 0, 25, "all_reduce", ((1024, 1024),), ((1024, 1024),), ("Float",), WALL - 70, 600.0, done=True),),
        collectives_at=NOW - 0.5,
        enqueued={"0": 25, "1": 12},
        completed={"0": 25, "1": 12},
        compile_totals=COMPILE,
        ddp=DDP,
        cudagraph=CUDAGRAPH,
        probes=PROBES,
        steps=24,
        last_step_at=NOW - 61,
        step_s=0.42,
    )
    return dataclasses.replace(base, **changes)


def waiting_rank(rank: int, seq: int = 26, **changes: Any) -> RankState:
    """A rank that has been in all_reduce for 60 s."""
    entry = Collective("0", 0, seq, "all_reduce", ((1024, 1024),), ((1024, 1024),), ("Float",), WALL - 60, 600.0, done=False)
    fields: dict[str, Any] = {
        "collectives": (entry,),
        "enqueued": {"0": seq, "1": 12},
        "completed": {"0": seq - 1, "1": 12},
        "stack": stack(21106 + rank, WAIT),
    }
    return rank_state(rank, **(fields | changes))


def snapshot(ranks: tuple[RankState, ...], **changes: Any) -> JobSnapshot:
    """One node's report of these ranks at NOW."""
    base = JobSnapshot(now=NOW, wall_at=WALL, world_size=len(ranks), attempt=0, nodes=(NodeReport("node05", ranks),), gap_s=0.5, started_at=NOW - 584)
    return dataclasses.replace(base, **changes)


def stuck_verdict(**changes: Any) -> Verdict:
    """Rank 1 sits in load_batch, seven others wait in all_reduce."""
    base = Verdict(
        key="absent:1",
        verdict="stuck",
        cause="not_entered",
        domain="user_code",
        culprit_ranks=(1,),
        waiting_ranks=(0, 2, 3, 4, 5, 6, 7),
        since=NOW - 60,
        summary="rank 1 has not entered all_reduce seq 26 of default_pg: it has been in load_batch (train.py:31) for 60 s; "
        "ranks 0,2-7 wait; the watchdog ends the job in 540 s",
        at="train.py:31:load_batch",
        group=WaitedOn("0", "default_pg", tuple(range(8)), "all_reduce", 26, ((1024, 1024),), ("Float",)),
        timeout_s=600.0,
        timeout_left_s=540.0,
        confidence="certain",
        advice=(
            "Look at load_batch in train.py:31 on rank 1: what does it wait for?",
            "If the wait is legitimate, raise the timeout: init_process_group(timeout=timedelta(minutes=30)).",
        ),
        evidence=(
            "default_pg: ranks 0,2-7 have enqueued seq 26 (all_reduce), rank 1 stopped at seq 25",
            "rank 1: two stacks 2 s apart are equal, 0.0 s of processor time between them",
        ),
        missing_evidence=("no native stack of rank 1: py-spy --native timed out after 2 s",),
    )
    return dataclasses.replace(base, **changes)


def stuck_incident(**changes: Any) -> Incident:
    """The incident of `stuck_verdict`, first slow, then stuck, with all stacks."""
    stacks = {rank: stack(21106 + rank, LOAD if rank == 1 else WAIT) for rank in range(8)}
    base = Incident(
        id="20261130T031149Z-1",
        verdict=stuck_verdict(),
        opened_at=NOW - 55,
        opened_wall_at=WALL - 55,
        updated_wall_at=WALL,
        history=(Change(WALL - 55, "slow", "not_entered", (1,)), Change(WALL, "stuck", "not_entered", (1,))),
        since_wall_at=WALL - 60,
        stacks=stacks,
        stack_groups=(StackGroup((1,), LOAD, "culprit"), StackGroup((0, 2, 3, 4, 5, 6, 7), WAIT, "waiting")),
        lost_rank_s=420.0,
        hosts=dict.fromkeys(range(8), "node05"),
        pids={rank: 21106 + rank for rank in range(8)},
        recorder_files=("fr/rank_0.json", "fr/rank_1.json"),
    )
    return dataclasses.replace(base, **changes)


def stuck_status(**changes: Any) -> Status:
    """The whole picture of `stuck_incident`."""
    ranks = tuple(rank_state(1, stack=stack(21107, LOAD)) if rank == 1 else waiting_rank(rank) for rank in range(8))
    base = Status(
        job=job(),
        snapshot=snapshot(ranks),
        verdicts=(stuck_verdict(),),
        open_incidents=(stuck_incident(),),
        health=MonitorHealth(polls=1168, last_poll_s=0.0021, cpu_s=3.2, stack_dumps={"ok": 9, "failed": 1}, last_stack_dump_s=0.31),
        state="stuck",
    )
    return dataclasses.replace(base, **changes)


def compiling_activity(**changes: Any) -> CompileActivity:
    """Rank 3 recompiles block.forward in inductor."""
    base = CompileActivity(
        compile_id="3/1",
        kind="forward",
        frame="forward@model.py:31",
        phase="inductor",
        raw_phase="fx_codegen_and_compile",
        started_at=NOW - 41,
        phase_since=NOW - 12,
        recompile_reason="tensor 'x' size mismatch at index 0. expected 32, actual 17",
        split=2,
        splits=4,
        detail="",
    )
    return dataclasses.replace(base, **changes)


def compiling_incident(**changes: Any) -> Incident:
    """Rank 3 recompiles, the others wait: slow, no page."""
    verdict = Verdict(
        key="absent:3",
        verdict="slow",
        cause="compiling",
        domain="user_code",
        culprit_ranks=(3,),
        waiting_ranks=(0, 1, 2, 4, 5, 6, 7),
        since=NOW - 38,
        summary="rank 3 recompiles forward@model.py:31 (inductor, 41 s); ranks 0-2,4-7 wait in all_reduce seq 26 of default_pg; 562 s are left",
        at="model.py:31:forward",
        group=WaitedOn("0", "default_pg", tuple(range(8)), "all_reduce", 26, ((1024, 1024),), ("Float",)),
        timeout_s=600.0,
        timeout_left_s=562.0,
        confidence="certain",
        advice=("Nothing to do now: the compile makes progress.", "Mark the batch dimension dynamic: torch._dynamo.mark_dynamic(x, 0)."),
        evidence=("rank 3: compile 3/1 of forward@model.py:31 is in inductor since 12 s",),
    )
    base = Incident(
        id="20261130T031211Z-1",
        verdict=verdict,
        opened_at=NOW - 33,
        opened_wall_at=WALL - 33,
        updated_wall_at=WALL,
        history=(Change(WALL - 33, "slow", "compiling", (3,)),),
        since_wall_at=WALL - 38,
        stacks={3: stack(21109, INDUCTOR), 0: stack(21106, WAIT)},
        stack_groups=(StackGroup((3,), INDUCTOR, "culprit"), StackGroup((0,), WAIT, "waiting")),
        compiling={3: compiling_activity()},
        lost_rank_s=266.0,
        hosts={3: "node05"},
        pids={3: 21109},
    )
    return dataclasses.replace(base, **changes)


def compiling_status(**changes: Any) -> Status:
    """The whole picture of `compiling_incident`."""
    ranks = tuple(rank_state(3, compiling=(compiling_activity(),), stack=stack(21109, INDUCTOR)) if rank == 3 else waiting_rank(rank) for rank in range(8))
    base = Status(job=job(), snapshot=snapshot(ranks), verdicts=(compiling_incident().verdict,), open_incidents=(compiling_incident(),), state="running")
    return dataclasses.replace(base, **changes)


def healthy_status(**changes: Any) -> Status:
    """Eight ranks that step."""
    ranks = tuple(rank_state(rank, last_step_at=NOW - 0.2, step_s=0.40 + rank / 100) for rank in range(8))
    return dataclasses.replace(Status(job=job(), snapshot=snapshot(ranks), state="running"), **changes)


def crashed_status(**changes: Any) -> Status:
    """Rank 2 raised, torchrun has ended the others."""
    crash = Crash(
        type="ValueError",
        message="bad shard 17",
        where="train.py:31:load_batch",
        traceback="Traceback (most recent call last):\n"
        '  File "/home/alice/proj/train.py", line 31, in load_batch\n    raise ValueError("bad shard 17")\nValueError: bad shard 17\n',
        source="the rank's own exit",
        at_wall=WALL - 2,
    )
    ranks = []
    for rank in range(4):
        process = Process(pid=21106 + rank, alive=False, exit_code=1 if rank == 2 else -15, exited_at=NOW - (2 if rank == 2 else 1))
        ranks.append(rank_state(rank, world=4, process=process, stage="exiting", crash=crash if rank == 2 else None))
    verdict = Verdict(
        key="exit:2",
        verdict="failed",
        cause="crashed",
        domain="user_code",
        culprit_ranks=(2,),
        waiting_ranks=(0, 1, 3),
        since=NOW - 2,
        summary="rank 2 crashed: ValueError: bad shard 17 (train.py:31:load_batch); ranks 0-1,3 were waiting",
        at="train.py:31:load_batch",
        advice=("Read the traceback of rank 2.",),
        evidence=("rank 2: exit code 1",),
    )
    incident = Incident(
        id="20261130T031242Z-1",
        verdict=verdict,
        opened_at=NOW - 2,
        opened_wall_at=WALL - 2,
        updated_wall_at=WALL - 1,
        history=(Change(WALL - 2, "failed", "crashed", (2,)),),
        since_wall_at=WALL - 2,
        hosts={2: "node05"},
        pids={2: 21108},
        final=True,
    )
    base = Status(job=job(world_size=4), snapshot=snapshot(tuple(ranks), final=True), open_incidents=(incident,), state="failed", exit_code=1)
    return dataclasses.replace(base, **changes)
