"""Ranks that use CUDA graphs: what a recorder shows of them is not all that they wait for."""

from __future__ import annotations

from rankwatch.model import RankState
from rankwatch.monitor.diagnose import words
from rankwatch.monitor.diagnose.waits import Wait

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def used(rank: RankState) -> bool:
    """Whether it has recorded or captured a CUDA graph."""
    graphs = rank.cudagraph
    if not graphs:
        return False
    recordings, captures = graphs.get("recordings"), graphs.get("captures")
    return (isinstance(recordings, int) and recordings > 0) or (isinstance(captures, int) and captures > 0)


def symptom(wait: Wait, ranks: Mapping[int, RankState]) -> bool:
    """Whether everybody is in and no device is known to have started it, in ranks that replay graphs: it may only be the next operation behind a replay."""
    if wait.kind != "collective" or wait.missing or wait.unknown or wait.unread or wait.mismatch or wait.view is None:
        return False
    started = any(entry.started for entry in wait.view.at_frontier().values())
    return not started and all(rank in ranks and used(ranks[rank]) for rank in wait.waiters)


def behind_replay(stalled: Iterable[int], ranks: Mapping[int, RankState]) -> str:
    """A clause for the summary of a wait of which some waiters' devices have not begun; "" where they use no CUDA graphs."""
    found = tuple(rank for rank in stalled if rank in ranks and used(ranks[rank]))
    if not found:
        return ""
    where = "its device is" if len(found) == 1 else "their devices are"
    return f"; that operation is a symptom: on {words.ranks_text(found)} {where} still in earlier work, most likely a replay of a CUDA graph"


def advice(wait: Wait, ranks: Mapping[int, RankState]) -> tuple[str, ...]:
    """What else to do about such a wait."""
    return (_ABORT_ADVICE,) if behind_replay(wait.stalled, ranks) else ()


_ABORT_ADVICE = (
    "The timeout that comes is that of the next recorded operation, none of the captured ones has any. Its abort may never return, and the process then "
    "neither ends nor trains: end the job by hand, with SIGKILL if need be."
)
