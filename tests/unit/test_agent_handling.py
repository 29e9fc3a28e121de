"""What the main thread handles: seen from another thread, told when it lasts, and nothing of the job's runs for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rankwatch.agent.handling import Handling
from rankwatch.agent.heartbeat import with_handled


class Silent(ValueError):
    def __str__(self) -> str:
        raise AssertionError("code of the job, in our thread")


@contextmanager
def busy(work: Callable[[Callable[[], None]], None]) -> Iterator[int]:
    """A thread that runs work(stop), where stop() waits until the block has ended; gives its ident once it is there."""
    there, over = threading.Event(), threading.Event()

    def stop() -> None:
        there.set()
        assert over.wait(20)

    thread = threading.Thread(target=work, args=(stop,))
    thread.start()
    assert there.wait(20)
    assert thread.ident is not None
    try:
        yield thread.ident
    finally:
        over.set()
        thread.join(20)


def handler(stop: Callable[[], None]) -> None:
    try:
        raise ValueError("sample 17 has no label")
    except ValueError:
        stop()


def finally_(stop: Callable[[], None]) -> None:
    try:
        try:
            raise OSError(28, "No space left on device")
        finally:
            stop()
    except OSError:
        pass


def silent(stop: Callable[[], None]) -> None:
    try:
        raise Silent("one", object(), 2)
    except Silent:
        stop()


@pytest.mark.parametrize(
    ("work", "kind", "message", "where"),
    [
        (handler, "ValueError", "sample 17 has no label", "handler"),
        (finally_, "OSError", "28, No space left on device", "finally_"),
        (silent, f"{Silent.__module__}.Silent", "one, 2", "silent"),
    ],
)
def test_an_exception_that_is_handled_at_two_looks_is_told(work, kind, message, where):
    with busy(work) as ident:
        handling = Handling(ident)
        assert handling.look() is None
        told = handling.look()
        assert told is not None
        assert (told["type"], told["message"]) == (kind, message)
        assert told["where"].startswith("test_agent_handling.py:")
        assert told["where"].endswith(f":{where}")
        assert handling.look() == told


def test_a_thread_that_handles_nothing_any_more_tells_nothing():
    def work(stop: Callable[[], None]) -> None:
        try:
            raise ValueError
        except ValueError:
            pass
        stop()

    with busy(work) as ident:
        handling = Handling(ident)
        assert [handling.look(), handling.look()] == [None, None]


def test_the_end_of_an_iteration_is_no_error():
    def work(stop: Callable[[], None]) -> None:
        try:
            next(iter(()))
        except StopIteration:
            stop()

    with busy(work) as ident:
        handling = Handling(ident)
        assert [handling.look(), handling.look()] == [None, None]


def test_what_is_handled_goes_ahead_of_torchs_status():
    handled = {"type": "ValueError", "message": "x", "where": "", "wall_ns": 1}
    assert with_handled(b'{"pg_status":{}}', None) == b'{"pg_status":{}}'
    assert with_handled(b"{}", handled) == b'{"handling":{"type":"ValueError","message":"x","where":"","wall_ns":1}}'
    assert with_handled(b'{"pg_status":{}}', handled) == b'{"handling":{"type":"ValueError","message":"x","where":"","wall_ns":1},"pg_status":{}}'
    long = {**handled, "message": "\U0001f600" * 200}
    assert len(with_handled(b"{}", long)) <= 800
