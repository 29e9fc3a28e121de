"""Stacks of the right processes at the right moment: py-spy first, then what is left when it is missing or not allowed.

Fallback chain: py-spy -> the rank's worker server (needs the GIL) -> what /proc says of the main thread.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rankwatch.model import Frame, Stack, Thread
from rankwatch.monitor import pyspy
from rankwatch.monitor.pool import Job, Pool
from rankwatch.monitor.proc_stat import Stat, read_stat
from rankwatch.monitor.tracked import HEARTBEAT_STALE_S
from rankwatch.monitor.worker_server import ServerError, WorkerServer

AT_ONCE = 8
MAX_CHILDREN = 4
SERVED_S = 1.0
MAX_UNANSWERED = 1024  # processes of all attempts
# py-spy reads a process that runs on: what it copies may have been freed the moment before
_RACES = ("Bad address", "Failed to copy", "os error 14")
_WAITS_FOR_CHILDREN = ("torch/utils/data/", "multiprocessing/", "concurrent/futures/", "subprocess.py", "_inductor/", "joblib/", "ray/")


@dataclass(frozen=True, slots=True)
class Target:
    """One rank to look into. `children` is asked only when its stack shows that it waits for them.

    heartbeat_at: when a Python thread of it last ran (monotonic), as far as is known when that is asked.
    """

    rank: int
    pid: int
    socket: str = ""
    children: Callable[[], tuple[Stat, ...]] = tuple
    heartbeat_at: Callable[[], float | None] = lambda: None


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Whether stacks can be captured here. `reason` is "ok", or cause and next command."""

    ok: bool
    reason: str


class StackCapture:
    """Dumps many ranks at once. All methods may be called from any thread; `capture` blocks only its own pool."""

    def __init__(self, executable: str | None = None) -> None:
        self.executable = executable if executable is not None else pyspy.find_pyspy()
        self.counts = {"ok": 0, "failed": 0, "timeout": 0}
        self.last_s = 0.0
        self._pool = Pool("stacks", AT_ONCE)
        self._asking = threading.Lock()
        self._unanswered: dict[int, float] = {}  # pid -> when its worker server was asked, or given up on

    def start(self, target: Target, native: bool = False) -> Job[Stack] | None:
        """Begin a dump; None when too many wait already."""
        return self._pool.submit(lambda: self.capture(target, native))

    def capture(self, target: Target, native: bool = False) -> Stack:
        """One rank's stack, with its children's where it waits for them. At most about 2 s (8 s native)."""
        began = time.monotonic()
        stack = self._pyspy(target.pid, native)
        if stack.error:
            stack = replace(self._without_pyspy(target, stack.error, native), native=False)
        elif not native and waits_for_children(stack.main):
            stack = replace(stack, subprocesses=self._of_children(target, began))
        self.last_s = time.monotonic() - began
        outcome = "ok" if stack.threads else ("timeout" if "within" in stack.error else "failed")
        self.counts[outcome] += 1
        return stack

    def start_self_test(self, pid: int) -> Job[SelfTest] | None:
        """Begin a self_test."""
        return self._pool.submit(lambda: self.self_test(pid))

    def self_test(self, pid: int) -> SelfTest:
        """One probe of a live rank. py-spy and its target must not be parent and child only: the rank is what will be dumped later."""
        if self.executable is None:
            return SelfTest(False, f"py-spy was found neither beside {sys.executable} nor on PATH; install it: {sys.executable} -m pip install py-spy")
        stack = self._pyspy(pid, native=False)
        return SelfTest(bool(stack.threads), stack.error or "ok")

    def close(self) -> None:
        self._pool.close()

    def _pyspy(self, pid: int, native: bool) -> Stack:
        if self.executable is None:
            return Stack(pid=pid, at=time.monotonic(), error="py-spy is not installed")
        deadline_s = pyspy.NATIVE_DEADLINE_S if native else pyspy.DUMP_DEADLINE_S
        began = time.monotonic()
        stack = pyspy.dump(self.executable, pid, deadline_s, native)
        left_s = began + deadline_s - time.monotonic()
        if not stack.threads and any(words in stack.error for words in _RACES) and left_s > 0.1:
            stack = pyspy.dump(self.executable, pid, left_s, native)
        return stack

    def _of_children(self, target: Target, began: float) -> tuple[Stack, ...]:
        """Python children, the newest MAX_CHILDREN, as long as there is time left."""
        found: list[Stack] = []
        try:
            children = target.children()
        except Exception:  # a look at /proc that races with exits is no reason to lose the rank's own stack
            return ()
        for child in children[-MAX_CHILDREN:]:
            left_s = began + pyspy.DUMP_DEADLINE_S - time.monotonic()
            if left_s <= 0.05 or self.executable is None:
                break
            stack = pyspy.dump(self.executable, child.pid, left_s)
            if stack.threads:
                found.append(stack)
        return tuple(found)

    def _without_pyspy(self, target: Target, reason: str, native: bool) -> Stack:
        if target.socket and not native and self._may_ask(target):
            try:
                text = self._ask(target)
                threads = threads_of_faulthandler(text, target.pid)
                if threads:
                    words = f"{text}\n(from the rank's worker server: {reason})\n"
                    return Stack(pid=target.pid, at=time.monotonic(), threads=threads, text=words, error="", asked=True)
            except ServerError as error:
                reason = f"{reason}; {error}"
        return Stack(pid=target.pid, at=time.monotonic(), text=_kernel_view(target.pid, reason), error=reason)

    def _may_ask(self, target: Target) -> bool:
        """Whether the rank's worker server can take the GIL now, and no earlier question waits for it; if so the question is on.

        One that was given up on stays in the rank until it gets the GIL: only beats that came after it show that it has.
        """
        now, beat = time.monotonic(), target.heartbeat_at()
        if beat is None or now - beat > HEARTBEAT_STALE_S:
            return False
        with self._asking:
            earlier = self._unanswered.get(target.pid)
            if earlier is not None and beat < earlier + SERVED_S:
                return False
            self._unanswered[target.pid] = float("inf")
        return True

    def _ask(self, target: Target) -> str:
        given_up = False
        try:
            return WorkerServer(target.socket).traceback()
        except ServerError as error:
            given_up = error.silent
            raise
        finally:
            with self._asking:
                if given_up:
                    self._unanswered[target.pid] = time.monotonic()
                    while len(self._unanswered) > MAX_UNANSWERED:
                        del self._unanswered[next(iter(self._unanswered))]
                else:
                    self._unanswered.pop(target.pid, None)


