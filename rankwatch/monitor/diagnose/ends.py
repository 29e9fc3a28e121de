"""How a rank ended, or failed to join: exit codes, signals and the words of its exception."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

from rankwatch.model import Crash, Domain, Frame, JobSnapshot, RankState
from rankwatch.monitor.diagnose import frames, gpu_oom
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import State
from rankwatch.monitor.diagnose.views import wall_to_mono

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
_HANDLED_BEFORE_S = 10.0  # so long before the others began to wait, work of the last step included
HANDLER_ADVICE = (
    "The error comes first: it is in no log before its handler, or the finally around it, has ended. Fix what is raised.",
    "Call nothing that waits for other ranks in an except or a finally: log the error, then leave.",
)
_UNSAID = Crash("an exception", "")
_PYTHON_REFUSED = 2  # what Python ends with where it finds no script, and argparse with where it refuses the arguments
FATAL = "Fatal Python error"  # type of what faulthandler writes when a signal ends the process
STALE_ADVICE = (
    "torchrun keeps its store over restarts, and the ranks find the addresses of the attempt before in it: start torchrun with --rdzv-backend c10d (one node: "
    "--standalone) and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, then every attempt gets a store of its own (rank 0 hosts it). The static rendezvous "
    "(--master-addr, --node-rank) shares its store whatever is set: with it use --max-restarts 0 and have the scheduler start the job anew.",
    "End this attempt: it waits for processes that are gone. torchrun's next restart, or a new job, may get through.",
)
_OWN_MEMORY_ADVICE = (
    "Its memory cgroup was full: raise the job's memory limit (memory.max of the cgroup, --mem, the container's limit), or need less: "
    "fewer DataLoader workers, a smaller cache.",
)
_NODE_MEMORY_ADVICE = ("The host ran out of memory: fewer DataLoader workers, a smaller cache, or more memory for the job.",)
_UNSEEN_ADVICE = ("Nothing says where: run with PYTHONFAULTHANDLER=1 and torchrun --log-dir/--redirects, then the rank's log holds its Python stack.",)
_NATIVE_ADVICE = ("Native code ended it: a core dump (ulimit -c unlimited) shows where; SIGBUS is most often a full /dev/shm or a truncated mapped file.",)
_TRACEBACK_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')
_CONNECTS = re.compile(r"connect|socket|getaddrinfo|name resolution|host ?name|timed out|distnetworkerror|diststoreerror", re.IGNORECASE)
_NETWORK = ("NCCL error", "ncclSystemError", "ncclRemoteError", "ibv_", "vendor err", "No route to host", "Network is unreachable", "DistNetworkError")


def signal_name(code: int) -> str:
    """`SIGKILL` for -9 and, as shells report it, 137; "" for an ordinary exit code."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    try:
        return signal.Signals(number).name if number else ""
    except ValueError:
        return f"signal {number}"


def believed(ranks: Mapping[int, RankState]) -> dict[int, RankState]:
    """The ranks without those exceptions that ended nobody: a traceback in a log may be of one that was caught, unless the process ended badly."""
    return {number: replace(rank, crash=None) if _only_logged(rank) else rank for number, rank in ranks.items()}


def _only_logged(rank: RankState) -> bool:
    crash, process = rank.crash, rank.process
    return crash is not None and crash.source.startswith("log ") and (process is None or process.exit_code in (None, 0))


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


def handled(rank: RankState, since: float, snapshot: JobSnapshot) -> Crash | None:
    """The exception that its main thread handles since about the moment at which the others began to wait; an older one explains nothing."""
    held = rank.handling
    if held is None or held.at_wall is None:
        return None
    offset_s = next((node.clock_offset_s for node in snapshot.nodes if node.node == rank.node), 0.0)
    return held if wall_to_mono(snapshot, held.at_wall, offset_s) >= since - _HANDLED_BEFORE_S else None


def with_handled(finding: Finding, rank: RankState, since: float, snapshot: JobSnapshot) -> Finding:
    """The finding of a rank that is in an error handler or a `finally`, with the exception that no log shows yet."""
    held = handled(rank, since, snapshot)
    if held is None or finding.cause not in ("not_entered", "store_wait", "external_io", "checkpointing", "unknown"):
        return finding
    where = f" (raised at {held.where})" if held.where else ""
    says = f"{finding.says or 'it waits'} while it handles {said(held)}{where}"
    line = f"its main thread handles {said(held)}{where}, so it is in an except or a finally, or in what these call"
    return replace(finding, says=says, evidence=(line, *finding.evidence), advice=finding.advice or HANDLER_ADVICE)


