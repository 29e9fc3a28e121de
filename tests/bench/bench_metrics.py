"""What /metrics costs: series a rank, size and processor time of a scrape, by level; of a node with 8 ranks, and of node 0 of a synthetic job of 2,048 nodes.

  python tests/bench/bench_metrics.py        about a minute; prints a table for the README

Of a rank: what a test picture of a stuck gloo job gives, and the most that the catalogue allows with every probe on. A rendering is the median of 15,
in CPU ms: text, OpenMetrics (what Prometheus asks for), and the file of --textfile-dir with its write.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("support", "synthetic"))

from build_status import job, stuck_incident, stuck_status
from build_world import LargeJob
from prometheus_client.parser import text_string_to_metric_families

from rankwatch.config.accepted import MORE_PROBES, PROBES
from rankwatch.export.prometheus import Exporter
from rankwatch.export.textfile import Textfile
from rankwatch.model import Status
from rankwatch.wire.signals import COMPILE_STAGES, SIGNALS, exported, level_for

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
TIMES = 15
RANK_BARS = {"low": 12, "default": 60, "full": 120}
NODE_BAR_MS, JUDGE_BAR_MS = 50.0, 1000.0


def main() -> int:
    large = LargeJob(16_384, "asleep", 7)
    *_, look = large.looks(2.0, 4.0, 2.0)
    node0 = Status(job(world_size=16_384, nnodes=2048, node="node0000"), look, open_incidents=(stuck_incident(),), state="stuck")
    print("| picture | level | series | a rank: here / at most (bar) | size | text / OpenMetrics / textfile, CPU ms (bar) |\n|---|---|---|---|---|---|")
    fine = [row("a node with 8 ranks", stuck_status(), level, NODE_BAR_MS) for level in ("low", "default", "full")]
    fine += [row("node 0 of 2,048", node0, level, JUDGE_BAR_MS) for level in ("auto", "full")]
    print("within the bars" if all(fine) else "ABOVE A BAR")
    return 0 if all(fine) else 1


def row(name: str, picture: Status, level: str, bar_ms: float) -> bool:
    """One line of the table. Whether it is within the bars."""
    body = Exporter(level).render(picture)[0]
    samples = [sample for family in text_string_to_metric_families(body.decode()) for sample in family.samples]
    ranks = Counter(sample.labels["rank"] for sample in samples if "rank" in sample.labels and sample.name != "rankwatch_incident_info")
    here, bound, bar = max(ranks.values()), most(level_for(level, picture.job.world_size)), RANK_BARS[level_for(level, picture.job.world_size)]
    with tempfile.TemporaryDirectory() as folder:
        found = (
            cpu_ms(lambda: Exporter(level).render(picture)),
            cpu_ms(lambda: Exporter(level).render(picture, OPENMETRICS)),
            cpu_ms(lambda: Textfile(folder, level, time.time).write(picture, False)),
        )
    times = " / ".join(f"{each:.1f}" for each in found)
    print(f"| {name} | {level} | {len(samples)} | {here} / {bound} ({bar}) | {len(body) / 1024:.0f} KB | {times} ({bar_ms:.0f}) |")
    return bound <= bar and max(found) <= bar_ms


def most(level: str) -> int:
    """Series of one rank with every probe on and every metric filled."""
    values = {"stage": len(COMPILE_STAGES), "probe": len(PROBES) + len(MORE_PROBES), "what": 2}
    names = exported(level)
    return sum(math.prod(values.get(label, 1) for label in signal.labels) for signal in SIGNALS if signal.scope == "R" and signal.name in names)


def cpu_ms(work: Callable[[], object]) -> float:
    took = []
    for _ in range(TIMES):
        began_s = time.process_time()
        work()
        took.append(1000 * (time.process_time() - began_s))
    return statistics.median(took)


if __name__ == "__main__":
    sys.exit(main())
