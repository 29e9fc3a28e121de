"""What the main thread's stack says of a rank that is not in its collective: data loading, checkpointing, transfers, a debugger, or a line of the job."""

from __future__ import annotations

from dataclasses import replace

from rankwatch.model import Domain, RankState, Stack
from rankwatch.monitor.diagnose import frames
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import State


def fresh_stack(rank: RankState, since: float) -> Stack | None:
    """The newest sample, if it was taken during this wait and shows something."""
    stack = rank.stack
    return stack if stack is not None and stack.main and stack.at >= since else None


def by_stack(rank: RankState, since: float, state: State, now: float) -> Finding:
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
