"""What `rankwatch torchrun` costs beside torchrun: start-up, exit, memory, CPU of the launcher. Paired runs in turn; prints one table.

  python tests/bench/bench_launcher.py                   start-up, exit and memory (about 1 min), CPU at 4 and 8 ranks (about 2 min)
  python tests/bench/bench_launcher.py --pairs 9 --cpu-ranks ''

start-up: launcher's exec to the first line of the first rank. exit: end of the last rank to the end of the launcher. memory and CPU: of the
launcher's process while gloo ranks do ten all_reduce a second; a run without rankwatch is measured in the same way and subtracted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

STOCK = [sys.executable, "-m", "torch.distributed.run"]
PLAIN_RANK = """
import os, time
os.write(1, f"first {time.time()}\\n".encode())
time.sleep(1.0)
os.write(1, f"last {time.time()}\\n".encode())
"""
GLOO_RANK = """
import os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
one = torch.ones(64)
dist.all_reduce(one)
if dist.get_rank() == 0:
    open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[2]):
    dist.all_reduce(one)
    time.sleep(0.1)
    stop = torch.tensor([float(os.path.exists(sys.argv[2]))])
    dist.all_reduce(stop)
    if stop.item():
        break
dist.destroy_process_group()
"""
DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True)
class Times:
    startup_s: float
    exit_s: float


@dataclass(frozen=True, slots=True)
class Load:
    cpu_ratio: float  # of one core
    rss_bytes: int


def ours(run_dir: str) -> list[str]:
    return [sys.executable, "-m", "rankwatch", "--run-dir", run_dir, "--listen", "127.0.0.1:0", "torchrun"]


def environment() -> dict[str, str]:
    """Ours, with compiled modules as after an installation (a first pair that is not counted writes them)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RANKWATCH_") and name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def time_one(launcher: list[str], folder: Path) -> Times:
    """One short job of two ranks without torch."""
    (folder / "rank.py").write_text(PLAIN_RANK)
    began = time.time()
    done = subprocess.run(
        [*launcher, "--standalone", "--nproc-per-node", "2", "rank.py"], cwd=folder, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    ended = time.time()
    if done.returncode:
        raise SystemExit(f"{launcher}: exit {done.returncode}\n{done.stderr[-2000:]}")
    said = [line.split() for line in done.stdout.splitlines()]
    return Times(min(float(at) for what, at in said if what == "first") - began, ended - max(float(at) for what, at in said if what == "last"))


def load_of(launcher: list[str], folder: Path, ranks: int, seconds: float) -> Load:
    """CPU and memory of the launcher over `seconds` while `ranks` gloo ranks work."""
    (folder / "rank.py").write_text(GLOO_RANK)
    ready, stop = folder / "ready", folder / "stop"
    command = [*launcher, "--standalone", "--nproc-per-node", str(ranks), "rank.py", str(ready), str(stop)]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + DEADLINE_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{launcher}: the ranks do not start")
            time.sleep(0.2)
        time.sleep(5.0)  # past the self-test at the start
        before, began = cpu_s(process.pid), time.monotonic()
        time.sleep(seconds)
        spent = cpu_s(process.pid) - before
        result = Load(spent / (time.monotonic() - began), rss_bytes(process.pid))
        stop.touch()
        process.wait(DEADLINE_S)
        return result
    finally:
        stop.touch()
        process.terminate()
        process.wait(60)


def cpu_s(pid: int) -> float:
    """User and system time of a process and of the children that it has collected (py-spy)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--cpu-ranks", default="4,8", help="numbers of ranks at which CPU and memory are measured; empty: not")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one CPU measurement")
    arguments = parser.parse_args()
    rows: list[tuple[str, str, str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        stock, mine = [], []
        for n in range(arguments.pairs + 1):
            for side in (stock, mine) if n % 2 else (mine, stock):
                folder = Path(scratch, f"{n}{'o' if side is mine else 's'}")
                folder.mkdir()
                side.append(time_one(ours("run") if side is mine else STOCK, folder))
        del stock[0], mine[0]
        for what, key in (("start-up", "startup_s"), ("exit after success", "exit_s")):
            one, two = ([getattr(times, key) for times in side] for side in (stock, mine))
            added = statistics.median(b - a for a, b in zip(one, two, strict=True))
            ratio = statistics.median(b / a for a, b in zip(one, two, strict=True))
            rows.append(
                (
                    what,
                    f"{statistics.median(one):.2f} s",
                    f"{statistics.median(two):.2f} s",
                    f"{added:+.2f} s (x {ratio:.3f}); quickest {min(two) - min(one):+.2f} s",
                )
            )
        for ranks in [int(word) for word in arguments.cpu_ranks.split(",") if word]:
            loads = []
            for name, launcher in (("stock", STOCK), ("ours", ours("run"))):
                folder = Path(scratch, f"{name}{ranks}")
                folder.mkdir()
                loads.append(load_of(launcher, folder, ranks, arguments.seconds))
            one, two = loads
            rows.append((f"CPU, {ranks} ranks", f"{one.cpu_ratio:.2%}", f"{two.cpu_ratio:.2%}", f"{two.cpu_ratio - one.cpu_ratio:+.2%} of a core"))
            megabytes = [load.rss_bytes / 1e6 for load in loads]
            rows.append((f"RSS, {ranks} ranks", f"{megabytes[0]:.0f} MB", f"{megabytes[1]:.0f} MB", f"{megabytes[1] - megabytes[0]:+.0f} MB"))
    header = ("launcher", "torchrun", "rankwatch torchrun", f"added (median of {arguments.pairs} pairs)")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(4)]
    for row in (header, *rows):
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
