"""What the stack says of a rank that is not in its collective: data loading, checkpointing, transfers, a debugger, or a line of the job."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from rankwatch.model import Domain, Frame, KernelWait, Process, RankState, Stack, Thread
from rankwatch.monitor.diagnose import frames
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.frames import Recognised
from rankwatch.monitor.diagnose.known_work import TRANSFERS
from rankwatch.monitor.diagnose.state import State, Watch
from rankwatch.monitor.diagnose.thread_waits import waits_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_SPIN_RATIO = 0.2  # of a core in the process tree, with the main thread found running
_SPIN_SAMPLES = 2
_POOL_FILE = re.compile(r"/multiprocessing/pool\.py$")
_POOL = "it waits for a result of multiprocessing.Pool: a worker that is killed is replaced, and its task never returns"
_SAVES = ("save", "checkpoint", "ckpt", "dump")


def fresh_stack(rank: RankState, since: float) -> Stack | None:
    """The newest sample, if it was taken during this wait and shows something."""
    stack = rank.stack
    return stack if stack is not None and stack.main and stack.at >= since else None


def by_stack(rank: RankState, since: float, state: State, now: float) -> Finding:
    """The finding for a rank of which only its stack can tell why it is not there."""
    stack = fresh_stack(rank, since)
    watch = state.watches.get(rank.rank)
    if rank.stage == "exiting" and not (stack is not None and frames.user_frames(stack.main)) and not frames.at_the_end(stack):
        return _shutting_down(rank, stack, watch, now)
    if stack is None:
        return _unread(rank, watch, now)
    at = frames.where(stack.main)
    lines = [f"main thread in {stack.main[0].short}" + _called_from(stack.main, at), *_progress(stack, watch, now)]
    seen, thread = frames.recognise(stack), None
    if seen is None and (wait := frames.waits_for_thread(stack.main)) is not None:
        thread, seen = _worker(stack, wait)
        at = (frames.where(thread.frames) if thread else "") or at
    here = frames.innermost(thread.frames if thread else stack.main)
    lines += _lost_children(rank.process)
    # where a rank is does not tell whether it will come
    plain = Finding(rank.rank, "not_entered", "user_code", f"it is in {here}" if here else "", at, evidence=tuple(lines), confidence="likely")
    if thread is not None:
        by = frames.where(stack.main)
        lines.append(f"its main thread waits{f' in {by}' if by else ''} for thread {thread.name}, which is in {here}")
        plain = replace(plain, says=f"its main thread waits for thread {thread.name}, which is in {here}", evidence=tuple(lines))
    elif _in_multiprocessing(stack) and (lost := _lost_children(rank.process)):
        plain = replace(plain, says=f"{plain.says}; {lost[0].partition(':')[0].replace('child', 'its child', 1)}")
    found = _known(seen, stack, thread, plain, rank.process) if seen is not None else None
    if found is None:
        found = _unknown_work(rank.process, stack, watch, plain) if thread is None else plain
    phase = frames.evaluation(thread.frames if thread else stack.main)
    if phase is not None and found.cause in ("not_entered", "data_loading", "external_io") and found.says:
        found = replace(found, says=f"{found.says}, while it evaluates", evidence=(*found.evidence, f"it evaluates: {phase.short} is on its stack"))
    return found


def _shutting_down(rank: RankState, stack: Stack | None, watch: Watch | None, now: float) -> Finding:
    """Its script is over, and no line of the job runs any more: what Python and torch do at an end has no Python frame, or only library ones."""
    where = f" (in {here})" if stack is not None and (here := frames.innermost(stack.main)) else ""
    lines = [f"its script has ended: {rank.crash.type}" if rank.crash is not None else "its script has ended, by sys.exit or at its last line"]
    return Finding(
        rank.rank, "not_entered", "user_code", f"its script has ended and the interpreter is shutting down{where}",
        evidence=(*lines, *_progress(stack, watch, now), *_threads(stack)) if stack is not None else (*lines, *_progress(stack, watch, now)),
        confidence="likely",
        advice=(
            "The rank has left its script while others still need it: check for an early return or sys.exit.",
            "What runs at its end takes long or hangs: atexit handlers, threads that are no daemons, torch's own clean-up.",
        ),
    )  # fmt: skip


def _unread(rank: RankState, watch: Watch | None, now: float) -> Finding:
    """No stack: where it is, is not known, and what else is known is told."""
    error = rank.stack.error if rank.stack is not None else ""
    lines = _progress(None, watch, now)
    process = rank.process
    if process is not None and process.main_wait is not None and process.main_wait.call:
        lines.append(f"its main thread is in {_kernel(process.main_wait)}")
    why = f"stack of rank {rank.rank}" + (f" ({error})" if error else "")
    return Finding(rank.rank, "not_entered", "user_code", "", "", evidence=tuple(lines), missing_evidence=(why,), confidence="likely")


def _known(seen: Recognised, stack: Stack, thread: Thread | None, plain: Finding, process: Process | None) -> Finding | None:
    """What a recognised kind of work makes of the plain finding; None where the kind says nothing of the cause."""
    at, place = plain.at, seen.frame.short
    if at:
        place += f", which runs {at}" if seen.own else f", called from {at}"
    sure = replace(plain, confidence="likely" if thread else "certain")
    if seen.kind == "debugger":
        return replace(sure, cause="debugger", says=f"it {seen.does} ({place})", limit="never")
    if seen.kind == "collective":
        call = frames.function(seen.frame)
        return replace(
            plain,
            says=f"it waits in {call}" + (f", called from {at}" if at else ""),
            evidence=(*plain.evidence, f"it is in a collective call itself ({place})"),
        )
    if seen.kind == "data_loading":
        domain: Domain = "user_code" if seen.own or any(frames.user_frames(child.main) for child in stack.subprocesses) else seen.domain
        if "external_io" in seen.inside:
            domain = "network"
        says = f"it makes its next batch itself, in {at}" if seen.own and at else f"it {seen.does} in {place}"
        evidence = (*plain.evidence, *children(stack))
        worker, there = _busy_worker(stack) if not seen.own else (None, "")
        if worker is not None:
            says += f", and its worker {worker.pid} is in {there}"
        return replace(plain, cause="data_loading", domain=domain, says=says, at=there or at, limit="pause", evidence=evidence)
    if seen.kind == "checkpointing":
        return replace(sure, cause="checkpointing", domain=seen.domain, says=f"it {seen.does} in {place}", limit="io")
    if seen.kind == "external_io":
        return replace(sure, cause="external_io", domain=seen.domain, says=f"it {seen.does} in {place}", limit="io")
    if seen.kind == "noted":
        transfer = _transfer(process) if seen.frame.file.endswith("subprocess.py") else ""
        if transfer:
            says = f"it waits for its child process {transfer}" + (f", started by {at}" if at else "")
            return replace(sure, cause="external_io", domain="network", says=says, limit="io", evidence=(*plain.evidence, *children(stack)))
        names = f" ({', '.join(process.children[:4])})" if process is not None and process.children and seen.frame.file.endswith("subprocess.py") else ""
        return replace(plain, says=f"it {seen.does}{names} in {place}", evidence=(*plain.evidence, *children(stack)))
    return None


def _unknown_work(process: Process | None, stack: Stack, watch: Watch | None, plain: Finding) -> Finding:
    """No frame tells: the end of the script, input from a terminal, a child's work, a native writer, threads and coroutines."""
    if frames.at_the_end(stack):
        return replace(plain, says="its script has ended, and Python waits for a thread that does not", evidence=(*plain.evidence, *_threads(stack)))
    wait = process.main_wait if process is not None else None
    innermost = next((frame for frame in stack.main), None)
    own = innermost is not None and frames.is_user(innermost)  # a native call made by this line
    if wait is not None and own and wait.call == "read" and wait.fd == 0:
        return replace(
            plain,
            cause="debugger",
            says=f"it waits for input from a person in {plain.at}",
            limit="never",
            evidence=(*plain.evidence, f"its main thread is in {_kernel(wait)}"),
        )
    if wait is not None and own and wait.call in ("wait4", "waitid") and (name := _transfer(process)):
        says = f"it waits for its child process {name}, started by {plain.at}"
        return replace(plain, cause="external_io", domain="network", says=says, limit="io")
    if innermost is not None and own and watch is not None and "MB moved" in watch.why and any(word in frames.function(innermost).lower() for word in _SAVES):
        # named like a save, in native code, and bytes move: each alone would not do
        return replace(plain, cause="checkpointing", domain="storage", says=f"it writes in {plain.at}", limit="io")
    if frames.in_event_loop(stack.main):
        says = "its asyncio event loop has nothing to run" + (f", started by {plain.at}" if plain.at else "")
        return replace(
            plain,
            says=says,
            evidence=(*plain.evidence, *_threads(stack)),
            missing_evidence=("what its suspended coroutines wait for: samples show running code only",),
        )
    if frames.waits_for_thread(stack.main):
        pool = (_POOL,) if any(_POOL_FILE.search(frame.file) for frame in stack.main) and (watch is None or watch.last_progress is None) else ()
        return replace(plain, evidence=(*plain.evidence, *pool, *_threads(stack)))
    if wait is not None and wait.call and (wait.target or wait.mount):
        return replace(plain, evidence=(*plain.evidence, f"its main thread is in {_kernel(wait)}"))
    return plain


