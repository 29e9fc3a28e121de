"""Launchers that find each other through torch's own TCPStore, also while it is blocked, stopped or dead."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from jobs import wait_for

from rankwatch.launcher.discovery import Discovery

pytestmark = pytest.mark.ranks

SERVER = """
import sys, threading, datetime, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, 1, True, datetime.timedelta(seconds=60), wait_for_workers=False, use_libuv=sys.argv[1] == "libuv")
print(store.port, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def server(kind="libuv"):
    """A process that holds the store; (process, port)."""
    process = subprocess.Popen([sys.executable, "-c", SERVER, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def stores(port, count=2, prefix="torch.rendezvous.job.0", kind="libuv"):
    """What torchrun hands to each launcher."""
    timeout = timedelta(seconds=60)
    return [dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, None, False, timeout, use_libuv=kind == "libuv")) for _ in range(count)]


@contextlib.contextmanager
def looking(stores):
    launchers = [Discovery(store, rank, len(stores), local_addr="127.0.0.1") for rank, store in enumerate(stores)]
    for launcher in launchers:
        launcher.start()
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.stop()


def found(launchers):
    """All publish, and find each other."""
    for rank, launcher in enumerate(launchers):
        launcher.publish(40000 + rank, f"nonce{rank}", (rank,), "run" if rank == 0 else "")
    judge, *members = launchers
    wait_for(lambda: len(judge.peers()) == len(members), 30, "the judge finds all members")
    assert [(peer.group_rank, peer.port, peer.nonce) for peer in judge.peers()] == [(rank, 40000 + rank, f"nonce{rank}") for rank in range(1, len(launchers))]
    for member in members:
        assert member.secret(30) == judge.secret()
        assert (member.judge().port, member.run_name(30)) == (40000, "run")


@pytest.mark.parametrize("kind", ["libuv", "legacy"])
def test_three_launchers_find_each_other(kind):
    with server(kind) as (_, port), looking(stores(port, 3, kind=kind)) as launchers:
        found(launchers)
        assert {launcher.problem for launcher in launchers} == {""}


def test_each_round_has_keys_of_its_own_below_torchruns_prefix():
    with server() as (_, port):
        with looking(stores(port)) as launchers:
            found(launchers)
        (later,) = stores(port, 1, "torch.rendezvous.job.1")
        assert not later.check(["rankwatch/judge"])
        (same,) = stores(port, 1)
        assert same.check(["rankwatch/judge"])


def test_the_launchers_own_connection_and_its_timeout_stay_as_they_are():
    with server() as (_, port):
        given = stores(port)
        with looking(given) as launchers:
            found(launchers)
            assert [store.underlying_store.timeout for store in given] == [timedelta(seconds=60)] * 2


def test_a_get_of_torchruns_that_blocks_does_not_block_the_search():
    with server() as (_, port):
        given = stores(port)
        waiting = threading.Thread(target=lambda: given[1].get("a key that comes late"), daemon=True)
        waiting.start()
        with looking(given) as launchers:
            found(launchers)
            assert waiting.is_alive()
        stores(port, 1)[0].set("a key that comes late", "now")
        waiting.join(30)
        assert not waiting.is_alive()


@pytest.mark.slow_ranks
def test_a_store_that_stops_answering_holds_nobody_up(capfd):
    with server() as (process, port), looking(stores(port)) as launchers:
        found(launchers)
        os.kill(process.pid, signal.SIGSTOP)
        judge, member = launchers
        member.refused()
        wait_for(lambda: member._calling_since is not None, 30, "a call is under way")
        secret, asked = judge.secret(60), member.judge()
        member.publish(50000, "nonce2", (1,))
        assert (member.secret(60), asked.port, len(judge.peers())) == (secret, 40000, 1)
        wait_for(lambda: "torchrun's store has not answered for" in member.problem, 30, "the problem is said")
        for launcher in launchers:
            launcher.stop()
        os.kill(process.pid, signal.SIGCONT)
        wait_for(lambda: judge._calling_since is None and member._calling_since is None, 30, "the calls return")
    assert capfd.readouterr().err == ""


def test_a_store_that_dies_is_left_alone_without_a_word(capfd):
    with server() as (process, port):
        judge, member = (Discovery(store, rank, 2, local_addr="127.0.0.1") for rank, store in enumerate(stores(port)))
        judge.publish(40000, "nonce0", (0,))
        for launcher in (judge, member):
            launcher.look()
        process.kill()
        process.wait(30)
        for launcher in (judge, member):
            assert launcher.look() > 1
            assert "torchrun's store cannot be asked ([Errno 111] Connection refused)" in launcher.problem
        assert member.secret() == judge.secret()
        assert member.judge().port == 40000
    assert capfd.readouterr().err == ""
