"""Runs py-spy on one process and turns its JSON into model.Stack."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

from rankwatch.model import Frame, Stack, Thread
from rankwatch.monitor import bounded
from rankwatch.monitor.proc_stat import read_stat

DUMP_DEADLINE_S = 1.8
NATIVE_DEADLINE_S = 6.0
MAX_BYTES = 16 << 20
MAX_THREADS = 64
MAX_FRAMES = 200
LOOKS_AFTER = {True: 1, False: 6}  # at a target after py-spy has ended well or not, each 0.02 s after the other


def find_pyspy() -> str | None:
    """py-spy beside this interpreter, else on PATH; None when there is none."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def dump(pyspy: str, pid: int, deadline_s: float = DUMP_DEADLINE_S, native: bool = False) -> Stack:
    """All Python threads of a process; `error` is set when there is nothing. Never raises.

    Without `native` the target is not paused and may be stopped or hold the GIL. With it the target is paused for about half a second;
    one that is then found stopped, and was not before, is continued.
    """
    before = read_stat(pid)
    if before is None:
        return Stack(pid=pid, at=time.monotonic(), error="process is gone")
    if native and before.state in ("T", "t"):
        return Stack(pid=pid, at=time.monotonic(), error="process is stopped: a native dump would have to pause it")
    command = [pyspy, "dump", "--json", "--pid", str(pid), "--native" if native else "--nonblocking"]
    ended_well = False
    try:
        done = bounded.run(command, deadline_s, MAX_BYTES, _environment())
        ended_well = done.returncode == 0
    except TimeoutError:
        return Stack(pid=pid, at=time.monotonic(), error=f"py-spy gave no answer within {deadline_s:g} s")
    except bounded.Flood:
        return Stack(pid=pid, at=time.monotonic(), error=f"py-spy wrote more than {MAX_BYTES >> 20} MiB; is {pyspy} really py-spy?")
    except OSError as error:
        return Stack(pid=pid, at=time.monotonic(), error=f"py-spy does not start: {error}")
    finally:
        if native:
            _continue_if_left_stopped(pid, before.start_ticks, LOOKS_AFTER[ended_well])
    at = time.monotonic()
    if done.returncode != 0:
        return Stack(pid=pid, at=at, error=explain(done.stderr.decode("utf-8", "replace"), pid))
    try:
        threads = threads_of(json.loads(done.stdout), pid)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        return Stack(pid=pid, at=at, error=f"py-spy's output does not decode: {error}")
    if not threads:
        return Stack(pid=pid, at=at, error="py-spy found no Python thread", native=native)
    return Stack(pid=pid, at=at, threads=threads, text=render(pid, threads, native), native=native)


def threads_of(document: Iterable[dict[str, Any]], pid: int) -> tuple[Thread, ...]:
    """py-spy's list of threads, main thread (os_thread_id is the pid) first, then those that have frames."""
    found = []
    for item in document:
        frames = tuple(
            Frame(name=str(frame.get("name", "")), file=str(frame.get("filename", "")), line=int(frame.get("line") or 0))
            for frame in (item.get("frames") or ())[:MAX_FRAMES]
        )
        native_id = int(item.get("os_thread_id") or 0)
        name = "MainThread" if native_id == pid else str(item.get("thread_name") or "")
        found.append(Thread(name=name, native_id=native_id, frames=frames, active=bool(item.get("active")), owns_gil=bool(item.get("owns_gil"))))
    if all(thread.native_id != pid for thread in found):
        # Without thread ids (another pid namespace) the main thread is the one at the bottom of a script.
        found.sort(key=lambda thread: not (thread.frames and thread.frames[-1].name == "<module>"))
    found.sort(key=lambda thread: (thread.native_id != pid, not thread.frames))
    return tuple(thread for thread in found if thread.frames or thread.native_id == pid)[:MAX_THREADS]


def render(pid: int, threads: Iterable[Thread], native: bool = False) -> str:
    """The text that people read: innermost frame first."""
    lines = [f"Process {pid}{' (native frames included)' if native else ''}"]
    for thread in threads:
        marks = "+".join(mark for mark, on in (("active", thread.active), ("gil", thread.owns_gil)) if on) or "idle"
        lines.append(f'\nThread {thread.native_id} "{thread.name}" ({marks})')
        lines += [f"    {frame.name} ({frame.file}:{frame.line})" for frame in thread.frames] or ["    <no Python frame>"]
    return "\n".join(lines) + "\n"


def explain(stderr: str, pid: int) -> str:
    """py-spy's complaint, the likeliest cause, checked, and what to do."""
    text = " ".join(line.strip() for line in stderr.splitlines() if line.strip())
    short = text.removeprefix("Error: ")[:300] or "py-spy failed without a word"
    if "ermission" not in text and "EPERM" not in text and "not permitted" not in text:
        return short
    return f"py-spy may not read process {pid}: {permission_cause(pid)}"


def permission_cause(pid: int) -> str:
    """Why ptrace is refused here and the next command."""
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        owner = os.geteuid()
    if owner != os.geteuid() and os.geteuid() != 0:
        return f"it runs as uid {owner}, the launcher as uid {os.geteuid()}; run both as the same user"
    scope = ptrace_scope()
    if scope == 1:
        return "kernel.yama.ptrace_scope is 1 and the rank did not grant it (did the agent load?); or as root: sysctl kernel.yama.ptrace_scope=0"
    if scope == 2:
        return (
            "kernel.yama.ptrace_scope is 2 (only CAP_SYS_PTRACE); as root: sysctl kernel.yama.ptrace_scope=0, or add the capability SYS_PTRACE to the container"
        )
    if scope == 3:
        return "kernel.yama.ptrace_scope is 3: tracing is off until the next boot"
    return "the capability SYS_PTRACE is missing or a seccomp profile refuses it; in a container: --cap-add SYS_PTRACE"


def ptrace_scope() -> int:
    """Yama's mode; 0 where there is no Yama."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def _continue_if_left_stopped(pid: int, start_ticks: int, looks: int) -> None:
    """A py-spy that was killed while it paused its target may leave it in state T; the job must go on. looks: at the least, a stop may take a moment."""
    for look in range(10):
        now = read_stat(pid)
        if now is None or now.start_ticks != start_ticks or (now.state not in ("T", "t") and look + 1 >= looks):
            return
        if now.state == "T":
            try:
                os.kill(pid, signal.SIGCONT)
            except OSError:
                return
        time.sleep(0.02)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("RUST_LOG", "RUST_BACKTRACE")}
