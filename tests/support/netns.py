"""Several hosts on one machine: a network namespace a node, joined by a bridge that has a namespace of its own. Needs root on Linux.

    with Network(2) as network:
        network.spawn(0, ["hostname"])          # node0, at network.address(0) = 10.77.0.1 and fd77::1

Nothing appears in the machine's own network. Every node has loopback, `eth0` with an IPv4 and an IPv6 address, a host name node<i> of its own, and
an /etc/hosts of its own, in which the nodes' names stand only with resolves=True. All nodes share the files and the process numbers of the machine.
What a job needs where the names do not resolve stands at Cluster (cluster.py).
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PREFIX = "rwnet"
MOST_NODES = 200
COMMAND_S = 10.0
_NAME = re.compile(rf"{PREFIX}(\d+)x\d+-\w+")
_SERIAL = itertools.count()
_ENTER = 'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"'
_RANDOM = 4294963256  # SKF_AD_OFF + SKF_AD_RANDOM: where a classic filter finds a random number


class Unavailable(Exception):
    """This machine cannot do that; the text says why."""


@functools.cache
def why_not() -> str:
    """Why there can be no network namespaces here; "" where there can."""
    try:
        with Network(1) as network:
            if network.output(0, ["cat", "/proc/sys/kernel/hostname"]).strip() != "node0":
                return "a process in a namespace keeps the machine's host name"
    except (OSError, RuntimeError, Unavailable, subprocess.SubprocessError) as error:
        return str(error)
    return ""


class Network:
    """`n` nodes. A context manager: whatever runs in the nodes is killed at its end, and the namespaces go. Unavailable where that is not permitted."""

    def __init__(self, n: int, resolves: bool = False) -> None:
        if not 1 <= n <= MOST_NODES:
            raise ValueError(f"1 to {MOST_NODES} nodes, not {n}")
        self.n = n
        self.resolves = resolves
        self._stem = f"{PREFIX}{os.getpid()}x{next(_SERIAL)}"
        self._hosts = ""
        self._processes: list[subprocess.Popen[Any]] = []
        self._losing: dict[int, str] = {}  # node -> how: "netem" or "bpf"

    def __enter__(self) -> Network:
        missing = [program for program in ("ip", "unshare", "mount") if shutil.which(program) is None]
        if missing:
            raise Unavailable(f"no {missing[0]} here; install iproute2 and util-linux")
        if os.geteuid() != 0:
            raise Unavailable("network namespaces need root; run the tests as root")
        _sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _build(self) -> None:
        names = "".join(f"{self.address(i)} {self.name(i)}\n{self.address(i, 6)} {self.name(i)}\n" for i in range(self.n)) if self.resolves else ""
        with tempfile.NamedTemporaryFile("w", prefix=f"{PREFIX}-hosts-", delete=False) as file:
            file.write(f"127.0.0.1 localhost\n::1 localhost\n{names}")
        self._hosts = file.name
        os.chmod(self._hosts, 0o644)
        switch = self.namespace(None)
        lines = [f"netns add {switch}", f"-n {switch} link add br0 type bridge forward_delay 0", f"-n {switch} link set br0 up"]
        for i in range(self.n):
            node = self.namespace(i)
            lines += [
                f"netns add {node}",
                f"-n {switch} link add port{i} type veth peer name eth0 netns {node}",
                f"-n {switch} link set port{i} master br0 up",
                f"-n {node} link set lo up",
                f"-n {node} address add {self.address(i)}/16 dev eth0",
                f"-n {node} address add {self.address(i, 6)}/64 dev eth0 nodad",  # an address that is being checked cannot be bound yet
                f"-n {node} link set eth0 up",
            ]
        for line in lines:
            _command("ip", *line.split())

    # -- what a node is called

    def name(self, i: int) -> str:
        """The node's host name."""
        return f"node{i}"

    def address(self, i: int, version: int = 4) -> str:
        """The node's own address, IPv4 or IPv6."""
        return f"10.77.0.{i + 1}" if version == 4 else f"fd77::{i + 1:x}"

    def namespace(self, i: int | None) -> str:
        """The name for `ip netns exec`; None: the bridge's."""
        return f"{self._stem}-{'switch' if i is None else i}"

    # -- processes

    def spawn(
        self,
        i: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdout: int | IO[Any] | None = subprocess.DEVNULL,
        stderr: int | IO[Any] | None = subprocess.STDOUT,
    ) -> subprocess.Popen[Any]:
        """Start a program in a node, in a session of its own. The pid is the program's own. env: the whole environment, else the caller's."""
        process = subprocess.Popen(self.argv(i, argv), env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True)
        self._processes.append(process)
        return process

    def output(self, i: int, argv: Sequence[str], timeout_s: float = COMMAND_S) -> str:
        """What a short program writes to stdout in a node. RuntimeError, with its stderr, where it fails."""
        done = subprocess.run(self.argv(i, argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} in {self.name(i)} ends with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def argv(self, i: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` in a node. Each link of the chain replaces the one before it: the pid stays."""
        return ["ip", "netns", "exec", self.namespace(i), "unshare", "--uts", "sh", "-c", _ENTER, self.name(i), self._hosts, *argv]

    def pids(self, i: int) -> list[int]:
        """Every process that runs in a node."""
        found = subprocess.run(["ip", "netns", "pids", self.namespace(i)], capture_output=True, text=True, timeout=COMMAND_S)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, i: int) -> None:
        """The node's power goes: SIGKILL to all that runs there, until nothing does. Its connections are closed by the kernel unless it was cut off first."""
        _end(self.namespace(i))

    # -- the wires

    def cut(self, i: int) -> None:
        """The node's cable is pulled out of the switch: packets vanish and nobody is told. A connection lives on if it is healed in time."""
        _command("ip", "-n", self.namespace(None), "link", "set", f"port{i}", "nomaster")

    def heal(self, i: int) -> None:
        """Undo `cut`."""
        _command("ip", "-n", self.namespace(None), "link", "set", f"port{i}", "master", "br0")

    def loss(self, i: int, percent: float) -> None:
        """Lose this share of the packets from and to a node, by chance; 0: none. Unavailable where the kernel can neither way.

        netem, else a filter of the classic kind that drops by the kernel's random numbers.
        """
        if not 0 <= percent <= 100:
            raise ValueError(f"0 to 100 percent, not {percent}")
        switch, port = self.namespace(None), f"port{i}"
        ends = {"netem": ((switch, port), (self.namespace(i), "eth0")), "bpf": ((switch, port),)}
        if i in self._losing:
            how = self._losing.pop(i)
            for namespace, device in ends[how]:
                _command("tc", "-n", namespace, "qdisc", "del", "dev", device, "root" if how == "netem" else "clsact")
        if percent == 0:
            return
        problems = []
        for how in ends:
            try:
                for namespace, device in ends[how]:
                    for line in _losing(how, device, percent):
                        _command("tc", "-n", namespace, *line)
                self._losing[i] = how
                return
            except Unavailable as error:
                problems.append(str(error))
                for namespace, device in ends[how]:
                    subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", device, "root" if how == "netem" else "clsact"], capture_output=True)
        raise Unavailable(f"this kernel loses no packets on request: {'; '.join(problems)}")

    # -- the end

    def close(self) -> None:
        """Kill what runs in the nodes and remove everything; safe to call twice."""
        for i in (*range(self.n), None):
            _remove(self.namespace(i))
        for process in self._processes:
            process.wait(COMMAND_S)
        if self._hosts:
            Path(self._hosts).unlink(missing_ok=True)


def _losing(how: str, device: str, percent: float) -> list[list[str]]:
    """The commands of tc for one end of a wire."""
    if how == "netem":
        return [["qdisc", "add", "dev", device, "root", "netem", "loss", f"{percent}%"]]
    limit = min(2**32 - 1, int(percent / 100 * 2**32))
    # A = random; if A >= limit: return 0 (pass) else return 2 (TC_ACT_SHOT)
    program = f"4,32 0 0 {_RANDOM},53 0 1 {limit},6 0 0 0,6 0 0 2"
    adding = ["filter", "add", "dev", device]
    return [["qdisc", "add", "dev", device, "clsact"], *([*adding, side, "bpf", "da", "bytecode", program] for side in ("ingress", "egress"))]


def _command(*argv: str) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S)
    except FileNotFoundError:
        raise Unavailable(f"no {argv[0]} here; install iproute2") from None
    if done.returncode != 0:
        raise Unavailable(f"`{' '.join(argv)}`: {(done.stderr or done.stdout).strip()}")


def _names() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=COMMAND_S)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]


def _end(namespace: str) -> None:
    """SIGKILL for whatever runs in a namespace of ours, until nothing does."""
    until = time.monotonic() + COMMAND_S
    while time.monotonic() < until:
        found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=COMMAND_S)
        pids = [int(pid) for pid in found.stdout.split()]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _remove(namespace: str) -> None:
    if namespace in _names():
        _end(namespace)
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=COMMAND_S)


def _sweep() -> None:
    """Remove what a test run that was killed has left: namespaces whose maker is gone."""
    for name in _names():
        made = _NAME.fullmatch(name)
        if made is not None and not os.path.exists(f"/proc/{made[1]}"):
            _remove(name)
