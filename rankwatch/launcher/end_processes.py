"""End children without torch's help: the way for a torch whose failures we cannot make."""

from __future__ import annotations

import os
import signal
import time

KILL_AFTER_S = 30.0  # as torchrun gives its workers


def end_processes(pids: tuple[int, ...], kill_after_s: float) -> None:
    """SIGTERM, then SIGKILL for children that have not ended within kill_after_s. Collects none of them: their numbers stay theirs."""
    _send(pids, signal.SIGTERM)
    deadline = time.monotonic() + kill_after_s
    while time.monotonic() < deadline and any(_lives(pid) for pid in pids):
        time.sleep(0.1)
    _send(tuple(pid for pid in pids if _lives(pid)), signal.SIGKILL)


def _send(pids: tuple[int, ...], number: signal.Signals) -> None:
    for pid in pids:
        try:
            if _lives(pid):
                os.kill(pid, number)
        except ProcessLookupError:
            continue  # torchrun collected it in between


def _lives(pid: int) -> bool:
    """Whether this child of ours runs: one that somebody has collected is no child any more."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except OSError:
        return False
