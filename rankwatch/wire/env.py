"""Every environment name that the launcher sets for ranks. Values are strings; absent means "not under rankwatch"."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SLOT_DIR = "RANKWATCH_SLOT_DIR"
"""Node-local 0700 directory of this attempt's slots and sockets; absent: no slot place was found, the rank runs unwatched."""

AGENT_DIR = "RANKWATCH_AGENT_DIR"
"""Folder of the installed package `rankwatch`; the agent is loaded from it by file location, never through sys.path."""

LAUNCHER_PID = "RANKWATCH_LAUNCHER_PID"
"""Process that may trace the ranks (prctl PR_SET_PTRACER)."""

ATTEMPT = "RANKWATCH_ATTEMPT"
"""Number of this start of the workers by this launcher, from 0; names the slots' generation."""

PTRACE_OPT_IN = "RANKWATCH_PTRACE_OPT_IN"
"""`1` where Yama's ptrace_scope is 1: the rank grants LAUNCHER_PID the right to trace it, once, at boot."""

CLAIMED = "RANKWATCH_CLAIMED"
"""Pid of the process that joined the process group. Its descendants see it and stay inert."""

NO_PROBES = "RANKWATCH_NO_PROBES"
"""Comma-separated names of probes that stay off (`--no-probe`)."""

ABLATE_PLAN = "RANKWATCH_ABLATE_PLAN"
"""File that tells a rank of `rankwatch ablate` which backend it is to compile with; set by that command, not by the launcher, and kept by it."""

MORE_PROBES = "RANKWATCH_MORE_PROBES"
"""Comma-separated names of probes that run only if asked for (`--probe`), each perhaps with `=NUMBER`."""

TRACE_DIR = "RANKWATCH_TRACE_DIR"
"""Directory of this attempt's structured traces (`--torch-trace`): each rank sets TORCH_TRACE to a folder of its own in it."""

TORCH_TRACE = "TORCH_TRACE"
"""torch's own: the directory of its structured trace. The rank's agent sets it below TRACE_DIR where the user has not."""

RANK_VARIABLES = (SLOT_DIR, AGENT_DIR, LAUNCHER_PID, ATTEMPT, PTRACE_OPT_IN, CLAIMED, NO_PROBES, MORE_PROBES, TRACE_DIR)


def more_probes(environ: Mapping[str, str]) -> dict[str, str]:
    """{"numerics": "10"} of MORE_PROBES; "" where no number is given."""
    words = [word.partition("=") for word in environ.get(MORE_PROBES, "").split(",")]
    return {name.strip(): number.strip() for name, _equals, number in words if name.strip()}


def trace_folder(rank: int) -> str:
    """Folder of a rank's trace files below TRACE_DIR: torch puts the rank into their names only after init_process_group."""
    return f"rank_{rank}"


def slot_name(rank: int) -> str:
    """File name of a rank's slot in SLOT_DIR. By global rank: --virtual-local-rank makes every LOCAL_RANK 0."""
    return f"rank_{rank}.slot"


def socket_name(rank: int) -> str:
    """File name of the unix socket of a rank's C++ worker server in SLOT_DIR."""
    return f"rank_{rank}.sock"