# -- threads and children --------------------------------------------------------------------------------------------------


def _worker(stack: Stack, wait: Frame) -> tuple[Thread | None, Recognised | None]:
    """The one thread that the main thread can be waiting for, with its work; nothing where several could be it and differ.

    A lock, an event or a condition does not tell whom it is for: a watchdog of the job's own is a thread as well. Of a queue only known work is believed.
    """
    found = []
    kind = waits_for(stack.main)
    if kind not in ("work", "queue"):
        return None, None
    pool = "concurrent/futures" in wait.file or any("concurrent/futures" in frame.file for frame in stack.main[:4])
    for thread in stack.threads[1:]:
        own, seen = frames.user_frames(thread.frames), frames.recognise_frames(thread.frames)
        of_pool = any(frame.file.endswith("concurrent/futures/thread.py") for frame in thread.frames)
        said = own or (seen is not None and seen.kind != "noted")
        if (pool and not of_pool) or not said or (seen is None and kind == "queue"):
            continue
        found.append((thread, seen))
    if len({seen.kind if seen else frames.where(thread.frames) for thread, seen in found}) != 1:
        return None, None
    return found[0]


def _busy_worker(stack: Stack) -> tuple[Stack | None, str]:
    """The data-loader worker that is in a line of the job, and that line; nothing where several are in different ones."""
    found = [(child, at) for child in stack.subprocesses if (at := frames.where(child.main))]
    return found[0] if len({at for _, at in found}) == 1 else (None, "")


