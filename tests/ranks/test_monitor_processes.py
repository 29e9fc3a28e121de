"""Real processes as /proc shows them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from rankwatch.monitor.exits import ExitWatch, child_exit
from rankwatch.monitor.proc_stat import read_stat
from rankwatch.monitor.processes import Processes

pytestmark = pytest.mark.ranks


def until(condition, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)


@pytest.fixture
def start():
    started = []

    def _start(code):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield _start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


SLEEPS = "import time; print('ready', flush=True); time.sleep(60)"


def test_a_sleeping_process_is_alive_in_state_s(start):
    child = start(SLEEPS)
    process = until(lambda: (found := Processes().look(child.pid)).state == "S" and found)
    assert process.alive
    assert process.pid == child.pid
    assert process.rss_bytes > 1 << 20
    assert abs(time.monotonic() - process.started_at) < 30
    assert process.io_bytes > 0


def test_a_stopped_process_is_seen_as_such(start):
    child = start(SLEEPS)
    os.kill(child.pid, signal.SIGSTOP)
    assert until(lambda: Processes().look(child.pid).state == "T")


def test_another_start_time_is_another_process(start):
    child = start(SLEEPS)
    ticks = read_stat(child.pid).start_ticks
    assert Processes().look(child.pid, ticks).alive
    assert not Processes().look(child.pid, ticks - 1).alive


def test_the_tree_counts_cpu_of_living_and_of_collected_children(start):
    parent = start(
        "import os, subprocess, sys\n"
        "burn = 'import time; e = time.process_time() + 0.3\\nwhile time.process_time() < e: pass'\n"
        "subprocess.run([sys.executable, '-c', burn])\n"
        "child = subprocess.Popen([sys.executable, '-c', burn + '\\nprint(1, flush=True)\\ntime.sleep(60)'], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print('ready', flush=True)\n"
        "try:\n    child.wait(60)\nfinally:\n    child.kill()\n"
    )
    processes = Processes()
    process = processes.look(parent.pid, suspect=True)
    children = processes.children(parent.pid)
    assert len(children) == 1
    assert process.tree_cpu_s - process.cpu_s >= 0.55
    os.kill(children[0].pid, signal.SIGKILL)


def test_a_process_that_ends_keeps_its_figures_and_the_time_of_its_end(start):
    child = start(SLEEPS)
    processes = Processes()
    before = processes.look(child.pid)
    child.kill()
    zombie = until(lambda: not (found := processes.look(child.pid)).alive and found)
    assert zombie.state in ("Z", "")
    child.wait()
    gone = until(lambda: (found := processes.look(child.pid)).state == "" and found)
    assert gone.exited_at == zombie.exited_at
    assert gone.tree_cpu_s >= before.cpu_s
    assert processes.look(child.pid) == gone


def test_an_exit_code_is_read_without_reaping(start):
    child = start("import sys; print('ready', flush=True); sys.stdin.close(); sys.exit(7)")
    assert until(lambda: child_exit(child.pid) == (True, 7))
    assert child_exit(child.pid) == (True, 7)
    assert child.wait() == 7
    assert child_exit(child.pid) == (False, None)


def test_the_watch_tells_exit_codes_and_signals_and_leaves_the_child_to_its_parent(start):
    told = {}
    both = threading.Event()

    def on_exit(pid, code):
        told[pid] = code
        if len(told) == 2:
            both.set()

    watch = ExitWatch(on_exit)
    sleeper, quitter = start(SLEEPS), start("import sys; print('ready', flush=True); sys.exit(0)")
    watch.add(sleeper.pid)
    watch.add(quitter.pid)
    sleeper.kill()
    assert both.wait(20)
    assert told == {sleeper.pid: -9, quitter.pid: 0}
    assert (sleeper.wait(), quitter.wait()) == (-9, 0)
    watch.close()


VFORK = (
    "import ctypes, platform, signal, threading, time\n"
    "number = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
    "def wait_in_kernel():\n"
    "    if ctypes.CDLL(None).syscall(number, 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) == 0:\n"  # CLONE_VFORK: asleep until the child ends
    "        ctypes.CDLL(None).pause()\n"
)


def test_a_thread_that_sleeps_uninterruptibly_is_told_with_the_time_of_that_sleep(start):
    child = start(VFORK + "threading.Thread(target=wait_in_kernel).start()\ntime.sleep(0.2)\nprint('ready', flush=True)\ntime.sleep(60)")
    processes = Processes()
    try:
        wait = until(lambda: next((each for each in processes.look(child.pid, suspect=True).blocked_threads if each.asleep_s >= 1 and each.call), None))
        assert (wait.state, wait.tid != child.pid) == ("D", True)
        assert "clone" in wait.call or "fork" in wait.call
        assert processes.look(child.pid, suspect=True).state == "S"
    finally:
        for each in processes.children(child.pid):
            os.kill(each.pid, signal.SIGKILL)


def test_a_main_thread_in_the_kernel_shows_the_file_that_it_reads(start):
    child = start("import os; r, w = os.pipe(); print('ready', flush=True); os.read(r, 1)")
    processes = Processes()
    wait = until(lambda: (found := processes.look(child.pid, suspect=True).main_wait) is not None and found.call and found)
    assert (wait.call, wait.target[:6]) == ("read", "pipe:[")


def test_bytes_over_sockets_are_seen_although_the_process_counts_none(start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = start(
            "import socket, sys\n"
            f"link = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\n"
            "print('ready', flush=True)\n"
            "while True:\n    link.recv(1 << 16)\n"
        )
        link, _ = server.accept()
        with link:
            processes = Processes()
            before = processes.look(child.pid, suspect=True)
            link.sendall(bytes(1 << 20))
            until(lambda: processes.look(child.pid, suspect=True).net_bytes >= 1 << 20)
            assert processes.look(child.pid, suspect=True).io_bytes - before.io_bytes < 1 << 16
