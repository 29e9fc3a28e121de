"""What the compile probe costs a job that compiles many frames. Run by hand: `python tests/bench/bench_compile.py [--frames 200] [--runs 5]`.

Runs the same job with the compile probe on and off (`--no-probe compile`; all else of the agent stays) in turn, and prints a table with the
ratio. Every frame is one more function with a graph of its own, so that the hooks work as often as in a real job and the compiler as little
as possible for it: the least favourable case. Two figures, which say different things:

  share    time inside the hooks, and inside what heartbeats do for them, over the time of the compiles, all taken in one run: what a busy
           machine hurts least
  paired   time of the compiles with the probe over that without, of pairs of runs: what includes everything, and the machine's noise

Times are CPU seconds, of the thread inside hooks and heartbeats and of the process over the compiles; wall seconds are printed beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from one_rank import Node

from rankwatch.wire import env

JOB = """
import json, os, sys, time
import torch
import torch._dynamo.utils as utils
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")  # a rank as it is in a job: with the heartbeat, which writes what may wait
frames, backend = int(os.environ["FRAMES"]), os.environ["BACKEND"]
inside, calls = {"events": 0.0, "finished": 0.0, "beats": 0.0}, [0]

def timed(function, name):
    def call(*args):
        started = time.thread_time()
        try:
            return function(*args)
        finally:
            inside[name] += time.thread_time() - started
            calls[0] += name != "beats"
    return call

if os.environ["TIME_HOOKS"] == "1":  # they end in torch's own functions of these names, which are empty
    utils.record_chromium_event_internal = timed(utils.record_chromium_event_internal, "events")
    utils.log_compilation_event = timed(utils.log_compilation_event, "finished")
    on_beat = sys.modules["rankwatch.agent.rank"]._rank.on_beat
    on_beat[:] = [timed(look, "beats") for look in on_beat]  # where the totals of a compile are written when they may wait

source = "def f{n}(x):\\n    y = x * {n} + 1.5\\n    return torch.relu(y).sum() - y.mean()\\n"
with open(os.path.join(os.environ["FOLDER"], "many_frames.py"), "w") as file:  # a file that exists: torch wraps the code of others in a frame of its own
    file.write("import torch\\n" + "".join(source.format(n=n) for n in range(frames + 2)))
sys.path.insert(0, os.environ["FOLDER"])
import many_frames
functions = [torch.compile(getattr(many_frames, f"f{n}"), backend=backend) for n in range(frames + 2)]
x = torch.ones(8)
for function in functions[:2]:
    function(x)  # what is imported at the first compile is not the compiler's time
inside.update(dict.fromkeys(inside, 0.0))
calls[0] = 0
wall, cpu = time.perf_counter(), time.process_time()
for function in functions[2:]:
    function(x)
print(json.dumps({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "calls": calls[0], **inside}), flush=True)
dist.destroy_process_group()
"""


def run(backend: str, frames: int, probe: bool, time_hooks: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, Node(Path(folder)) as node:
        more: dict[str, Any] = {
            "FRAMES": str(frames),
            "BACKEND": backend,
            "TIME_HOOKS": str(int(time_hooks)),
            "FOLDER": folder,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache",
        }
        more.update({} if probe else {env.NO_PROBES: "compile"})
        code, out, err = node.run(JOB, timeout_s=3600, **more)
        assert code == 0, err
        compiled = node.record("compile").get("frames", 0)
        assert compiled >= frames if probe else compiled == 0, f"{compiled} frames were seen"
        found: dict[str, float] = json.loads(out)
        return found


def inside(found: dict[str, float]) -> float:
    """Seconds inside the hooks and the heartbeats' looks."""
    return found["events"] + found["finished"] + found["beats"]


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}}, {len(values)} runs)"


def compare(backend: str, frames: int, runs: int) -> None:
    on, off = [], []
    for _ in range(runs):
        off.append(run(backend, frames, probe=False, time_hooks=False))
        on.append(run(backend, frames, probe=True, time_hooks=False))
        print(f"... {backend}: {off[-1]['cpu']:.2f} s without, {on[-1]['cpu']:.2f} s with", file=sys.stderr, flush=True)
    timed, empty = [], []
    for _ in range(max(1, runs // 2)):
        timed.append(run(backend, frames, probe=True, time_hooks=True))
        empty.append(run(backend, frames, probe=False, time_hooks=True))  # torch's own empty functions: what reading the clock costs
    print(f"\n{backend}, {frames} frames")
    print(f"  compiles, CPU s without      {spread([r['cpu'] for r in off], '.2f')}; wall {spread([r['wall'] for r in off], '.2f')}")
    print(f"  compiles, CPU s with         {spread([r['cpu'] for r in on], '.2f')}; wall {spread([r['wall'] for r in on], '.2f')}")
    print(f"  paired ratio, CPU            {spread([b['cpu'] / a['cpu'] for a, b in zip(off, on, strict=True)], '.4f')}")
    print(f"  calls of the hooks a frame   {timed[0]['calls'] / frames:.0f}")
    print(f"  starts and ends, us a frame  {spread([1e6 * r['events'] / frames for r in timed], '.0f')}")
    print(f"  finished, us a frame         {spread([1e6 * r['finished'] / frames for r in timed], '.0f')}")
    print(f"  heartbeats, us a frame       {spread([1e6 * r['beats'] / frames for r in timed], '.0f')}")
    print(f"  without probe, us a frame    {spread([1e6 * inside(r) / frames for r in empty], '.0f')}")
    share = [100 * (inside(a) - inside(b)) / a["cpu"] for a, b in zip(timed, empty, strict=True)]
    print(f"  share of the compiles        {spread(share, '.2f')} %   (bar: 1 %; without what is there without the probe)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--backend", action="append", choices=["eager", "aot_eager", "inductor"], help="default: aot_eager and inductor")
    options = parser.parse_args()
    for backend in options.backend or ["aot_eager", "inductor"]:
        compare(backend, options.frames, options.runs)


if __name__ == "__main__":
    main()
