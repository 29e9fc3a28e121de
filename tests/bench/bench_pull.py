"""What pulling many nodes costs the judge: CPU, time of a round, bytes, memory. Real HTTP on loopback; prints one table.

  python tests/bench/bench_pull.py                              256 launchers of 8 ranks, pulled every 2 s for 30 s
  python tests/bench/bench_pull.py --cycles 10000 --nodes 4     as fast as it goes: memory after every tenth of the cycles
  python tests/bench/bench_pull.py --silent 8                   eight of them accept and never answer

The launchers run in a few processes of their own and change their reports twice a second: heartbeats, steps, CPU times, four new collectives a rank.
Only this process is measured; it also takes the reports after every round, as the monitor's loop does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankwatch.model import Calls, Collective, Group, NodeReport, Process, RankState
from rankwatch.monitor.calls import KEEP
from rankwatch.monitor.heap import keep_large_apart
from rankwatch.monitor.nodes.offer import Offer
from rankwatch.monitor.nodes.pull import Peer, Puller
from rankwatch.serve.server import Server

RANKS = 8
ENTRIES = 64
CHANGE_S = 0.5
WARM_S = 5.0
SECRET = "RANKWATCH_BENCH_SECRET"


class Training:
    """How far the job is: the same for all ranks of a process, so that showing it costs little."""

    def __init__(self) -> None:
        self.kinds = {n: Collective("", 0, 0, "all_reduce", ((1024 * n,),), ((1024 * n,),), ("Float",)) for n in range(1, 9)}
        self.numbers = struct.pack("<8I", *(seq % 8 + 1 for seq in range(8))) * (KEEP // 8 + 1)
        self.steps = 4 * KEEP
        self.go_on()

    def go_on(self) -> None:
        """Another half second: two steps of two collectives each."""
        self.steps += 2
        last = self.last = 2 * self.steps
        self.entries = tuple(
            Collective("0", 0, seq, "all_reduce", ((1024 * (seq % 8 + 1),),), ((1024 * (seq % 8 + 1),),), ("Float",), seq * 0.125, 600.0, seq < last)
            for seq in range(last - ENTRIES, last + 1)
        )
        first = last - KEEP + 1
        self.calls = {"0": Calls(0, first, self.numbers[first % 8 * 4 : (first % 8 + KEEP) * 4], self.kinds)}


class Synthetic:
    """One launcher with RANKS ranks of a job that trains."""

    def __init__(self, number: int, world: int, secret: str, training: Training) -> None:
        self.number, self.training = number, training
        self.offer = Offer(f"nonce-{number}", "bench")
        self.server = Server("127.0.0.1:0", self.offer.routes(), secret)
        if not self.server.start():
            raise SystemExit(self.server.notice)
        first = number * RANKS
        groups = (
            Group("0", "default_pg", "nccl", tuple(range(world)), 600.0),
            Group("1", "dp", "nccl", tuple(range(first % 8, world, 8)), 600.0),
            Group("2", "tp", "nccl", tuple(range(first, first + RANKS)), 600.0),
        )
        self.ranks = [self._rank(first + local, local, groups) for local in range(RANKS)]
        self.change()

    def _rank(self, rank: int, local: int, groups: tuple[Group, ...]) -> RankState:
        return RankState(
            rank=rank, local_rank=local, node=f"node{self.number}", groups=groups, process=Process(4000 + local, True, "R", started_at=1.0),
            compile_totals={"frames": 40, "recompiles": 3, "seconds": {"dynamo": 12.5, "inductor": 61.0}},
            memory={"allocated_bytes": 30 << 30, "reserved_bytes": 40 << 30, "segments": 120},
            probes={name: {"state": "ok", "errors": 0} for name in ("compile", "ddp", "collectives", "steps", "cudagraph", "memory")},
        )  # fmt: skip

    def change(self) -> None:
        """Show how far the training is now."""
        now, wall, training = time.monotonic(), time.time(), self.training
        steps, last = training.steps, training.last
        self.ranks = [
            replace(
                rank, heartbeat_at=now, steps=steps, last_step_at=now - 0.1, step_s=0.25, collectives=training.entries, collectives_at=now,
                calls=training.calls, enqueued={"0": last, "1": last, "2": last}, completed={"0": last - 1, "1": last, "2": last},
                process=replace(rank.process, cpu_s=now, tree_cpu_s=now * 1.1, io_bytes=int(now * 1e6), rss_bytes=(3 << 30) + steps),
            )
            for rank in self.ranks
        ]  # fmt: skip
        event = {"kind": "compile", "rank": self.ranks[0].rank, "wall_ns": int(wall * 1e9), "frame": "forward@model.py:31", "seconds": 1.5}
        self.offer.put(NodeReport(f"node{self.number}", tuple(self.ranks), self.number), [event] if steps % 10 == 0 else [])


def serve(first: int, nodes: int, world: int, every_s: float) -> None:
    """A child: so many launchers, until stdin ends."""
    secret, training = os.environ[SECRET], Training()
    launchers = [Synthetic(number, world, secret, training) for number in range(first, first + nodes)]
    print(json.dumps([[launcher.number, launcher.server.port] for launcher in launchers]), flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.wait(every_s):
        training.go_on()
        for launcher in launchers:
            launcher.change()


class Children:
    """The processes of all launchers."""

    def __init__(self, nodes: int, processes: int, every_s: float) -> None:
        self.secret = secrets.token_hex(16)
        each = -(-nodes // processes)
        spans = [(first, min(each, nodes + 1 - first)) for first in range(1, nodes + 1, each)]
        command = [sys.executable, __file__, "--world", str((nodes + 1) * RANKS), "--every", str(every_s)]
        self.processes = [
            subprocess.Popen(
                [*command, "--serve", f"{first}:{count}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, SECRET: self.secret}
            )
            for first, count in spans
        ]
        ports: list[list[int]] = []
        for process in self.processes:
            assert process.stdout is not None
            ports += json.loads(process.stdout.readline())
        self.peers = [
            Peer(number, f"node{number}", ("127.0.0.1",), port, f"nonce-{number}", "bench", tuple(range(number * RANKS, (number + 1) * RANKS)))
            for number, port in ports
        ]

    def stop(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(30)


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Judge:
    """A puller, and what its rounds were like."""

    def __init__(self, children: Children, silent: int, workers: int) -> None:
        self.rounds: list[float] = []
        self.ages: list[float] = []
        self.events = 0
        self.deaf = [socket.create_server(("127.0.0.1", 0)) for _ in range(silent)]  # take the connection and never answer
        ports = {peer.group_rank: listener.getsockname()[1] for peer, listener in zip(children.peers, self.deaf, strict=False)}
        self.peers = [replace(peer, port=ports.get(peer.group_rank, peer.port)) for peer in children.peers]
        self.puller = Puller(children.secret, lambda line: print(f"  said: {line}"), lambda: "http://127.0.0.1:27435", self.came, workers=workers)
        self.puller.set_peers(self.peers)

    def came(self) -> None:
        now = time.monotonic()
        self.rounds.append(now - self.puller._turns._round_at)
        reports = self.puller.reports(now)
        self.ages += [report.report_age_s for report in reports if report.ranks]
        self.events += len(self.puller.take_events())

    def moved(self) -> tuple[int, int]:
        states = self.puller.states()
        return sum(state.pulls for state in states), sum(state.bytes for state in states)


def row(name: str, value: str) -> None:
    print(f"{name:<46} {value}")


def by_the_clock(judge: Judge, nodes: int, seconds: float) -> None:
    """Pulled every 2 s."""
    before, cpu = rss_bytes(), time.process_time()
    judge.puller.start()
    time.sleep(WARM_S)
    row("first rounds: CPU s, MB more", f"{time.process_time() - cpu:.2f}, {(rss_bytes() - before) / 1e6:.1f}")
    judge.rounds, judge.ages = [], []
    (pulls, moved), cpu, rss, began = judge.moved(), time.process_time(), rss_bytes(), time.monotonic()
    sizes = [rss]
    for _ in range(5):
        time.sleep(seconds / 5)
        sizes.append(rss_bytes())
    took, used = time.monotonic() - began, time.process_time() - cpu
    pulled, wire = (now - then for now, then in zip(judge.moved(), (pulls, moved), strict=True))
    row("rounds, pulls", f"{len(judge.rounds)}, {pulled}")
    row("CPU of the judge's process", f"{used / took:.1%} of a core, {used / max(1, pulled) * 1e3:.2f} ms a pull")
    row("time of a round, median / longest", f"{statistics.median(judge.rounds):.2f} s / {max(judge.rounds):.2f} s")
    row("bytes of a pull, both ways; all nodes", f"{wire / max(1, pulled):,.0f}; {wire / took / 1e6:.2f} MB/s")
    row("age of reports after a round, median / oldest", f"{statistics.median(judge.ages):.2f} s / {max(judge.ages):.2f} s")
    row(f"memory, MB, every {seconds / 5:.0f} s", ", ".join(f"{size / 1e6:.0f}" for size in sizes))
    row("threads", str(threading.active_count()))
    failing = [state for state in judge.puller.states() if state.problem]
    row("nodes with a problem", f"{len(failing)} of {nodes}" + (f": {failing[0].problem}" if failing else ""))


def as_fast_as_it_goes(judge: Judge, cycles: int) -> None:
    """Every cycle pulls all nodes."""
    judge.puller.start()
    cpu, began, sizes = time.process_time(), time.monotonic(), []
    for cycle in range(1, cycles + 1):
        judge.puller.pull_now(10.0)
        judge.came()
        if cycle % max(1, cycles // 10) == 0:
            gc.collect()
            sizes.append(rss_bytes())
            judge.rounds, judge.ages = [], []
            row(f"after {cycle} cycles", f"{sizes[-1] / 1e6:.2f} MB, {judge.events} events")
    pulled, wire = judge.moved()
    row(
        "cycles a second, CPU ms a pull, bytes a pull",
        f"{cycles / (time.monotonic() - began):.0f}, {(time.process_time() - cpu) / pulled * 1e3:.2f}, {wire / pulled:,.0f}",
    )
    row("memory growth over the last nine tenths", f"{(sizes[-1] - sizes[0]) / 1e6:+.2f} MB")
    row("failures", str(sum(state.failures for state in judge.puller.states())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--silent", type=int, default=0)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--every", type=float, default=CHANGE_S, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.serve:
        first, _, count = options.serve.partition(":")
        serve(int(first), int(count), options.world, options.every)
        return
    keep_large_apart()
    children = Children(options.nodes, min(options.processes, options.nodes), 0.05 if options.cycles else CHANGE_S)
    try:
        judge = Judge(children, options.silent, options.workers)
        row("nodes, ranks", f"{options.nodes}, {options.nodes * RANKS}")
        if options.cycles:
            as_fast_as_it_goes(judge, options.cycles)
        else:
            by_the_clock(judge, options.nodes, options.seconds)
        judge.puller.stop()
    finally:
        children.stop()


if __name__ == "__main__":
    main()
