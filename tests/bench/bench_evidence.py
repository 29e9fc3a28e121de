"""How long after the verdict all evidence of an incident on many nodes is on disk. Real HTTP on loopback, a real writer; prints one table.

  python tests/bench/bench_evidence.py                     64 nodes of 8 ranks, one rank of each node asleep, five jobs, about 2 min
  python tests/bench/bench_evidence.py --culprits 1        one rank asleep
  python tests/bench/bench_evidence.py --answer-s 0.3      nodes that take their time over recorders

The launchers of all nodes but the first run in a few processes of their own and answer as real ones do: reports twice a second, stacks DUMP_S after
they were asked for, recorders from a buffer. This process judges node 0 and them: it looks after each round of pulls, as the monitor's loop does,
and writes the incident. All is there when each culprit has its stack in incident.json, its stacks/rank_N.txt and its fr/rank_N.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).parents[1] / name) for name in ("support", "synthetic"))

from build_status import job as job_info
from build_world import MONO, NODE_RANKS, WALL, LargeJob

from rankwatch.config import Options
from rankwatch.model import JobSnapshot, MonitorHealth, NodeReport, RankState, Status, Want
from rankwatch.monitor import heap, published
from rankwatch.monitor.announce import Announcer
from rankwatch.monitor.cases import Cases
from rankwatch.monitor.command import IncidentCommand
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.evidence import Evidence
from rankwatch.monitor.files import RunFiles
from rankwatch.monitor.nodes.offer import Offer
from rankwatch.monitor.nodes.pull import Peer, Puller
from rankwatch.monitor.policy import Limits
from rankwatch.monitor.stacks import StackCapture
from rankwatch.monitor.writer import Writer
from rankwatch.notify.direct import Direct
from rankwatch.serve.server import Server

SECRET = "RANKWATCH_BENCH_SECRET"
LOCAL = 3  # the culprit of a node
DUMP_S = 0.4  # py-spy over the ranks of a node
CHANGE_S = 0.5
BEFORE_S = 5.0  # a job does well before its ranks fall asleep
LOOK_S = 2.5  # of the judge, should no round come
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Clock:
    """The job's times, from a moment of CLOCK_MONOTONIC that all processes share: its ranks fall asleep then, at MONO."""

    zero: float

    def mono(self) -> float:
        return time.monotonic() - self.zero + MONO

    def wall(self) -> float:
        return time.monotonic() - self.zero + WALL

    @property
    def t(self) -> float:
        return time.monotonic() - self.zero


class Asleep(LargeJob):
    """Of the first `culprits` nodes one rank is asleep."""

    culprits = 1
    own: Iterable[int] = ()  # nodes whose recorders are read in this process

    def _refresh(self, t: float) -> None:
        self._read_at.update(dict.fromkeys(set(range(self.nodes)).difference(self.own), max(t, 2.0)))
        super()._refresh(t)

    def blame(self, rank: int) -> None:
        self.culprit = rank if rank % NODE_RANKS == LOCAL and rank // NODE_RANKS < self.culprits else -1

    def _state(self, rank: int, node: str, t: float) -> RankState:
        self.blame(rank)
        return super()._state(rank, node, t)

    def _open(self, rank: int) -> Any:
        self.blame(rank)
        return super()._open(rank)

    def dumped(self, ranks: Iterable[int], t: float) -> None:
        for rank in ranks:
            self.blame(rank)
            self.want((Want("stacks", (rank,), ""),), t)

    def report(self, node: int, t: float) -> NodeReport:
        return self._node(node, t)


def world(nodes: int, culprits: int, own: Iterable[int]) -> Asleep:
    made = Asleep(nodes * NODE_RANKS, "asleep", timeout_s=600.0)
    made.culprits, made.own = culprits, own
    return made


