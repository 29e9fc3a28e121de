"""Whether a suspect gets anywhere: CPU of its process tree, bytes, phases, steps, stack samples that differ."""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import RankState
from rankwatch.monitor.diagnose.frames import moved
from rankwatch.monitor.diagnose.state import Watch
from rankwatch.monitor.policy import Limits


def marks(rank: RankState) -> tuple[object, ...]:
    """Cheap signs of life that never change in a rank that stands still."""
    compiling = tuple((each.compile_id, each.phase, each.raw_phase, each.split, each.detail) for each in rank.compiling)
    return (rank.stage, rank.steps, rank.process.pid if rank.process else 0, compiling)


def observe(watch: Watch | None, rank: RankState, now: float, look_s: float, limits: Limits) -> Watch:
    """The watch after one more look. The first look only takes the baseline.

    CPU and bytes are judged once per look_s, so that a recorder dump of ours (some 50 ms in the rank) is no progress.
    """
    process = rank.process
    cpu = max(process.tree_cpu_s, process.cpu_s) if process else 0.0
    io = process.io_bytes if process else 0
    stack_at = rank.stack.at if rank.stack else 0.0
    signs = marks(rank)
    if watch is None:
        return Watch(since=now, look_at=now, cpu_s=cpu, io_bytes=io, marks=signs, stack_at=stack_at)
    if signs != watch.marks:
        watch = replace(watch, marks=signs, last_progress=now, why="a new phase or step")
    if rank.stack is not None and stack_at > watch.stack_at:
        if watch.stack_at and moved(rank.earlier_stack, rank.stack) and rank.earlier_stack is not None and rank.earlier_stack.at >= watch.since - look_s:
            watch = replace(watch, last_progress=max(watch.last_progress or 0.0, min(now, stack_at)), why="its stack moves")
        watch = replace(watch, stack_at=stack_at)
    elapsed = now - watch.look_at
    if elapsed < look_s:
        return watch
    ratio = max(0.0, cpu - watch.cpu_s) / elapsed
    moved_bytes = io - watch.io_bytes
    watch = replace(watch, look_at=now, cpu_s=cpu, io_bytes=io, looks=watch.looks + 1, busy_ratio=ratio)
    if ratio >= limits.progress_cpu_ratio:
        return replace(watch, last_progress=now, why=f"{ratio:.0%} of a core in its process tree")
    if moved_bytes >= limits.progress_io_bytes:
        return replace(watch, last_progress=now, why=f"{moved_bytes / 1e6:.1f} MB moved in {elapsed:.0f} s")
    return watch


def silent_since(watch: Watch | None, since: float) -> float:
    """Start of the present silence: of the wait, or the last progress seen after that."""
    return max(since, watch.last_progress) if watch and watch.last_progress else since


def progresses(watch: Watch | None, now: float, look_s: float) -> bool:
    """Whether anything moved within the last two looks."""
    return watch is not None and watch.last_progress is not None and now - watch.last_progress <= 2 * look_s
