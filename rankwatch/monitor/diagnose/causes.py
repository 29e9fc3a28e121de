"""Why one rank is not where the others wait for it. The order of the tests is the precedence of the causes."""

from __future__ import annotations

import re
from dataclasses import replace

from rankwatch.model import Domain, Frame, KernelWait, Process, RankState
from rankwatch.monitor.compiles import guards
from rankwatch.monitor.compiles.cures import guard_cure
from rankwatch.monitor.diagnose import frames, words
from rankwatch.monitor.diagnose.ends import dead, first_line
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.progress import telling_beat, waits_for_a_lock
from rankwatch.monitor.diagnose.state import State, Watch, age
from rankwatch.monitor.diagnose.work import by_stack, children, fresh_stack
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


_THAW = "Thaw it: echo 0 into cgroup.freeze of its cgroup, or resume the container or the scheduler's job step that was suspended."
_STACK_COMES_S = 1.0  # after it was asked for
_FREEZERS = ("do_freezer_trap", "__refrigerator", "get_signal_freeze")
_DRIVER = re.compile(r"^(nv|os_acquire|rm_|uvm|_?nvidia|amdgpu|kfd|drm|mlx\d|ib_|rdma|bnxt|efa)")


def letter(state: State, rank: int, now: float) -> tuple[str, float, int]:
    """Process state letter, for how long it has been that, in how many looks."""
    found = state.letters.get(rank)
    return (found[0], now - found[1], found[2]) if found else ("", 0.0, 0)


def of(rank: RankState, since: float, state: State, now: float, limits: Limits, *, in_collective: bool = False) -> Finding:
    """The finding for a rank that others have waited for since `since`.

    in_collective: it has entered as well, so its Python side explains nothing; only its process does.
    """
    found = _by_process(rank, state, now, limits)
    if found is None and not in_collective:
        watch = state.watches.get(rank.rank)
        found = _compiling(rank, since, watch, state, now) or _gil(rank, since, state, now, limits) or _blocked_thread(rank, since, limits)
        found = found or by_stack(rank, since, state, now)
    return found or Finding(rank.rank, "unknown", "unknown", confidence="likely")


def _by_process(rank: RankState, state: State, now: float, limits: Limits) -> Finding | None:
    process = rank.process
    if process is None:
        return None
    if process.exit_code is not None or not process.alive or process.state in ("Z", "X"):
        return dead(rank, state)
    kind, lasted, looks = letter(state, rank.rank, now)
    frozen = process.wchan if process.wchan in _FREEZERS and process.state in ("S", "D") else ""
    held_s = process.main_wait.asleep_s if frozen and process.main_wait else lasted
    stack = rank.stack if rank.stack is not None and rank.stack.at >= now - held_s - _STACK_COMES_S else None  # an older one shows another place
    at = frames.where(stack.main) if stack else ""
    if kind == "T" or frozen:
        how = f"its cgroup is frozen ({frozen})" if frozen else "its process is stopped (state T)"
        cure = f"{words.FROZEN} {_THAW}" if frozen else f"{words.STOPPED} `kill -CONT {process.pid}` continues it; find out who sent SIGSTOP."
        return Finding(
            rank.rank, "stopped", "node", how, at, "at_once", advice=(cure,),
            ready=held_s >= limits.stopped_s and (bool(frozen) or looks >= limits.agree_polls) and (bool(at) or held_s >= limits.stack_s + _STACK_COMES_S),
            evidence=(f"pid {process.pid} has been {'frozen' if frozen else 'in state T'} for {held_s:.0f} s",),
        )  # fmt: skip
    if kind == "t" and lasted >= limits.traced_s:
        by = f"{process.tracer} traces it" if process.tracer else "another process traces it"
        evidence = (f"pid {process.pid} has been in state t for {lasted:.0f} s",)
        return Finding(rank.rank, "debugger", "user_code", f"{by} (state t), most likely a debugger", at, "never", evidence=evidence)
    if kind == "D" and process.main_wait is not None and process.main_wait.state == "D":
        lasted = process.main_wait.asleep_s  # of one and the same sleep: a rank that writes fast is found in many
    if kind == "D" and lasted >= limits.uninterruptible_s:
        return _uninterruptible(rank.rank, process, process.main_wait, "its process", f"pid {process.pid}", lasted, at)
    return None


