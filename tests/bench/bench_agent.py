"""What the agent costs inside a rank. Run by hand: `python tests/bench/bench_agent.py`; prints one table, about two minutes on a quiet machine.

Every comparison is paired: with and without in turn, so that a busy machine hurts both alike; the median of the ratios is what counts.
Starts are measured in CPU time of the process, which a busy machine hurts less than wall time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from agent_fakes import FakeRank
from one_rank import Node

from rankwatch.agent.compiling.finished import Compiles

EVENTS = 100_000
ROUNDS = 500
STARTS = 40
TORCH_STARTS = 6
ALL_REDUCE_PAIRS = 8
ALL_REDUCE = """
import json, os, sys, time
def threads():
    return int(next(line for line in open("/proc/self/status") if line.startswith("Threads")).split()[1])
import torch, torch.distributed as dist
torch.set_num_threads(1)
before = threads()
dist.init_process_group("gloo")
joined = threads()
x = torch.ones(1000)
for _ in range(500):
    dist.all_reduce(x)
wall, cpu = [], []
for _ in range(10):
    started, used = time.perf_counter(), time.process_time()
    for _ in range(500):
        dist.all_reduce(x)
    wall.append((time.perf_counter() - started) / 500)
    cpu.append((time.process_time() - used) / 500)
print(json.dumps({"wall": 1e6 * min(wall), "cpu": 1e6 * min(cpu), "before": before, "joined": joined}))
dist.destroy_process_group()
"""

rows: list[tuple[str, str, str]] = []


def row(what: str, figure: str, bar: str = "") -> None:
    rows.append((what, figure, bar))
    print(f"... {what}: {figure}", file=sys.stderr, flush=True)


def per_event(folder: Path) -> None:
    """The hook of a compile's regions, fed without torch."""
    fake = FakeRank(folder)
    utils = SimpleNamespace(guard_failures={}, config=SimpleNamespace(), get_chromium_event_logger=lambda: SimpleNamespace(get_stack=list))
    stub: dict[str, Callable[[object], None]] = {"__name__": "torch._utils_internal"}  # type: ignore[dict-item]
    exec("def record_chromium_event_internal(event):\n    return None\n", stub)
    hook = Compiles(fake.rank, fake.rank.probes["compile"], utils).live.wrap_event(stub["record_chromium_event_internal"])
    frame = ({"name": "dynamo", "ph": "B", "args": {"compile_id": "0/0"}}, {"name": "dynamo", "ph": "E", "args": {}})
    region = ({"name": "GraphLowering.codegen", "ph": "B", "args": {"compile_id": "0/0"}}, {"name": "GraphLowering.codegen", "ph": "E", "args": {}})

    def compile_frame(depth: int, code: object) -> float:
        """`_compile` with `depth` callers between it and the hook, as in torch (4)."""
        if depth:
            return compile_frame(depth - 1, code)
        started = time.perf_counter()
        hook(frame[0])
        spent = time.perf_counter() - started
        hook(frame[1])
        return spent

    def _compile(code: object) -> float:
        return compile_frame(4, code)

    starts = sorted(_compile(per_event.__code__) for _ in range(2_000))
    row("compile: start of a frame, with the frame walk", f"{1e6 * starts[len(starts) // 2]:.1f} us", "<= 30 us")
    hook(frame[0])
    rounds = []
    for _ in range(ROUNDS):  # short ones: some fall between what else the machine does
        started = time.perf_counter()
        for _ in range(EVENTS // ROUNDS // 2):
            hook(region[0])
            hook(region[1])
        rounds.append((time.perf_counter() - started) / (EVENTS // ROUNDS))
    rounds.sort()
    row("compile: a phase event, quiet (median)", f"{1e6 * rounds[0]:.2f} us ({1e6 * rounds[ROUNDS // 2]:.2f} us)", "<= 2 us")


def start_up(node: Node, code: str, changes: dict[str, dict[str, str]], repeats: int) -> dict[str, list[float]]:
    """CPU seconds of `python -c code` under each change of the environment, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in changes}
    for name in changes:
        subprocess.run([sys.executable, "-c", code], env=node.environ(**changes[name]), check=True)
    for _ in range(repeats):
        for name, change in changes.items():
            pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], node.environ(**change))
            _pid, status, usage = os.wait4(pid, 0)
            assert status == 0
            seconds[name].append(usage.ru_utime + usage.ru_stime)
    return seconds


def compared(without: list[float], with_us: list[float]) -> str:
    added = statistics.median(b - a for a, b in zip(without, with_us, strict=True))
    ratio = statistics.median(b / a for a, b in zip(without, with_us, strict=True))
    return f"{1000 * added:+.1f} ms (x {ratio:.3f} of {1000 * statistics.median(without):.0f} ms)"


def starts(node: Node) -> None:
    changes = {"none": {"PYTHONPATH": ""}, "inert": {"RANKWATCH_CLAIMED": "1"}, "rank": {}}
    seconds = start_up(node, "pass", changes, STARTS)
    row("interpreter start, inert child", compared(seconds["none"], seconds["inert"]), "<= 5 ms")
    row("interpreter start, rank before torch", compared(seconds["none"], seconds["rank"]), "<= 5 ms")
    del changes["inert"]
    seconds = start_up(node, "import torch", changes, TORCH_STARTS)
    row("import torch, armed rank", compared(seconds["none"], seconds["rank"]))


def all_reduce(node: Node) -> None:
    runs: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for _ in range(ALL_REDUCE_PAIRS):
        for name, change in (("without", {"PYTHONPATH": ""}), ("with", {})):
            code, out, err = node.run(ALL_REDUCE, **change)
            assert code == 0, err
            runs[name].append(json.loads(out))
    for clock in ("wall", "cpu"):
        ratios = sorted(b[clock] / a[clock] for a, b in zip(runs["without"], runs["with"], strict=True))
        typical = statistics.median(run[clock] for run in runs["without"])
        figure = f"x {statistics.median(ratios):.3f} of {typical:.1f} us (pairs: {ratios[0]:.3f}-{ratios[-1]:.3f})"
        row(f"gloo all_reduce of 1000 floats, world of one, {clock} time", figure, "x 1.00")
    added = [runs["with"][0]["joined"] - runs["without"][0]["joined"], runs["with"][0]["before"] - runs["without"][0]["before"]]
    row("threads added by joining (worker server, heartbeat)", f"{added[0]:.0f}")
    row("threads added before joining", f"{added[1]:.0f}", "0")


def threads_under_load(node: Node) -> None:
    process = node.start(ALL_REDUCE + "print('ready', flush=True)\nsys.stdin.readline()\n")
    assert process.stdout is not None
    joined = json.loads(process.stdout.readline())["joined"]
    process.stdout.readline()
    started = time.perf_counter()
    for _ in range(200):
        node.ask("ping")
    row("worker server: a ping", f"{1e6 * (time.perf_counter() - started) / 200:.0f} us")
    now = int(next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("Threads")).split()[1])
    row("threads added by 200 requests", f"{now - joined}")
    process.communicate("\n", timeout=30)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for number, bench in enumerate((starts, all_reduce, threads_under_load)):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            with Node(folder) as node:
                bench(node)
        per_event(Path(scratch))
    width = max(len(what) for what, _figure, _bar in rows)
    for what, figure, bar in rows:
        print(f"{what.ljust(width)}  {figure.ljust(46)}  {bar}")


if __name__ == "__main__":
    main()