def waits_for_children(frames: tuple[Frame, ...]) -> bool:
    """The stack shows a wait for other processes: data-loader workers, compile workers, a subprocess."""
    return any(needle in frame.file for frame in frames for needle in _WAITS_FOR_CHILDREN)


_FAULTHANDLER_FRAME = re.compile(r'^\s*File "(.*)", line (\d+) in (.*)$')


def threads_of_faulthandler(text: str, pid: int) -> tuple[Thread, ...]:
    """faulthandler's dump as threads; it lists the oldest thread last, and that one is the main thread."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        found = _FAULTHANDLER_FRAME.match(line)
        if line.startswith(("Thread 0x", "Current thread 0x")):
            stacks.append([])
        elif found and stacks:
            stacks[-1].append(Frame(name=found[3], file=found[1], line=int(found[2])))
    threads = [Thread(name="", native_id=0, frames=tuple(frames)) for frames in reversed(stacks) if frames]
    if threads:
        threads[0] = replace(threads[0], name="MainThread", native_id=pid)
    return tuple(threads)


def _kernel_view(pid: int, reason: str) -> str:
    """What /proc tells of the main thread when nothing better is to be had."""
    lines = [f"Process {pid}: no Python stack ({reason})"]
    for name in ("comm", "wchan", "syscall", "stack"):
        try:
            with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as file:
                text = file.read(2000).strip()
        except OSError as error:
            text = f"not readable: {error.strerror}"
        lines.append(f"{name}: {text}")
    stat = read_stat(pid)
    lines.append(f"state: {stat.state if stat else 'gone'}")
    return "\n".join(lines) + "\n"
