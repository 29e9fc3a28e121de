"""The agent's edge: a failing hook costs the job nothing, switches itself off, and says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rankwatch.agent import guard as edge
from rankwatch.agent.guard import Probe, guarded


@pytest.fixture(autouse=True)
def _restore_here() -> Iterator[None]:
    pid = edge.here.pid
    yield
    edge.here.pid = pid


def probe() -> tuple[Probe, list[str]]:
    shown: list[str] = []
    made = Probe("compile", lambda: shown.append(f"{made.status} {made.errors}"))
    return made, shown


def test_an_exception_stays_inside_and_is_counted() -> None:
    tested, shown = probe()
    assert guarded(tested)(lambda: 1 / 0)() is None
    assert (tested.status, tested.errors, tested.detail) == ("armed", 1, "ZeroDivisionError: division by zero")
    assert shown == ["armed 1"]


def test_the_fifth_error_switches_the_probe_off() -> None:
    tested, shown = probe()
    calls = []
    hook = guarded(tested)(lambda: calls.append(1) or 1 / 0)  # type: ignore[func-returns-value]
    for _ in range(9):
        hook()
    assert len(calls) == 5
    assert not tested.on
    assert tested.status == "failed"
    assert tested.detail == "switched itself off after 5 errors; the last one: ZeroDivisionError: division by zero"
    assert shown[-1] == "failed 5"


def test_keyboard_interrupt_and_system_exit_go_through() -> None:
    """It is the user's Ctrl-C: it goes on as if it had fallen into torch, and counts as no error."""
    tested, _shown = probe()
    for error in (KeyboardInterrupt, SystemExit):

        def hook(error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error):
            guarded(tested)(hook)()
    assert tested.errors == 0


def test_a_hook_in_another_process_does_nothing() -> None:
    """A fork child has the patched functions in its memory."""
    tested, _shown = probe()
    calls = []
    hook = guarded(tested)(lambda: calls.append(1))
    edge.here.pid = 0
    hook()
    assert calls == []


def test_a_probe_that_is_off_or_missing_runs_no_hook() -> None:
    tested, shown = probe()
    tested.report("missing", "no such function")
    assert guarded(tested)(lambda: 1)() is None
    assert shown == ["missing 0"]


def test_values_and_arguments_pass() -> None:
    tested, _shown = probe()
    assert guarded(tested)(lambda a, b: a + b)(1, b=2) == 3


def test_reporting_an_error_cannot_fail() -> None:
    def broken() -> None:
        raise OSError("slot is gone")

    tested = Probe("ddp", broken)
    tested.caught(ValueError("x"))
    assert tested.errors == 1


def test_a_job_that_replaces_getpid_breaks_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """os.getpid was bound when the agent was loaded; and were it to fail, that would stay inside, too."""

    def broken() -> int:
        raise RuntimeError("no pid here")

    tested, _shown = probe()
    hook = guarded(tested)(lambda: 7)
    monkeypatch.setattr("os.getpid", broken)
    assert hook() == 7
    monkeypatch.setattr(edge, "getpid", broken)
    assert hook() is None
    assert tested.errors == 1
