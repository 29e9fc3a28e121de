"""Why one rank is not where the others wait for it. The order of the tests is the precedence of the causes."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import Literal

from rankwatch.model import Cause, Confidence, Crash, Domain, Frame, RankState, Stack
from rankwatch.monitor.diagnose import frames
from rankwatch.monitor.diagnose.state import State, Watch
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PRECEDENCE: tuple[Cause, ...] = (
    "killed",
    "oom_killed",
    "crashed",
    "exited",
    "stopped",
    "uninterruptible",
    "gil_held",
    "data_loading",
    "external_io",
    "checkpointing",
    "not_entered",
    "store_wait",
    "debugger",
    "compiling",
    "unknown",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank does. limit: which silence makes it stuck; at_once: evidence that cannot heal; never: it waits for a person.

    says: the clause in the summary, "it is in train.py:31:load_batch". silent_from: start of the silence that counts for a compile.
    """

    rank: int
    cause: Cause
    domain: Domain
    says: str = ""
    at: str = ""
    limit: Literal["normal", "io", "compile", "at_once", "never"] = "normal"
    silent_from: float | None = None
    evidence: tuple[str, ...] = ()
    missing_evidence: tuple[str, ...] = ()
    confidence: Confidence = "certain"
    exit_code: int | None = None  # of a rank that ended without an exception
    ready: bool = True  # False: at_once evidence that has not lasted long enough


def letter(state: State, rank: int, now: float) -> tuple[str, float, int]:
    """Process state letter, for how long it has been that, in how many looks."""
    found = state.letters.get(rank)
    return (found[0], now - found[1], found[2]) if found else ("", 0.0, 0)


def fresh_stack(rank: RankState, since: float) -> Stack | None:
    """The newest sample, if it was taken during this wait and shows something."""
    stack = rank.stack
    return stack if stack is not None and stack.main and stack.at >= since else None


def signal_name(code: int) -> str:
    """`SIGKILL` for -9 and, as shells report it, 137; "" for an ordinary exit code."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    try:
        return signal.Signals(number).name if number else ""
    except ValueError:
        return f"signal {number}"


def of(rank: RankState, since: float, state: State, now: float, limits: Limits, *, in_collective: bool = False) -> Finding:
    """The finding for a rank that others have waited for since `since`.

    in_collective: it has entered as well, so its Python side explains nothing; only its process does.
    """
    found = _by_process(rank, state, now, limits)
    if found is None and not in_collective:
        watch = state.watches.get(rank.rank)
        found = _compiling(rank, since, watch, state, now) or _gil(rank, since, now, limits) or _by_stack(rank, since, state, now)
    return found or Finding(rank.rank, "unknown", "unknown", confidence="likely")


def joins_failed(before: State, ranks: Mapping[int, RankState]) -> dict[int, Crash]:
    """Ranks whose own init_process_group raised, with what it raised; kept over their end, dropped when they try again."""
    found = {rank.rank: rank.crash or _UNSAID for rank in ranks.values() if rank.stage == "join_failed"}
    ended = {number: crash for number, crash in before.joins_failed.items() if number in ranks and ranks[number].stage == "exiting"}
    return {**ended, **found}


def failed_join(rank: RankState, state: State) -> Crash | None:
    """What its init_process_group raised, if that is why it has not joined; None for a rank that ends of something else after that."""
    if rank.stage not in ("join_failed", "exiting", "starting"):
        return None
    raised, crash = state.joins_failed.get(rank.rank), rank.crash
    if raised is not None:
        of_it = crash is None or (crash.type, crash.message) == (raised.type, raised.message) or _IN_INIT in crash.traceback
        return raised if of_it or rank.stage == "join_failed" else None
    # raised and ended between two looks, or no agent: only the traceback tells
    return crash if crash is not None and not rank.groups and _IN_INIT in crash.traceback else None


def place(crash: Crash) -> str:
    """Its `where`, if that is a line of the job's own code as far as the traceback shows; else ""."""
    for file, line, name in _TRACEBACK_FRAME.findall(crash.traceback):
        frame = Frame(name, file, int(line))
        if frame.short == crash.where:
            return crash.where if frames.is_user(frame) else ""
    return crash.where


