"""What people read: one line that says who, where, why, who waits and how long is left, and what to do about it."""

from __future__ import annotations

from rankwatch.model import Cause, JobSnapshot, RankState, WaitedOn
from rankwatch.monitor.diagnose import frames
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.waits import Wait
from rankwatch.monitor.diagnose.work import fresh_stack
from rankwatch.wire.ranks import compress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0,2-3`, `no rank`."""
    found = sorted(set(ranks))
    return "no rank" if not found else f"rank {found[0]}" if len(found) == 1 else f"ranks {compress(found)}"


def verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def seen(ranks: Mapping[int, RankState], snapshot: JobSnapshot) -> str:
    """` (8 of 64 ranks seen)` when the view is partial, else ""."""
    return f" ({len(ranks)} of {snapshot.world_size} ranks seen)" if len(ranks) < snapshot.world_size else ""


def unknown(ranks: Mapping[int, RankState], snapshot: JobSnapshot) -> tuple[int, ...]:
    return tuple(rank for rank in range(snapshot.world_size) if rank not in ranks)


def place(wait: Wait) -> str:
    """`all_reduce #26 of default_pg`."""
    if wait.kind == "barrier":
        return f"monitored_barrier #{wait.seq} of {wait.label}"
    if wait.kind != "collective":
        return wait.label
    return f"{wait.entry.op if wait.entry else 'collective'} #{wait.seq} of {wait.label}"


def waited_on(wait: Wait) -> WaitedOn:
    entry = wait.entry
    op = entry.op if entry else {"init": "init_process_group", "creation": "new_group", "barrier": "monitored_barrier"}.get(wait.kind, "")
    return WaitedOn(
        wait.name, wait.label, wait.ranks, op, wait.seq, entry.input_sizes if entry else (), entry.dtypes if entry else ()
    )  # fmt: skip


def absent(culprits: tuple[int, ...], finding: Finding, wait: Wait, age_s: float, *, called: bool = False) -> str:
    """`rank 1 has not entered all_reduce #26 of default_pg (it is in train.py:31:load_batch) for 12 s`.

    called: it has called init_process_group, and that has failed.
    """
    have = verb(culprits, "has", "have")
    what = {"init": f"{have} not joined" if called else f"{have} not called init_process_group", "creation": f"{have} not come to {place(wait)}"}.get(
        wait.kind, f"{have} not entered {place(wait)}"
    )
    says = finding.says
    if len(culprits) > 1:
        its = says.startswith("its ")
        says = f"rank {finding.rank}'s " + says[len("its ") :] if its else says.replace("it ", f"rank {finding.rank} ", 1)
    return f"{ranks_text(culprits)} {what}{f' ({says})' if says else ''} for {age_s:.0f} s"


def tail(waiting: tuple[int, ...], timeout_left_s: float | None) -> str:
    """`; ranks 0,2-3 wait; the group's timeout comes in 588 s`."""
    text = f"; {ranks_text(waiting)} {verb(waiting, 'waits', 'wait')}" if waiting else ""
    if timeout_left_s is None:
        return text
    return text + (f"; the group's timeout comes in {timeout_left_s:.0f} s" if timeout_left_s > 0 else "; the group's timeout has passed")


MAX_PLACES = 8
_MOVES = "Nothing is broken while it moves. "
NEAR_TIMEOUT = f"{_MOVES}Near the timeout: raise init_process_group(timeout=...) or warm the compile cache on all ranks before training."
STOPPED, FROZEN = "The process was stopped by a signal.", "Its cgroup is frozen."
RECOMPILES = "It recompiles because of"
_AFTERWARDS = (
    (f"{_MOVES}Near the timeout:", "It was no error. Should such a compile come near the timeout:"),
    (_MOVES, ""),
    (RECOMPILES, "It was compiled anew because of"),
)
_WHILE_OPEN = (STOPPED, FROZEN, "Continue or detach the debugger")


def places(culprits: Sequence[int], ranks: Mapping[int, RankState], since: float) -> tuple[str, tuple[tuple[int, str], ...]]:
    """(the one line of the job that all culprits are in, ()), or ("", each one's) where they are in different ones. Of stacks since `since`."""
    stacks = {rank: fresh_stack(ranks[rank], since) for rank in culprits[:MAX_PLACES] if rank in ranks}
    found = tuple((rank, at) for rank, stack in stacks.items() if stack is not None and (at := frames.where(stack.main)))
    return (found[0][1] if found else "", ()) if len({at for _, at in found}) <= 1 else ("", found)


