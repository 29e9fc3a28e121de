"""Helper programs: a flood and a hang are killed, and what replaces py-spy's dump is asked for with care."""

import os
import threading
import time

import pytest

from rankwatch.model import Stack, Thread
from rankwatch.monitor import bounded, pyspy, stacks
from rankwatch.monitor.stacks import SelfTest, StackCapture, Target
from rankwatch.monitor.worker_server import ServerError

TRACEBACK = 'Current thread 0x00 (most recent call first):\n  File "train.py", line 3 in load\n'


def run(shell, deadline_s=20.0, max_bytes=1 << 20):
    return bounded.run(["/bin/sh", "-c", shell], deadline_s, max_bytes, dict(os.environ))


def test_what_a_program_writes_and_how_it_ends():
    assert run("echo out; echo err >&2; exit 3") == bounded.Finished(3, b"out\n", b"err\n")


def test_a_flood_is_killed():
    with pytest.raises(bounded.Flood):
        run("exec yes")


def test_of_a_long_stderr_the_end_is_kept():
    finished = run("yes x | head -c 1000000 >&2; echo last >&2")
    assert len(finished.stderr) == bounded.STDERR_BYTES
    assert finished.stderr.endswith(b"\nlast\n")


def test_a_hang_is_killed_at_the_deadline():
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run("exec sleep 60", deadline_s=0.1)
    with pytest.raises(TimeoutError):
        run("exec >&- 2>&-; exec sleep 60", deadline_s=0.1)
    assert time.monotonic() - began < 10


def test_a_pyspy_that_floods_is_an_error_of_the_dump(tmp_path, monkeypatch):
    monkeypatch.setattr(pyspy, "MAX_BYTES", 1 << 20)
    fake = tmp_path / "py-spy"
    fake.write_text("#!/bin/sh\nexec yes\n")
    fake.chmod(0o700)
    assert pyspy.dump(str(fake), os.getpid(), 20.0).error == f"py-spy wrote more than 1 MiB; is {fake} really py-spy?"


class Server:
    """Stands for the ranks' worker servers; `answer` is a text, an exception, or a gate that opens."""

    def __init__(self):
        self.asked = 0
        self.answer = TRACEBACK
        self.gate = None

    def __call__(self, path):
        return self

    def traceback(self):
        self.asked += 1
        if self.gate is not None:
            assert self.gate.wait(20)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def server(monkeypatch):
    server = Server()
    monkeypatch.setattr(stacks, "WorkerServer", server)
    return server


@pytest.fixture
def capture(tmp_path):
    capture = StackCapture(str(tmp_path / "no-py-spy"))
    yield capture
    capture.close()


def target(beat_age_s=0.0):
    return Target(0, os.getpid(), "socket", heartbeat_at=lambda: None if beat_age_s is None else time.monotonic() - beat_age_s)


def test_the_worker_server_stands_in_for_pyspy(server, capture):
    assert capture.capture(target()).main[0].short == "train.py:3:load"
    assert capture.capture(target()).main
    assert server.asked == 2


@pytest.mark.parametrize("age_s", [None, 3.0])
def test_a_rank_without_a_fresh_heartbeat_is_not_asked(server, capture, age_s):
    stack = capture.capture(target(age_s))
    assert not stack.threads
    assert "wchan:" in stack.text
    assert server.asked == 0


def test_a_native_dump_asks_nobody(server, capture):
    assert not capture.capture(target(), native=True).threads
    assert server.asked == 0


def test_after_a_question_that_was_not_answered_only_later_beats_allow_another(server, capture, monkeypatch):
    server.answer = ServerError("no answer", silent=True)
    assert not capture.capture(target()).threads
    server.answer = TRACEBACK
    assert not capture.capture(target()).threads
    assert server.asked == 1
    monkeypatch.setattr(stacks, "SERVED_S", -60.0)  # a minute later
    assert capture.capture(target()).threads
    assert server.asked == 2


def test_one_question_at_a_time_goes_to_a_rank(server, capture):
    server.gate = threading.Event()
    first = capture.start(target())
    deadline = time.monotonic() + 10
    while not server.asked and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not capture.capture(target()).threads
    server.gate.set()
    assert first.wait(10)
    assert first.value.threads
    assert server.asked == 1


def test_a_sample_that_met_a_process_in_the_middle_of_a_change_is_taken_again_once(monkeypatch):
    calls = []

    def dump(_pyspy, pid, deadline_s, native):
        calls.append(deadline_s)
        return answers[len(calls) - 1]

    race = Stack(7, 1.0, error="Failed to get stack traces Caused by: 0: Bad address (os error 14)")
    good = Stack(7, 1.0, (Thread("MainThread", 7, ()),))
    monkeypatch.setattr(pyspy, "dump", dump)
    answers = [race, good]
    assert StackCapture("py-spy").self_test(7) == SelfTest(True, "ok")
    assert calls[1] < calls[0]
    calls.clear()
    answers = [race, race]
    assert not StackCapture("py-spy").self_test(7).ok
    assert len(calls) == 2
    calls.clear()
    answers = [Stack(7, 1.0, error="py-spy may not read process 7: no")]
    assert not StackCapture("py-spy").self_test(7).ok