def _by_process(rank: RankState, state: State, now: float, limits: Limits) -> Finding | None:
    process = rank.process
    if process is None:
        return None
    if process.exit_code is not None or not process.alive or process.state in ("Z", "X"):
        return _dead(rank, state)
    kind, lasted, looks = letter(state, rank.rank, now)
    stack = rank.stack
    at = frames.where(stack.main) if stack else ""
    if kind == "T":
        return Finding(
            rank.rank, "stopped", "node", "its process is stopped (state T)", at, "at_once", ready=lasted >= limits.stopped_s and looks >= limits.agree_polls,
            evidence=(f"pid {process.pid} has been in state T for {lasted:.0f} s",),
        )  # fmt: skip
    if kind == "t" and lasted >= limits.traced_s:
        says = "another process traces it (state t), most likely a debugger"
        return Finding(rank.rank, "debugger", "user_code", says, at, "never", evidence=(f"pid {process.pid} has been in state t for {lasted:.0f} s",))
    if kind == "D" and lasted >= limits.uninterruptible_s:
        where = f" in {process.wchan}" if process.wchan not in ("", "0") else ""
        return Finding(
            rank.rank, "uninterruptible", "storage", f"its process waits in the kernel{where} (state D)", at,
            evidence=(f"pid {process.pid} has been in state D{where} for {lasted:.0f} s; SIGKILL has no effect until the kernel answers",),
        )  # fmt: skip
    return None


def _dead(rank: RankState, state: State) -> Finding:
    process = rank.process
    code = process.exit_code if process else None
    crash = rank.crash
    at = place(crash) if crash else frames.where(rank.stack.main) if rank.stack else ""
    if code is None:
        lines = ("its process is gone, the exit code is not known yet",)
        return Finding(rank.rank, "exited", "unknown", "its process is gone", at, "at_once", evidence=lines, confidence="likely")
    name = signal_name(code)
    raised = failed_join(rank, state)
    if raised is not None and code and name != "SIGKILL":
        text = said(raised)
        domain: Domain = "network" if _CONNECTS.search(f"{raised.type}: {raised.message}") else crash_domain(raised.type, raised.message)
        says = f"it failed in init_process_group: {text}"
        return Finding(rank.rank, "crashed", domain, says, place(raised) or at, "at_once", evidence=(f"exit code {code}", f"init_process_group raised {text}"))
    if crash is not None and name not in ("SIGKILL",):
        text = said(crash)
        return Finding(rank.rank, "crashed", crash_domain(crash.type, crash.message), f"it raised {text}", at, "at_once", evidence=(f"exit code {code}", text))
    if name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS"):
        domain = "node" if name == "SIGBUS" else "unknown"
        return Finding(rank.rank, "crashed", domain, f"it died of {name}", at, "at_once", evidence=(f"exit code {code} ({name}), no Python exception",))
    if name == "SIGKILL" and process is not None and process.oom_killed:
        return Finding(
            rank.rank, "oom_killed", "node", "it was killed by the kernel: its memory cgroup had none left", at, "at_once",
            evidence=(f"exit code {code} (SIGKILL)", "the memory cgroup's count of out-of-memory kills rose with it"),
        )  # fmt: skip
    if name:
        domain = "node" if name == "SIGKILL" else "scheduler"
        return Finding(rank.rank, "killed", domain, f"it was killed by {name}", at, "at_once", evidence=(f"exit code {code} ({name}), no traceback",))
    return Finding(
        rank.rank, "exited", "user_code", f"it ended with exit code {code}", at, "at_once", evidence=(f"exit code {code}, no exception seen",), exit_code=code
    )  # fmt: skip


def _compiling(rank: RankState, since: float, watch: Watch | None, state: State, now: float) -> Finding | None:
    stack = fresh_stack(rank, since)
    seen = frames.recognise(stack)
    if seen is not None and seen.kind == "debugger":
        return None
    moved = watch.last_progress if watch and watch.last_progress else since
    if rank.compiling:
        activity = min(rank.compiling, key=lambda each: each.started_at)
        newest = max(each.phase_since for each in rank.compiling)
        took = now - activity.started_at
        phase = f"phase {activity.phase}" + (f" ({activity.raw_phase})" if activity.raw_phase and activity.raw_phase != activity.phase else "")
        what = f"torch.compile of {activity.frame or 'a frame'} [{activity.compile_id}]"
        text = f"{what} has run for {took:.0f} s, {phase} for {now - activity.phase_since:.0f} s"
        if activity.splits:
            text += f", split {activity.split} of {activity.splits}"
        lines = [text]
        if activity.recompile_reason:
            lines.append(f"recompiled because: {first_line(activity.recompile_reason)}")
        if others := state.frame_times.get(activity.frame):
            times = [seconds for other, seconds in others.items() if other != rank.rank]
            if times:
                lines.append(f"peers took {min(times):.1f} to {max(times):.1f} s for the same frame")
        lines.append(f"last sign of progress {now - max(newest, moved):.0f} s ago" + (f" ({watch.why})" if watch and watch.why else ""))
        lines += children(stack)
        says = text + (f" (recompiled: {first_line(activity.recompile_reason, 90)})" if activity.recompile_reason else "")
        return Finding(rank.rank, "compiling", "user_code", says, _at_of_frame(activity.frame), "compile", max(newest, moved), tuple(lines))
    if rank.compile_witness or (seen is not None and seen.kind == "compiling"):
        how = "torch's own wait counters say that a compile is active" if rank.compile_witness else f"its stack is in {seen.frame.short if seen else ''}"
        if rank.probes.get("compile", {}).get("status") == "armed":  # it reports, and nothing is under way: these witnesses are a little old
            frame = str((rank.compile_totals.get("last") or {}).get("frame") or "")
            return Finding(
                rank.rank, "compiling", "user_code", f"it has just compiled {frame or 'a frame'}", _at_of_frame(frame), "compile", moved,
                (how, *children(stack)), (), "likely",
            )  # fmt: skip
        at = frames.where(stack.main) if stack else ""
        return Finding(
            rank.rank, "compiling", "user_code", f"it is in torch.compile{' at ' + at if at else ''}", at, "compile", moved, (how, *children(stack)),
            ("phase and frame: the compile probe did not report",), "likely",
        )  # fmt: skip
    return None


