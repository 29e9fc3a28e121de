"""Jobs of several nodes on real gloo ranks, all defaults: node 0's launcher judges them all, and the job is never disturbed.

A test prints what it has measured (`pytest -s`).
"""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import netns
import pytest
from cluster import Cluster, Node
from jobs import wait_for
from netns import Network

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(netns.why_not()), reason=f"no network namespaces: {netns.why_not()}")]
slow = pytest.mark.slow_ranks
PAGING = {"stuck", "failed", "timeout_imminent", "diverged"}
JOB = "many_nodes.py"
NAMED_S, UNHEALABLE_S, STACKS_S = 10.0, 5.0, 5.0
STORE_CALLS, STORE_CALL_EVERY_S, STORE_BYTES, STORE_CALL_BYTES = 60, 4.0, 4096, 512
SLACK_S = 4.0  # the machines that run this are small: a bar that is missed by a little there is no fault

# kind, rank, (verdict, cause), nodes, ranks a node, rendezvous
FAULTS = [
    pytest.param("asleep", 2, ("stuck", "not_entered"), 2, 2, "static", id="asleep, 2 nodes, static"),
    pytest.param("killed", 3, ("failed", "killed"), 2, 2, "c10d", id="killed, 2 nodes, c10d"),
    pytest.param("mismatch", 2, ("stuck", "mismatch"), 2, 2, "static", id="mismatch, 2 nodes, static", marks=slow),
    pytest.param("exited", 2, ("failed", "exited"), 2, 2, "c10d", id="exited, 2 nodes, c10d", marks=slow),
    pytest.param("stopped", 4, ("stuck", "stopped"), 3, 2, "c10d", id="stopped, 3 nodes, c10d", marks=slow),
    pytest.param("crashed", 4, ("failed", "crashed"), 3, 2, "static", id="crashed, 3 nodes, static", marks=slow),
    pytest.param("killed", 2, ("failed", "killed"), 4, 1, "static", id="killed, 4 nodes, static", marks=slow),
    pytest.param("asleep", 3, ("stuck", "not_entered"), 4, 1, "c10d", id="asleep, 4 nodes, c10d", marks=slow),
]


@pytest.mark.parametrize(("kind", "rank", "expected", "n", "nproc", "rendezvous"), FAULTS)
def test_a_fault_on_another_node_is_named(tmp_path: Path, kind: str, rank: int, expected: tuple[str, str], n: int, nproc: int, rendezvous: str) -> None:
    """Rank, host, cause and stacks are node 0's to tell; the others say notices and keep their evidence. Exit codes are torchrun's."""
    with Network(n) as network, Cluster(network, tmp_path, JOB, kind, "--rank", str(rank), "--timeout", "60", nproc=nproc, rendezvous=rendezvous) as cluster:
        first, there = cluster.nodes[0], cluster.nodes[rank // nproc]
        cluster.training()
        onset = float(wait_for(lambda: re.search(rf"rank {rank} is {kind} at (\S+)", there.stdout), 30, "the trouble begins")[1])
        doc = first.incident(60, culprit_ranks=[rank])
        wait_for(lambda: _with_stacks(first, doc["id"], rank, expected), 20, f"stacks, beyond {doc['stacks'].keys()}\n{first.tail()}")
        stacks_at = time.time()
        seen = first.incident(60, verdict=expected[0], cause=expected[1], culprit_ranks=[rank])
        print("\n" + _row(kind, n, rendezvous, onset, seen, stacks_at))
        assert seen["hosts"][str(rank)] == there.name
        line = first.line(f"{expected[0].upper()} rank={rank} host={there.name} ")
        assert f"cause={expected[1]}" in line
        assert not [d for d in first.incidents() if d["verdict"] in PAGING and d["culprit_ranks"] != [rank]]
        if expected[0] == "stuck":
            folder = first.run_dir / "incidents" / doc["id"] / "fr"
            wanted = {f"rank_{rank}.json", "rank_0.json", f"rank_{n * nproc - 1 if rank != n * nproc - 1 else 1}.json"}
            wait_for(lambda: wanted <= {path.name for path in folder.glob("*")}, 15, f"recorder files {wanted}")
        if expected[0] == "failed":
            assert cluster.end() == [1] * n, "\n".join(node.tail() for node in cluster.nodes)
        for node in cluster.nodes[1:]:
            _only_notices(node)
            assert list(node.run_dir.glob(f"nodes/{node.name}-*/events.jsonl"))
            assert not node.incidents()


@slow
def test_packets_that_get_lost_page_nobody(tmp_path: Path) -> None:
    """A quarter of all packets from and to a node for 20 s: the job goes on slowly and ends well, and so do our lines."""
    with Network(2) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "35", "--timeout", "120", nproc=2) as cluster:
        _all_report(cluster)
        try:
            network.loss(1, 25)
        except netns.Unavailable as error:
            pytest.skip(str(error))
        _let_pass(cluster, 20)
        network.loss(1, 0)
        _ends_well(cluster, also=r"node1 has not answered|node1 answers again| SLOW ", elsewhere=_ALONE)


