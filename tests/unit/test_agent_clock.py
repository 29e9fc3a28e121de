"""The agent's clocks while the job plays with its own."""

from __future__ import annotations

import pkgutil
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from agent_fakes import FakeRank
from fake_dynamo import CODE, Torch, metrics

import rankwatch.agent
from rankwatch.agent import guard, heartbeat
from rankwatch.agent.ablate_steps import Steps
from rankwatch.agent.clock import Clock, clock
from rankwatch.agent.guard import Probe
from rankwatch.agent.heartbeat import Heartbeat
from rankwatch.agent.record_file import RecordFile

CLOCKS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns")


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


def test_no_module_of_the_agent_holds_a_clock_that_a_job_may_replace() -> None:
    names = [found.name for found in pkgutil.walk_packages(rankwatch.agent.__path__, "rankwatch.agent.")]
    held = {f"{name}.{clock}" for name in names for clock in CLOCKS if getattr(import_module(name), clock, None) is getattr(time, clock)}
    assert held == set()


def test_what_frozen_clocks_and_a_mocked_getpid_do_not_change(tmp_path: Path, frozen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a compile and a step of `rankwatch ablate` take, and that a record is its own process's."""
    monkeypatch.setattr("os.getpid", lambda: 1)
    live = FakeRank(tmp_path).rank.threads.here()
    assert 0 < live.started_ns <= clock.now_ns()
    file = RecordFile(str(tmp_path / "rank_0.jsonl"))
    steps = Steps(file, Probe("ablate", lambda: None), last=9, world=1)
    steps.explicit()
    file.write("last", n=1)
    lines = (tmp_path / "rank_0.jsonl").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ['{"kind":"step"', '{"kind":"last"']
    assert '"seconds":0.0,' not in lines[0]


def test_frozen_clocks_of_the_job_do_not_stop_those_of_a_compile(tmp_path: Path, frozen: None) -> None:
    fake = FakeRank(tmp_path)
    torch = Torch(fake)
    before = clock.now_ns()
    torch._compile(CODE)
    torch.begin("backend_compile")
    (live,) = fake.threads()
    assert before <= live["started_ns"] <= live["phase_ns"] <= clock.now_ns()
    torch.compiles.finished(metrics())
    assert fake.record("compile")["last"]["wall_ns"] > 1_600_000_000 * 10**9


class C10d:
    """torch's module, of which the heartbeat finds nothing."""


def beats(rank: Any) -> int:
    return int(repr(rank.slot.cursors["heartbeat"].next_seq).strip("count()"))


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
