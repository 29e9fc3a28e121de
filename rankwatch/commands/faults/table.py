"""What `rankwatch demo --fault` can plant, and what has to be said of it. The truth is this table; rankwatch itself never reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Fault:
    """One planted fault: expected is one of `verdicts` with one of `causes` and exactly the `culprits`.

    recovers: it is over by itself, and no page may come at all. outside: what the demo does to the ranks, see outside.py. flags: options of
    rankwatch that shorten the wait, shown to the reader. timeout_s: of the process group.
    """

    name: str
    help: str
    script: Literal["elsewhere.py", "together.py", "ended.py"]
    planted: str
    culprits: tuple[int, ...]
    causes: tuple[str, ...]
    verdicts: tuple[str, ...] = ("stuck",)
    timeout_s: float = 60.0
    nproc: int = 3
    recovers: bool = False
    outside: Literal["", "trace_rank_1", "hold_gloo_of_rank_1", "limit_memory", "open_fifo"] = ""
    flags: tuple[str, ...] = ()
    also_culprits: tuple[tuple[int, ...], ...] = ()


FAULTS = (
    Fault(
        "not_entered", "a rank waits for a queue and never comes to the collective", "elsewhere.py",
        "rank 1 waits for ever in wait_for_a_queue_that_stays_empty()", (1,), ("not_entered",),
    ),
    Fault(
        "evaluation", "rank 0 evaluates alone for 20 s while the others wait; it recovers", "elsewhere.py",
        "rank 0 computes in evaluate() for 20 s", (0,), ("not_entered",), ("slow",), timeout_s=300, recovers=True,
    ),
    Fault(
        "compiling", "a rank recompiles alone for some seconds while the others wait; it recovers", "elsewhere.py",
        "rank 1 recompiles block() alone", (1,), ("compiling",), ("slow",), timeout_s=300, recovers=True,
    ),
    Fault(
        "compile_hung", "a rank's compile waits for a child that does nothing", "elsewhere.py",
        "rank 1's compiler waits for a child process that sleeps", (1,), ("compiling",), timeout_s=120, flags=("--limit", "compile_silent_s=15"),
    ),
    Fault(
        "data_loading", "a DataLoader worker never answers", "elsewhere.py",
        "rank 1's DataLoader worker hangs in decode_a_file_that_never_opens()", (1,), ("data_loading",),
    ),
    Fault(
        "checkpointing", "rank 0 saves to slow storage while the others wait; it recovers", "elsewhere.py",
        "rank 0 writes a checkpoint for 15 s", (0,), ("checkpointing",), ("slow",), timeout_s=120, recovers=True,
    ),
    Fault(
        "external_io", "a download that stalls", "elsewhere.py",
        "rank 1 downloads from a server that stops sending", (1,), ("external_io",), timeout_s=40,
    ),
    Fault(
        "debugger", "a rank stands at a breakpoint", "elsewhere.py",
        "rank 1 is in pdb, which waits for a person", (1,), ("debugger",), ("slow",), timeout_s=300,
    ),
    Fault(
        "traced", "another process traces a rank and holds it, as strace or gdb do", "elsewhere.py",
        "the demo traces rank 1's main thread and holds it", (1,), ("debugger",), ("slow",), timeout_s=300, outside="trace_rank_1",
    ),
    Fault(
        "straggler", "the same rank is late at every collective", "elsewhere.py",
        "rank 1 takes 0.25 s longer for each step", (1,), ("not_entered", "unknown"), ("straggler",), timeout_s=300,
    ),
    Fault(
        "timeout_imminent", "a rank works on while the watchdog's time runs out", "elsewhere.py",
        "rank 1 sorts for longer than the group's 40 s", (1,), ("not_entered",), ("timeout_imminent",), timeout_s=40,
    ),
    Fault(
        "mismatch", "a rank calls another collective than its peers, and all hang", "together.py",
        "rank 2 calls all_gather where the others call all_reduce", (2,), ("mismatch",),
    ),
    Fault(
        "diverged", "a rank skips one collective and from then on pairs the wrong ones, without hanging", "together.py",
        "rank 1 leaves out one gradient and averages the wrong ones from then on", (1,), ("mismatch",), ("diverged",),
    ),
    Fault(
        "group_order_deadlock", "two ranks use two groups in different orders", "together.py",
        "rank 0 and rank 1 use two process groups in opposite orders", (0, 1), ("group_order_deadlock",), nproc=2,
    ),
    Fault(
        "all_entered", "everybody is in the collective and nothing moves", "together.py",
        "the demo holds the thread that moves rank 1's bytes in gloo", (), ("all_entered",), timeout_s=40, outside="hold_gloo_of_rank_1",
        also_culprits=((1,),),
    ),
    Fault(
        "store_wait", "a rank never calls init_process_group", "together.py",
        "rank 1 stays in prepare_node_local_data() before it joins", (1,), ("store_wait",), flags=("--limit", "startup_stuck_s=20"),
    ),
    Fault(
        "store_barrier", "a rank waits in a barrier of the store that its peers never call", "together.py",
        "rank 0 calls a barrier of torchelastic's store, the others do not", (0,), ("store_wait",),
    ),
    Fault(
        "exited", "a rank ends with code 0 while the others still need it", "ended.py",
        "rank 1 leaves with exit code 0", (1,), ("exited",), ("failed", "stuck"), timeout_s=300,
    ),
    Fault("killed", "a rank is killed by SIGKILL", "ended.py", "rank 1 is killed by SIGKILL", (1,), ("killed",), ("failed",), timeout_s=300),
    Fault(
        "oom_killed", "the kernel kills a rank because its memory cgroup is full (needs a writable cgroup)", "ended.py",
        "rank 1 allocates until the kernel kills it", (1,), ("oom_killed",), ("failed",), timeout_s=300, nproc=2, outside="limit_memory",
    ),
    Fault("crashed", "a rank raises", "ended.py", "rank 1 raises ValueError in read_sample()", (1,), ("crashed",), ("failed",), timeout_s=300),
    Fault("stopped", "a rank is stopped (SIGSTOP)", "ended.py", "rank 1 stops itself with SIGSTOP", (1,), ("stopped",), timeout_s=300),
    Fault("gil_held", "native code of a rank holds the GIL", "ended.py", "rank 1 sleeps in C with the GIL held", (1,), ("gil_held",)),
    Fault(
        "uninterruptible", "a rank hangs in the kernel (state D)", "ended.py",
        "rank 1 waits in the kernel, in state D, for a child that opens a FIFO", (1,), ("uninterruptible",), outside="open_fifo",
    ),
)  # fmt: skip


def find(name: str) -> Fault | None:
    """By its name, - and _ alike."""
    return next((fault for fault in FAULTS if fault.name == name.replace("-", "_")), None)


def listing() -> str:
    """One line each, for --help and for an unknown name."""
    width = max(len(fault.name) for fault in FAULTS)
    return "\n".join(f"  {fault.name:{width}}  {fault.help}" for fault in FAULTS)
