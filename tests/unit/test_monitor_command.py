"""The user's command: it gets the incident, its complaint is said, and neither a flood nor a hang reaches the monitor."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from rankwatch.monitor import command
from rankwatch.monitor.command import IncidentCommand
from rankwatch.monitor.proc_stat import read_stat


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.something = threading.Event()

    def __call__(self, text: str) -> None:
        self.lines.append(text)
        self.something.set()


def run(shell: str, document: bytes = b"{}") -> list[str]:
    said = Said()
    runner = IncidentCommand(shell, said)
    runner.run("opened", "20260101T000000Z-1", lambda: document)
    assert said.something.wait(20)
    runner.close()
    return said.lines


def test_it_gets_the_incident_on_stdin_and_in_its_environment() -> None:
    lines = run('read -r all; echo "$RANKWATCH_CHANGE $RANKWATCH_INCIDENT $all" >&2; exit 3', b'{"a": 1}\n')
    assert lines == ['on-incident command ended with exit code 3: opened 20260101T000000Z-1 {"a": 1}']


def test_it_is_told_where_incident_json_lies_and_calls_are_counted() -> None:
    said = Said()
    runner = IncidentCommand('echo "$RANKWATCH_INCIDENT_JSON" >&2; exit 3', said)
    assert runner.counts == {("on_incident", "ok"): 0, ("on_incident", "failed"): 0, ("on_incident", "dropped"): 0}
    runner.run("opened", "a", lambda: b"{}", path="/runs/x/incidents/a/incident.json")
    assert said.something.wait(20)
    runner.close()
    assert said.lines == ["on-incident command ended with exit code 3: /runs/x/incidents/a/incident.json"]
    assert runner.counts["on_incident", "failed"] == 1
    assert IncidentCommand("", said).counts == {}


def test_a_large_incident_that_nobody_reads_harms_nothing() -> None:
    assert run("exit 4", b"x" * (4 << 20)) == ["on-incident command ended with exit code 4: "]


def test_a_flood_on_stderr_is_dropped_but_for_its_end() -> None:
    assert run("yes flood | head -c 30000000 >&2; echo last >&2; exit 5") == ["on-incident command ended with exit code 5: last"]


def test_the_last_calls_are_started_behind_those_that_wait_and_outlive_the_launcher(tmp_path) -> None:
    """Both threads are busy with commands that do not end, a third one waits: all are started, in their order, and nobody is waited for."""
    program = (
        "import os, sys, time\nfrom rankwatch.monitor import command\ncommand.DEADLINE_S = 1\n"
        f"runner = command.IncidentCommand('echo $RANKWATCH_CHANGE $RANKWATCH_INCIDENT $RANKWATCH_REASON $(cat) >> {tmp_path}/told; sleep 1000', print)\n"
        "for name in 'ab': runner.run('opened', name, lambda: b'1')\n"
        f"while not os.path.exists('{tmp_path}/told') or len(open('{tmp_path}/told').readlines()) < 2: time.sleep(0.01)\n"
        "runner.run('opened', 'c', lambda: b'2')\n"
        "began = time.monotonic()\n"
        "runner.finish([command.Call('closed', name, lambda: b'3', 'job_ended') for name in 'ac'])\n"
        "assert runner.finished(20)\n"
        f"while len(open('{tmp_path}/told').readlines()) < 5: time.sleep(0.01)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=50, check=True)
    told = (tmp_path / "told").read_text().splitlines()
    assert sorted(told[:2]) == ["opened a 1", "opened b 1"]
    assert sorted(told[2:]) == ["closed a job_ended 3", "closed c job_ended 3", "opened c 2"]


def test_without_a_command_nothing_is_finished() -> None:
    runner = IncidentCommand("", print)
    runner.finish([command.Call("closed", "a", lambda: b"", "job_ended")])
    assert runner.finished(0.0)


def test_one_that_runs_when_the_launcher_ends_keeps_its_deadline(tmp_path) -> None:
    program = (
        "import os, sys, time\nfrom rankwatch.monitor import command\ncommand.DEADLINE_S = 0.2\n"
        f"command.IncidentCommand('echo $$ > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 1000 & wait', print).run('opened', 'i', lambda: b'')\n"
        f"while not os.path.exists('{tmp_path}/pid'): time.sleep(0.01)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=20, check=True)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while (found := read_stat(pid)) is not None and found.state != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "DEADLINE_S", 0.3)
    assert run("sleep 1000 & wait") == ["on-incident command ran longer than 0.3 s and was ended: sleep 1000 & wait"]
