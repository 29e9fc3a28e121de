"""py-spy on real processes: asleep, stopped, holding the GIL; and py-spys that misbehave."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest

from rankwatch.monitor import pyspy
from rankwatch.monitor.proc_stat import read_stat
from rankwatch.monitor.processes import Processes
from rankwatch.monitor.stacks import StackCapture, Target

pytestmark = pytest.mark.ranks

SLEEPER = """
import threading, time
def load_batch():
    print("ready", flush=True)
    time.sleep(60)
threading.Thread(target=time.sleep, args=(60,), name="helper", daemon=True).start()
load_batch()
"""
GIL_HOLDER = """
import ctypes
def native_call():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(60)
native_call()
"""
LOADER = """
import multiprocessing, time
def fetch_row(queue):
    queue.put(1)
    time.sleep(60)
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=fetch_row, args=(queue,), daemon=True)
    worker.start()
    queue.get()
    print("ready", flush=True)
    worker.join()
"""


def until(condition, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    started = []

    def _start(code):
        script = tmp_path / f"job{len(started)}.py"
        script.write_text(code)
        process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield _start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def fake_pyspy(tmp_path, body):
    path = tmp_path / "py-spy"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def in_function(capture, pid, function):
    return until(lambda: (stack := capture.capture(Target(0, pid))).main and stack.main[0].name == function and stack)


def test_a_sleeping_process_shows_its_line_with_the_main_thread_first(start):
    stack = in_function(StackCapture(), pid := start(SLEEPER), "load_batch")
    assert stack.threads[0].native_id == pid
    assert stack.main[0].short == "job0.py:5:load_batch"
    assert [thread.name for thread in stack.threads] == ["MainThread", "helper"]
    assert f'Thread {pid} "MainThread"' in stack.text
    assert "    load_batch (" in stack.text


def test_a_stopped_process_is_dumped_and_stays_stopped(start):
    pid = start(SLEEPER)
    capture = StackCapture()
    in_function(capture, pid, "load_batch")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: read_stat(pid).state == "T")
    assert capture.capture(Target(0, pid)).main[0].name == "load_batch"
    assert capture.capture(Target(0, pid), native=True).error.startswith("process is stopped")
    assert read_stat(pid).state == "T"


def test_a_process_that_holds_the_gil_in_c_shows_its_python_line(start):
    stack = in_function(StackCapture(), start(GIL_HOLDER), "native_call")
    assert stack.main[0].line == 5


def test_a_native_dump_shows_c_frames_and_the_process_goes_on(start):
    pid = start(SLEEPER)
    stack = until(lambda: (found := StackCapture().capture(Target(0, pid), native=True)).threads and found)
    assert stack.native
    assert any("sleep" in frame.name for frame in stack.main)
    assert read_stat(pid).state == "S"


def test_children_of_a_rank_that_waits_for_them_are_shown(start):
    pid = start(LOADER)
    processes = Processes()
    capture = StackCapture()
    stack = until(lambda: (found := capture.capture(Target(0, pid, children=lambda: processes.children(pid)))).subprocesses and found)
    assert stack.subprocesses[0].main[0].name == "fetch_row"


def test_a_process_that_is_gone_is_said_to_be_gone():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    stack = StackCapture().capture(Target(0, process.pid))
    assert (stack.threads, stack.error) == ((), "process is gone")


def test_a_hung_pyspy_costs_its_deadline_and_falls_back_to_the_kernel(start, tmp_path, monkeypatch):
    monkeypatch.setattr(pyspy, "DUMP_DEADLINE_S", 0.3)
    pid = start(SLEEPER)
    capture = StackCapture(fake_pyspy(tmp_path, "exec sleep 60"))
    stack = capture.capture(Target(0, pid))
    assert stack.error == "py-spy gave no answer within 0.3 s"
    assert "wchan:" in stack.text
    assert "state: S" in stack.text
    assert capture.counts == {"ok": 0, "failed": 0, "timeout": 1}


def test_a_pyspy_that_leaves_its_target_stopped_is_made_good(start, tmp_path):
    pid = start(SLEEPER)
    pyspy.dump(fake_pyspy(tmp_path, f"kill -STOP {pid}; exit 1"), pid, native=True)
    assert until(lambda: read_stat(pid).state == "S")


def test_a_stop_that_cannot_be_pyspys_is_left_alone(start, tmp_path):
    pid = start(SLEEPER)
    pyspy.dump(fake_pyspy(tmp_path, f"kill -STOP {pid}; exit 1"), pid)
    until(lambda: read_stat(pid).state == "T")
    os.kill(pid, signal.SIGCONT)


def test_the_self_test_tells_a_missing_pyspy_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(pyspy, "find_pyspy", lambda: None)
    test = StackCapture().self_test(os.getpid())
    assert not test.ok
    assert test.reason.endswith(f"install it: {sys.executable} -m pip install py-spy")


def test_the_self_test_explains_a_refusal(start, tmp_path):
    capture = StackCapture(fake_pyspy(tmp_path, "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1"))
    test = capture.self_test(start(SLEEPER))
    assert not test.ok
    assert test.reason.startswith("py-spy may not read process ")
    assert "ptrace" in test.reason or "SYS_PTRACE" in test.reason


def test_the_self_test_of_a_python_process_is_ok(start):
    assert StackCapture().self_test(start(SLEEPER)).reason == "ok"
