"""`changed`, by which every look makes its states."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest

from rankwatch.monitor.diagnose.state import State, changed


def test_a_changed_state_is_what_replace_gives() -> None:
    state = State(attempt=2, minted=3, pauses=((5.0, 1.0),))
    assert changed(state, quiet=4, moved_at=9.0) == replace(state, quiet=4, moved_at=9.0)
    assert changed(state) == state
    assert state == State(attempt=2, minted=3, pauses=((5.0, 1.0),))


def test_every_field_can_be_changed() -> None:
    for each in fields(State):
        assert getattr(changed(State(), **{each.name: "new"}), each.name) == "new"


def test_a_changed_state_is_frozen_and_of_the_class() -> None:
    made = changed(State(), quiet=1)
    assert type(made) is State
    with pytest.raises(FrozenInstanceError):
        made.quiet = 2  # type: ignore[misc]


def test_a_name_that_is_no_field_is_refused() -> None:
    with pytest.raises(KeyError, match="quite"):
        changed(State(), quite=1)