@slow
def test_a_node_that_is_cut_off_for_a_while_is_unknown_and_comes_back(tmp_path: Path) -> None:
    """Some 15 s without a link, which TCP survives: no rank here is blamed, its ranks are unknown, then all is said to be well again."""
    with Network(2) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "40", "--timeout", "120", nproc=2) as cluster:
        first, other = cluster.nodes
        _all_report(cluster)
        network.cut(1)
        first.line(r"node1 has not answered for \d+ s \(.*\): its ranks 2-3 are unknown; does its launcher run", 30)
        slow_one = first.incident(60, verdict="slow")
        assert (slow_one["unknown_ranks"], slow_one["confidence"]) == ([2, 3], "partial")
        other.line("has stopped asking: this one judges its own ranks", 30)
        network.heal(1)
        first.line("node1 answers again after", 40)
        first.line(" RECOVERED ", 60)
        assert all(set(doc["culprit_ranks"]) <= {2, 3} for doc in first.incidents())
        _ends_well(cluster, also=r"node1 has not answered|node1 answers again| SLOW | RECOVERED ", elsewhere=_ALONE + "| SLOW ")
        other.line("asks again: it tells the incidents of the whole job", 1)


@slow
def test_a_node_that_stays_cut_off_is_what_the_page_speaks_of(tmp_path: Path) -> None:
    """The watchdog ends node 0's ranks. Before that it is paged that the others are unknown; no rank of node 0 is blamed."""
    with Network(2) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "40", "--timeout", "40", nproc=2) as cluster:
        first, other = cluster.nodes
        _all_report(cluster)
        network.cut(1)
        first.line("node1 has not answered for", 30)
        doc = wait_for(lambda: next((doc for doc in first.incidents() if _paged(doc)), None), 60, "a page")
        assert (doc["unknown_ranks"], doc["confidence"]) == ([2, 3], "partial")
        assert first.end(90) == 1
        assert all(set(doc["culprit_ranks"]) <= {2, 3} for doc in first.incidents())
        other.line("has stopped asking: this one judges its own ranks", 30)
        assert list(other.run_dir.glob("nodes/node1-*/incidents/*/incident.json"))


@slow
def test_a_launcher_that_is_stopped_for_a_while_is_no_incident(tmp_path: Path) -> None:
    """Its ranks train on."""
    with Network(2) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "40", nproc=2) as cluster:
        first, other = cluster.nodes
        _all_report(cluster)
        other.process.send_signal(signal.SIGSTOP)
        first.line("node1 has not answered for", 30)
        _let_pass(cluster, 8)
        other.process.send_signal(signal.SIGCONT)
        first.line("node1 answers again after", 30)
        _ends_well(cluster, also=r"node1 has not answered|node1 answers again", elsewhere=_ALONE)
        assert not first.incidents()


@slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_ranks_whose_launcher_is_killed_train_on_unknown(tmp_path: Path, rendezvous: str) -> None:
    """Node 0's launcher waits for the dead one in torchrun's exit barrier, as it does without rankwatch, and says so."""
    with Network(2) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "25", nproc=2, rendezvous=rendezvous) as cluster:
        first, other = cluster.nodes
        _all_report(cluster)
        other.process.kill()
        first.line(r"node1 has not answered for \d+ s \(10.77.0.2:\d+: connection refused\): its ranks 2-3 are unknown", 30)
        first.line(r"the ranks of this node have ended: torchrun has waited for 60 s for the launchers of the other nodes \(its exit barrier, for 300 s", 120)
        assert not first.incidents()


@slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_a_node_whose_judge_loses_its_power_speaks_for_itself(tmp_path: Path, rendezvous: str) -> None:
    """Its ranks fail within moments. It says so, keeps the evidence, and ends as torchrun does."""
    with Network(2) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "60", nproc=2, rendezvous=rendezvous) as cluster:
        other = cluster.nodes[1]
        _all_report(cluster)
        network.kill(0)
        assert other.end(60) == 1
        other.line("has stopped asking: this one judges its own ranks", 1)
        home = next(other.run_dir.glob("nodes/node1-*"))
        other.line(rf" done .*, exit code 1: .*run={home}$", 1)
        assert json.loads((home / "run.json").read_text())["exit_code"] == 1
        for doc in map(json.loads, (path.read_text() for path in home.glob("incidents/*/incident.json"))):
            assert (doc["culprit_ranks"], doc["confidence"]) == ([], "partial")
            other.line(f"report: {home}/incidents/{doc['id']}/report.txt", 1)


@slow
def test_a_node_whose_judge_is_killed_speaks_for_itself_after_a_while(tmp_path: Path) -> None:
    """The ranks train on, here and there."""
    with Network(2) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "30", nproc=2) as cluster:
        _all_report(cluster)
        cluster.nodes[0].process.kill()
        other = cluster.nodes[1]
        other.line("the launcher of group rank 0 has stopped asking", 40)
        assert other.end(60) == 0
        other.line(" done .*: 0 stuck, 0 slow", 1)