def _uninterruptible(rank: int, process: Process, wait: KernelWait | None, who: str, whom: str, lasted: float, at: str) -> Finding:
    """who: subject of the clause that people read; whom: of the line of evidence."""
    wchan = wait.wchan if wait is not None and wait.wchan else process.wchan
    where = f" in {wchan}" if wchan not in ("", "0") else ""
    what, known = "", wait is not None and wait.state == "D" and bool(wait.target or wait.mount)
    if wait is not None and known:
        what = f", {wait.call or 'a system call'} of {wait.target or 'a file'}" + (f" on {wait.mount}" if wait.mount else "")
    domain: Domain = "node" if _DRIVER.search(wchan) and not known else "storage"
    missing = () if known or domain == "node" else ("which file or device the kernel waits for",)
    return Finding(
        rank, "uninterruptible", domain, f"{who} waits in the kernel{where} (state D){what}", at,
        evidence=(f"{whom} has been in state D{where} for {lasted:.0f} s{what}; SIGKILL has no effect until the kernel answers",), missing_evidence=missing,
    )  # fmt: skip


def _blocked_thread(rank: RankState, since: float, limits: Limits) -> Finding | None:
    """Its main thread waits for another thread, and one of those sleeps uninterruptibly."""
    stack, process = fresh_stack(rank, since), rank.process
    if stack is None or process is None or frames.waits_for_thread(stack.main) is None:
        return None
    for wait in process.blocked_threads:
        thread = next((each for each in stack.threads if each.native_id == wait.tid), None)
        if thread is not None and wait.asleep_s >= limits.uninterruptible_s:
            at = frames.where(thread.frames) or frames.where(stack.main)
            who = f"its main thread waits for thread {thread.name or wait.tid}, which"
            return _uninterruptible(rank.rank, process, wait, who, f"thread {wait.tid} of pid {process.pid}", wait.asleep_s, at)
    return None


def _compiling(rank: RankState, since: float, watch: Watch | None, state: State, now: float) -> Finding | None:
    stack = fresh_stack(rank, since)
    seen = frames.recognise(stack)
    if seen is not None and seen.kind == "debugger":
        return None
    moved = (watch.last_progress or watch.since) if watch else since
    if rank.compiling:
        activity = min(rank.compiling, key=lambda each: each.started_at)
        newest = max(each.phase_since for each in rank.compiling)
        took = now - activity.started_at
        phase = f"phase {activity.phase}" + (f" ({activity.raw_phase})" if activity.raw_phase and activity.raw_phase != activity.phase else "")
        what = f"torch.compile of {activity.frame or 'a frame'} [{activity.compile_id}]"
        text = f"{what} has run for {took:.0f} s, {phase} for {now - activity.phase_since:.0f} s"
        if activity.splits:
            text += f", split {activity.split} of {activity.splits}"
        if rank.stack is not None and rank.stack.at >= newest and waits_for_a_lock(rank):
            text += ", it waits for a lock file that another process holds"
        lines = [text]
        if activity.recompile_reason:
            lines.append(f"recompiled because: {first_line(activity.recompile_reason)}")
        if others := state.frame_times.get(activity.frame):
            times = [seconds for other, seconds in others.items() if other != rank.rank]
            if times:
                least, most = f"{min(times):.1f}", f"{max(times):.1f}"
                lines.append(f"peers took {least if least == most else f'{least} to {most}'} s for the same frame")
        lines.append(f"last sign of progress {now - max(newest, moved):.0f} s ago" + (f" ({watch.why})" if watch and watch.why else ""))
        lines += children(stack)
        says = text + (f" (recompiled: {first_line(activity.recompile_reason, 90)})" if activity.recompile_reason else "")
        return Finding(
            rank.rank, "compiling", "user_code", says, _at_of_frame(activity.frame), "compile", max(newest, moved), tuple(lines),
            advice=_compile_advice(activity.recompile_reason),
        )  # fmt: skip
    if rank.compile_witness or (seen is not None and seen.kind == "compiling"):
        how = "torch's own wait counters say that a compile is active" if rank.compile_witness else f"its stack is in {seen.frame.short if seen else ''}"
        if rank.probes.get("compile", {}).get("status") == "armed":  # it reports, and nothing is under way: these witnesses are a little old
            last = rank.compile_totals.get("last") or {}
            frame = str(last.get("frame") or "")
            return Finding(
                rank.rank, "compiling", "user_code", f"it has just compiled {frame or 'a frame'}", _at_of_frame(frame), "compile", moved,
                (how, *children(stack)), (), "likely", advice=_compile_advice(str(last.get("recompile_reason") or "")),
            )  # fmt: skip
        at = frames.where(stack.main) if stack else ""
        return Finding(
            rank.rank, "compiling", "user_code", f"it is in torch.compile{' at ' + at if at else ''}", at, "compile", moved, (how, *children(stack)),
            ("phase and frame: the compile probe did not report",), "likely",
        )  # fmt: skip
    return None


