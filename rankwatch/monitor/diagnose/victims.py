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
    r"ranks? .* failed to (pass|reach) monitored|error originated at tensorpipe",
    re.IGNORECASE,
)
_TIMED_OUT = re.compile(r"timed out|timeout", re.IGNORECASE)
_TORCH_COMM = re.compile(
    r"gloo|nccl|c10d|torch[/.]distributed|dist(backend|network|store)error|tcpstore|processgroup|pair\.cc|unbound_buffer\.cc|monitored ?barrier|tensorpipe",
    re.IGNORECASE,
)
_OF_ANOTHER = re.compile(r"^(Original )?Traceback \(most recent call last\):", re.MULTILINE)  # in a message: of an exception in another process
_FRAME = re.compile(r'^\s*File "(.+?)", line \d+', re.MULTILINE)
_ITS_FILES = "torch/distributed/"
_OF_ALL_KINDS = ("torch.AcceleratorError",)  # of the device; the watchdog's abort is told as one
_OF_A_SAVE = "CheckpointException"  # torch's, but its message is what storage said, perhaps to another rank


def is_victim(rank: RankState, death: Death) -> bool:
    """Whether it only followed: it lost a peer, or its own collective timed out."""
    if rank.crash is not None:
        if speaks_of_peers(rank.crash):
            return True
        if _LOST_PEER.search(_own_words(rank.crash.type, rank.crash.message)):
            return False  # an ordinary network error
    return death.overdue and signal_name(death.code) in ("SIGABRT", "SIGTERM", "")


def followers(state: State, ranks: Mapping[int, RankState]) -> frozenset[int]:
    """Ranks that have ended, or are about to, of a lost peer or a timeout."""
    ending = {rank.rank for rank in ranks.values() if rank.crash is not None and (rank.stage == "exiting" or not alive(rank)) and speaks_of_peers(rank.crash)}
    return frozenset(ending | {rank for rank, death in state.deaths.items() if rank in ranks and death.code and is_victim(ranks[rank], death)})


def speaks_of_peers(crash: Crash) -> bool:
    """Whether torch's communication raised it, or what it came of. A ConnectionResetError in the job's own download code is no lost peer."""
    own = _own_words(crash.type, crash.message)
    if _LOST_PEER.search(own) and (torchs_words(crash) or crash.type in _OF_ALL_KINDS):
        return True
    return loss_behind(crash) is not None


def loss_behind(crash: Crash) -> Crash | None:
    """The lost peer or timeout that it came of: the job's own error, raised `from` torch's or while that was handled. None: of none."""
    for kind, message in crash.chain:
        words = _own_words(kind, message)
        if _LOST_PEER.search(words) and _TORCH_COMM.search(words):
            return Crash(kind, message)
    return None


def timed_out(crash: Crash) -> bool:
    """Whether it speaks of peers that did not come in time, and of no connection that broke."""
    link = loss_behind(crash) or crash
    return speaks_of_peers(crash) and bool(_TIMED_OUT.search(_own_words(link.type, link.message)))


def handles_a_loss(rank: RankState) -> bool:
    return rank.handling is not None and speaks_of_peers(rank.handling)


def torchs_words(crash: Crash) -> bool:
    """Whether the exception itself comes out of torch's communication: it says so, or was raised there."""
    words = _own_words(crash.type, crash.message)
    if _TORCH_COMM.search(words):
        return True
    files = _FRAME.findall(crash.traceback) if words else []
    return bool(files) and _ITS_FILES in files[-1] and not crash.type.endswith(_OF_A_SAVE)


def _own_words(kind: str, message: str) -> str:
    """`type: message` without what the message quotes of another process."""
    if kind.endswith(_OF_A_SAVE):
        kind = _OF_A_SAVE
    found = _OF_ANOTHER.search(message)
    return f"{kind}: {message[: found.start()] if found else message}"
