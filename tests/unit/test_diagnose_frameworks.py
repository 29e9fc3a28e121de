"""Stacks as py-spy showed them below real frameworks (tests/ranks/test_frameworks.py makes them): [name, file, line] of each frame, innermost first."""

import json
from pathlib import Path

import pytest

from rankwatch.model import Frame, RankState, Stack, Thread
from rankwatch.monitor.diagnose import State
from rankwatch.monitor.diagnose.work import by_stack

STACKS = Path(__file__).parents[1] / "support" / "data" / "stacks"
# fault -> cause, domain, function of the job in `at`
EXPECTED = {
    "step": ("not_entered", "user_code", "compute_loss_that_never_ends"),
    "worker": ("data_loading", "storage", None),
    "own_data": ("data_loading", "user_code", "read_shard_that_never_comes"),
    "save": ("checkpointing", "storage", "SlowDisk.write"),
    "evaluate": ("not_entered", "user_code", "score_that_takes_long"),
    "download": ("external_io", "network", "fetch_weights"),
}


@pytest.mark.parametrize("recording", sorted(STACKS.glob("*.json")), ids=lambda path: path.stem)
def test_a_frameworks_stack_is_read_as_what_the_job_does(recording):
    framework, _, fault = recording.stem.partition("_")
    cause, domain, function = EXPECTED[fault]
    frames = tuple(Frame(name, file, line) for name, file, line in json.loads(recording.read_text()))
    sample = Stack(7, 10.0, (Thread("MainThread", 7, frames),))
    finding = by_stack(RankState(1, stack=sample), 5.0, State(), 11.0)
    assert (finding.cause, finding.domain) == (cause, domain)
    assert finding.at.startswith("planned.py:" if function else f"{framework}_job.py:")
    assert function is None or finding.at.endswith(f":{function}")
    assert finding.says.endswith(", while it evaluates") == (fault == "evaluate")


def test_every_fault_is_recorded():
    assert {path.stem.partition("_")[2] for path in STACKS.glob("*.json")} == set(EXPECTED)
