"""What doctor prints for each mix of findings, and its exit code."""

from __future__ import annotations

import pytest

from rankwatch.commands.doctor import Check, as_text, exit_code

GOOD = Check("torch", "ok", "2.13.0")
NO_GPU = Check("gpu", "n/a", "no GPU on this machine")
NO_STACKS = Check("stacks", "degraded", "py-spy: permission denied", "data_loading", "add the SYS_PTRACE capability")
NO_TORCH = Check("torch", "missing", "No module named 'torch'", "everything", "install torch")


@pytest.mark.parametrize(
    ("checks", "code"),
    [([GOOD, NO_GPU], 0), ([GOOD, NO_STACKS], 3), ([NO_TORCH], 4), ([NO_TORCH, NO_STACKS], 4)],
    ids=["all well", "something is off", "nothing works", "the worst decides"],
)
def test_exit_code(checks: list[Check], code: int) -> None:
    assert exit_code(checks) == code


def test_text_shows_loss_and_remedy_below_the_finding() -> None:
    assert as_text([GOOD, NO_STACKS], 3, quiet=False) == (
        "torch   ok        2.13.0\n"
        "stacks  degraded  py-spy: permission denied\n"
        "        lost: data_loading\n"
        "        do: add the SYS_PTRACE capability\n"
        "degraded: what is listed as lost cannot be given here\n"
    )


def test_quiet_prints_nothing_when_all_is_well() -> None:
    assert as_text([GOOD, NO_GPU], 0, quiet=True) == ""
