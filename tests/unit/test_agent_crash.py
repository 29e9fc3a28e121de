"""What is read of the exception that ends a process."""

from __future__ import annotations

import json
import sys

import pytest

from rankwatch.agent import sources
from rankwatch.agent.crash import ending_exception


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


def test_a_long_traceback_keeps_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_exc", raising=False)
    monkeypatch.setattr(sys, "last_value", ValueError("m" * 9000 + "END"), raising=False)
    found = ending_exception()
    assert found is not None
    assert len(found["traceback"].encode()) <= 2500
    assert found["traceback"].rstrip().endswith("END")
    assert (found["type"], found["where"], len(found["message"])) == ("ValueError", "", 500)


def test_whose_code_a_file_is() -> None:
    assert not sources.is_users("<frozen runpy>")
    assert not sources.is_users(json.__file__)
    assert not sources.is_users("/venv/lib/python3.11/site-packages/transformers/modeling.py")
    assert sources.is_users("/home/u/train.py")
    assert sources.is_torch_or_stdlib(json.__file__)
    assert not sources.is_torch_or_stdlib("/venv/lib/python3.11/site-packages/transformers/modeling.py")
