"""The launcher's side without torch: exit codes read early, calls that hang, an agent class of another shape."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from rankwatch.config import Options
from rankwatch.launcher import supervision
from rankwatch.launcher.aside import Aside
from rankwatch.launcher.supervision import Start, Supervision, failed_exits
from rankwatch.launcher.torchrun import script_problem, supervised
from rankwatch.monitor import end_waits
from rankwatch.monitor.policy import Limits
from rankwatch.notify.direct import LAST_POST_S


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ended(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


def test_exit_codes_are_read_without_collecting_the_child():
    programs = {0: "pass", 1: "raise SystemExit(3)", 2: "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 3: "input()"}
    children = {rank: subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE) for rank, text in programs.items()}
    pids = {rank: child.pid for rank, child in children.items()}
    wait_until(lambda: all(ended(pids[rank]) for rank in (0, 1, 2)))
    assert failed_exits(pids) == {1: 3, 2: -9}
    children[3].kill()
    for child in children.values():
        child.communicate(timeout=20)
    assert [children[rank].returncode for rank in (0, 1, 2)] == [0, 3, -signal.SIGKILL]
    assert failed_exits(pids) == {}


def test_calls_run_in_order_beside_the_caller_and_keep_their_errors():
    aside, seen = Aside("test"), []
    aside.submit(lambda: seen.append(threading.current_thread().name))
    failed = aside.call(lambda: 1 // 0, 10)
    assert aside.call(lambda: seen.append(2) or "value", 10).value == "value"
    assert seen == ["test", 2]
    assert failed.done
    assert isinstance(failed.error, ZeroDivisionError)


def test_a_call_that_hangs_costs_its_bound_and_no_more():
    aside, release = Aside("test"), threading.Event()
    call = aside.call(release.wait, 0.05)
    assert not call.done
    release.set()
    assert call.wait(10)


class Signal(Exception):
    """Stands for torch's SignalException."""


class Agent:
    """What torchrun's agent is to us."""

    def _rendezvous(self, worker_group):
        return "met"

    def _start_workers(self, worker_group):
        return {0: 1}

    def _monitor_workers(self, worker_group):
        return worker_group

    def _stop_workers(self, worker_group):
        return "stopped"

    def run(self, worker_group):
        try:
            return self._monitor_workers(worker_group)
        except Signal:
            self.told = self._shutdown("SIGTERM", timeout=3)
            raise

    def _shutdown(self, death_sig="SIGTERM", timeout=30):
        return death_sig, timeout

    def _exit_barrier(self):
        return "all have ended"


class Broken:
    """Every call fails."""

    def __init__(self, error):
        self.error = error

    def __getattr__(self, name):
        def fail(*args):
            raise self.error

        return fail


def test_whatever_fails_in_ours_the_agent_does_its_work_and_one_line_is_said():
    said = []
    agent = supervised(Agent, Broken(KeyError("gone")), Signal, said.append)()
    assert agent._rendezvous(None) == "met"
    assert agent._start_workers(None) == {0: 1}
    assert agent._monitor_workers("result") == "result"
    assert agent._stop_workers(None) == "stopped"
    assert agent._shutdown() == ("SIGTERM", 30)
    assert agent._exit_barrier() == "all have ended"
    assert said == ["supervision impaired: KeyError: 'gone'; the job runs on"]


def test_a_signal_that_falls_into_our_code_reaches_torchrun():
    agent = supervised(Agent, Broken(Signal()), Signal, print)()
    for call in (agent._rendezvous, agent._monitor_workers, agent._stop_workers):
        with pytest.raises(Signal):
            call(None)


class Signalled(Agent):
    def _monitor_workers(self, worker_group):
        raise Signal


def test_a_signal_that_ends_torchrun_is_told_with_no_frame_of_ours_in_its_traceback():
    told = []
    agent = supervised(Signalled, SimpleNamespace(look=list, ending=told.append), Signal, print)()
    with pytest.raises(Signal) as raised:
        agent.run(None)
    assert agent.told == ("SIGTERM", 3)
    assert told == ["a signal to the launcher"]
    assert [entry.name for entry in raised.traceback[1:]] == ["run", "_monitor_workers", "_monitor_workers"]  # the second one while it looks
    agent._shutdown()
    assert len(told) == 1