def serve(first: int, count: int, options: Any) -> None:
    """A child: so many launchers, until stdin ends."""
    clock, job = Clock(options.zero), world(options.nodes, options.culprits, range(first, first + count))
    body = json.dumps({"version": "2.10", "entries": ["x" * 350] * (options.recorder_kb * 1000 // 354)}).encode()
    offers = {node: Offer(f"nonce-{node}", "bench", job.size, clock.mono, clock.wall) for node in range(first, first + count)}
    servers = {node: Server("127.0.0.1:0", offer.routes(), os.environ[SECRET]) for node, offer in offers.items()}
    for node, offer in offers.items():
        offer.recorders(lambda ranks: (time.sleep(options.answer_s), {rank: {"nccl": body} for rank in ranks})[1])
        if not servers[node].start():
            raise SystemExit(servers[node].notice)
    print(json.dumps([[node, server.port] for node, server in servers.items()]), flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    dumps: list[tuple[float, int, tuple[int, ...]]] = []
    change_at = 0.0
    while not over.wait(0.02):
        t = clock.t
        dumps += [(t + DUMP_S, node, want.ranks) for node, offer in offers.items() for want in offer.take_wants() if want.kind == "stacks"]
        changed = {node for at, node, _ in dumps if at <= t}
        for at, _, ranks in dumps:
            if at <= t:
                job.dumped(ranks, t)
        dumps = [dump for dump in dumps if dump[0] > t]
        if t >= change_at:
            change_at, changed = t + CHANGE_S, set(offers)
            job._refresh(t)
        for node in changed:
            offers[node].put(job.report(node, t), ())


class Launchers:
    """The processes of all launchers but the judge's."""

    def __init__(self, options: Any, zero: float) -> None:
        self.secret = secrets.token_hex(16)
        each = -(-(options.nodes - 1) // options.processes)
        spans = [(first, min(each, options.nodes - first)) for first in range(1, options.nodes, each)]
        command = [sys.executable, __file__, "--zero", str(zero), "--nodes", str(options.nodes), "--culprits", str(options.culprits)]
        command += ["--recorder-kb", str(options.recorder_kb), "--answer-s", str(options.answer_s)]
        self.processes = [
            subprocess.Popen(
                [*command, "--serve", f"{first}:{count}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, SECRET: self.secret}
            )
            for first, count in spans
        ]
        ports = [each for process in self.processes for each in json.loads(process.stdout.readline())]  # type: ignore[union-attr]
        self.peers = [
            Peer(node, f"node{node:04d}", ("127.0.0.1",), port, f"nonce-{node}", "bench", tuple(range(node * NODE_RANKS, (node + 1) * NODE_RANKS)))
            for node, port in ports
        ]

    def stop(self) -> None:
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            process.wait(30)


class Judge:
    """Node 0: looks, asks, writes. `look` is what the monitor's loop does at each of its own."""

    def __init__(self, options: Any, clock: Clock, launchers: Launchers, folder: str) -> None:
        self.clock, self.job, self.came = clock, world(options.nodes, options.culprits, (0,)), threading.Event()
        self.puller = Puller(launchers.secret, print, lambda: "http://127.0.0.1:27435", self.came.set, clock.mono, clock.wall)
        self.puller.set_peers(launchers.peers)
        self.writer = Writer(folder, print)
        say: Callable[[str], None] = print
        self.cases = Cases(RunFiles(self.writer), Announcer(io.StringIO()), IncidentCommand("", say), Evidence(StackCapture()), Direct(Options(), say))
        self.status = Status(job_info(world_size=self.job.size, nnodes=options.nodes, node="node0000", run_dir=folder), None)
        self.state, self.limits = State(), Limits()
        self.verdict_at: float | None = None

    def look(self) -> None:
        now = self.clock.mono()
        self.job._refresh(self.clock.t)
        own = self.job.report(0, self.clock.t)
        snapshot = JobSnapshot(now, self.clock.wall(), self.job.size, 0, (own, *self.puller.reports(now)), "", 0.5, MONO - 600.0)
        self.puller.take_events()
        self.state, verdicts, wanted = diagnose(self.state, snapshot, now, self.limits)
        changes = self.cases.judge(verdicts, snapshot, self.limits)
        if changes and self.verdict_at is None:
            self.verdict_at = time.monotonic()
        shown = self.cases.ranks_to_dump(changes)
        wants = (*wanted, Want("stacks", shown, "an incident shows them")) if shown else wanted
        self.job.dumped([rank for want in wants if want.kind == "stacks" for rank in want.ranks if rank < NODE_RANKS], self.clock.t)
        self.puller.ask(wants)
        self.puller.hurry(bool(wanted or self.cases.book.open))
        self.cases.attach(changes, self.recorders, self.status)
        self.status = published.status(self.status, snapshot, verdicts, self.cases.book, MonitorHealth(polls=1), "", self.writer.root, None)
        self.cases.tell(changes, self.status)

    def recorders(self, ranks: Iterable[int]) -> dict[int, dict[str, bytes]]:
        wanted = tuple(ranks)
        here = {rank: {"nccl": b'{"entries": []}'} for rank in wanted if rank < NODE_RANKS}
        return {**here, **self.puller.recorders(wanted, 0)}

    def written(self, culprits: Iterable[int]) -> dict[str, bool]:
        """Which evidence of all culprits is on disk."""
        folder = next((Path(self.writer.root) / "incidents").iterdir(), None) if (Path(self.writer.root) / "incidents").exists() else None
        if folder is None or not (folder / "incident.json").exists():
            return dict.fromkeys(("incident.json", "stacks", "recorders"), False)
        stacks = json.loads((folder / "incident.json").read_bytes())["stacks"]
        return {
            "incident.json": all(stacks.get(str(rank)) for rank in culprits),
            "stacks": all((folder / "stacks" / f"rank_{rank}.txt").exists() for rank in culprits),
            "recorders": all((folder / "fr" / f"rank_{rank}.json").exists() for rank in culprits),
        }


def one_job(options: Any) -> dict[str, float]:
    """Seconds from the first verdict until each kind of evidence is whole on disk, and what the verdict took."""
    zero = time.monotonic() + BEFORE_S + 3.0
    launchers = Launchers(options, zero)
    with tempfile.TemporaryDirectory() as folder:
        judge = Judge(options, Clock(zero), launchers, folder)
        culprits = [node * NODE_RANKS + LOCAL for node in range(options.culprits)]
        found: dict[str, float] = {}
        judge.puller.start()
        try:
            look_at = 0.0
            while len(found) < 3 and time.monotonic() < zero + LIMIT_S:
                if judge.came.wait(0.05) or time.monotonic() >= look_at:
                    judge.came.clear()
                    judge.look()
                    look_at = time.monotonic() + LOOK_S
                if judge.verdict_at is not None:
                    there = [what for what, whole in judge.written(culprits).items() if whole]
                    for what in there:
                        found.setdefault(what, time.monotonic() - judge.verdict_at)
        finally:
            judge.puller.stop()
            launchers.stop()
            judge.writer.flush(5.0)
        if judge.verdict_at is None:
            raise SystemExit("no verdict came")
        (incident,) = judge.cases.book.open
        assert incident.verdict.culprit_ranks == tuple(culprits), incident.verdict.summary
        return {"asleep until named": judge.verdict_at - zero, **{what: found.get(what, float("nan")) for what in ("incident.json", "stacks", "recorders")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--culprits", type=int, help="nodes of which one rank is asleep; default: all")
    parser.add_argument("--recorder-kb", type=int, default=700, help="of one rank's recorder: torch keeps 2,000 entries")
    parser.add_argument("--answer-s", type=float, default=0.0, help="so long a node takes for an answer with recorders, beside what that costs")
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--zero", type=float, help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    options.culprits = options.culprits or options.nodes
    if options.serve:
        first, _, count = options.serve.partition(":")
        serve(int(first), int(count), options)
        return
    heap.keep_large_apart()
    heap.collect_less_often()
    print(f"{options.nodes} nodes, {options.culprits} ranks asleep, recorders of {options.recorder_kb} KB after {options.answer_s:g} s, {options.jobs} jobs")
    print("seconds from the verdict until all is on disk:")
    jobs = [one_job(options) for _ in range(options.jobs)]
    for what in jobs[0]:
        values = sorted(job[what] for job in jobs)
        print(f"{what:<20} median {statistics.median(values):.2f}   all: " + ", ".join(f"{value:.2f}" for value in values))


if __name__ == "__main__":
    main()