def _gil(rank: RankState, since: float, now: float, limits: Limits) -> Finding | None:
    """A Python heartbeat that stopped in a process that runs: native code holds the GIL."""
    if rank.heartbeat_at is None or rank.process is None or rank.stage != "joined":
        return None
    silent = now - rank.heartbeat_at
    if silent < limits.gil_stale_s or rank.ping_ok is False:
        return None
    stack = rank.stack if rank.stack is not None and rank.stack.at >= rank.heartbeat_at else fresh_stack(rank, since)
    owner = next((thread for thread in stack.threads if thread.owns_gil), None) if stack else None
    held: tuple[Frame, ...] = owner.frames if owner else stack.main if stack else ()
    at = frames.where(held)
    lines = [f"no Python thread has run for {silent:.0f} s"]
    lines.append("its C++ worker server answers, so the process runs" if rank.ping_ok else "its process is alive and not stopped")
    if owner:
        lines.append(f"thread {owner.name} owns the GIL in {owner.frames[0].short if owner.frames else 'native code'}")
    return Finding(
        rank.rank, "gil_held", "user_code", f"native code{' called from ' + at if at else ''} holds the GIL, no Python thread has run for {silent:.0f} s", at,
        evidence=tuple(lines), missing_evidence=() if stack else ("stack of the rank",), confidence="certain" if rank.ping_ok and stack else "likely",
    )  # fmt: skip


def _by_stack(rank: RankState, since: float, state: State, now: float) -> Finding:
    stack = fresh_stack(rank, since)
    if stack is None:
        why = f"stack of rank {rank.rank}" + (f" ({rank.stack.error})" if rank.stack is not None and rank.stack.error else "")
        return Finding(rank.rank, "not_entered", "user_code", "", "", missing_evidence=(why,), confidence="likely")
    at = frames.where(stack.main)
    seen = frames.recognise(stack)
    watch = state.watches.get(rank.rank)
    lines = [f"main thread in {stack.main[0].short}" + (f", called from {at}" if at and at != stack.main[0].short else "")]
    if watch and watch.looks:
        seen_s = f"progress: {watch.why}, {now - watch.last_progress:.0f} s ago" if watch.last_progress else ""
        lines.append(seen_s or f"no progress seen: {watch.busy_ratio or 0:.1%} of a core, same stack")
    here = frames.innermost(stack.main)
    # where a rank is does not tell whether it will come
    plain = Finding(rank.rank, "not_entered", "user_code", f"it is in {here}" if here else "", at, evidence=tuple(lines), confidence="likely")
    if seen is None and frames.at_the_end(stack):
        return replace(plain, says="its script has ended, and Python waits for a thread that does not", evidence=(*lines, *_threads(stack)))
    if seen is None:
        return plain
    if seen.kind == "debugger":
        return replace(plain, cause="debugger", says=f"it is in a debugger ({seen.frame.short})", limit="never", confidence="certain")
    if seen.kind == "data_loading":
        workers = children(stack)
        own = frames.user_frames(stack.main[: stack.main.index(seen.frame)])  # num_workers=0: the dataset's own code runs below the loader's
        domain: Domain = "user_code" if own or any(frames.user_frames(child.main) for child in stack.subprocesses) else "storage"
        says = f"it waits for its next batch in {seen.frame.short}" + (f", called from {at}" if at else "")
        if own:
            says = f"it makes its next batch itself, in {at}"
        return replace(plain, cause="data_loading", domain=domain, says=says, evidence=(*lines, *workers))
    if seen.kind == "checkpointing":
        says = f"it reads or writes a checkpoint in {seen.frame.short}" + (f", called from {at}" if at else "")
        return replace(plain, cause="checkpointing", domain="storage", says=says, limit="io", confidence="certain")
    if seen.kind == "external_io":
        says = f"it waits for something outside the job in {seen.frame.short}" + (f", called from {at}" if at else "")
        return replace(plain, cause="external_io", domain="network", says=says, limit="io", confidence="certain")
    return plain