def test_an_error_of_torchruns_own_is_a_planned_end_of_the_ranks():
    told = []
    agent = supervised(Agent, SimpleNamespace(ending=told.append), Signal, print)()
    try:
        raise ConnectionError("the store is gone")
    except ConnectionError:
        agent._shutdown()
    assert told == ["torchrun itself fails with ConnectionError"]


def test_the_class_keeps_its_name():
    assert supervised(Agent, Broken(Signal()), Signal, print).__name__ == "Agent"


def test_importing_the_launcher_loads_neither_torch_nor_the_monitors_libraries():
    program = "import sys, rankwatch.launcher.torchrun; print([name for name in ('torch', 'jinja2', 'prometheus_client', 'psutil') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[]\n"


class Monitor:
    """Keeps what it was told."""

    exit_request = None

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *what: self.told.append((name, *what))


def test_a_job_that_ends_while_the_monitor_still_starts_is_told_to_it_all_the_same(tmp_path):
    monitor, never = Monitor(), threading.Event()

    def slow(options, job, limits):
        never.wait(1.3)  # past what the end of a longer job waits for
        return monitor

    one = Supervision(Options(run_dir=str(tmp_path)), Limits(), ("rankwatch",), {}, print, slow)
    start = Start(0, 1, 1, {0: 0}, "none")
    one.prepare(start)
    one.started(start, ())
    one.finish(0)
    assert [name for name, *_ in monitor.told] == ["start", "workers_started", "stop"]
    assert monitor.told[-1] == ("stop", 0)


@pytest.mark.parametrize(
    ("options", "environ", "more_s"),
    [
        ({}, {}, 0.0),
        ({"archive_dir": "/shared"}, {}, 2.0),
        ({"archive_dir": "/shared", "webhook": ("http://hooks.example",), "textfile_dir": "/metrics"}, {}, 2.0),
        ({"alertmanager": ("http://alerts.example",)}, {}, 1.0),
        ({"dcgm_job_mapping_dir": "/jobs"}, {}, 0.1),
        ({"sd_dir": "/targets"}, {}, 0.2),
        ({"sd_dir": "/targets", "listen": "off"}, {}, 0.0),
        ({"termination_log": "/why", "archive_dir": "/shared", "sd_dir": "/targets"}, {}, 2.4),
        ({"termination_log": "off"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 0.0),
    ],
)
def test_the_end_is_granted_more_time_for_what_is_asked_for_only(options, environ, more_s):
    assert end_waits.end_wait_s(Options(**options), environ) == pytest.approx(more_s)
    assert end_waits.MESSAGES_WAIT_S == LAST_POST_S


@pytest.mark.parametrize(("exit_code", "bound_s"), [(0, 1.0 + 2.0), (1, 4.0 + 2.0)])
def test_the_launcher_waits_for_the_archive_as_long_as_the_monitor_may(tmp_path, exit_code, bound_s):
    granted = []
    one = Supervision(Options(run_dir=str(tmp_path), archive_dir="/shared", termination_log="off"), Limits(), ("rankwatch",), {}, print, lambda *_: Monitor())
    one.prepare(Start(0, 1, 1, {0: 0}, "none"))
    one._started_at = time.monotonic() - 60
    one._aside = SimpleNamespace(submit=lambda what: None, call=lambda what, timeout_s: granted.append(timeout_s))
    one.finish(exit_code)
    assert granted == [pytest.approx(bound_s)]


@pytest.mark.parametrize(
    ("entrypoint", "words", "problem"),
    [
        ("/usr/bin/python3", ("-u", "nofile.py", "--x"), "nofile.py does not exist in {here}"),
        ("/usr/bin/python3", ("-u", "/nope/x.py"), "/nope/x.py does not exist"),
        ("/usr/bin/python3", ("-u", "there.py", "nofile.py"), ""),
        ("/usr/bin/python3", ("-u", "-m", "some.module"), ""),
        ("./program", ("nofile.py",), ""),
        (print, (), ""),
    ],
)
def test_a_script_that_does_not_exist_is_seen_before_it_is_started(tmp_path, monkeypatch, entrypoint, words, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").touch()
    assert script_problem(entrypoint, words) == problem.format(here=tmp_path)


def test_the_package_folder_is_the_one_that_holds_the_agent():
    assert supervision.PACKAGE_DIR.endswith("rankwatch")
