"""Runs a helper program within a deadline and a size: what floods or hangs is killed and holds nothing up."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STDERR_BYTES = 64 << 10
REAP_S = 0.5


class Flood(Exception):
    """The program wrote more than it may; it was killed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended and what it wrote; of stderr the last STDERR_BYTES."""

    returncode: int
    stdout: bytes
    stderr: bytes


def run(command: Sequence[str], deadline_s: float, max_bytes: int, env: Mapping[str, str]) -> Finished:
    """Run `command` to its end. TimeoutError past deadline_s, Flood past max_bytes of stdout: it is killed then. OSError: it does not start."""
    until = time.monotonic() + deadline_s
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(env))
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with process.stdout, process.stderr:
            stdout, stderr = _read(process.stdout.fileno(), process.stderr.fileno(), until, max_bytes)
        process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        if process.poll() is None:
            process.kill()
            try:
                process.wait(REAP_S)
            except subprocess.TimeoutExpired:
                pass  # it hangs in the kernel; a later Popen reaps it
    return Finished(process.returncode, stdout, stderr)


def _read(out: int, err: int, until: float, max_bytes: int) -> tuple[bytes, bytes]:
    got = {out: bytearray(), err: bytearray()}
    still_open = {out, err}
    poll = select.poll()
    for fd in still_open:
        poll.register(fd, select.POLLIN)
    while still_open:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        for fd, _event in poll.poll(left_s * 1000):
            chunk = os.read(fd, 1 << 16)
            got[fd] += chunk
            if not chunk:
                poll.unregister(fd)
                still_open.discard(fd)
        if len(got[out]) > max_bytes:
            raise Flood
        del got[err][:-STDERR_BYTES]
    return bytes(got[out]), bytes(got[err])
