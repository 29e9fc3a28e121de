"""One torchrun agent a node of a Network, with or without rankwatch around it: what each prints, what the judge writes, how each ends.

What torch 2.13 itself needs where host names do not resolve (all found by running it; Cluster gives it unless the network resolves):
* gloo binds to the address that the host name resolves to. Without one it warns ("Unable to resolve hostname to a (local) address") and takes
  127.0.0.1: a rank of another node is then never reached, one side fails after its timeout. GLOO_SOCKET_IFNAME=eth0 helps.
* The static rendezvous needs no name: `--master-addr` with an address is enough.
* The c10d rendezvous asks whether the endpoint is this host and dies of socket.gaierror on every node: `--rdzv-conf is_host=1` (0 elsewhere) keeps it
  from asking. It then publishes its own host name as MASTER_ADDR, which nobody reaches: `--local-addr` with an address helps.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import JOBS, wait_for
from netns import Network

PORT = 29500
"""Of the rendezvous, on node 0. In a namespace of its own it is always free."""


class Node:
    """One agent of a Cluster: its process, and what it writes."""

    def __init__(self, network: Network, index: int, run_dir: Path, folder: Path) -> None:
        self.index = index
        self.name = network.name(index)
        self.address = network.address(index)
        self.run_dir = run_dir
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._network = network
        self._folder = folder

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the agent; again after its end, or after `Network.kill`. Each start has files of its own."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} still runs"
        self.starts += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._file("stdout").open("wb") as stdout, self._file("stderr").open("wb") as stderr:
            self.process = self._network.spawn(self.index, command, env=env, cwd=self._folder, stdout=stdout, stderr=stderr)

    @property
    def stdout(self) -> str:
        """Of the last start, launcher and ranks together."""
        return self._file("stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._file("stderr").read_text(errors="replace")

    def lines(self) -> list[str]:
        """What rankwatch has said here."""
        return [line for line in self.stderr.splitlines() if line.startswith("[rankwatch]")]

    def line(self, pattern: str, deadline_s: float = 60) -> str:
        """The first line of rankwatch's that matches, waited for."""
        found: str = self._wait(lambda: next((line for line in self.lines() if re.search(pattern, line)), ""), deadline_s, f"a line with {pattern!r}")
        return found

    def incidents(self) -> list[dict[str, Any]]:
        """Every incident.json in this node's run directory, oldest first."""
        return [json.loads(path.read_text()) for path in sorted(self.run_dir.glob("incidents/*/incident.json"))]

    def incident(self, deadline_s: float, **want: Any) -> dict[str, Any]:
        """The first incident that has all of `want`, e.g. verdict="stuck", waited for."""

        def found() -> dict[str, Any] | None:
            return next((doc for doc in self.incidents() if all(doc.get(key) == value for key, value in want.items())), None)

        document: dict[str, Any] = self._wait(found, deadline_s, f"an incident with {want}")
        return document

    def url(self, deadline_s: float = 60) -> str:
        """The status page as rankwatch says it; reached from this node only, see `get`."""
        said = self.line(r"http://\S+", deadline_s)
        return re.search(r"http://[^\s;,]+", said).group()  # type: ignore[union-attr]

    def get(self, url: str, token: str = "", timeout_s: float = 10) -> str:
        """The body of a page, fetched by a process of this node. AssertionError for any status but 200."""
        code = "import sys,urllib.request as r; q=r.Request(sys.argv[1],headers={'Authorization':'Bearer '+sys.argv[2]} if sys.argv[2] else {}); "
        code += "sys.stdout.write(r.build_opener(r.ProxyHandler({})).open(q,timeout=float(sys.argv[3])).read().decode())"
        return self._network.output(self.index, [sys.executable, "-S", "-c", code, url, token, str(timeout_s)], timeout_s + 5)

    def end(self, deadline_s: float = 60) -> int:
        """The exit code, waited for."""
        assert self.process is not None, f"{self.name} was never started"
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {deadline_s:.0f} s\n{self.tail()}") from None

    def tail(self, chars: int = 3000) -> str:
        """The end of what it wrote, for a test's message."""
        return f"--- {self.name} stdout\n{self.stdout[-chars:]}\n--- {self.name} stderr\n{self.stderr[-chars:]}"

    def _wait(self, what: Any, deadline_s: float, why: str) -> Any:
        try:
            return wait_for(what, deadline_s, f"{why} on {self.name}")
        except AssertionError as error:
            seen = [(doc["verdict"], doc["cause"], doc["culprit_ranks"], doc["summary"]) for doc in self.incidents()]
            raise AssertionError(f"{error}; incidents: {seen}\n{self.tail()}") from None

    def _file(self, stream: str) -> Path:
        return self._folder / f"{stream}-{self.starts}.log"


