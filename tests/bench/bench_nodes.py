"""What reports of many nodes cost their judge, and what one costs its node: CPU of a cycle in which every node answers once. Prints a table.

  python tests/bench/bench_nodes.py                       64, 512 and 2,048 nodes of 8 ranks, about 2 min
  python tests/bench/bench_nodes.py --nodes 64 --entries 64

One process a size, without sockets and gzip; medians of some cycles.
  first    the whole of every node, once
  quiet    a second in which beats, CPU, steps and counters of all ranks have moved, and one collective of each has completed
  read     a second in which all recorders were read: --entries new entries a rank in four groups, and as many more calls in its histories
a node: diff, encode and JSON of one answer. judge: parse, then apply and report, of all nodes. bytes: of one answer, before and after gzip.
memory: what the judge keeps of a node. All nodes give the answers of a few, so that making reports costs no time and no memory here.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rankwatch.model import KIND_BYTES, Calls, Collective, Group, NodeReport, Process, RankState
from rankwatch.monitor.nodes.codec import Shift
from rankwatch.monitor.nodes.delta import Receiver, Sender, calls_kept, entries_sent

RANKS = 8
GROUPS = ("0", "1", "2", "3")
OPS = ("all_reduce", "_reduce_scatter_base", "_all_gather_base", "broadcast")
KNOWN = {100 + number: Collective("", 0, 0, OPS[number % 4], ((4096, 1024 + number),), (), ("BFloat16",)) for number in range(24)}
WALL, MONO = 1_796_000_000.0, 5000.0
CYCLES = 3
SHIFT = Shift(1234.5, -0.25)


class Ranks:
    """The ranks of one node, second by second."""

    def __init__(self, first: int, world: int, entries: int) -> None:
        self.first, self.each = first, entries // len(GROUPS)
        self.groups = [self._groups(rank, world) for rank in range(first, first + RANKS)]
        self.seq = 4096
        self.entries = self._entries()
        self.calls = self._calls()

    def _groups(self, rank: int, world: int) -> tuple[Group, ...]:
        """The world, the ranks of its node, those of its place on every node, and those on every eighth."""
        members = range(world), range(self.first, self.first + RANKS), range(rank % RANKS, world, RANKS), range(rank % 64, world, 64)
        return tuple(Group(name, name, "nccl", tuple(ranks), 600.0) for name, ranks in zip(GROUPS, members, strict=True))

    def _entries(self) -> tuple[Collective, ...]:
        found = [
            Collective(name, 0, seq, OPS[seq % 4], ((4096, 1024 + seq % 24),), ((4096, 1024 + seq % 24),), ("BFloat16",), WALL + seq * 0.01, 600.0, True)
            for seq in range(self.seq - self.each + 1, self.seq + 1) for name in GROUPS
        ]  # fmt: skip
        return (*found[:-1], replace(found[-1], done=False))

    def _calls(self) -> dict[str, Calls]:
        kinds = b"".join((100 + seq % 24).to_bytes(KIND_BYTES, "little") for seq in range(self.seq - 4095, self.seq + 1))
        return {name: Calls(0, self.seq - 4095, kinds, KNOWN) for name in GROUPS}

    def read(self) -> None:
        """All recorders were read."""
        self.seq += self.each
        self.entries, self.calls = self._entries(), self._calls()

    def complete(self) -> None:
        """The newest collective of every rank is done, or open again."""
        self.entries = (*self.entries[:-1], replace(self.entries[-1], done=not self.entries[-1].done))

    def report(self, second: int) -> NodeReport:
        numbers = dict.fromkeys(GROUPS, self.seq + second)
        node, cpu_s = f"node{self.first // RANKS:04d}", 100.0 + second
        states = tuple(
            RankState(
                rank=rank, local_rank=rank - self.first, node=node, stage_since=MONO, heartbeat_at=MONO + second, groups=self.groups[rank - self.first],
                process=Process(4000 + rank, True, "S", cpu_s, cpu_s + 20.0, rss_bytes=2_400_000_000 + second, started_at=MONO - 9.0, name="python3"),
                collectives=self.entries, collectives_at=MONO + self.seq, calls=self.calls, enqueued=numbers, completed=dict(numbers), steps=second,
                last_step_at=MONO + second - 0.25, step_s=0.5 + second / 1e6, probes={name: {"status": "armed"} for name in ("compile", "ddp", "steps")},
                compile_totals={"frames": 12, "seconds": {"dynamo": 3.5, "inductor": 20.25}, "by_frame": {f"f{n}": [1, 2.5, "ab12", 1] for n in range(12)}},
                memory={"allocated": 10**10, "reserved": 2 * 10**10, "peak_allocated": 10**10, "oom": None},
            )
            for rank in range(self.first, self.first + RANKS)
        )  # fmt: skip
        return NodeReport(node, states, self.first // RANKS)


class Row(NamedTuple):
    """CPU seconds: of one node's answer; of the judge for all of them. bytes: of one answer; gzip: with it."""

    node_s: float
    parse_s: float
    apply_s: float
    bytes: float
    gzip: float


