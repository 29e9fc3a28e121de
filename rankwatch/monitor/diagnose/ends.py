"""How a rank ended, or failed to join: exit codes, signals and the words of its exception."""

from __future__ import annotations

import re
import signal

from rankwatch.model import Crash, Domain, Frame, RankState
from rankwatch.monitor.diagnose import frames
from rankwatch.monitor.diagnose.finding import Finding
from rankwatch.monitor.diagnose.state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

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


def signal_name(code: int) -> str:
    """`SIGKILL` for -9 and, as shells report it, 137; "" for an ordinary exit code."""
    number = -code if code < 0 else code - 128 if 128 < code < 160 else 0
    try:
        return signal.Signals(number).name if number else ""
    except ValueError:
        return f"signal {number}"


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
