"""Several hosts on one machine (tests/support/netns.py, cluster.py): what the tests of many nodes stand on."""

from __future__ import annotations

import re
import subprocess
import sys

import netns
import pytest
from cluster import Cluster
from netns import Network

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(netns.why_not()), reason=f"no network namespaces: {netns.why_not()}")]

JOB = """
import datetime, socket, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
print(f"{socket.gethostname()} rank {dist.get_rank()} of {int(total)}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
LISTEN = """
import socket, sys
server = socket.create_server(("10.77.0.1", 7000))
print("listens", flush=True)
connection, peer = server.accept()
while word := connection.recv(100):
    connection.sendall(word)
"""
COUNT = """
import socket
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 7000))
print("listens", flush=True)
numbers = set()
while (word := udp.recvfrom(100))[0] != b"end":
    if word[0] == b"hello":
        udp.sendto(b"here", word[1])
    else:
        numbers.add(word[0])
print(len(numbers), flush=True)
"""
UDP = """
import socket
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
place = ("10.77.0.1", 7000)
"""
HELLO = "udp.settimeout(10); udp.sendto(b'hello', place); udp.recv(10)"  # then each knows where the other is
SEND = "for word in [b'%d' % n for n in range(200)] + [b'end'] * 50: udp.sendto(word, place)"


@pytest.mark.slow_ranks
@pytest.mark.parametrize(("rendezvous", "resolves"), [("static", False), ("static", True), ("c10d", False)])
def test_plain_torchrun_runs_on_two_nodes(tmp_path, rendezvous, resolves):
    job = tmp_path / "job.py"
    job.write_text(JOB)
    with Network(2, resolves=resolves) as network, Cluster(network, tmp_path, str(job), rendezvous=rendezvous, watched=False) as cluster:
        assert cluster.end(90) == [0, 0], "\n".join(node.tail() for node in cluster.nodes)
        said = sorted(re.findall(r"node\d rank \d of \d", "".join(node.stdout for node in cluster.nodes)))
    assert [line.split(" ")[0] for line in said] == ["node0", "node1"]
    assert sorted(line.split(" ", 1)[1] for line in said) == ["rank 0 of 2", "rank 1 of 2"]


def test_nodes_have_names_and_addresses_of_their_own():
    with Network(2) as network, Network(2, resolves=True) as other:
        show = ["sh", "-c", "hostname; getent hosts node1 || echo unknown; ip -brief address show eth0"]
        first, second = network.output(0, show), other.output(1, show)
    assert first.splitlines()[:2] == ["node0", "unknown"]
    assert "10.77.0.1/16" in first
    assert "fd77::1/64" in first
    assert second.splitlines()[0] == "node1"
    assert "fd77::2" in second.splitlines()[1]


@pytest.mark.slow_ranks
def test_a_connection_outlives_a_short_cut():
    talk = """
import socket, sys
link = socket.create_connection(("10.77.0.1", 7000), 5)
for line in sys.stdin:
    link.settimeout(float(line))
    link.sendall(b"hello")
    try:
        print("answer" if link.recv(100) else "closed", flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""
    with Network(2) as network:
        server = network.spawn(0, [sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"listens\n"
        client = subprocess.Popen(network.argv(1, [sys.executable, "-c", talk]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def ask(timeout_s: float) -> str:
            client.stdin.write(f"{timeout_s}\n")
            client.stdin.flush()
            return client.stdout.readline().strip()

        try:
            assert ask(10) == "answer"
            network.cut(1)
            assert ask(0.3) == "silence"
            network.heal(1)
            assert ask(10) == "answer"
        finally:
            client.communicate()
            server.stdout.close()


@pytest.mark.slow_ranks
def test_packets_get_lost_by_the_share_asked_for():
    with Network(2) as network:
        server = network.spawn(0, [sys.executable, "-c", COUNT], stdout=subprocess.PIPE)
        assert server.stdout.readline() == b"listens\n"
        network.output(1, [sys.executable, "-c", UDP + HELLO])
        try:
            network.loss(1, 50)
        except netns.Unavailable as error:
            pytest.skip(str(error))
        network.output(1, [sys.executable, "-c", UDP + SEND])
        assert 50 < int(server.stdout.readline()) < 150  # of 200: seven standard deviations
        network.loss(1, 0)
        server.stdout.close()


def test_nothing_outlives_the_network():
    with Network(1) as network:
        process = network.spawn(0, ["sleep", "600"])
        name = network.namespace(0)
        assert process.pid in network.pids(0) or process.poll() is None
    assert process.returncode == -9
    assert name not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
