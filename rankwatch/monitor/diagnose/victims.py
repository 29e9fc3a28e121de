"""Ranks that only followed: they lost a peer, or their own collective timed out."""

from __future__ import annotations

import re

from rankwatch.model import Crash, RankState
from rankwatch.monitor.diagnose.ends import signal_name
from rankwatch.monitor.diagnose.state import Death, State
from rankwatch.monitor.diagnose.views import alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by (remote )?peer|broken pipe|socket (is )?closed|unexpected end of (file|stream)|"
    r"application timeout caused pair closure|read error|write error|writev|readv|timed out (waiting|after)|timeout waiting|wait timeout|"
    r"watchdog caught collective|collective operation timeout|nccl communicator was aborted|remote process exited|ncclremoteerror|"
    r"distnetworkerror|diststoreerror|connectfullmesh|failed to (recv|send)|heartbeat.*(timeout|stuck)|monitoredbarrier|"
    r"ranks? .* failed to (pass|reach) monitored",
    re.IGNORECASE,
)
_TORCH_COMM = re.compile(r"gloo|nccl|c10d|torch[/.]distributed|dist(backend|network|store)error|tcpstore|processgroup|pair\.cc|socket", re.IGNORECASE)


def is_victim(rank: RankState, death: Death) -> bool:
    """Whether it only followed: it lost a peer, or its own collective timed out."""
    if rank.crash is not None and _LOST_PEER.search(f"{rank.crash.type}: {rank.crash.message}"):
        return speaks_of_peers(rank.crash)
    return death.overdue and signal_name(death.code) in ("SIGABRT", "SIGTERM", "")


def followers(state: State, ranks: Mapping[int, RankState]) -> frozenset[int]:
    """Ranks that have ended, or are about to, of a lost peer or a timeout."""
    ending = {rank.rank for rank in ranks.values() if rank.crash is not None and (rank.stage == "exiting" or not alive(rank)) and speaks_of_peers(rank.crash)}
    return frozenset(ending | {rank for rank, death in state.deaths.items() if rank in ranks and death.code and is_victim(ranks[rank], death)})


def speaks_of_peers(crash: Crash) -> bool:
    """Whether torch's communication raised it. A plain ConnectionResetError in the job's own download code is no lost peer."""
    text = f"{crash.type}: {crash.message}"
    if not _LOST_PEER.search(text):
        return False
    return torchs_words(crash) or crash.type in ("RuntimeError", "torch.AcceleratorError")


def handles_a_loss(rank: RankState) -> bool:
    return rank.handling is not None and speaks_of_peers(rank.handling)


def torchs_words(crash: Crash) -> bool:
    """Whether the exception comes out of torch's communication."""
    return bool(_TORCH_COMM.search(f"{crash.type}: {crash.message}") or _TORCH_COMM.search(crash.traceback))
