"""A day of one rank: what the agent remembers inside the job is as large in its last hour as in its third."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from agent_fakes import FakeRank
from rank_day import FRAMES, RankDay

import rankwatch

AGENT = f"{Path(rankwatch.__file__).parent}/*"
BOUNDS = {
    "agent.groups.MAX_NAMES": 12, "agent.replicas.MAX_GROUPS": 12, "agent.probes.collectives.MAX_MEETINGS": 12,
    "agent.threads._KNOWN_NAMES": 24, "agent.compiling.live.KNOWN_FRAMES": 24, "agent.compiling.live._KNOWN_REGIONS": 24,
    "agent.compiling.finished._KNOWN_FRAMES": 24, "agent.compiling.breaks._KNOWN_PLACES": 24, "agent.compiling.texts.TEXTS": 50,
    "agent.probes.ddp._KNOWN_COMPILES": 24, "agent.graph_counts._KNOWN_FUNCTIONS": 24, "agent.graph_frames._KNOWN_IDS": 24,
    "agent.graph_frames._KNOWN_SIZES": 24,
}  # fmt: skip
"""Bounds that a day does not reach are made smaller, so that two hours do."""
FEW = 60  # steps an hour, where each allocation is traced


class Hours(NamedTuple):
    """The largest number of members of all containers below each part within the third hour and the last; memory at their ends."""

    third: dict[str, int]
    last: dict[str, int]
    memory_third: int
    memory_last: int


def play(folder: Path, bounds: dict[str, int], steps: int, memory: Callable[[], int], hours: int = 24) -> tuple[RankDay, Hours]:
    with pytest.MonkeyPatch.context() as patch:
        for name, bound in bounds.items():
            patch.setattr(f"rankwatch.{name}", bound)
        day, counted, kept = RankDay(FakeRank(folder), patch), [], []
        for hour in range(hours):
            looks: list[dict[str, int]] = []
            look = hour in (2, hours - 1)
            day.play(hour, steps, partial(measure, day, looks) if look else lambda: None)
            if look:
                counted.append({name: max(sizes[name] for sizes in looks) for name in day.parts})
                gc.collect()
                kept.append(memory())
    return day, Hours(*counted, *kept)


def measure(day: RankDay, looks: list[dict[str, int]]) -> None:
    """States of threads that have ended are kept until there are many of them; how many there are now is the system's luck with idents."""
    day.fake.rank.threads._reclaim()
    looks.append({name: size(part) for name, part in day.parts.items()})


def allocated() -> int:
    """Bytes that the agent's own lines have allocated and that are in use."""
    found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, AGENT)])
    return sum(trace.size for trace in found.traces)


def size(root: Any) -> int:
    """Members of all containers below it, each once; of objects only the agent's own."""
    seen: set[int] = set()
    left, total = [root], 0
    while left:
        found = left.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, dict):
            members = [*found, *found.values()]
        elif isinstance(found, (list, tuple, set, frozenset, deque)):
            members = list(found)
        elif type(found).__module__.startswith("rankwatch"):
            slots = [getattr(found, name) for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(found, name)]
            members = [*slots, *getattr(found, "__dict__", {}).values()]
        else:
            continue
        total += len(members)
        left += members
    return total


def grown(hours: Hours) -> set[str]:
    """But for the little that one hour's names differ from another's, and for a thread or two that the system has not quite ended."""
    return {name for name, count in hours.last.items() if count > 1.02 * hours.third[name] + 40}


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> tuple[RankDay, Hours]:
    return play(tmp_path_factory.mktemp("slots"), BOUNDS, 4200, sys.getallocatedblocks)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def test_no_probe_has_failed_on_the_day_and_each_has_seen_something(day: tuple[RankDay, Hours]) -> None:
    played, _ = day
    assert {name: probe.errors for name, probe in played.fake.rank.probes.items() if probe.errors} == {}
    assert played.steps.count > 100_000
    assert played.fake.record("numerics")["step"] > 100_000
    assert played.splits.calls == played.fake.record("cudagraph")["recordings"] == 24 * FRAMES
    assert played.fake.record("compile")["failures"] == 24 * FRAMES // 3
    assert played.fake.record("compile")["texts_dropped"] > 0


def test_nothing_that_the_agent_remembers_grows_from_the_third_hour_to_the_last(day: tuple[RankDay, Hours]) -> None:
    """88,000 steps lie between: that is no block of memory in 5 of them, in the whole process, the test runner's own included."""
    _, hours = day
    assert grown(hours) == set(), hours
    assert hours.memory_last < hours.memory_third + 16_000


def test_the_agents_lines_hold_no_more_bytes_after_the_last_hour_than_after_the_third(tmp_path: Path, traced: None) -> None:
    _, hours = play(tmp_path, BOUNDS, FEW, allocated)
    assert hours.memory_last < hours.memory_third + 8192


def test_the_day_shows_what_grows_without_its_bound(tmp_path: Path, traced: None) -> None:
    _, hours = play(tmp_path, dict.fromkeys(BOUNDS, 10**9), FEW, allocated, hours=12)
    assert grown(hours) == {"membership", "numerics", "compile", "ddp", "cudagraph", "names of regions"}
    assert hours.memory_last > hours.memory_third + 20_000
