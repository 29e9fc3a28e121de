"""Whether a suspect gets anywhere: CPU of its process tree, bytes, phases, steps, stack samples that differ."""

from __future__ import annotations

import re
from dataclasses import replace

from rankwatch.model import RankState, Stack
from rankwatch.monitor.diagnose.frames import comparable, moved, recognise
from rankwatch.monitor.diagnose.known_work import FILE_BATON, FILELOCK
from rankwatch.monitor.diagnose.state import Watch
from rankwatch.monitor.diagnose.thread_waits import waits_for
from rankwatch.monitor.policy import Limits
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_BLOCKS_BYTES = 8192  # seen on ext4
_ASLEEP_RATIO = 0.01  # of a core, by a main thread that only wakes up for our samples
_BESIDE_RATIO = 0.3
_LOCK_FILE = re.compile(f"{FILELOCK}|{FILE_BATON}")


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
    io, disk, net = (process.io_bytes, process.disk_bytes, process.net_bytes) if process else (0, 0, 0)
    stack_at = rank.stack.at if rank.stack else 0.0
    signs = marks(rank)
    if watch is None:
        return Watch(
            since=now, look_at=now, cpu_s=cpu, io_bytes=io, marks=signs, stack_at=stack_at, disk_bytes=disk, net_bytes=net, silent=_silent(rank, now, limits),
            own_cpu_s=process.cpu_s if process else 0.0, main_cpu_s=process.main_cpu_s if process else 0.0,
        )  # fmt: skip
    silent = _silent(rank, now, limits)
    if watch.silent and not silent:
        watch = replace(watch, last_progress=now, why="its Python threads run again")  # what held the GIL has ended: the silence begins anew
    if silent != watch.silent:
        watch = replace(watch, silent=silent)
    if signs != watch.marks:
        watch = replace(watch, marks=signs, last_progress=now, why="a new phase or step")
    if rank.stack is not None and stack_at > watch.stack_at:
        watch = _stack_taken(watch, rank, now, look_s)
    elapsed = now - watch.look_at
    if elapsed < look_s:
        return watch
    ratio = max(0.0, cpu - watch.cpu_s - _beside_s(watch, rank, elapsed)) / elapsed
    files = max(io - watch.io_bytes, disk - watch.disk_bytes)  # what is read from storage is read by the process too
    files -= sum(_asked_bytes(stack) for stack in (rank.stack, rank.earlier_stack) if stack is not None and stack.at > watch.look_at)
    network = net - watch.net_bytes
    watch = replace(watch, look_at=now, cpu_s=cpu, io_bytes=io, disk_bytes=disk, net_bytes=net, looks=watch.looks + 1, busy_ratio=ratio)
    watch = replace(watch, own_cpu_s=process.cpu_s, main_cpu_s=process.main_cpu_s) if process is not None else watch
    if ratio >= limits.progress_cpu_ratio:
        watch = replace(watch, last_progress=now, why=f"{ratio:.0%} of a core in its process tree")
    if files + network >= limits.progress_io_bytes:
        over = " over the network" if network > files else ""
        watch = replace(watch, last_progress=now, why=f"{(files + network) / 1e6:.1f} MB moved{over} in {elapsed:.0f} s")
    return watch


def _beside_s(watch: Watch, rank: RankState, elapsed: float) -> float:
    """CPU seconds that count for nothing: of threads that run beside a main thread that stands, as a collector of metrics or a watchdog does.

    It sleeps in one line, in two samples, which is no known work and no wait for what a thread does. Threads that work for it use far more.
    """
    process, stack = rank.process, rank.stack
    if process is None or process.main_wait is None or process.main_wait.state != "S" or stack is None or watch.same_samples < 1:
        return 0.0
    own, main = process.cpu_s - watch.own_cpu_s, process.main_cpu_s - watch.main_cpu_s
    if main >= _ASLEEP_RATIO * elapsed or not 0.0 < own < _BESIDE_RATIO * elapsed or recognise(stack) is not None:
        return 0.0
    return own if waits_for(stack.main) in ("", "signal") else 0.0


def _asked_bytes(stack: Stack) -> int:
    """What a sample costs that the rank's worker server has taken: it writes the text into a temporary file, by whole blocks, and reads it back."""
    return 2 * len(stack.text) + _BLOCKS_BYTES if stack.asked else 0


def _silent(rank: RankState, now: float, limits: Limits) -> bool:
    """Whether none of its Python threads has run lately."""
    beat = telling_beat(rank, limits)
    return beat is not None and now - beat >= limits.gil_stale_s


def telling_beat(rank: RankState, limits: Limits) -> float | None:
    """The last beat, of which the silence since then means that no Python thread runs; None where something shows that Python does run.

    Then it is the thread that has ended or hangs, or its clock that stands: a job may set the clocks of its process.
    """
    beat = last_beat(rank)
    return None if beat is None or _python_runs(rank, beat + limits.gil_stale_s) else beat


