"""The user's command: it gets the incident, its complaint is said, and neither a flood nor a hang reaches the monitor."""

from __future__ import annotations

import threading

import pytest

from rankwatch.monitor import command
from rankwatch.monitor.command import IncidentCommand


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


def test_a_large_incident_that_nobody_reads_harms_nothing() -> None:
    assert run("exit 4", b"x" * (4 << 20)) == ["on-incident command ended with exit code 4: "]


def test_a_flood_on_stderr_is_dropped_but_for_its_end() -> None:
    assert run("yes flood | head -c 30000000 >&2; echo last >&2; exit 5") == ["on-incident command ended with exit code 5: last"]


def test_one_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "DEADLINE_S", 0.3)
    assert run("sleep 1000 & wait") == ["on-incident command ran longer than 0.3 s and was ended: sleep 1000 & wait"]
