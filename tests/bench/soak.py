"""A healthy hour under rankwatch with default options: nothing may be paged and no memory may grow. Prints one table; raw numbers as JSON.

  python tests/bench/soak.py --minutes 60 --json-out soak.json
  python tests/bench/soak.py --minutes 3 --quick          (closer checkpoints and evaluations, for trying it out)
  python tests/bench/soak.py --minutes 60 --plain         (under plain torchrun: what torch's own memory does)

Every 10 s the resident memory of launcher and ranks and the launcher's CPU time are read. The first third of the training settles: torch's flight
recorder fills its ring of 2,000 entries, which is read again and again. Of the rest each two minutes are one median, and the slope is the median
of the slopes between all pairs of these (Theil-Sen) with its 95 % interval (Sen): neither an outlier nor a regular rise and fall moves it.
A process grows where its slope is 2 MB/h or more and 0 lies outside of the interval; it is unclear where the interval reaches beyond 10 MB/h.
Ranks have torch's own memory in them: --against the JSON of a --plain run of the same length says what that does.
Exit code 0: the job ended with 0, no incident was ever above slow and the launcher did not grow; 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil, sqrt
from pathlib import Path
from statistics import median
from typing import Any

JOB = Path(__file__).with_name("soak_job.py")
SAMPLE_S = 10.0
SETTLES = 1 / 3  # of the training
BLOCK_S = 120.0
BLOCKS = 16  # of a short run, which are shorter
GROWS_MB_PER_H = 2.0
UNCLEAR_MB_PER_H = 10.0
QUIET = {"slow", "recovered"}
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Sample:
    at_s: float  # since the start of the launcher
    launcher_rss_bytes: int
    launcher_cpu_s: float
    rank_rss_bytes: list[int]


@dataclass(slots=True)
class Soak:
    samples: list[Sample] = field(default_factory=list)
    incidents: dict[str, dict[str, Any]] = field(default_factory=dict)  # id -> newest document; the folder itself is pruned at 50
    exit_code: int | None = None
    trained_from_s: float | None = None

    def paged(self) -> list[dict[str, Any]]:
        return [doc for doc in self.incidents.values() if {change["verdict"] for change in doc["history"]} - QUIET]


def rss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK


def ranks_of(launcher: int) -> list[int]:
    """The launcher's children, in the order in which it started them."""
    found: set[int] = set()
    for path in Path(f"/proc/{launcher}/task").glob("*/children"):
        try:
            found |= {int(pid) for pid in path.read_text().split()}
        except OSError:
            continue
    return sorted(pid for pid in found if b"soak_job.py" in _command(pid))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def soak(command: list[str], run_dir: Path, output: Path, deadline_s: float) -> Soak:
    """Run the job to its end and watch it; ended by SIGTERM after deadline_s."""
    found = Soak()
    began = time.monotonic()
    with output.open("wb") as log:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            while job.poll() is None and time.monotonic() - began < deadline_s:
                ranks = ranks_of(job.pid)
                found.samples.append(Sample(time.monotonic() - began, rss_bytes(job.pid), cpu_s(job.pid), [rss_bytes(pid) for pid in ranks]))
                if found.trained_from_s is None and b"rank 0 trains" in output.read_bytes():
                    found.trained_from_s = found.samples[-1].at_s
                read_incidents(run_dir, found)
                try:
                    job.wait(SAMPLE_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if job.poll() is None:
                job.terminate()
            try:
                found.exit_code = job.wait(60)
            except subprocess.TimeoutExpired:
                job.kill()
                found.exit_code = job.wait()
    read_incidents(run_dir, found)
    return found


def read_incidents(run_dir: Path, found: Soak) -> None:
    for path in run_dir.glob("incidents/*/incident.json"):
        try:
            found.incidents[path.parent.name] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue  # pruned this moment


@dataclass(frozen=True, slots=True)
class Slope:
    """MB an hour with its 95 % interval; of fewer than eight blocks nothing can be said."""

    mb_per_h: float = 0.0
    low: float = float("-inf")
    high: float = float("inf")
    blocks: int = 0

    @property
    def word(self) -> str:
        if self.mb_per_h >= GROWS_MB_PER_H and self.low > 0.0:
            return "grows"
        return "flat" if self.high <= UNCLEAR_MB_PER_H else "unclear"


def slope(points: list[tuple[float, int]]) -> Slope:
    """Of (seconds, bytes): Theil-Sen over medians of blocks, so that samples of one rise and fall do not count as many."""
    blocks: dict[int, list[tuple[float, int]]] = {}
    span_s = points[-1][0] - points[0][0] if points else 0.0
    block_s = min(BLOCK_S, max(SAMPLE_S, span_s / BLOCKS))
    for at_s, value in points:
        blocks.setdefault(int((at_s - points[0][0]) / block_s), []).append((at_s, value))
    middles = [(median(at_s for at_s, _ in part) / 3600, median(value for _, value in part) / 1e6) for part in blocks.values()]
    n = len(middles)
    if n < 8:
        return Slope(blocks=n)
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(middles, 2))
    off = 1.96 * sqrt(n * (n - 1) * (2 * n + 5) / 18)  # of Kendall's sum, where nothing grows
    low, high = int((len(slopes) - off) / 2), min(len(slopes) - 1, ceil((len(slopes) + off) / 2))
    return Slope(median(slopes), slopes[max(0, low)], slopes[high], n)