@slow
def test_after_a_restart_all_ranks_are_seen_again(tmp_path: Path) -> None:
    """A rank of another node raises once. One incident, closed by the restart; the second attempt is judged as a whole and ends well."""
    words = ("crashed", "--rank", "2", "--once", str(tmp_path / "once"), "--seconds", "12")
    again = {"torchrun": ("--max-restarts", "1"), "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
    with Network(2) as network, Cluster(network, tmp_path, JOB, *words, nproc=2, rendezvous="c10d", **again) as cluster:
        first, other = cluster.nodes
        first.line("FAILED rank=2 host=node1 .*cause=crashed", 90)
        first.line("RECOVERED rank=2 host=node1 .*by=restart attempt=1", 90)
        first.line("all 4 ranks stepping", 60)
        _ends_well(cluster, also=" FAILED rank=2| RECOVERED rank=2", pages=1)
        assert [(doc["closed_by"], doc["culprit_ranks"]) for doc in first.incidents()] == [("restart", [2])]
        assert _run(first)["restarts"] == 1
        _only_notices(other)


@slow
def test_a_restart_into_a_stale_store_ends_as_without_us(tmp_path: Path) -> None:
    """The static rendezvous keeps the addresses of the attempt before, whatever is set: gloo does not connect in the next one.

    torchrun by itself ends after 7 s, or, as often, after 156 s: then node 0's ranks wait for those of node 1, which have no restart left.
    """
    words = ("crashed", "--rank", "2", "--once", str(tmp_path / "once"), "--seconds", "12", "--timeout", "30")
    with Network(2) as network, Cluster(network, tmp_path, JOB, *words, nproc=2, torchrun=("--max-restarts", "1")) as cluster:
        first = cluster.nodes[0]
        first.line("FAILED rank=2 host=node1 .*cause=crashed", 90)
        first.incident(90, verdict="failed", cause="store_wait")
        assert cluster.end(200) == [1, 1]


@slow
def test_nodes_that_join_and_leave_an_elastic_job_are_no_incident(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    more: dict[str, Any] = {"nnodes": "1:2", "late": (1,), "torchrun": ("--rdzv-conf", "last_call_timeout=2", "--max-restarts", "3")}
    more["env"] = {"STOP_FILE": str(stop), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Network(2, resolves=True) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "600", nproc=2, rendezvous="c10d", **more) as it:
        first, other = it.nodes

        def trained(node: Node, times: int) -> None:
            wait_for(lambda: node.stdout.count(" trains") >= times, 90, f"{times} ranks have trained\n{node.tail()}")

        trained(first, 2)
        first.line("watching 2 ranks on 1 node;", 30)
        it.start(1)
        trained(other, 2)
        wait_for(lambda: [each.get("ranks") for each in _state(first)["nodes"]] == ["0-1", "2-3"], 30, "node 0 sees all ranks")
        trained(first, 4)
        other.process.send_signal(signal.SIGTERM)
        assert other.end(60) != 0
        trained(first, 6)
        wait_for(lambda: [each.get("ranks") for each in _state(first)["nodes"]] == ["0-1"], 30, "node 0 sees its own ranks")
        stop.touch()
        assert first.end(60) == 0
        assert not first.incidents()
        assert {"event": "ending", "node": "node1", "reason": "SIGTERM to the launcher"} in [
            {name: value for name, value in event.items() if name != "at"} for event in _events(first)
        ]
        _only_notices(other)


@slow
def test_the_launcher_that_is_group_rank_0_after_a_restart_judges(tmp_path: Path) -> None:
    """Node 0 loses its power, and the rendezvous lives on node 2: node 1 is group rank 0 of the next round, draws a secret and names a rank of node 2."""
    more: dict[str, Any] = {"nnodes": "1:3", "rendezvous": "c10d", "endpoint": 2}
    more["torchrun"] = ("--rdzv-conf", "last_call_timeout=2", "--max-restarts", "3")
    more["env"] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ("asleep", "--rank", "1", "--restarted", "--seconds", "600", "--timeout", "60")
    with Network(3, resolves=True) as network, Cluster(network, tmp_path, JOB, *words, **more) as cluster:
        first, second, third = cluster.nodes
        cluster.training()
        first.line("all 3 ranks stepping", 60)
        _only_notices(second)
        network.kill(0)
        said = second.line("STUCK rank=1 host=node2 .*cause=not_entered", 150)
        print(f"\nMEASURED take-over: {said}")
        doc = second.incident(30, verdict="stuck", culprit_ranks=[1])
        assert (doc["waiting_ranks"], doc["hosts"]["1"], doc["unknown_ranks"]) == ([0], "node2", [])
        wait_for(lambda: _with_stacks(second, doc["id"], 1, ("stuck", "")), 30, "the stack of a rank of node 2")
        assert second.run_dir.joinpath("run.json").exists()
        _only_notices(third)


@slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_a_node_that_loses_its_power_is_named_and_not_the_ranks_that_die_of_it(tmp_path: Path, rendezvous: str) -> None:
    """On gloo they raise at once, long before the node counts as silent."""
    with Network(3) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "60", nproc=2, rendezvous=rendezvous) as cluster:
        first = cluster.nodes[0]
        _all_report(cluster)
        onset = time.time()
        network.kill(1)
        assert first.end(60) == 1
        said = first.line(r" FAILED ranks?=2-3 host=node1 .*cause=(killed|unknown) domain=node", 1)
        print(f"\nMEASURED lost node, {rendezvous}: node 0 has ended {time.time() - onset:.1f} s after it; {said}")
        (doc,) = first.incidents()
        assert (doc["verdict"], doc["culprit_ranks"], doc["confidence"]) == ("failed", [2, 3], "likely")
        assert cluster.nodes[2].end(60) == 1


def _acted(doc: dict[str, Any]) -> bool:
    return bool(doc["action"]) and doc["action"]["taken"] == "exit"


@slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_the_workers_of_all_nodes_are_ended_where_the_job_cannot_heal(tmp_path: Path, rendezvous: str) -> None:
    """--on-stuck exit, no restart left: the judge ends its workers, and has the others end theirs; all exit codes are 1."""
    words = ("mismatch", "--rank", "2", "--timeout", "300")
    more: dict[str, Any] = {"options": ("--on-stuck", "exit"), "rendezvous": rendezvous}
    with Network(2) as network, Cluster(network, tmp_path, JOB, *words, nproc=2, **more) as cluster:
        first, other = cluster.nodes
        onset = float(wait_for(lambda: re.search(r"rank 2 is mismatch at (\S+)", other.stdout), 60, "the trouble begins")[1])
        assert cluster.end(60) == [1, 1]
        print(f"\nMEASURED on-stuck exit, {rendezvous}: all have ended after {time.time() - onset:.1f} s")
        (doc,) = first.incidents()
        assert (doc["cause"], doc["culprit_ranks"], _acted(doc)) == ("mismatch", [2], True)
        for node in cluster.nodes:
            assert "rankwatch ended the workers (--on-stuck exit)" in node.stderr
        _only_notices(other)


@slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_a_node_whose_ranks_notice_nothing_is_ended_as_well(tmp_path: Path, rendezvous: str) -> None:
    """The only rank of node 1 is stopped: no connection that closes tells it anything, and torchrun there would wait for ever."""
    more: dict[str, Any] = {"options": ("--on-stuck", "exit", "--limit", "exit_stopped_s=5"), "rendezvous": rendezvous}
    with Network(2) as network, Cluster(network, tmp_path, JOB, "stopped", "--rank", "1", "--timeout", "300", **more) as cluster:
        onset = float(wait_for(lambda: re.search(r"rank 1 is stopped at (\S+)", cluster.nodes[1].stdout), 60, "the trouble begins")[1])
        assert cluster.end(90) == [1, 1]  # SIGTERM does not end a stopped process: torchrun kills it 30 s later
        print(f"\nMEASURED on-stuck exit of a stopped rank, {rendezvous}: all have ended after {time.time() - onset:.1f} s")


@slow
def test_max_restarts_restarts_the_workers_of_all_nodes_after_the_judge_has_ended_them(tmp_path: Path) -> None:
    words = ("mismatch", "--rank", "2", "--once", str(tmp_path / "once"), "--seconds", "12", "--timeout", "300")
    more: dict[str, Any] = {"options": ("--on-stuck", "exit"), "torchrun": ("--max-restarts", "1"), "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
    with Network(2) as network, Cluster(network, tmp_path, JOB, *words, nproc=2, rendezvous="c10d", **more) as cluster:
        first, other = cluster.nodes
        first.line("STUCK rank=2 host=node1 .*cause=mismatch", 90)
        assert cluster.end(120) == [0, 0], "\n".join(node.tail() for node in cluster.nodes)
        assert [(doc["closed_by"], _acted(doc)) for doc in first.incidents()] == [("restart", True)]
        assert _run(first)["restarts"] == 1
        _only_notices(other)


@slow
def test_a_launcher_that_was_not_told_to_act_leaves_its_workers_alone(tmp_path: Path) -> None:
    """It says so; on gloo its ranks then fail of the closed connections."""
    words = ("mismatch", "--rank", "2", "--timeout", "300")
    with Network(2) as network, Cluster(network, tmp_path, JOB, *words, nproc=2, more_options={0: ("--on-stuck", "exit")}) as cluster:
        first, other = cluster.nodes
        assert cluster.end(90) == [1, 1]
        assert "rankwatch ended the workers" in first.stderr
        other.line(r"ends the workers \(--on-stuck exit\); this launcher was started without it", 1)
        assert "rankwatch ended the workers" not in other.stderr


class Elsewhere(Cluster):
    """With other words for a node, and a folder that all nodes work in. instead: old word -> new ones; common: no --run-dir."""

    instead: dict[str, tuple[str, ...]] = {}
    of_node: dict[int, dict[str, tuple[str, ...]]] = {}
    common: Path | None = None

    def command(self, i: int) -> list[str]:
        words = super().command(i)
        for old, new in {**self.instead, **self.of_node.get(i, {})}.items():
            at = words.index(old)
            words[at : at + 2] = new
        if self.common is not None:
            self.common.mkdir(exist_ok=True)
            at = words.index("--run-dir")
            words = ["env", "-C", str(self.common), *words[:at], *words[at + 2 :]]
        return words


@slow
def test_launchers_meet_at_an_ipv6_address(tmp_path: Path) -> None:
    class Six(Elsewhere):
        instead = {"--master-addr": ("--master-addr", "fd77::1")}

    with Network(2) as network, Six(network, tmp_path, JOB, "trained", "--seconds", "8") as cluster:
        _all_report(cluster)
        _ends_well(cluster)


@slow
def test_nodes_may_have_different_numbers_of_ranks(tmp_path: Path) -> None:
    class Uneven(Elsewhere):
        of_node = {1: {"--nproc-per-node": ("--nproc-per-node", "3")}}

    with Network(2) as network, Uneven(network, tmp_path, JOB, "asleep", "--rank", "3") as cluster:
        first = cluster.nodes[0]
        first.line("watching 4 ranks on 2 nodes", 90)
        doc = first.incident(90, culprit_ranks=[3])
        assert (doc["waiting_ranks"], doc["hosts"]["3"]) == ([0, 1, 2], "node1")


@slow
def test_launchers_that_are_listed_ask_no_store(tmp_path: Path) -> None:
    options = ("--peers", "10.77.0.1:4100,10.77.0.2:4101", "--token-file", str(_token(tmp_path)))
    with Network(2) as network, Cluster(network, tmp_path, JOB, "asleep", "--rank", "2", "--timeout", "40", nproc=2, options=options) as cluster:
        first = cluster.nodes[0]
        first.line("watching 4 ranks on 2 nodes", 90)
        assert first.incident(90, culprit_ranks=[2])["hosts"]["2"] == "node1"
        assert first.end(120) == 1
        assert _run(first)["store"] == {"calls": 0, "bytes": 0}


@slow
def test_listed_launchers_find_each_other_in_any_order(tmp_path: Path) -> None:
    """c10d gives group ranks in the order of the nodes' addresses as texts: the judge here has the last line."""
    options = ("--peers", "10.77.0.3:4100,10.77.0.2:4100,10.77.0.1:4100", "--token-file", str(_token(tmp_path)))
    words = ("asleep", "--rank", "2", "--timeout", "60")
    with Network(3) as network, Cluster(network, tmp_path, JOB, *words, rendezvous="c10d", options=options) as cluster:
        first = cluster.nodes[0]
        doc = first.incident(90, verdict="stuck", culprit_ranks=[2])
        assert (doc["waiting_ranks"], doc["hosts"]["2"], doc["unknown_ranks"]) == ([0, 1], "node2", [])
        for node in cluster.nodes[1:]:
            _only_notices(node)


@slow
def test_two_jobs_with_one_list_and_token_file_are_two_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finds the listed ports taken, says so on every node, and judges each node's ranks alone: nothing of the first job is its own."""
    options = ("--peers", "10.77.0.1:4100,10.77.0.2:4100", "--token-file", str(_token(tmp_path)))
    with Network(2) as network, Cluster(network, tmp_path / "a", JOB, "trained", "--seconds", "120", options=options) as it:
        _all_report(it)
        monkeypatch.setattr("cluster.PORT", 29501)
        words = ("asleep", "--rank", "1", "--seconds", "60", "--timeout", "60")
        with Cluster(network, tmp_path / "b", JOB, *words, options=(*options, "--on-stuck", "exit")) as other:
            first = other.nodes[0]
            for node in other.nodes:
                node.line(r"--peers lists port 4100 for this node, and it is taken by .*\(by another job's launcher\?\)", 60)
            first.line("nodes 1 of 2 nodes report: 10.77.0.2: 10.77.0.2:4100 refuses this judge's secret: it is another job's launcher", 60)
            doc = first.incident(90, verdict="timeout_imminent")
            assert (doc["culprit_ranks"], doc["confidence"]) == ([], "partial")
            assert not [each for each in first.incidents() if each["verdict"] == "diverged" or each["action"]]
            assert not it.nodes[0].incidents()
            assert all(node.process.poll() is None for node in it.nodes)
            _only_notices(it.nodes[1])


@slow
def test_token_files_that_differ_are_told_on_both_nodes(tmp_path: Path) -> None:
    given = {node: ("--token-file", str(_token(tmp_path, f"the words of node {node}"))) for node in (0, 1)}
    with Network(2) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "40", "--timeout", "120", more_options=given) as cluster:
        first, other = cluster.nodes
        cluster.training()
        first.line("nodes 1 of 2 nodes report: node1: .* refuses this judge's secret: its --token-file has another text", 60)
        other.line("the judge of the job on node0 and this launcher refuse each other: its --token-file has another text", 60)
        assert cluster.end() == [0, 0]
        for node in cluster.nodes:
            run = json.loads(next(node.run_dir.rglob("run.json")).read_text())
            print(f"\nMEASURED store: {run['store']} in {run['ended_at'] - run['started_at']:.0f} s")
            assert run["store"]["calls"] < STORE_CALLS


@slow
def test_a_launcher_listens_where_it_is_told_to(tmp_path: Path) -> None:
    given = {1: ("--peer-address", "10.77.0.2:4555")}
    with Network(2) as network, Cluster(network, tmp_path, JOB, "trained", "--seconds", "8", more_options=given) as cluster:
        _all_report(cluster)
        assert ":4555" in network.output(1, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]).replace(f":{4555:04X} ", ":4555 ")
        _ends_well(cluster)


