"""What the dashboards ask of Prometheus at 16,384 ranks: a history with a scripted hang is written as blocks, every query is timed. Run by hand.

    python tests/bench/bench_dashboards.py [--ranks 16384] [--minutes 20] [--every 60] [--keep FOLDER]

One job of that size at the metrics level that it would have, and 30 jobs of 64 ranks for Fleet. In the last 8 minutes rank 9001 (or the middle one) has not
entered a collective that all others wait in. --keep leaves the blocks and prints how to look at them with tests/dashboards/draw.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from prometheus_server import Prometheus  # noqa: E402

from dashboards.build.names import SMALL_RANKS  # noqa: E402
from dashboards.build.queries import asked, filled  # noqa: E402
from rankwatch.wire.signals import BY_NAME, VERDICTS, exported, level_for  # noqa: E402

PER_NODE = 8
RANGE_S = {"job": 1800, "rank": 1800, "compile": 3600, "fleet": 1800}  # what is written is shorter than Fleet's day
SCRAPE_S = 15.0
TIMEOUT_S = 1800.0
HANG_S = 480.0
BIG, OTHERS = "70001", 30


class Told:
    """One job as it is told: every value is a function of rank and time."""

    def __init__(self, job_id: str, ranks: int, begin: float, end: float, hangs: bool) -> None:
        self.job_id, self.ranks, self.begin, self.end = job_id, ranks, begin, end
        self.hang_at = end - HANG_S if hangs else end + 1
        self.culprit = min(9001, ranks // 2)

    def waits(self, at: float) -> float:
        """Seconds that the hang has lasted."""
        return max(0.0, at - self.hang_at)

    def seq(self, rank: int, at: float) -> int:
        done = int((min(at, self.hang_at) - self.begin) * 8)
        return done if self.waits(at) and rank == self.culprit else done + (1 if self.waits(at) else -(hash((rank, at)) % 7 == 0))

    def of_a_rank(self) -> dict[str, Callable[[int, float], float]]:
        """metric -> value of (rank, time)."""
        victim: Callable[[int, float], bool] = lambda rank, at: self.waits(at) > 5 and rank != self.culprit  # noqa: E731
        return {
            "rankwatch_rank_up": lambda rank, at: 1,
            "rankwatch_rank_phase": lambda rank, at: 3 if self.waits(at) and rank != self.culprit else 1,
            "rankwatch_rank_phase_start_timestamp_seconds": lambda rank, at: min(at, self.hang_at),
            "rankwatch_rank_heartbeat_timestamp_seconds": lambda rank, at: at,
            "rankwatch_rank_stuck": lambda rank, at: self.waits(at) > 120 and rank == self.culprit,
            "rankwatch_rank_waiting": victim,
            "rankwatch_rank_steps_total": lambda rank, at: int((min(at, self.hang_at) - self.begin) / 2),
            "rankwatch_collective_seq": self.seq,
            "rankwatch_collective_lag": lambda rank, at: (self.waits(at) > 0) * (rank == self.culprit) or (not self.waits(at) and hash((rank, at)) % 7 == 0),
            "rankwatch_collective_inflight_seconds": lambda rank, at: self.waits(at) * (rank != self.culprit),
            "rankwatch_collective_timeout_ratio": lambda rank, at: self.waits(at) * (rank != self.culprit) / TIMEOUT_S,
            "rankwatch_rank_last_step_timestamp_seconds": lambda rank, at: min(at, self.hang_at),
            "rankwatch_rank_step_seconds": lambda rank, at: 2.0 + rank % 13 / 100,
            "rankwatch_compile_active": lambda rank, at: 0,
            "rankwatch_process_cpu_seconds_total": lambda rank, at: int((at - self.begin) * 0.9),
            "rankwatch_process_resident_memory_bytes": lambda rank, at: 6e9 + rank % 97 * 1e7,
        }

    def of_the_job(self) -> Iterator[tuple[str, str, Callable[[float], float | None]]]:
        """(metric, labels as text, value of time or None where it is absent)."""
        yield (
            "rankwatch_job_info",
            f'version="0.1.0",torch="2.13.0",nccl="2.28.3",backend="nccl",world_size="{self.ranks}",nnodes="{self.ranks // 8}"',
            lambda at: 1,
        )
        yield "rankwatch_world_size", "", lambda at: self.ranks
        yield "rankwatch_ranks_seen", "", lambda at: self.ranks
        yield "rankwatch_job_state", "", lambda at: 2 if self.waits(at) > 120 else 1
        yield "rankwatch_job_start_timestamp_seconds", "", lambda at: self.begin - self.ranks
        yield "rankwatch_job_restarts_total", 'reason="torchelastic"', lambda at: 0
        yield "rankwatch_job_step_seconds", "", lambda at: 2.0
        yield "rankwatch_job_desync_ranks", 'group="default_pg"', lambda at: 0
        yield "rankwatch_job_compile_skew_seconds", "", lambda at: 0
        yield "rankwatch_collective_timeout_seconds", "", lambda at: TIMEOUT_S
        yield "rankwatch_peer_report_age_seconds", "", lambda at: 1.5
        yield "rankwatch_compile_regime", 'regime="compiled"', lambda at: 1
        yield "rankwatch_lost_rank_seconds_total", "", lambda at: self.waits(at) * (self.ranks - 1) + (at - self.begin) * self.ranks * 0.004
        for verdict in VERDICTS:
            at_once = {"slow": (5, 120), "stuck": (120, 1e9)}.get(verdict, (1e9, 1e9))
            yield "rankwatch_verdict", f'verdict="{verdict}"', lambda at, when=at_once: when[0] < self.waits(at) <= when[1]
            yield "rankwatch_incidents_total", f'verdict="{verdict}"', lambda at, when=at_once: self.waits(at) > when[0]
        who = f'incident="20261130T120000Z-1",verdict="stuck",cause="not_entered",domain="user_code",rank="{self.culprit}",node="node{self.culprit // 8:04}"'
        yield "rankwatch_incident_info", who, lambda at: 1 if self.waits(at) > 120 else None
        opened = self.hang_at + 5
        yield "rankwatch_incident_open_timestamp_seconds", 'incident="20261130T120000Z-1",verdict="stuck"', lambda at: opened if self.waits(at) > 120 else None

    def of_a_node(self, node: int) -> Iterator[tuple[str, str, Callable[[float], float]]]:
        """(metric, labels as text, value of time)."""
        yield "rankwatch_build_info", f'version="0.1.0",python="3.11.9",node="node{node:04}"', lambda at: 1
        yield "rankwatch_monitor_polls_total", "", lambda at: int((at - self.begin) * 2)
        yield "rankwatch_monitor_poll_duration_seconds", "", lambda at: 0.004
        yield "rankwatch_monitor_cpu_seconds_total", "", lambda at: (at - self.begin) * 0.01
        yield "rankwatch_monitor_errors_total", "", lambda at: 0
        yield "rankwatch_writes_dropped_total", "", lambda at: 0
        yield "rankwatch_stack_dump_duration_seconds", "", lambda at: 0.4
        yield "rankwatch_agent_collect_duration_seconds", "", lambda at: 0.01


def write(jobs: list[Told], times: list[float], out: TextIO) -> int:
    """OpenMetrics text, a family at a time. Number of samples."""
    written = 0
    families: dict[str, list[tuple[str, Callable[[float], float | None]]]] = {}
    ranks: dict[str, list[tuple[Told, Callable[[int, float], float]]]] = {}
    for job in jobs:
        level = exported(level_for("auto", job.ranks))
        for name, value in job.of_a_rank().items():
            if name in level:
                ranks.setdefault(name, []).append((job, value))
        for name, labels, told in job.of_the_job():
            families.setdefault(name, []).append((f'instance="{place(job, 0)}",job_id="{job.job_id}",{labels}'.rstrip(","), told))
        for node in range(job.ranks // PER_NODE):
            for name, labels, told in job.of_a_node(node):
                families.setdefault(name, []).append((f'instance="{place(job, node)}",job_id="{job.job_id}",{labels}'.rstrip(","), told))
    for name in (*families, *ranks):
        out.write(f"# TYPE {name.removesuffix('_total')} {BY_NAME[name].type}\n")
        for labels, told in families.get(name, ()):
            text = [f"{name}{{{labels}}} {float(value)} {at:.0f}\n" for at in times if (value := told(at)) is not None]
            out.writelines(text)
            written += len(text)
        for job, value in ranks.get(name, ()):
            for rank in range(job.ranks):
                head = f'{name}{{instance="{place(job, rank // PER_NODE)}",job_id="{job.job_id}",rank="{rank}"}} '
                out.write("".join([f"{head}{float(value(rank, at))} {at:.0f}\n" for at in times]))
            written += job.ranks * len(times)
    out.write("# EOF\n")
    return written


def place(job: Told, node: int) -> str:
    """host:port of a launcher."""
    return f"node{node:04}:27435" if job.job_id == BIG else f"j{job.job_id}n{node}:27435"


def timed(prometheus: Prometheus, end: float, ranks: int) -> list[tuple[float, int, str]]:
    """(seconds, series, where) of every query, the slowest first, as the dashboards ask by default."""
    found = []
    for path in sorted((ROOT / "dashboards").glob("rankwatch-*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        range_s = RANGE_S[path.stem.removeprefix("rankwatch-")]
        small = BIG if ranks <= SMALL_RANKS else ""
        for query in asked(board):
            step_s = max(SCRAPE_S, round(range_s / query.points))
            expression = filled(query.expression, {"cluster": ".*", "job_id": BIG, "small_job": small, "rank": "9001"}, range_s, step_s, SCRAPE_S)
            start = time.perf_counter()
            series = prometheus.now(expression, end) if query.now else prometheus.over(expression, end - range_s, end, step_s)
            found.append((time.perf_counter() - start, len(series), query.where))
    return sorted(found, reverse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="time every query of the dashboards at a large job")
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=60, help="seconds between samples")
    parser.add_argument("--keep", default="", metavar="FOLDER")
    given = parser.parse_args()
    end = time.time() // 60 * 60
    begin = end - given.minutes * 60
    times = [begin + at * given.every for at in range(int(given.minutes * 60 / given.every) + 1)]
    jobs = [Told(BIG, given.ranks, begin, end, True)] + [Told(str(80000 + at), 64, begin, end, at % 10 == 3) for at in range(OTHERS)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.keep or temporary)
        folder.mkdir(exist_ok=True)
        text = folder / "history.txt"
        start = time.perf_counter()
        with text.open("w", encoding="utf-8", buffering=1 << 20) as out:
            samples = write(jobs, times, out)
        size, wrote_s, start = text.stat().st_size, time.perf_counter() - start, time.perf_counter()
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "--quiet", str(text), str(folder / "tsdb")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        text.unlink()
        print(f"{samples:,} samples, {size / 1e6:.0f} MB of text in {wrote_s:.0f} s, blocks in {time.perf_counter() - start:.0f} s")
        with Prometheus(folder, arguments=("--storage.tsdb.retention.time=10y",)) as prometheus:
            timed(prometheus, end, given.ranks)  # the first time reads the files
            found = timed(prometheus, end, given.ranks)
            memory = Path(f"/proc/{prometheus.process.pid}/status").read_text().split("VmHWM:")[1].split("kB")[0]
        for seconds, series, where in found[:15]:
            print(f"{seconds:7.2f} s  {series:6} series  {where}")
        for name in RANGE_S:
            own = [seconds for seconds, _, where in found if where.startswith(f"{name} / ")]
            print(f"{name}: {len(own)} queries, {sum(own):.1f} s one after the other, slowest {max(own):.2f} s")
        print(f"Prometheus: {int(memory) / 1024:.0f} MiB at most")
        if given.keep:
            print(f"prometheus --storage.tsdb.path={folder}/tsdb --storage.tsdb.retention.time=10y, then draw.py URL {BIG} {end:.0f} 1800 OUT.png job 9001")
    return 0


if __name__ == "__main__":
    sys.exit(main())
