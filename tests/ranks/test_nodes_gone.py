"""Who speaks when the launcher that judges the job has ended, was told to end everything, or is gone; and of a node that leaves. Real gloo ranks."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import netns
import pytest
from cluster import Cluster
from jobs import wait_for
from netns import Network

pytestmark = [pytest.mark.ranks, pytest.mark.slow_ranks, pytest.mark.skipif(bool(netns.why_not()), reason=f"no network namespaces: {netns.why_not()}")]
JOB = "many_nodes.py"
POINTER = "[rankwatch] node0 has ended; its log tells of the whole job"


def test_a_node_that_fails_of_node_0s_end_points_to_its_log(tmp_path: Path) -> None:
    with Network(2) as network, Cluster(network, tmp_path, JOB, "crashed", "--rank", "0") as cluster:
        first, other = cluster.nodes
        assert cluster.end(90) == [1, 1]
        assert sum(" FAILED rank=0 " in line for line in first.lines()) == 1
        assert other.lines() in ([], [POINTER])  # nothing where node 0 still listened


def test_a_node_that_ends_a_stopped_rank_by_order_keeps_silent(tmp_path: Path) -> None:
    """torchrun takes 30 s to kill it, and node 0 has ended by then."""
    words = ("stopped", "--rank", "1", "--timeout", "300")
    with Network(2) as network, Cluster(network, tmp_path, JOB, *words, options=("--on-stuck", "exit", "--limit", "exit_stopped_s=5")) as cluster:
        assert cluster.end(120) == [1, 1]
        assert cluster.nodes[1].lines() in ([], [POINTER])


def test_a_node_that_takes_over_says_what_node_0_saw_and_calls_for_what_is_open(tmp_path: Path) -> None:
    called = tmp_path / "called"
    more = {1: ("--on-incident", f'echo "$RANKWATCH_CHANGE" >> {called}')}
    with Network(2) as network, Cluster(network, tmp_path, JOB, "stopped", "--rank", "1", "--timeout", "300", more_options=more) as cluster:
        first, other = cluster.nodes
        first.line("STUCK rank=1 host=node1", 90)
        wait_for(lambda: list(other.run_dir.glob("nodes/*/incidents/*/incident.json")), 30, "node 1 has opened its own incident in silence")
        assert not called.exists()
        network.kill(0)
        other.line("has stopped asking: this one judges its own ranks", 60)
        other.line(r"as node0 last saw it at \d\d:\d\d:\d\dZ: STUCK rank=1 cause=stopped: rank 1 ", 10)
        wait_for(lambda: called.exists() and "opened" in called.read_text(), 30, "the command of node 1 is called")


def test_a_node_that_leaves_is_told_and_counted_out(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    more: dict[str, Any] = {"nnodes": "1:3", "torchrun": ("--rdzv-conf", "last_call_timeout=2", "--max-restarts", "3")}
    more["env"] = {"STOP_FILE": str(stop), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Network(3, resolves=True) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "600", rendezvous="c10d", **more) as cluster:
        first, _second, third = cluster.nodes
        cluster.training()
        first.line("all 3 ranks stepping", 60)
        assert third.process is not None
        third.process.send_signal(signal.SIGTERM)
        first.line("node2 has left: SIGTERM to its launcher; the job goes on with 2 ranks on 2 nodes", 90)
        wait_for(lambda: first.stdout.count(" trains") >= 2, 60, "the others train again")
        stop.touch()
        assert first.end(90) == 0
        assert json.loads((first.run_dir / "run.json").read_text())["nnodes"] == 2