def children(stack: Stack | None) -> tuple[str, ...]:
    """What the sampled children of a rank do: data-loader or compile workers."""
    lines = []
    for child in (stack.subprocesses if stack else ())[:4]:
        at = frames.where(child.main)
        doing = "is asleep" if not any(thread.active for thread in child.threads) else "runs"
        lines.append(
            f"child pid {child.pid} {doing}"
            + (f" in {child.main[0].short}" if child.main else "")
            + (f", called from {at}" if at and at != child.main[0].short else "")
        )
    return tuple(lines)


def _threads(stack: Stack) -> tuple[str, ...]:
    """Threads of the job's own beside the main one."""
    found = (
        (thread.name, frames.innermost(thread.frames)) for thread in stack.threads[1:] if frames.user_frames(thread.frames) or thread.name.startswith("Thread-")
    )
    return tuple(f"thread {name} is in {at}" for name, at in found if at)[:4]


def first_line(text: str, width: int = 200) -> str:
    line = next((part.strip() for part in text.splitlines() if part.strip()), "")
    if len(line) <= width:
        return line
    cut = line[: width - 3]
    if not line[len(cut)].isspace():  # in the middle of a word: without it, unless it is nearly all there is
        short = cut.rpartition(" ")[0]
        cut = short if len(short) >= width // 2 else cut
    return cut.rstrip() + "..."


def said(crash: Crash) -> str:
    """`ValueError: bad batch`, the message's first line."""
    return f"{crash.type}: {text}" if (text := first_line(crash.message)) else crash.type


def _at_of_frame(frame: str) -> str:
    """`model.py:31:forward` from the compile probe's `forward@model.py:31`."""
    name, _, place = frame.partition("@")
    return f"{place.rsplit('/', 1)[-1]}:{name}" if place else frame


_STORAGE = (
    "No space left on device", "Stale file handle", "Input/output error", "Disk quota exceeded",
    "Read-only file system", "Remote I/O error", "Transport endpoint",
)  # fmt: skip
_NODE = (
    "uncorrectable ECC",
    "CUDA error",
    "unspecified launch failure",
    "hardware",
    "NVLink",
    "Xid",
    "GPU has fallen off",
    "Bus error",
    "Cannot allocate memory",
)
_IN_INIT = "in init_process_group\n"
_UNSAID = Crash("an exception", "")
_TRACEBACK_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')
_CONNECTS = re.compile(r"connect|socket|getaddrinfo|name resolution|host ?name|timed out|distnetworkerror|diststoreerror", re.IGNORECASE)
_NETWORK = ("NCCL error", "ncclSystemError", "ncclRemoteError", "ibv_", "vendor err", "No route to host", "Network is unreachable", "DistNetworkError")


def crash_domain(type_name: str, message: str) -> Domain:
    """Where the trouble lies, by the words of an exception. A device-side assert and an out-of-memory are the user's."""
    text = f"{type_name}: {message}"
    if any(word in text for word in _STORAGE):
        return "storage"
    if "device-side assert" in text or "out of memory" in text:
        return "user_code"
    if any(word in text for word in _NETWORK):
        return "network"
    return "node" if any(word in text for word in _NODE) else "user_code"


def frame_times(before: State, ranks: Mapping[int, RankState], now: float) -> tuple[dict[tuple[int, str], tuple[str, float]], dict[str, dict[int, float]]]:
    """Compiles that run now, and for each frame how long each rank took for it, learned by watching compiles end."""
    running = {(rank.rank, each.compile_id): (each.frame, each.started_at) for rank in ranks.values() for each in rank.compiling if each.frame}
    times = {frame: dict(by_rank) for frame, by_rank in before.frame_times.items()}
    for (rank, compile_id), (frame, started) in before.compiles.items():
        if (rank, compile_id) not in running and rank in ranks:
            times.setdefault(frame, {})[rank] = now - started
    while len(times) > 64:
        times.pop(next(iter(times)))
    return running, times