def handled_text(culprits: Iterable[int], ranks: Mapping[int, RankState], since: float, snapshot: JobSnapshot) -> tuple[str, list[str]]:
    """The same for ranks that called something else: a clause, and a line each."""
    lines = []
    for rank in culprits:
        if rank in ranks and (held := handled(ranks[rank], since, snapshot)) is not None:
            lines.append(f"rank {rank} handles {said(held)}" + (f" (raised at {held.where})" if held.where else ""))
    return (f"; {lines[0]}" if lines else ""), lines[:4]


def place(crash: Crash) -> str:
    """Its `where`, if that is a line of the job's own code as far as the traceback shows; else ""."""
    for file, line, name in _TRACEBACK_FRAME.findall(crash.traceback):
        frame = Frame(name, file, int(line))
        if frame.short == crash.where:
            return crash.where if frames.is_user(frame) else ""
    return crash.where


def said(crash: Crash) -> str:
    """`ValueError: bad batch`, the message's first line."""
    return f"{crash.type}: {text}" if (text := first_line(crash.message)) else crash.type


def first_line(text: str, width: int = 200) -> str:
    line = next((part.strip() for part in text.splitlines() if part.strip()), "")
    if len(line) <= width:
        return line
    cut = line[: width - 3]
    if not line[len(cut)].isspace():  # in the middle of a word: without it, unless it is nearly all there is
        short = cut.rpartition(" ")[0]
        cut = short if len(short) >= width // 2 else cut
    return cut.rstrip() + "..."


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


def dead(rank: RankState, state: State) -> Finding:
    process = rank.process
    code = process.exit_code if process else None
    crash = rank.crash
    name = signal_name(code) if code is not None else ""
    # the last traceback of a log may be of an exception that was caught long before a signal came
    printed = said(crash) if crash is not None and name and crash.source.startswith("log ") and not _is_fatal(crash) else ""
    crash = None if printed or (crash is not None and crash.type == "KeyboardInterrupt" and name == "SIGINT") else crash
    at = place(crash) if crash else frames.where(rank.stack.main) if rank.stack else ""
    if code is None:
        gone = ("its process is gone, the exit code is not known yet",)
        return Finding(rank.rank, "exited", "unknown", "its process is gone", at, "at_once", evidence=gone, confidence="likely")
    raised = failed_join(rank, state)
    if raised is not None and code and name != "SIGKILL":
        return _failed_to_join(rank, raised, state, place(raised) or at, f"exit code {code}")
    if crash is not None and name not in ("SIGKILL",) and crash.type != FATAL:
        text = said(crash)
        seen, steps = gpu_oom.found(rank, crash)
        lines = (f"exit code {code}", text, *seen)
        return Finding(rank.rank, "crashed", crash_domain(crash.type, crash.message), f"it raised {text}", at, "at_once", evidence=lines, advice=steps)
    if name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS"):
        domain: Domain = "node" if name == "SIGBUS" else "unknown"
        how = "its Python stack is in its log" if crash is not None else "no Python exception"
        lines = (f"exit code {code} ({name}), {how}", *_before(printed))
        advice = _NATIVE_ADVICE if crash is not None else (*_UNSEEN_ADVICE, *_NATIVE_ADVICE)
        return Finding(rank.rank, "crashed", domain, f"it died of {name}", at, "at_once", evidence=lines, advice=advice)
    if name == "SIGKILL" and process is not None:
        held = (f"it held {process.rss_bytes / 1e9:.1f} GB when it was last looked at",) if process.rss_bytes >= 1e8 else ()
        note = process.oom_note
        if process.oom_killed:
            own = not note or "MEMCG" in note or "emory cgroup" in note
            whose = "its memory cgroup" if own else "the node"
            return Finding(
                rank.rank, "oom_killed", "node", f"it was killed by the kernel: {whose} had no memory left", at, "at_once",
                evidence=(f"exit code {code} (SIGKILL)", note or "the memory cgroup's count of out-of-memory kills rose with it", *held),
                advice=_OWN_MEMORY_ADVICE if own else _NODE_MEMORY_ADVICE,
            )  # fmt: skip
        missing = () if note else ("who killed it: neither the memory cgroup's count of out-of-memory kills nor the kernel's log could be read",)
        seen = (f"exit code {code} (SIGKILL), no traceback", *((note,) if note else ()), *held)
        return Finding(rank.rank, "killed", "node", "it was killed by SIGKILL", at, "at_once", evidence=seen, missing_evidence=missing)
    if name:
        sent = (f"exit code {code} ({name}), no traceback", *_before(printed))
        return Finding(rank.rank, "killed", "scheduler", f"it was killed by {name}", at, "at_once", evidence=sent, advice=_signal_advice(name))
    if code == _PYTHON_REFUSED and rank.agent in ("silent", "loaded"):
        return _never_began(rank, at)
    unseen: tuple[str, ...] = ()
    if code and rank.agent in ("off", "silent", "loaded"):  # nothing of ours was there to see an exception
        unseen = (
            f"The rank ended by itself with exit code {code} before the agent could tell why: the last lines of its log say whether by an exception; "
            f"else look for sys.exit({code}), os._exit or a program that the script calls.",
        )
    return Finding(
        rank.rank, "exited", "user_code", f"it ended with exit code {code}", at, "at_once", evidence=(f"exit code {code}, no exception seen",), exit_code=code,
        advice=unseen,
    )  # fmt: skip