@slow
@pytest.mark.parametrize("given", [True, False], ids=["--run-dir", "by default"])
def test_all_nodes_keep_their_files_in_one_run_directory_where_they_share_one(tmp_path: Path, given: bool) -> None:
    class Shared(Elsewhere):
        common = None if given else tmp_path / "common"

    with Network(2) as network, Shared(network, tmp_path, JOB, "trained", "--seconds", "8", shared_run_dir=given) as cluster:
        _ends_well(cluster, judged=False)
        runs = [tmp_path / "run"] if given else [path for path in (tmp_path / "common" / "rankwatch-runs").iterdir() if not path.is_symlink()]
        assert len(runs) == 1
        first, second = json.loads((runs[0] / "run.json").read_text()), [json.loads(path.read_text()) for path in runs[0].glob("nodes/*/run.json")]
        assert first["nodes"] == ["node0", "node1"]
        assert [each["exit_code"] for each in second] == [0]


@slow
def test_two_launchers_on_one_host_do_not_mix_their_files(tmp_path: Path) -> None:
    class Twice(Elsewhere):
        instead = {"--nnodes": ("--nnodes", "2")}
        common = tmp_path / "common"

    with Network(1) as network, Twice(network, tmp_path, JOB, "asleep", "--rank", "3", nproc=2) as cluster:
        second = Node(network, 0, tmp_path / "second" / "run", tmp_path / "second")
        words = cluster.command(0)
        words[words.index("--node-rank") + 1] = "1"
        second.start(words, cluster._env)
        first = cluster.nodes[0]
        first.line("watching 4 ranks on 2 nodes", 90)
        said = first.line("STUCK rank=3 host=node0", 90)
        folder = Path(re.search(r"report=(\S+)/report.txt", said)[1])
        doc = json.loads((folder / "incident.json").read_text())
        assert (doc["culprit_ranks"], doc["waiting_ranks"]) == ([3], [0, 1, 2])
        run = folder.parent.parent
        assert {path.name.rsplit("-", 1)[0] for path in (run / "nodes").iterdir()} == {"node0"}
        assert len(list((tmp_path / "common" / "rankwatch-runs").glob("2*"))) == 1
        _only_notices(second)


