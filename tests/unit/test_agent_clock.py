"""The agent's clocks while the job plays with its own."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from agent_fakes import FakeRank

from rankwatch.agent import guard, heartbeat
from rankwatch.agent.clock import Clock, clock
from rankwatch.agent.guard import Probe
from rankwatch.agent.heartbeat import Heartbeat


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As freezegun does: the functions are replaced in the module time and wherever a module holds one of them."""
    real = {time.monotonic_ns: lambda: 0, time.time_ns: lambda: 0, time.monotonic: lambda: 0.0, time.time: lambda: 0.0}
    for name, module in list(sys.modules.items()):
        if name == "time" or name.startswith("rankwatch.agent"):
            for attribute, value in list(vars(module).items()):
                if callable(value) and getattr(value, "__module__", "") == "time" and value in real:
                    monkeypatch.setattr(module, attribute, real[value])


def test_frozen_clocks_of_the_job_do_not_stop_the_agents(frozen: None) -> None:
    assert time.monotonic_ns() == 0
    before = clock.now_ns()
    assert 0 < before <= clock.now_ns()
    assert clock.wall_ns() > 1_600_000_000 * 10**9
    assert Clock().now_ns() == 0  # one that is made now gets what is there now


class C10d:
    """torch's module, of which the heartbeat finds nothing."""


def beats(rank: Any) -> int:
    return int(rank.slot.cursors["heartbeat"].next_seq.__reduce__()[1][0])


def test_the_heartbeat_outlives_whatever_one_beat_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: None) -> None:
    fake = FakeRank(tmp_path)
    monkeypatch.setattr(guard.here, "pid", guard.getpid())
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    failed: list[int] = []

    def look() -> None:
        failed.append(1)
        if len(failed) < 3:
            raise RuntimeError("a probe")

    fake.rank.on_beat.append(look)
    probe = Probe("collectives", lambda: None)
    thread = Heartbeat(fake.rank, probe, C10d, None)
    end = clock.now_ns() + 10 * 10**9
    while len(failed) < 5 and clock.now_ns() < end:
        thread._running.acquire(timeout=0.01)
    thread.stop()
    assert (probe.errors, probe.on) == (2, True)
    assert len(failed) >= 5
    assert beats(fake.rank) > 5
