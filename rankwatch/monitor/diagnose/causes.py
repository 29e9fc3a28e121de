"""Why one rank is not where the others wait for it. The order of the tests is the precedence of the causes."""

from __future__ import annotations

from rankwatch.model import Frame, RankState
from rankwatch.monitor.diagnose import frames
from rankwatch.monitor.diagnose.ends import dead, first_line
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import State, Watch
from rankwatch.monitor.diagnose.work import by_stack, children, fresh_stack
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


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
        found = _compiling(rank, since, watch, state, now) or _gil(rank, since, now, limits) or by_stack(rank, since, state, now)
    return found or Finding(rank.rank, "unknown", "unknown", confidence="likely")


def _by_process(rank: RankState, state: State, now: float, limits: Limits) -> Finding | None:
    process = rank.process
    if process is None:
        return None
    if process.exit_code is not None or not process.alive or process.state in ("Z", "X"):
        return dead(rank, state)
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