def _python_runs(rank: RankState, after: float) -> bool:
    """Whether somebody had the GIL, or nobody wanted it, later than `after`: a step, a phase, samples that differ, or one that shows it free."""
    if max(rank.last_step_at or 0.0, *(each.phase_since for each in rank.compiling), 0.0) > after:
        return True
    stack, earlier = rank.stack, rank.earlier_stack
    if stack is None or not stack.main or stack.at <= after:
        return False
    if earlier is not None and earlier.at > after and comparable(earlier, stack) and moved(earlier, stack):
        return True
    return not any(thread.owns_gil or thread.active for thread in stack.threads)


def last_beat(rank: RankState) -> float | None:
    """When a Python thread of it ran for the last time, as far as that tells anything; None where nothing beats.

    The agent's thread is there before the rank has joined: one that has never beaten since has not got the GIL.
    """
    if str(rank.probes.get("collectives", {}).get("status", "armed")) != "armed":
        return None  # it has been switched off: its silence means nothing
    if rank.heartbeat_at is not None:
        return rank.heartbeat_at
    return rank.stage_since if rank.agent == "claimed" and rank.stage == "joined" and rank.stage_since > 0 else None


def _stack_taken(watch: Watch, rank: RankState, now: float, look_s: float) -> Watch:
    """A sample counts against the one before it, if both are of this watch and of the same thread."""
    earlier, stack = rank.earlier_stack, rank.stack
    assert stack is not None
    if not watch.stack_at or earlier is None or earlier.at < watch.since - look_s or not comparable(earlier, stack):
        return replace(watch, stack_at=stack.at, same_samples=0)
    if moved(earlier, stack):
        return replace(watch, stack_at=stack.at, same_samples=0, last_progress=max(watch.last_progress or 0.0, min(now, stack.at)), why="its stack moves")
    return replace(watch, stack_at=stack.at, same_samples=watch.same_samples + 1, same_since=watch.same_since if watch.same_samples else earlier.at)


def with_lock_holders(watches: Mapping[int, Watch], ranks: Mapping[int, RankState]) -> dict[int, Watch]:
    """A rank whose compile waits for a lock gets on while a peer gets on with a compile of the same frame: its cache entry is made there."""
    found = dict(watches)
    for rank, watch in watches.items():
        mine = {each.frame for each in ranks[rank].compiling if each.frame}
        if not mine or not waits_for_a_lock(ranks[rank]):
            continue
        peers = [other for other in watches if other != rank and any(each.frame in mine for each in ranks[other].compiling)]
        moved_at = max((watches[peer].last_progress or 0.0 for peer in peers), default=0.0)
        if moved_at > (watch.last_progress or 0.0):
            found[rank] = replace(watch, last_progress=moved_at, why=f"it waits for a lock while {_who(peers)} the same frame")
    return found


def with_absent_peers(
    watches: Mapping[int, Watch], hangs: Iterable[Sequence[int]], ranks: Mapping[int, RankState], now: float, look_s: float
) -> dict[int, Watch]:
    """A silent rank may wait for another absent one by a file, a lock or a message that nobody records: while that one gets on, it is not stuck.

    hangs: the absent ranks of each. Its silence begins anew with the last progress of any of them: once that one has come, it has time to see it.
    A compile waits for others by locks only, which are seen.
    """
    found = dict(watches)
    for roots in hangs:
        first = max((rank for rank in roots if rank in watches), key=lambda rank: watches[rank].last_progress or 0.0, default=None)
        if first is None or watches[first].last_progress is None:
            continue
        for rank in roots:
            watch = watches.get(rank)
            if (
                watch is not None
                and not ranks[rank].compiling
                and (watch.last_progress or 0.0) < (watches[first].last_progress or 0.0)
                and not progresses(watch, now, look_s)
            ):
                found[rank] = replace(watch, last_progress=watches[first].last_progress, why=f"rank {first} gets on, and it may wait for that one")
    return found


def _who(compiling: Sequence[int]) -> str:
    return f"rank {compiling[0]} compiles" if len(compiling) == 1 else f"ranks {compress(compiling)} compile"


def waits_for_a_lock(rank: RankState) -> bool:
    """Whether a thread of it waits for a lock file: the main one, or one that builds a kernel while the main one waits for that."""
    wait = rank.process.main_wait if rank.process is not None else None
    if wait is not None and wait.call in ("flock", "fcntl"):
        return True
    return rank.stack is not None and any(_LOCK_FILE.search(frame.file) for thread in rank.stack.threads for frame in thread.frames)


def silent_since(watch: Watch | None, since: float) -> float:
    """Start of the present silence: of the wait, or the last progress seen after that."""
    return max(since, watch.last_progress) if watch and watch.last_progress else since


def progresses(watch: Watch | None, now: float, look_s: float) -> bool:
    """Whether anything moved within the last two looks."""
    return watch is not None and watch.last_progress is not None and now - watch.last_progress <= 2 * look_s