# -- what the tests look at ------------------------------------------------------------------------------------------------------

_ALONE = r"has stopped asking: this one judges|asks again: it tells"


def _token(folder: Path, text: str = "a word that all nodes know") -> Path:
    path = folder / f"{text.replace(' ', '-')}.token"
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return path


def _all_report(cluster: Cluster) -> None:
    """All train, and node 0 has seen every rank."""
    cluster.training()
    n = cluster.nproc * len(cluster.nodes)
    cluster.nodes[0].line(rf"(all {n}|both) ranks stepping", 60)


def _let_pass(cluster: Cluster, seconds: float) -> None:
    """While this time passes, the job must go on."""
    until = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > until or any(node.process.poll() is not None for node in cluster.nodes), seconds + 10, "time passes")
    assert all(node.process.poll() is None for node in cluster.nodes), "\n".join(node.tail() for node in cluster.nodes)


def _ends_well(cluster: Cluster, also: str = "", elsewhere: str = "", pages: int = 0, judged: bool = True) -> None:
    """Exit code 0 everywhere; node 0 says its three lines and those that match `also`, the others those that match `elsewhere`; the store was left alone."""
    assert cluster.end() == [0] * len(cluster.nodes), "\n".join(node.tail() for node in cluster.nodes)
    for node, allowed in zip(cluster.nodes, [also, *[elsewhere] * len(cluster.nodes)], strict=False):
        expected = "nothing else" if node.index else r" watching \d+ ranks| ranks stepping| done "
        lines = [line for line in node.lines() if not re.search(expected, line) and not (allowed and re.search(allowed, line))]
        assert not lines, "\n".join(lines)
    if judged:
        first = cluster.nodes[0]
        assert sum(_paged(doc) for doc in first.incidents()) == pages
        written = [path for node in cluster.nodes for path in (*node.run_dir.glob("run.json"), *node.run_dir.glob("nodes/*/run.json"))]
        for run in [json.loads(path.read_text()) for path in written]:
            lasted_s = run["ended_at"] - run["started_at"]
            print(f"\nMEASURED store: {run['store']} in {lasted_s:.0f} s")
            assert 0 < run["store"]["calls"] < STORE_CALLS + lasted_s / STORE_CALL_EVERY_S
            assert run["store"]["bytes"] < STORE_BYTES + STORE_CALL_BYTES * run["store"]["calls"]


