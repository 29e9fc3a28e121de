"""The claim rule: which process writes a rank's slot."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rankwatch.agent import ownership
from rankwatch.agent.boot import foreign_world, is_torch_helper

ME = os.getpid()
PARENT = os.getppid()


def owner(pid: int, state: str, ticks: int | None = None) -> dict[str, Any]:
    return {"pid": pid, "state": state, "start_ticks": ownership.start_ticks(pid) if ticks is None else ticks}


DEAD = {"pid": 2**22 + 1, "start_ticks": 1}
STRANGER = owner(1, "armed")  # alive, and neither this process nor one that started it directly


@pytest.mark.parametrize(
    ("record", "helper", "expected"),
    [
        pytest.param({}, False, True, id="nobody"),
        pytest.param({}, True, False, id="a multiprocessing child arms nothing"),
        pytest.param(owner(ME, "armed"), False, True, id="this process"),
        pytest.param(owner(ME, "claimed"), False, True, id="this process after exec"),
        pytest.param({**DEAD, "state": "armed"}, False, True, id="a dead armed process"),
        pytest.param(owner(1, "loaded"), False, True, id="a stranger's mark"),
        pytest.param(owner(PARENT, "loaded"), True, False, id="a multiprocessing child arms nothing over a mark either"),
        pytest.param({**DEAD, "state": "claimed"}, False, False, id="a dead rank keeps its last state"),
        pytest.param(owner(PARENT, "armed"), False, True, id="the wrapper that started this process"),
        pytest.param(owner(PARENT, "claimed"), False, False, id="a rank that started this process"),
    ],
)
def test_arming(record: dict[str, Any], helper: bool, expected: bool) -> None:
    assert ownership.may_arm(record, ME, helper) is expected


@pytest.mark.parametrize(
    ("record", "pid", "expected"),
    [
        pytest.param({}, ME, True, id="nobody"),
        pytest.param(owner(PARENT, "armed"), ME, True, id="an armed process gives way"),
        pytest.param({**DEAD, "state": "claimed"}, ME, True, id="a dead rank gives way"),
        pytest.param(owner(ME, "claimed"), ME, True, id="this process again"),
        pytest.param(owner(PARENT, "claimed"), ME, False, id="a living rank keeps it"),
        pytest.param(owner(ME, "claimed"), PARENT, True, id="a child with a world of its own gives way to its parent"),
        pytest.param(owner(ME, "claimed", ticks=1), PARENT, True, id="a number that another process has now"),
    ],
)
def test_claiming(record: dict[str, Any], pid: int, expected: bool) -> None:
    assert ownership.may_claim(record, pid) is expected


def test_a_living_process_needs_pid_and_start_time() -> None:
    assert ownership.alive(owner(ME, "armed"))
    assert not ownership.alive(owner(ME, "armed", ticks=3))
    assert not ownership.alive(DEAD)


def test_descent_follows_parents_and_ends_at_the_root() -> None:
    parents = {30: 20, 20: 10, 10: 1}
    assert not ownership.descends(30, owner(ME, "armed"), parents.__getitem__)
    assert ownership.descends(ME, owner(PARENT, "armed"))


@pytest.mark.parametrize(
    ("rank", "world_size", "expected"),
    [(None, None, False), (-1, -1, False), (1, 4, False), (0, 4, True), (1, 1, True), (0, 1, True)],
)
def test_arguments_of_another_world_are_seen(rank: object, world_size: object, expected: bool) -> None:
    assert ownership.joins_another_world({"RANK": "1", "WORLD_SIZE": "4"}, rank, world_size) is expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "2"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "2"}, True),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "4"}, False),
        ({"RANK": "0"}, False),
    ],
)
def test_an_environment_changed_for_an_inner_world_is_seen(environ: dict[str, str], expected: bool) -> None:
    assert foreign_world(environ) is expected


def test_compile_workers_are_known_by_their_command_line() -> None:
    assert is_torch_helper(["python", "/x/site-packages/torch/_inductor/compile_worker/__main__.py", "--workers=4"])
    assert not is_torch_helper(["python", "train.py"])
    assert ownership.is_multiprocessing_child(["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"])
    assert not ownership.is_multiprocessing_child(["python", "train.py"])
