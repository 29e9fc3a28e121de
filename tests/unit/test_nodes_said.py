"""What is said of nodes that do not report."""

from rankwatch.model import NodeReport, RankState
from rankwatch.monitor.nodes.peer import NodeState
from rankwatch.monitor.nodes.said import Silences, problem

ASK = "; does its launcher run, does a firewall stand between?"


def silent(group_rank, ranks, age_s=12.0, why=""):
    return NodeReport(f"node{group_rank}", (), group_rank, age_s, silent_ranks=ranks, problem=why)


def talking(group_rank, *ranks):
    return NodeReport(f"node{group_rank}", tuple(RankState(rank) for rank in ranks), group_rank)


def state(group_rank, age_s=1.0, why=""):
    return NodeState(group_rank, f"node{group_rank}", "10.0.0.1:1", age_s, 0.0, 0.0, "0", why, 1, 0, 1)


def test_a_node_that_falls_silent_is_told_once_and_again_when_it_is_back():
    told = Silences()
    assert told.look((talking(0, 0), talking(1, 1))) == []
    assert told.look((talking(0, 0), silent(1, (1,)))) == [f"node1 has not answered for 12 s: its rank 1 is unknown{ASK}"]
    assert told.look((talking(0, 0), silent(1, (1,), 40.0))) == []
    assert told.look((talking(0, 0), talking(1, 1))) == ["node1 answers again after 40 s"]
    assert told.look((talking(0, 0), talking(1, 1))) == []


def test_the_reason_is_told_with_the_ranks():
    told = Silences()
    assert told.look((silent(1, (8, 9, 10), why="connection refused"),)) == [
        f"node1 has not answered for 12 s (connection refused): its ranks 8-10 are unknown{ASK}"
    ]


def test_many_nodes_at_once_are_a_few_lines():
    told = Silences()
    lines = told.look([silent(node, (node,)) for node in range(1, 100)])
    assert len(lines) == 9
    assert lines[-1] == "91 more nodes do not answer; their ranks are unknown"


def test_how_many_nodes_report_is_said_while_some_do_not():
    assert problem((state(1), state(2)), 3, "") == ""
    assert problem((state(1), state(2, why="timed out")), 3, "") == "2 of 3 nodes report: node2: timed out"
    assert problem((state(1), state(2, age_s=None)), 3, "") == "2 of 3 nodes report: node2: no report yet"
    assert problem((state(1),), 4, "") == "2 of 4 nodes report: 2 not found in torchrun's store"
    assert problem((), 2, "torchrun's store does not answer") == "1 of 2 nodes report: torchrun's store does not answer"
    many = problem([state(node, why="refused") for node in range(1, 10)], 10, "")
    assert many == "1 of 10 nodes report: node1: refused, node2: refused, node3: refused, node4: refused, and 5 more"