def children(stack: Stack | None) -> tuple[str, ...]:
    """What the sampled children of a rank do: data-loader or compile workers."""
    lines = []
    for child in (stack.subprocesses if stack else ())[:4]:
        at = frames.where(child.main)
        doing = "is asleep" if not any(thread.active for thread in child.threads) else "runs"
        lines.append(f"child pid {child.pid} {doing}" + (f" in {child.main[0].short}{_called_from(child.main, at)}" if child.main else ""))
    return tuple(lines)


def _in_multiprocessing(stack: Stack) -> bool:
    """Whether the job's line waits in Python's multiprocessing: for a queue, a pipe, a pool or a child's end."""
    return any("/multiprocessing/" in frame.file for frame in itertools.takewhile(lambda frame: not frames.is_user(frame), stack.main))


def _lost_children(process: Process | None) -> tuple[str, ...]:
    if process is None:
        return ()
    stopped = (f"child pid {pid} is stopped (state T): `kill -CONT {pid}` continues it" for pid in process.stopped_children[:4])
    dead = (f"child pid {pid} is dead{f' (signal {signal})' if signal else ''} and nobody has collected it" for pid, signal in process.dead_children[:4])
    return (*stopped, *dead)


def _transfer(process: Process | None) -> str:
    return next((name for name in (process.children if process is not None else ()) if name in TRANSFERS), "")


def _threads(stack: Stack) -> tuple[str, ...]:
    """Threads of the job's own beside the main one."""
    found = (
        (thread.name, frames.innermost(thread.frames)) for thread in stack.threads[1:] if frames.user_frames(thread.frames) or thread.name.startswith("Thread-")
    )
    return tuple(f"thread {name} is in {at}" for name, at in found if at)[:4]


# -- words -----------------------------------------------------------------------------------------------------------------


def _called_from(stack: Sequence[Frame], at: str) -> str:
    return f", called from {at}" if at and stack and at != stack[0].short else ""


def _kernel(wait: KernelWait) -> str:
    """`read of /dev/pts/0`, `write of /ckpt/a.pt on nfs4 filer:/export at /ckpt`."""
    return wait.call + (f" of {wait.target}" if wait.target else "") + (f" on {wait.mount}" if wait.mount else "")


def _progress(stack: Stack | None, watch: Watch | None, now: float) -> list[str]:
    if watch is None or not watch.looks:
        return []
    lines = [f"progress: {watch.why}, {now - watch.last_progress:.0f} s ago"] if watch.last_progress else []
    if not lines:
        same = ", same stack" if watch.same_samples >= 1 else ""
        lines.append(f"no progress seen: {watch.busy_ratio or 0:.1%} of a core{same}")
    spins = stack is not None and stack.threads and stack.threads[0].active and (watch.busy_ratio or 0.0) >= _SPIN_RATIO
    if spins and watch.same_samples >= _SPIN_SAMPLES:
        text = f"{watch.same_samples + 1} samples over {watch.stack_at - watch.same_since:.0f} s show the same line"
        lines.append(f"{text} while it uses {watch.busy_ratio or 0:.0%} of a core: a long calculation, or a loop that never ends")
    return lines