NO_OOM_KILL = "oom_kill did not rise"
"""What evidence says where the memory cgroup's own count rules it out."""
_SENT_BY_SOMEBODY = (
    "It was not its memory cgroup that killed it: look for who sent the SIGKILL (the scheduler's log; `dmesg -T | grep -i oom` for the node's own OOM killer).",
)
_ADVICE: dict[Cause, tuple[str, ...]] = {
    "compiling": (
        NEAR_TIMEOUT,
        "A rank that compiles alone has come to other code or other inputs than its peers: let every rank run each variant once before the loop.",
    ),
    "not_entered": (
        "Look at the line where it is: the rank is there instead of in the collective. It must come back, or every rank must take that branch.",
        "Work of one rank that takes long on purpose: use a group of its own with new_group(timeout=...) for the barrier around it.",
    ),
    "mismatch": (
        "Compare the call sites: ranks took different branches or saw different numbers of batches (uneven data: DDP join(), drop_last, DistributedSampler).",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL checks every call and names the first difference, at a price.",
    ),
    "group_order_deadlock": ("Issue the collectives of these groups in the same order on every rank.",),
    "all_entered": (
        "Every rank called the same operation, so the code did not diverge: look at network, device and driver (dmesg, Xid, link counters) of the ranks.",
        "With NCCL set TORCH_NCCL_ENABLE_TIMING=1 to see which device has not started it.",
    ),
    "exited": ("The rank ended while others still need it: check for an early return, sys.exit, or a handler that ends the process with code 0.",),
    "killed": (
        "SIGKILL without our doing is most often the out-of-memory killer: see `dmesg -T | grep -i oom`, memory.events of the cgroup, or the scheduler's log.",
    ),
    "oom_killed": ("Its memory ran out: fewer DataLoader workers, a smaller cache, or more memory for the job.",),
    "crashed": ("Fix the error of this rank first; what the other ranks raised are consequences.",),
    "stopped": (f"{STOPPED} `kill -CONT` continues it; find out who sent SIGSTOP.",),
    "gil_held": (
        "A native call keeps the GIL. Release it there (Py_BEGIN_ALLOW_THREADS, py::gil_scoped_release), or run the call in a child process.",
        "A full garbage collection can do the same for a while: gc.freeze() after start-up, or gc.disable() with collection at the same step on every rank.",
    ),
    "uninterruptible": (
        "The kernel waits for storage or a driver: check the mount (NFS, Lustre, FUSE) and dmesg on that node.",
        "Its process ends only once the kernel answers, whatever signal it is sent: plan for another node.",
    ),
    "data_loading": (
        "See what the data-loader worker does (its stack is in the report). With DataLoader(timeout=...) a dead worker raises instead of waiting for ever.",
        "A worker blocked on a lock after fork: use multiprocessing_context='spawn' or 'forkserver', or create locks and tokenizers inside the worker.",
    ),
    "checkpointing": (
        "Let the waiting ranks use a group with a longer timeout around the save, or save asynchronously (torch.distributed.checkpoint.async_save).",
        "Bytes that no longer move are the file system's: see whether it answers on that node, and dmesg there.",
    ),
    "external_io": (
        "Give the request a timeout and retries, and do it outside the step that others wait for.",
        "Downloads and preprocessing of one rank: do them before the job, or raise the timeout of the group in which the others wait for it.",
    ),
    "store_wait": (
        "The ranks meet in the store only when all have called it. Look at the rank that has not come: slow import, cold file system, or an error swallowed.",
    ),
    "debugger": ("Continue or detach the debugger; raise the group's timeout while debugging.",),
    "unknown": ("See the stacks and the recorder in the report.",),
}


def afterwards(advice: Iterable[str]) -> tuple[str, ...]:
    """Next steps once it is over: without what was to be done, or to be waited for, while it lasted."""
    return tuple(_past(line) for line in advice if not line.startswith(_WHILE_OPEN))


def _past(line: str) -> str:
    return next((past + line[len(present) :] for present, past in _AFTERWARDS if line.startswith(present)), line)


def advice(cause: Cause, finding: Finding | None = None, at: Sequence[tuple[int, str]] = ()) -> tuple[str, ...]:
    """Concrete next steps; the line of code first, where it is known. at: (rank, line) of culprits that are in different places."""
    lines = (finding.advice if finding is not None else ()) or _ADVICE[cause]
    if finding is not None and not finding.advice and cause in ("mismatch", "group_order_deadlock") and (at or finding.at):
        where = ", ".join(f"{place} on rank {rank}" for rank, place in at) or finding.at
        line = lines[0].replace("Compare the call sites", f"Compare the call sites, first {where}").replace("every rank.", f"every rank: see {where}.")
        return (line, *lines[1:])
    if finding is not None and cause == "killed" and not finding.advice and any(NO_OOM_KILL in line for line in finding.evidence):
        return _SENT_BY_SOMEBODY
    if finding is not None and cause == "exited" and finding.exit_code and not finding.advice:
        lines = (
            f"The rank ended by itself with exit code {finding.exit_code} and left no exception: look for sys.exit({finding.exit_code}), os._exit or a library "
            "that ends the process; the last lines of its log say more.",
        )
    if finding is not None and finding.at and cause in ("not_entered", "data_loading", "gil_held", "crashed", "exited"):
        return (f"Start at {finding.at} on rank {finding.rank}.", *lines)
    return lines
