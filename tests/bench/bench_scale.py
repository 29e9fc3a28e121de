"""What judging and showing a job costs by its size: 64 to 16,384 ranks on up to 2,048 nodes, simulated. Prints tables and a chart for the README.

  python tests/bench/bench_scale.py                       all sizes, about 8 min
  python tests/bench/bench_scale.py --sizes 64,512        quickly
  python tests/bench/bench_scale.py --profile asleep --sizes 4096

One process a size. A job of tests/support/build_world.py is judged every 2 s: 4 s well, then something is wrong (one rank asleep before an all_reduce
of the world, one killed, one that crashed and all others of it, one tensor-parallel group in a mismatch, a node that does not answer, a collective of
the world that does not complete though all are in, or one in every tensor-parallel group); then the last look
of the first of these is shown, and of the last one the status page. CPU seconds
are of the slowest look, the quicker of two tries, and of the first rendering; exponent: of the growth between the two largest sizes, 1 is linear.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import math
import pstats
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("support", "synthetic"))

from build_status import job
from build_world import FAULTS, IN_CALL, Fault, LargeJob

from rankwatch.export.prometheus import Exporter
from rankwatch.model import Frame, MonitorHealth, Stack, Status, Thread
from rankwatch.monitor import heap, published, storms
from rankwatch.monitor.diagnose import State, diagnose, ledger
from rankwatch.monitor.diagnose.stacks import group_stacks
from rankwatch.monitor.files import as_json
from rankwatch.monitor.incidents import Book, fold
from rankwatch.monitor.policy import Limits
from rankwatch.notify import lines
from rankwatch.report import incident as incident_report
from rankwatch.report import incident_list, page, state, status, text

SIZES = (64, 512, 4096, 16384)
STACKS = 100_000
REPEATS = 2  # of one and the same look, the quicker one counts: another program's work is in the slower one
BEFORE_S, EVERY_S = 4.0, 2.0
AFTER_S: dict[Fault, float] = {"healthy": 6.0, "asleep": 14.0, "dead": 4.0, "crashed": 4.0, "mismatch": 6.0, "silent": 14.0, "hung": 18.0, "storm": 18.0}
BARS: dict[str, tuple[float, float]] = {  # CPU seconds and bytes
    **{f"diagnose, {fault}": (2.0, math.inf) for fault in FAULTS},
    "status page": (1.0, 1e6),
    "status page, storm": (1.0, 1e6),
    "/api/v1/incidents, storm": (math.inf, 9e6),
    "incident page": (1.0, 1e6),
    "/metrics of node 0": (1.0, math.inf),
    "grouping of 100,000 stacks": (2.0, math.inf),
}
Cost = tuple[float, int]  # CPU seconds, bytes


def measure(size: int, entries: int) -> dict[str, Cost]:
    """Everything at one size, with the collector of cycles set as the judge of many nodes sets it."""
    heap.collect_less_often()
    found: dict[str, Cost] = {}
    for fault in FAULTS:
        before_bytes = rss_bytes()
        shown = judge(size, fault, entries, found)
        gc.collect()
        if fault == "asleep":
            found["the job's snapshot (RSS)"] = (0.0, rss_bytes() - before_bytes)
            show(shown, found)
        if fault == "storm":
            cost("status page, storm", lambda shown=shown: status.render(shown), found)  # type: ignore[misc]
            cost("/api/v1/incidents, storm", lambda shown=shown: as_json(incident_list.to_json(shown), indent=None), found)  # type: ignore[misc]
    found["peak RSS of all this"] = (0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return found


def judge(size: int, fault: Fault, entries: int, found: dict[str, Cost]) -> Status:
    """The looks of one job; what its last one gives to show."""
    culprit = min(size - 1, size // 2 + 3)
    world, memory, book, limits = LargeJob(size, fault, culprit, entries=entries), State(), Book(), Limits()
    picture = Status(job(world_size=size, nnodes=world.nodes, node="node0000"), None)
    diagnosing = folding = publishing = 0.0
    for snapshot in world.looks(BEFORE_S, AFTER_S[fault], EVERY_S):
        before, took_s = memory, math.inf
        for _ in range(REPEATS):
            began_s = process_time()
            memory, verdicts, wanted = diagnose(before, snapshot, snapshot.now, limits)
            took_s = min(took_s, process_time() - began_s)
        judged_s = process_time()
        book, _ = fold(book, verdicts, snapshot, snapshot.now, limits)
        folded_s = process_time()
        picture = published.status(picture, snapshot, verdicts, book, MonitorHealth(polls=1), "http://node0000:27435", "/runs/1", None)
        picture = replace(picture, waiting=ledger.rows(memory.ledger))
        publishing = max(publishing, process_time() - folded_s)
        diagnosing, folding = max(diagnosing, took_s), max(folding, folded_s - judged_s)
        world.want(wanted, snapshot.now - 5000.0)
    found[f"diagnose, {fault}"] = (diagnosing, 0)
    found["incidents"] = (max(folding, found.get("incidents", (0.0, 0))[0]), 0)
    found["what is published"] = (max(publishing, found.get("what is published", (0.0, 0))[0]), 0)
    held = bytes_of((memory, book), (picture.snapshot,))
    found["the judge's memory"] = (0.0, max(held, found.get("the judge's memory", (0.0, 0))[1]))
    told = [(verdict.verdict, verdict.cause, verdict.culprit_ranks) for verdict in picture.verdicts]
    node = tuple(range(culprit // 8 * 8, culprit // 8 * 8 + 8))
    expected = {
        "healthy": [],
        "asleep": [("stuck", "not_entered", (culprit,))],
        "dead": [("failed", "killed", (culprit,))],
        "mismatch": [("stuck", "mismatch", (culprit,))],
        "silent": [("stuck", "unknown", node)],
        "crashed": [("failed", "crashed", (culprit,))],
        "hung": [("slow", "all_entered", ())],
        "storm": [("slow", "all_entered", ())] * min(world.nodes, storms.OWN + 1),
    }[fault]
    if told != expected:
        print(f"{size} ranks, {fault}: said {told[:4]}, not {expected[:4]}", file=sys.stderr)
    return picture


def show(picture: Status, found: dict[str, Cost]) -> None:
    """Each surface once, of a picture that none has seen yet."""
    incident = picture.open_incidents[0]
    fresh = replace(picture, open_incidents=(*picture.open_incidents,), verdicts=(*picture.verdicts,))
    cost("status page", lambda: status.render(fresh), found)
    cost("/api/v1/state", lambda: as_json(state.to_json(replace(picture)), indent=None), found)
    cost("incident.json", lambda: as_json(incident_report.to_json(incident, picture)), found)
    cost("incident page", lambda: page.render(incident_report.to_json(incident, picture)), found)
    cost("report.txt", lambda: text.render(incident_report.to_json(incident, picture)), found)
    cost("line on stderr", lambda: lines.verdict(incident, picture, "/runs/1"), found)
    cost("/metrics of node 0", lambda: Exporter().render(picture)[0], found)


def cost(what: str, render: Callable[[], str | bytes], found: dict[str, Cost]) -> None:
    began_s = process_time()
    body = render()
    found[what] = (process_time() - began_s, len(body.encode() if isinstance(body, str) else body))


def grouping(count: int) -> Cost:
    """Stacks of so many ranks, each read by itself: 60 pictures of 30 frames, one of which most are in."""

    def frames(picture: int) -> tuple[Frame, ...]:
        inner = tuple(Frame(f"inner_{number}", f"/venv/lib/python3.11/site-packages/torch/nn/modules/m{number}.py", 100 + number) for number in range(26))
        return (*inner[: 26 - picture % 20], Frame("step", f"/job/model_{picture}.py", 40), *(Frame(each.name, each.file, each.line) for each in IN_CALL))

    stacks = {rank: Stack(rank, 0.0, (Thread("MainThread", rank, frames(rank % 60 if rank % 4 == 0 else 0)),)) for rank in range(count)}
    began_s = process_time()
    groups = group_stacks(stacks, culprits=(7,), waiting=range(8, count))
    took_s = process_time() - began_s
    if sum(len(group.ranks) for group in groups) != count:
        print(f"grouping lost ranks: {count} stacks, {len(groups)} groups", file=sys.stderr)
    return took_s, 0


def rss_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def bytes_of(roots: Iterable[object], without: Iterable[object]) -> int:
    """Of everything that hangs on these values and not on the others."""
    seen: set[int] = set()

    def walk(values: list[object], weigh: bool) -> int:
        total = 0
        while values:
            value = values.pop()
            if id(value) not in seen and not isinstance(value, (type, type(sys))) and not callable(value):
                seen.add(id(value))
                total += sys.getsizeof(value) if weigh else 0
                values += gc.get_referents(value)
        return total

    walk(list(without), False)
    return walk(list(roots), True)


# -- what is printed -------------------------------------------------------------------------------------------------------


def table(costs: dict[int, dict[str, Cost]]) -> list[str]:
    """Rows of a Markdown table: seconds, then bytes, at each size."""
    sizes = sorted(costs)
    head = ["", *(f"{size:,} ranks" for size in sizes), "exponent", "bar"]
    rows = [head, ["---", *("---:" for _ in head[1:])]]
    for what in dict.fromkeys(name for each in costs.values() for name in each):
        cells = [costs[size].get(what, (0.0, 0)) for size in sizes]
        bar_s, bar_bytes = BARS.get(what, (math.inf, math.inf))
        words = [_words(*cell) for cell in cells]
        bars = [f"{bar_s:g} s"] * (bar_s < math.inf) + [f"{bar_bytes / 1e6:g} MB"] * (bar_bytes < math.inf)
        over = cells[-1][0] > bar_s or cells[-1][1] > bar_bytes
        rows.append([what, *words, _exponent(sizes, cells), ", ".join(bars) + " OVER" * over])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _words(cpu_s: float, size_bytes: int) -> str:
    parts = [f"{cpu_s:.2f} s" if cpu_s >= 0.1 else f"{1e3 * cpu_s:.1f} ms"] * (cpu_s > 0)
    parts += [f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} KB"] * (size_bytes > 0)
    return ", ".join(parts) or "-"


def _exponent(sizes: list[int], cells: list[Cost]) -> str:
    """Of seconds where there are some, else of bytes."""
    if len(sizes) < 2:
        return ""
    part = 0 if cells[-1][0] else 1
    before, after = cells[-2][part], cells[-1][part]
    return f"{math.log(after / before) / math.log(sizes[-1] / sizes[-2]):.2f}" if before > 0 and after > 0 else ""


def _speed_s() -> float:
    """To compare machines."""
    began_s, entries = process_time(), {}
    for number in range(300_000):
        entries[number % 1000] = (number, str(number))
    return process_time() - began_s


def chart(costs: dict[int, dict[str, Cost]]) -> list[str]:
    """A mermaid block: CPU seconds of the slowest look and of what is shown, by ranks."""
    sizes = sorted(costs)
    looks = [max(cost[0] for what, cost in costs[size].items() if what.startswith("diagnose")) for size in sizes]
    pages = [costs[size]["status page"][0] for size in sizes]
    return [
        "```mermaid",
        "xychart-beta",
        '  title "CPU seconds by ranks: one look at everything, status page"',
        "  x-axis [" + ", ".join(f'"{size:,}"' for size in sizes) + "]",
        '  y-axis "CPU s" 0 --> 2',
        "  line [" + ", ".join(f"{value:.3f}" for value in looks) + "]",
        "  line [" + ", ".join(f"{value:.3f}" for value in pages) + "]",
        "```",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="ranks, multiples of 8")
    parser.add_argument("--entries", type=int, default=16, help="recorder entries of each group that every rank holds")
    parser.add_argument("--profile", choices=(*FAULTS, "show"), help="profile the looks of this job, or what is shown of one, at the first size")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.one is not None:
        print(json.dumps(measure(options.one, options.entries)))
        return 0
    if options.profile:
        picture = judge(sizes[0], "asleep", options.entries, {}) if options.profile == "show" else None
        profiler = cProfile.Profile(process_time)
        profiler.runcall(show, picture, {}) if picture is not None else profiler.runcall(judge, sizes[0], options.profile, options.entries, {})
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
        return 0
    costs: dict[int, dict[str, Any]] = {}
    for size in sizes:
        call = [sys.executable, __file__, "--one", str(size), "--entries", str(options.entries)]
        costs[size] = {what: tuple(cost) for what, cost in json.loads(subprocess.run(call, stdout=subprocess.PIPE, check=True).stdout).items()}
    print("\n".join(table(costs)))
    print(f"\na loop of 300,000 dictionary entries takes {1e3 * _speed_s():.0f} ms here")
    counts = (STACKS // 16, STACKS // 4, STACKS)
    groups = {count: grouping(count) for count in counts}
    bar = BARS["grouping of 100,000 stacks"][0]
    times = ", ".join(f"{count:,}: {cost[0]:.2f} s" for count, cost in groups.items())
    print(f"\ngrouping of stacks, {times}, exponent {_exponent(list(counts), list(groups.values()))}, bar {bar:g} s{' OVER' * (groups[STACKS][0] > bar)}\n")
    print("\n".join(chart(costs)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