def report(found: Soak, num_ranks: int, against: dict[str, Any]) -> dict[str, Any]:
    """Prints the table; returns what it says. against: what that of a plain run has returned, {} without one."""
    trained = found.trained_from_s or 0.0
    whole = [sample for sample in found.samples if len(sample.rank_rss_bytes) == num_ranks and sample.at_s >= trained]
    length = whole[-1].at_s - whole[0].at_s if whole else 0.0
    settled = [sample for sample in whole if sample.at_s >= whole[0].at_s + SETTLES * length]
    rows = {"launcher": [(sample.at_s, sample.launcher_rss_bytes) for sample in whole]}
    rows |= {f"rank {rank}": [(sample.at_s, sample.rank_rss_bytes[rank]) for sample in whole] for rank in range(num_ranks)}
    rows["mean rank"] = [(sample.at_s, sum(sample.rank_rss_bytes) // num_ranks) for sample in whole]  # steadier than each of them
    memory = {}
    print(f"\n{'process':<10} {'RSS when training began':>24} {'settled':>9} {'end':>9} {'largest':>9}   MB/h once settled, 95 % interval")
    for name, points in rows.items():
        late = points[len(points) - len(settled) :]
        ends = [value / 1e6 for value in (points[0][1], late[0][1], points[-1][1], max(value for _, value in points))] if late else [0.0] * 4
        fitted = slope(late)
        memory[name] = {
            "start_mb": ends[0], "settled_mb": ends[1], "end_mb": ends[2], "largest_mb": ends[3], "mb_per_h": fitted.mb_per_h,
            "interval_mb_per_h": [fitted.low, fitted.high] if fitted.blocks >= 8 else None, "blocks": fitted.blocks, "word": fitted.word,
        }  # fmt: skip
        said = f"{fitted.mb_per_h:+.2f} [{fitted.low:+.1f}, {fitted.high:+.1f}] {fitted.word}"
        other = against.get("memory", {}).get(name, {})
        if other.get("interval_mb_per_h"):
            said += f"; plain {other['mb_per_h']:+.2f} [{other['interval_mb_per_h'][0]:+.1f}, {other['interval_mb_per_h'][1]:+.1f}]"
        print(f"{name:<10} {ends[0]:>21.1f} MB {ends[1]:>6.1f} MB {ends[2]:>6.1f} MB {ends[3]:>6.1f} MB   {said}")
    cpu = (whole[-1].launcher_cpu_s - whole[0].launcher_cpu_s) / length if length else 0.0
    verdicts = Counter((change["verdict"], change["cause"]) for doc in found.incidents.values() for change in doc["history"])
    print(f"\nlauncher: {cpu:.2%} of a core over {length / 60:.1f} min of training; exit code {found.exit_code}")
    print("incidents: " + (", ".join(f"{count} x {verdict}/{cause}" for (verdict, cause), count in sorted(verdicts.items())) or "none"))
    for doc in found.paged():
        print(f"  ABOVE SLOW {doc['id']}: {' -> '.join(change['verdict'] for change in doc['history'])}: {doc['summary']}")
    return {
        "memory": memory, "launcher_cpu_ratio": cpu, "trained_s": length, "exit_code": found.exit_code,
        "verdicts": {f"{verdict}/{cause}": count for (verdict, cause), count in verdicts.items()},
        "above_slow": [doc["id"] for doc in found.paged()],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--backend", default="inductor", help="of torch.compile; aot_eager needs no C++ compiler")
    parser.add_argument("--quick", action="store_true", help="a checkpoint every 40 s and an evaluation every 70 s")
    parser.add_argument("--plain", action="store_true", help="without rankwatch")
    parser.add_argument("--against", type=Path, help="JSON of a --plain run, to be shown beside")
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--keep", type=Path, help="run directory and log stay here (default: a temporary folder that is named at the end)")
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="rankwatch_soak_"))
    folder.mkdir(parents=True, exist_ok=True)
    run_dir = folder / "run"
    launcher = ["torch.distributed.run"] if arguments.plain else ["rankwatch", "--run-dir", str(run_dir), "torchrun"]
    command = [sys.executable, "-m", *launcher, "--standalone", "--nproc-per-node", str(arguments.nproc)]
    command += [str(JOB), str(folder), "--minutes", f"{arguments.minutes:g}", "--backend", arguments.backend]
    command += ["--checkpoint-s", "40", "--evaluate-s", "70"] if arguments.quick else []
    print(" ".join(command), flush=True)
    found = soak(command, run_dir, folder / "output.log", arguments.minutes * 60 + 600)
    summary = report(found, arguments.nproc, json.loads(arguments.against.read_text()) if arguments.against else {})
    if arguments.json_out:
        raw = [[s.at_s, s.launcher_rss_bytes, s.launcher_cpu_s, *s.rank_rss_bytes] for s in found.samples]
        columns = ["at_s", "launcher_rss_bytes", "launcher_cpu_s", *(f"rank{rank}_rss_bytes" for rank in range(arguments.nproc))]
        arguments.json_out.write_text(
            json.dumps({**summary, "command": command, "columns": columns, "samples": raw, "incidents": list(found.incidents.values())})
        )
    print(f"run and log: {folder}")
    return 0 if found.exit_code == 0 and not found.paged() and summary["memory"]["launcher"]["word"] != "grows" else 1


if __name__ == "__main__":
    sys.exit(main())