def _never_began(rank: RankState, at: str) -> Finding:
    """Of exit code 2 before torch was imported: of Python, which found no script, or of a script that refuses its arguments."""
    lines = (f"exit code {_PYTHON_REFUSED} before torch was imported",)
    if rank.script_problem:
        says = f"Python could not start the script: {rank.script_problem}"
        advice = ("Correct the script's path in the torchrun command; a relative path is looked up where torchrun is started.",)
        return Finding(rank.rank, "exited", "user_code", says, at, "at_once", evidence=lines, exit_code=_PYTHON_REFUSED, advice=advice)
    advice = ("Python could not start the script, or the script refuses its arguments (argparse ends with 2): the last lines that the rank printed say which.",)
    says = f"it ended with exit code {_PYTHON_REFUSED} before torch was imported"
    return Finding(rank.rank, "exited", "user_code", says, at, "at_once", evidence=lines, exit_code=_PYTHON_REFUSED, advice=advice)


def raising(rank: RankState) -> Finding:
    """Of a rank that an exception ends, while its process still lives: what Python and torch do at an end may take long, or hang."""
    crash = rank.crash or _UNSAID
    text = said(crash)
    seen, steps = gpu_oom.found(rank, crash)
    lines = (text, *seen, "its process has not ended yet")
    return Finding(rank.rank, "crashed", crash_domain(crash.type, crash.message), f"it raised {text}", place(crash), "at_once", evidence=lines, advice=steps)


def _failed_to_join(rank: RankState, raised: Crash, state: State, at: str, code: str) -> Finding:
    text = said(raised)
    domain: Domain = "network" if _CONNECTS.search(f"{raised.type}: {raised.message}") else crash_domain(raised.type, raised.message)
    lines = (code, f"init_process_group raised {text}")
    if stale_store(rank, raised, state):
        says = f"it failed in init_process_group, most likely of the stale store of the attempt before: {text}"
        return Finding(rank.rank, "crashed", "scheduler", says, at, "at_once", evidence=lines, confidence="likely", advice=STALE_ADVICE)
    return Finding(rank.rank, "crashed", domain, f"it failed in init_process_group: {text}", at, "at_once", evidence=lines)


def stale_store(rank: RankState, raised: Crash, state: State) -> bool:
    """Whether this failure of init_process_group is most likely torchrun's: a later attempt that met in the store of the one before."""
    join = rank.join
    met = join is not None and join.shared and join.reached is not False
    return bool(state.attempt) and met and bool(_CONNECTS.search(f"{raised.type}: {raised.message}"))


def _is_fatal(crash: Crash) -> bool:
    """Whether it is what ended the process: a C++ exception that nobody caught, or Python's report of a fatal signal."""
    return crash.type == FATAL or "::" in crash.type


def _before(printed: str) -> tuple[str, ...]:
    return (f"the last traceback in its log is of {printed}",) if printed else ()


def _signal_advice(name: str) -> tuple[str, ...]:
    return (
        f"{name} was sent to this rank alone: look for a kill in a script, an operator, a preemption hook or the scheduler's log of that moment.",
        "To end a job, signal the launcher: torchrun then ends all ranks.",
    )
