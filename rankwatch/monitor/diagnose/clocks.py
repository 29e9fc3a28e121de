"""The judge's clocks: gaps between looks, wall clocks that are set, and times in recorders that need a clock to be read.

A gap in the monotonic clock (the monitor was stopped or is slow) is a pause: ages restart and nothing is judged for two looks. A jump of
the wall clock against the monotonic one (time set by hand or NTP, a suspended machine whose monotonic clock stood still) moves no age:
a recorder's wall times are read with the offset that held when they were written. So it is with the wall clock of each other node.
"""

from __future__ import annotations

from rankwatch.model import JobSnapshot
from rankwatch.monitor.diagnose.state import State, changed
from rankwatch.monitor.policy import Limits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwatch.monitor.diagnose.state import NodeKey

Eras = tuple[tuple[float, float], ...]

_STEP_S = 1.0  # slewing moves a clock by 0.0005 s a second
_ERAS = 8
_PACE_LOOKS = 5  # so many long gaps in a row are the monitor's pace under load, no pause: else it would never judge again
_SLACK_S = 0.5


def look(state: State, snapshot: JobSnapshot, limits: Limits) -> State:
    """The state with what this look shows of the clocks."""
    now, offset = snapshot.now, snapshot.wall_at - snapshot.now
    eras = state.eras or ((float("-inf"), offset),)
    stepped = abs(offset - eras[-1][1]) > _STEP_S
    eras = (*eras, (now, offset))[-_ERAS:] if stepped else (*eras[:-1], (eras[-1][0], offset))
    long_gaps = state.long_gaps + 1 if snapshot.gap_s > limits.max_gap_s else 0
    state = changed(state, eras=eras, long_gaps=long_gaps, node_eras=_of_nodes(state.node_eras, state.reported, snapshot))
    if long_gaps > _PACE_LOOKS:
        return state
    if long_gaps:
        return paused(state, now, snapshot.gap_s, limits)
    return changed(state, quiet=limits.quiet_polls) if stepped else state


def _of_nodes(before: Mapping[str, Eras], reported: Mapping[NodeKey, float], snapshot: JobSnapshot) -> Mapping[str, Eras]:
    """The wall clock of each node of many, against our monotonic one. It is heard of with a report, so a step may be as old as the report before."""
    if len(snapshot.nodes) < 2:
        return before
    found = dict(before)
    for node in snapshot.nodes:
        if not node.ranks or node.failing_since is not None:
            continue
        offset, eras = snapshot.wall_at - snapshot.now - node.clock_offset_s, found.get(node.node)
        if eras is None:
            found[node.node] = ((float("-inf"), offset),)
        elif abs(offset - eras[-1][1]) > _STEP_S:
            start = max(eras[-1][0], reported.get((node.group_rank, node.node), snapshot.now))
            found[node.node] = (*eras, (start, offset))[-_ERAS:]
        else:
            found[node.node] = (*eras[:-1], (eras[-1][0], offset))
    return found


def paused(state: State, now: float, lost_s: float, limits: Limits) -> State:
    """The state after a pause of lost_s that ends now."""
    return changed(state, quiet=limits.quiet_polls, pauses=(*state.pauses, (now, lost_s))[-16:])


def mono(state: State, snapshot: JobSnapshot, wall: float, offset_s: float = 0.0, node: str = "") -> float:
    """Monotonic time of a wall time written on `node`, whose clock differs by offset_s; never in the future.

    The newest offset under which the time fits into the span in which that offset held decides: of two readings the younger one, which
    never makes a wait older than it is.
    """
    end = snapshot.now
    eras = state.eras or ((float("-inf"), snapshot.wall_at - snapshot.now),)
    if len(own := state.node_eras.get(node, ())) > 1:
        eras, offset_s = own, 0.0
    for start, offset in reversed(eras):
        at = wall + offset_s - offset
        if start - _SLACK_S <= at <= end + _SLACK_S:
            return min(max(at, start), end)
        if start == float("-inf"):
            break
        end = start
    return snapshot.now if wall + offset_s - eras[-1][1] > snapshot.now else end  # it fits nowhere: the future, or a moment that was jumped over