def _paged(doc: dict[str, Any]) -> bool:
    return any(change["verdict"] in PAGING for change in doc["history"])


def _state(node: Node) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(node.get(f"{node.url()}/api/v1/state"))
    return state


def _run(node: Node) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((node.run_dir / "run.json").read_text())
    return document


def _events(node: Node) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (node.run_dir / "events.jsonl").read_text().splitlines()]


def _with_stacks(node: Node, incident: str, rank: int, expected: tuple[str, str]) -> dict[str, Any] | None:
    """The incident's document once it holds the stacks that can be had."""
    doc: dict[str, Any] = json.loads((node.run_dir / "incidents" / incident / "incident.json").read_text())
    if expected[0] == "failed":  # gloo ends the others within milliseconds, often before anybody can look
        return doc
    return doc if doc["stack_groups"] and doc["stacks"].get(str(rank)) else None


def _row(kind: str, n: int, rendezvous: str, onset: float, doc: dict[str, Any], stacks_at: float) -> str:
    told = {change["verdict"]: change["at"] - onset for change in reversed(doc["history"])}
    words = " ".join(f"{verdict}={after_s:.1f}s" for verdict, after_s in sorted(told.items(), key=lambda item: item[1]))
    return f"MEASURED {kind} nodes={n} {rendezvous}: {words} stacks={stacks_at - onset:.1f}s"


def _only_notices(node: Node) -> None:
    """What a launcher says that another one speaks for: no first line, no verdict, no last line."""
    lines = node.lines()
    assert not [line for line in lines if re.search(r" watching \d| done | [A-Z]{4,} rank=|judges its own ranks", line)], "\n".join(lines)