def _compile_advice(reason: str) -> tuple[str, ...]:
    """What is said of every compile, and what helps against the guard that has made it a recompile."""
    guard = guards.parse(re.sub(r"\s+# ", "  # ", reason)) if reason else None  # the user's line behind it is set off by two blanks at least
    cure = guard_cure(guard.kind, guard.source, guard.expected) if guard is not None else ""
    return (words.NEAR_TIMEOUT, f"{words.RECOMPILES} the guard `{guard.text}`: {cure}.") if guard is not None and cure else ()


def _gil(rank: RankState, since: float, state: State, now: float, limits: Limits) -> Finding | None:
    """A Python heartbeat that stopped in a process that runs: native code holds the GIL."""
    beat = telling_beat(rank, limits)
    if beat is None or rank.process is None or rank.stage != "joined":
        return None
    silent = age(state.pauses, beat, now)
    if silent < limits.gil_stale_s or rank.ping_ok is False:
        return None
    stack = rank.stack if rank.stack is not None and rank.stack.at >= beat else fresh_stack(rank, since)
    owner = next((thread for thread in stack.threads if thread.owns_gil), None) if stack else None
    held: tuple[Frame, ...] = owner.frames if owner else stack.main if stack else ()
    at = frames.where(held)
    lines = [f"no Python thread has run for {silent:.0f} s"]
    lines.append("its C++ worker server answers, so the process runs" if rank.ping_ok else "its process is alive and not stopped")
    if owner:
        lines.append(f"thread {owner.name} owns the GIL in {owner.frames[0].short if owner.frames else 'native code'}")
    seen = frames.recognise_frames(held)
    if seen is not None and seen.kind in ("checkpointing", "external_io") and not seen.own and (owner is None or stack is None or owner == stack.threads[0]):
        # torch.save opens its file with the GIL held: a file system that does not answer looks like this
        known = by_stack(rank, since, state, now)
        return replace(known, evidence=(*known.evidence, *lines))
    return Finding(
        rank.rank, "gil_held", "user_code", f"native code{' called from ' + at if at else ''} holds the GIL, no Python thread has run for {silent:.0f} s",
        at, "pause", evidence=tuple(lines), missing_evidence=() if stack else ("stack of the rank",),
        confidence="certain" if rank.ping_ok and stack else "likely",
    )  # fmt: skip


def _at_of_frame(frame: str) -> str:
    """`model.py:31:forward` from the compile probe's `forward@model.py:31`."""
    name, _, place = frame.partition("@")
    return f"{place.rsplit('/', 1)[-1]}:{name}" if place else frame


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
