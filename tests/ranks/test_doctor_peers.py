"""`rankwatch doctor --peers` with real processes: on loopback with a port each, and in network namespaces with a cable cut, a link cut, a firewall."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import netns
import pytest
from netns import Network

from rankwatch.commands.peers.nodelist import DEFAULT_PORT

pytestmark = pytest.mark.ranks
MAY_TAKE_S = 5.0
"""More than --wait, by contract."""
START_S = 10.0
"""The interpreter's start and end on a busy machine."""
spaces = pytest.mark.skipif(bool(netns.why_not()), reason=f"no network namespaces: {netns.why_not()}")
CALM = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}


def command(*words: str, before: Sequence[str] = ()) -> list[str]:
    return [sys.executable, "-m", "rankwatch", *before, "doctor", "--peers", *words]


def started(argv: Sequence[str], env: Mapping[str, str] = CALM, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, env=dict(env), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ends(processes: Sequence[subprocess.Popen[str]], wait_s: float) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each; all within the time that the check may take."""
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=wait_s + MAY_TAKE_S + START_S)
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return found


@pytest.fixture
def ports() -> list[int]:
    """Three free ports."""
    with socket.socket() as a, socket.socket() as b, socket.socket() as c:
        for each in (a, b, c):
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in (a, b, c)]


class TestOnLoopback:
    def test_three_processes_find_each_other_and_only_the_first_prints(self, ports: list[int], tmp_path: Path) -> None:
        """From a file, over IPv4 and IPv6 alike."""
        (tmp_path / "nodes").write_text(f"127.0.0.1:{ports[0]}  # the first\n[::1]:{ports[1]}\n127.0.0.1:{ports[2]}\n")
        found = ends([started(command("./nodes", "--peer-index", str(at)), cwd=tmp_path) for at in range(3)], 30)
        assert [code for code, _, _ in found] == [0, 0, 0], found
        assert re.search(r"^all 3 nodes reach each other; round trip [0-9.]+ ms", found[0][1], re.MULTILINE)
        assert f"1 [::1]:{ports[1]}" in found[0][1]
        assert [out for _, out, _ in found[1:]] == ["", ""]

    def test_json_is_for_programs(self, ports: list[int]) -> None:
        listed = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
        (code, out, _), (_, other, _) = ends([started(command(listed, "--json", "--peer-index", str(at))) for at in range(2)], 30)
        document = json.loads(out)
        assert (code, document["supervision"], document["faults"], other) == (0, "full", [], "")
        assert {a: list(row) for a, row in document["rows"].items()} == {"0": ["1"], "1": ["0"]}

    def test_a_node_that_was_not_started_is_told_after_the_wait(self, ports: list[int]) -> None:
        listed = ",".join(f"127.0.0.1:{port}" for port in ports)
        first, second = ends([started(command(listed, "--wait", "3s", "--peer-index", str(at))) for at in range(2)], 3)
        assert (first[0], second[0]) == (3, 3)
        missing = f"127.0.0.1:{ports[2]}"
        assert f"127.0.0.1:{ports[0]}, 127.0.0.1:{ports[1]} -> {missing}: refused\n    cause: the machine is up and nothing listens" in first[1]
        assert second[1] == f"127.0.0.1:{ports[1]} -> {missing}: refused\n"

    @pytest.mark.slow_ranks
    def test_where_the_first_was_not_started_the_next_tells(self, ports: list[int]) -> None:
        listed = ",".join(f"127.0.0.1:{port}" for port in ports)
        second, third = ends([started(command(listed, "--wait", "3s", "--peer-index", str(at))) for at in (1, 2)], 3)
        assert f"127.0.0.1:{ports[1]}, 127.0.0.1:{ports[2]} -> 127.0.0.1:{ports[0]}: refused\n" in second[1]
        assert third[1].count("\n") == 1

    def test_a_wrong_token_is_told_with_its_cause(self, ports: list[int], tmp_path: Path) -> None:
        (tmp_path / "token").write_text("correct horse\n")
        listed = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
        words = (listed, "--wait", "3s", "--peer-index")
        with_file = command(*words, "1", before=("--token-file", str(tmp_path / "token")))
        first, second = ends([started(command(*words, "0")), started(with_file)], 3)
        assert (first[0], second[0]) == (4, 4)
        assert f"wrong token\n    cause: 127.0.0.1:{ports[1]} was started with --token-file, 127.0.0.1:{ports[0]} was not\n" in first[1]
        assert f"127.0.0.1:{ports[1]} was started with --token-file" in second[1]

    def test_the_same_token_file_is_no_trouble(self, ports: list[int], tmp_path: Path) -> None:
        (tmp_path / "token").write_text("correct horse\n")
        listed = ",".join(f"127.0.0.1:{port}" for port in ports[:2])
        found = ends([started(command(listed, "--peer-index", str(at), before=("--token-file", str(tmp_path / "token")))) for at in range(2)], 30)
        assert [code for code, _, _ in found] == [0, 0], found

    def test_a_port_that_is_taken_is_told_with_who_holds_it(self, ports: list[int]) -> None:
        with socket.create_server(("127.0.0.1", ports[0])):
            ((code, out, err),) = ends([started(command(f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}", "--peer-index", "0"))], 0)
        assert (code, out) == (4, "")
        assert f"port {ports[0]} is taken by pid {os.getpid()} (" in err
        assert "--peer-port" in err

    def test_another_program_at_a_nodes_port_is_told(self, ports: list[int]) -> None:
        def answer(server: socket.socket) -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nServer: other\r\nContent-Length: 2\r\n\r\nhi")

        with socket.create_server(("127.0.0.1", ports[1])) as server:
            thread = threading.Thread(target=answer, args=(server,))
            thread.start()
            ((code, out, _),) = ends([started(command(f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}", "--peer-index", "0", "--wait", "2s"))], 2)
            server.shutdown(socket.SHUT_RDWR)
        thread.join()
        assert code == 4
        assert "another program answers" in out

    @pytest.mark.slow_ranks
    def test_an_interrupt_ends_it_with_what_is_known(self, ports: list[int]) -> None:
        process = started(command(f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}", "--peer-index", "0", "--wait", "600s"))
        assert process.stderr is not None
        assert "waiting for" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        ((code, out, err),) = ends([process], 0)
        assert code == 130
        assert "Traceback" not in err
        assert f"127.0.0.1:{ports[1]}: refused" in out

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            ((), "no list is given, and this is no SLURM step"),
            (("127.0.0.1:1,127.0.0.1:2",), "say which one this process is with --peer-index N (0 is 127.0.0.1:1, 1 is 127.0.0.1:2)"),
            (("a,b", "--peer-index", "2"), "the list has the places 0 to 1"),
            (("./missing",), "./missing cannot be read (No such file or directory)"),
            (("192.0.2.77,192.0.2.78",), "none of the 2 nodes of the list is this machine"),
            (("a:b",), "'a:b' is not accepted"),
        ],
    )
    def test_wrong_usage_says_what_to_give(self, tmp_path: Path, words: Sequence[str], why: str) -> None:
        ((code, out, err),) = ends([started(command(*words), cwd=tmp_path)], 0)
        assert (code, out) == (2, "")
        assert why in err


@spaces
class TestBetweenHosts:
    @staticmethod
    def step(network: Network, i: int, *words: str, local: int = 0, hosts: str = "") -> subprocess.Popen[Any]:
        """As srun starts it on node i."""
        slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": hosts or f"node[0-{network.n - 1}]", "SLURM_NODEID": str(i), "SLURM_PROCID": str(i)}
        env = {**CALM, **slurm, "SLURMD_NODENAME": network.name(i), "SLURM_LOCALID": str(local)}
        return network.spawn(i, command(*words), env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    @staticmethod
    def outcome(processes: Sequence[subprocess.Popen[Any]], wait_s: float) -> list[tuple[int, str]]:
        outputs = [process.communicate(timeout=wait_s + MAY_TAKE_S + START_S)[0].decode() for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, outputs, strict=True)]

    def test_a_slurm_step_needs_no_list(self) -> None:
        """The second task of a node has nothing to do, and says nothing."""
        with Network(3, resolves=True) as network:
            found = self.outcome([*(self.step(network, i) for i in range(3)), self.step(network, 1, local=1)], 30)
        assert [code for code, _ in found] == [0, 0, 0, 0], found
        assert "all 3 nodes reach each other" in found[0][1]
        assert [text for _, text in found[1:]] == ["", "", ""]

    def test_a_node_without_its_cable_is_told_on_the_first(self) -> None:
        with Network(3, resolves=True) as network:
            network.cut(2)
            first, second, third = self.outcome([self.step(network, i, "--wait", "6s") for i in range(3)], 6)
        assert (first[0], second[0], third[0]) == (3, 3, 4)
        assert re.search(r"^node0, node1 -> node2: (timed out|unreachable)", first[1], re.MULTILINE), first[1]
        assert "not known: whom node2 can reach" in first[1]
        assert second[1].startswith("node1 -> node2: ")
        assert third[1].startswith("node2 -> node0, node1: ")

    @pytest.mark.slow_ranks
    def test_a_link_between_two_that_is_cut_is_told_both_ways(self) -> None:
        """Their switch does not join these two ports; node 0 learns it from their own views."""
        with Network(3) as network:
            for i in (1, 2):
                done = subprocess.run(["bridge", "-n", str(network.namespace(None)), "link", "set", "dev", f"port{i}", "isolated", "on"], capture_output=True)
                if done.returncode != 0:
                    pytest.skip(f"the bridge isolates no port: {done.stderr.decode()}")
            listed = ",".join(network.address(i) for i in range(3))
            processes = [network.spawn(i, command(listed, "--wait", "6s"), env=CALM, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for i in range(3)]
            found = self.outcome(processes, 6)
        assert [code for code, _ in found] == [3, 3, 3]
        assert re.search(r"^10.77.0.2 <-> 10.77.0.3: (timed out|unreachable), both ways\n    cause: ", found[0][1], re.MULTILINE), found[0][1]
        assert "degraded: 4 of 6 connections" in found[0][1]

    @pytest.mark.slow_ranks
    def test_a_firewall_that_lets_one_port_through_is_told(self) -> None:
        """New connections to any port but the check's vanish: such a network carries no job."""
        with Network(2) as network:
            switch = ["tc", "-n", network.namespace(1)]
            # IPv4, TCP, SYN without ACK, another port than ours: drop (2), else pass (0)
            lines = ["40 0 0 12", "21 0 7 2048", "48 0 0 23", "21 0 5 6", "48 0 0 47", "84 0 0 18", "21 0 2 2", "40 0 0 36", f"21 0 1 {DEFAULT_PORT}"]
            lines += ["6 0 0 0", "6 0 0 2"]
            program = f"{len(lines)}," + ",".join(lines)
            for line in (["qdisc", "add", "dev", "eth0", "clsact"], ["filter", "add", "dev", "eth0", "ingress", "bpf", "da", "bytecode", program]):
                done = subprocess.run([*switch, *line], capture_output=True)
                if done.returncode != 0:
                    pytest.skip(f"this kernel filters no packets: {done.stderr.decode()}")
            listed = ",".join(network.address(i) for i in range(2))
            processes = [network.spawn(i, command(listed), env=CALM, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for i in range(2)]
            (code, text), (other, nothing) = self.outcome(processes, 30)
        assert (code, other, nothing) == (3, 0, "")
        assert f"10.77.0.1 -> 10.77.0.2: port {DEFAULT_PORT} works, others do not\n" in text
