"""What is read of the exception that ends a process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from rankwatch.agent import sources
from rankwatch.agent.crash import calling, chain, described, ending_exception


def test_no_exception_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("last_exc", "last_value"):
        monkeypatch.delattr(sys, name, raising=False)
    assert ending_exception() is None


def test_the_innermost_line_of_the_user_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception comes out of the standard library; the line that called it is what the user can mend."""
    try:
        json.loads("{")
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        monkeypatch.delattr(sys, "last_exc", raising=False)
        line = error.__traceback__.tb_lineno  # type: ignore[union-attr]
    found = ending_exception()
    assert found is not None
    assert found["type"] == "json.decoder.JSONDecodeError"
    assert found["where"] == f"test_agent_crash.py:{line}:test_the_innermost_line_of_the_user_is_named"
    assert found["traceback"].startswith("Traceback (most recent call last):")
    assert "JSONDecodeError" in found["traceback"]


def ends_by(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], object]) -> dict[str, Any]:
    monkeypatch.delattr(sys, "last_exc", raising=False)
    try:
        fail()
    except Exception as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    found = ending_exception()
    assert found is not None
    return found


@pytest.mark.parametrize("message", ["m" * 5_000_000, "line\n" * 1_000_000])
def test_a_long_message_leaves_the_frames_in_the_traceback(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    def load() -> None:
        raise ValueError(message)

    found = ends_by(monkeypatch, load)
    assert (len(found["message"]), len(found["traceback"].encode()) <= 2500) == (500, True)
    assert ", in load\n" in found["traceback"]
    assert "ValueError: " in found["traceback"]
    assert found["traceback"].endswith("...\n")


def test_a_deep_traceback_keeps_its_first_and_its_last_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    def even(n: int) -> None:
        odd(n - 1)

    def odd(n: int) -> None:
        if n < 0:
            raise KeyError("gone")
        even(n - 1)

    found = ends_by(monkeypatch, lambda: even(60))
    assert len(found["traceback"].encode()) <= 2500
    assert ", in ends_by\n" in found["traceback"]
    assert "\n  ...\n" in found["traceback"]
    assert found["traceback"].endswith("KeyError: 'gone'\n")
    assert found["where"].endswith(":odd")


def test_the_line_that_runs_now_is_the_users_innermost_one() -> None:
    assert json.loads("1", parse_int=lambda _text: calling()).split(":")[::2] == ["test_agent_crash.py", "<lambda>"]


def test_whose_code_a_file_is() -> None:
    assert not sources.is_users("<frozen runpy>")
    assert not sources.is_users(json.__file__)
    assert not sources.is_users("/venv/lib/python3.11/site-packages/transformers/modeling.py")
    assert sources.is_users("/home/u/train.py")
    assert sources.is_torch_or_stdlib(json.__file__)
    assert not sources.is_torch_or_stdlib("/venv/lib/python3.11/site-packages/transformers/modeling.py")


def test_an_exception_that_cannot_be_printed_is_described_all_the_same():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    try:
        raise Mute
    except Mute as error:
        told = described(error, error.__traceback__)
    assert told["message"] == "<exception str() failed>"
    assert told["type"].endswith("Mute")


def behind(*links: BaseException) -> BaseException:
    """An error that came of the first link, that of the second, and so on."""
    for error, cause in pairwise(links):
        error.__cause__ = cause
    return links[0]


def test_what_an_error_came_of_is_told_the_nearest_first():
    lost, first = ConnectionResetError(104, "Connection reset by peer"), KeyError("shard")
    lost.__context__ = first  # raised while that was handled
    told = described(behind(ValueError("step 31"), lost), None)
    assert told["chain"] == [{"type": "ConnectionResetError", "message": "104, Connection reset by peer"}, {"type": "KeyError", "message": "shard"}]
    assert told["type"] == "ValueError"


def test_an_error_that_came_of_none_has_no_chain():
    assert "chain" not in described(ValueError("bad batch"), None)


def test_a_long_chain_is_cut_and_its_messages_too_within_the_bound_of_the_traceback():
    long = [TypeError("t" * 3000) if n % 2 else RuntimeError("\u20ac" * 3000) for n in range(9)]
    told = described(behind(*long), None)
    assert [(link["type"], len(link["message"])) for link in told["chain"]] == [("TypeError", 200), ("RuntimeError", 66)] * 2
    assert len(told["traceback"].encode()) + sum(len(link["message"].encode()) for link in told["chain"]) < 2500
    assert told["traceback"].endswith("\u20ac...\n")


def test_a_number_that_python_does_not_print_is_left_out():
    assert chain(behind(ValueError("outer"), OverflowError(10**9999)))[0] == {"type": "OverflowError", "message": ""}


def test_a_chain_that_bites_its_tail_ends():
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    assert [link["message"] for link in chain(one)] == ["two", "one", "two", "one"]


def test_no_code_of_the_jobs_exceptions_is_run_for_the_chain():
    class Hostile(Exception):
        def __str__(self):
            raise AssertionError("run")

        __repr__ = __bool__ = __len__ = __eq__ = __str__
        args = __cause__ = __context__ = __class__ = property(__str__)  # type: ignore[assignment]
        __hash__ = None  # type: ignore[assignment]

    error = ValueError("outer")
    BaseException.__dict__["__cause__"].__set__(error, Hostile("inner"))
    (link,) = chain(error)
    assert link["type"].endswith(".Hostile")
    assert link["message"] == "inner"
