"""A launcher whose own thread sits in torch when the job is over ends with the job's exit code."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import atexit, sys, threading
from rankwatch.launcher import leaving

leaving.WAIT_S = 0.05
leaving.watch()
atexit.register(print, "others first")
threading.Thread(target={target}, name=leaving.IN_TORCH, daemon=True).start()
{end}
"""
STAYS = "threading.Event().wait"
ENDS = "int"


def run(target: str, end: str) -> "tuple[int, str]":
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM).format(target=target, end=end)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("code", [0, 3, None])
@pytest.mark.parametrize("target", [STAYS, ENDS])
def test_the_exit_code_is_the_one_that_was_about_to_be_returned(code, target):
    assert run(target, f"leaving.returns({code})\nsys.exit({code})") == (code or 0, "others first\n")


def test_what_python_makes_an_exit_code_of_is_left_to_python():
    code, _ = run(STAYS, "leaving.returns('text')\nsys.exit('text')")
    assert code == 1


def test_without_a_code_nothing_is_cut_short():
    assert run(STAYS, "raise KeyError") == (1, "others first\n")