class Cluster:
    """`[rankwatch options] torchrun --nnodes n --nproc-per-node k ... JOB` on every node. A context manager: nothing of it outlives the block.

    job: as for jobs.Job: a file of tests/ranks/jobs and its arguments, or torchrun's own words (an absolute path, `-m module`).
    rendezvous: "static" (--master-addr, --node-rank) or "c10d" (node `endpoint` is the endpoint). watched=False: plain torchrun.
    options: rankwatch's, for every node; more_options: {node: options}. nnodes: "1:2" and the like, for c10d.
    shared_run_dir: one --run-dir for all, as on a network file system, else one a node. late: nodes that start() is called for by hand.
    """

    def __init__(
        self,
        network: Network,
        tmp_path: Path,
        *job: str,
        nproc: int = 1,
        rendezvous: str = "static",
        watched: bool = True,
        options: Sequence[str] = (),
        more_options: Mapping[int, Sequence[str]] | None = None,
        torchrun: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        nnodes: str = "",
        shared_run_dir: bool = False,
        late: Sequence[int] = (),
        endpoint: int = 0,
    ) -> None:
        assert rendezvous in ("static", "c10d")
        self.network = network
        self.nproc = nproc
        self.nodes = [Node(network, i, tmp_path / "run" if shared_run_dir else tmp_path / f"node{i}" / "run", tmp_path / f"node{i}") for i in range(network.n)]
        self._job = (str(JOBS / job[0]), *job[1:]) if job[0].endswith(".py") else job
        self._rendezvous, self._watched, self._endpoint = rendezvous, watched, endpoint
        self._options, self._more_options = tuple(options), more_options or {}
        self._torchrun, self._nnodes, self._late = tuple(torchrun), nnodes or str(network.n), tuple(late)
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if not network.resolves:
            self._env.setdefault("GLOO_SOCKET_IFNAME", "eth0")
        self._env.update(env or {})

    def __enter__(self) -> Cluster:
        for node in self.nodes:
            if node.index not in self._late:
                self.start(node.index)
        return self

    def __exit__(self, *exc: object) -> None:
        for node in self.nodes:
            self.network.kill(node.index)
            if node.process is not None:
                node.process.wait(10)

    def start(self, i: int) -> None:
        """Start node i's agent: one of `late`, or again after its end."""
        self.nodes[i].start(self.command(i), self._env)

    def command(self, i: int) -> list[str]:
        """Node i's command line."""
        words = [sys.executable, "-m", "torch.distributed.run"]
        if self._watched:
            run_dir = str(self.nodes[i].run_dir)
            words = [sys.executable, "-m", "rankwatch", "--run-dir", run_dir, *self._options, *self._more_options.get(i, ()), "torchrun"]
        words += ["--nnodes", self._nnodes, "--nproc-per-node", str(self.nproc), *self._meeting(i), *self._torchrun]
        return [*words, *self._job]

    def end(self, deadline_s: float = 120) -> list[int]:
        """Every node's exit code, waited for."""
        until = time.monotonic() + deadline_s
        return [node.end(max(0.1, until - time.monotonic())) for node in self.nodes]

    def training(self, deadline_s: float = 90) -> None:
        """Returns once every rank has said that it trains (the jobs of tests/ranks/jobs print `... trains`)."""

        def all_train() -> bool:
            ended = any(node.process is None or node.process.poll() is not None for node in self.nodes)
            return ended or all(node.stdout.count(" trains") >= self.nproc for node in self.nodes)

        try:
            wait_for(all_train, deadline_s, "all ranks train")
        except AssertionError as error:
            raise AssertionError(f"{error}\n" + "\n".join(node.tail(1000) for node in self.nodes)) from None

    def _meeting(self, i: int) -> list[str]:
        place = self.network.address(self._endpoint)
        if self._rendezvous == "static":
            return ["--master-addr", place, "--master-port", str(PORT), "--node-rank", str(i)]
        words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{place}:{PORT}", "--rdzv-id", "job"]
        if not self.network.resolves:
            words += ["--rdzv-conf", f"is_host={int(i == self._endpoint)}", "--local-addr", self.network.address(i)]
        return words