class Cluster:
    """A judge with its copies of all nodes, and the few nodes that all answers are from."""

    def __init__(self, nodes: int, entries: int) -> None:
        self.templates = [Ranks(first * RANKS, nodes * RANKS, entries) for first in range(min(8, nodes))]
        self.senders = [Sender("n", entries=entries_sent(nodes * RANKS), calls=calls_kept(nodes * RANKS)) for _ in self.templates]
        self.receivers = [Receiver(calls_kept(nodes * RANKS)) for _ in range(nodes)]
        self.second = 0

    def cycle(self) -> Row:
        self.second += 1
        node_s = parse_s = apply_s = 0.0
        bodies = []
        for template, sender, receiver in zip(self.templates, self.senders, self.receivers, strict=False):
            report = template.report(self.second)
            at = process_time()
            sender.update(report, MONO, WALL, "", False, ())
            bodies.append(json.dumps(sender.answer(receiver.base, receiver.events_after, MONO, WALL)).encode())
            node_s += process_time() - at
        for node, receiver in enumerate(self.receivers):
            at = process_time()
            came = json.loads(bodies[node % len(bodies)])
            parse_s, at = parse_s + process_time() - at, process_time()
            receiver.apply(came, SHIFT)
            receiver.report(0.0)
            apply_s += process_time() - at
        return Row(node_s / len(bodies), parse_s, apply_s, statistics.mean(map(len, bodies)), statistics.mean(len(zlib.compress(body, 1)) for body in bodies))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(nodes: int, entries: int, collect: bool) -> dict[str, list[float]]:
    """Of one size, in this process."""
    cluster = Cluster(nodes, entries)
    if not collect:
        gc.disable()
    gc.collect()
    gc.freeze()
    before = rss_bytes()
    rows = {"first": cluster.cycle()}
    memory = (rss_bytes() - before) / nodes
    for name in ("quiet", "read"):
        found = []
        for _ in range(CYCLES):
            for template in cluster.templates:
                template.complete() if name == "quiet" else template.read()
            found.append(cluster.cycle())
        rows[name] = Row(*(statistics.median(column) for column in zip(*found, strict=True)))
    return {name: [*row, memory] for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="64,512,2048")
    parser.add_argument("--entries", type=int, default=256, help="new entries a rank, a multiple of 4")
    parser.add_argument("--no-gc", action="store_true", help="without Python's cyclic collector, which looks through all that the judge keeps")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.entries, not options.no_gc)))
        return
    print("| nodes | ranks | cycle | a node | judge: parse | judge: apply | judge | bytes | gzip | memory a node |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for nodes in map(int, options.nodes.split(",")):
        command = [sys.executable, __file__, "--one", str(nodes), "--entries", str(options.entries), *["--no-gc"] * options.no_gc]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
        for name, (node_s, parse_s, apply_s, size, packed, memory) in json.loads(done.stdout).items():
            times = f"{1e3 * node_s:.1f} ms | {1e3 * parse_s:,.0f} ms | {1e3 * apply_s:,.0f} ms | {1e3 * (parse_s + apply_s):,.0f} ms"
            print(f"| {nodes} | {nodes * RANKS} | {name} | {times} | {size / 1e3:.1f} kB | {packed / 1e3:.1f} kB | {memory / 1e3:,.0f} kB |", flush=True)


if __name__ == "__main__":
    main()
