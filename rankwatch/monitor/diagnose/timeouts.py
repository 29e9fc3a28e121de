"""When the watchdogs fire, as well as it can be known, and the line that sets a longer timeout next time.

A timeout belongs to the operation: it is what the group had when the operation was issued, or the call's own on gloo, and nobody can change
it afterwards. The recorder tells it (`timeout_ms`), except for what torch adds for a while to NCCL groups
(`_add_ephemeral_timeout_for_all_pgs`, called by Inductor): everything issued from then on has it until the first of these has completed.
Where it cannot be told whether an operation has such an extension, the earliest end counts for warnings and the latest for what follows
the end, and no countdown is shown. Source: torch 2.9-2.14, ProcessGroupNCCL assignTimeoutToWork.
"""

from __future__ import annotations

from rankwatch.model import RankState, VerdictName
from rankwatch.monitor.diagnose.state import Spent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwatch.monitor.diagnose.views import GroupKey, Member, View
    from rankwatch.monitor.diagnose.waits import Wait

ExtensionKey = tuple[int, str, int, float]  # rank, group, generation, unix seconds of the extension


def spent(before: Mapping[ExtensionKey, Spent], views: Mapping[GroupKey, View], ranks: Mapping[int, RankState], now: float) -> dict[ExtensionKey, Spent]:
    """Of each extension: the number that was last issued when it was first seen, and since when a later one is known to have completed."""
    found: dict[ExtensionKey, Spent] = {}
    if not any(rank.timeouts.extensions for rank in ranks.values()):
        return found
    for view in views.values():
        for number, member in view.members.items():
            for _, wall in _extensions(ranks[number], member):
                key = (number, view.group.name, member.group.generation, wall)
                old = before.get(key) or Spent(member.entered)
                over = old.at is None and member.done > old.entered
                found[key] = Spent(old.entered, now) if over else old
    return found


def extension(rank: RankState, member: Member, seq: int, since: float, since_wall: float, known: Mapping[ExtensionKey, Spent]) -> tuple[float, float]:
    """(seconds that operation `seq` has beyond its timeout for sure, seconds that it may have besides)."""
    sure = maybe = 0.0
    for seconds, wall in _extensions(rank, member):
        if since_wall < wall:
            continue  # issued before
        over = known.get((rank.rank, member.group.name, member.group.generation, wall))
        if over is not None and over.at is not None and since > over.at:
            continue
        after = [number for number, entry in member.entries.items() if entry.created_wall_at >= wall]
        before = any(entry.created_wall_at < wall for entry in member.entries.values()) or 1 in member.entries
        if after and before and min(after) == seq:
            sure += seconds
        else:
            maybe += seconds
    return sure, maybe


def unknown_why(wait: Wait) -> str:
    """Why no countdown can be told, "" where one can."""
    if wait.maybe_s:
        return f"when the timeout of {wait.label} comes: torch has extended it by up to {wait.maybe_s:.0f} s, and no recorder tells for which operations"
    if wait.deadline is None and wait.kind in ("collective", "barrier", "init", "creation"):
        return f"the timeout of {wait.label}: neither the group nor its operations tell it"
    return ""


def advice(wait: Wait, level: VerdictName, waited_s: float) -> tuple[str, ...]:
    """The line to write next time, once the timeout is near or half of it is used up: at least twice of what it is and of what was seen."""
    timeout = wait.timeout_s
    if not timeout or level not in ("slow", "timeout_imminent") or (level == "slow" and waited_s < 0.5 * timeout):
        return ()
    seconds = _round(2.0 * max(timeout, waited_s))
    group = wait.view.group if wait.view is not None else None
    given = f"timeout=timedelta(seconds={seconds})"
    own = group is not None and group.timeout_s is not None and abs(group.timeout_s - timeout) > 0.5
    if wait.kind == "barrier":
        line = f"dist.monitored_barrier(..., {given})"
    elif wait.kind == "init" or (group is not None and group.desc == "default_pg"):
        line = f"dist.init_process_group(..., {given})"
    else:
        line = f"dist.new_group(..., {given}) for {wait.label}"
    now = f"it is {timeout:.0f} s"
    if own and group is not None:
        now += f" for this operation ({group.timeout_s:.0f} s for the group now)"
    if wait.set_at:
        now += f", set at {wait.set_at}"
    return (f"For next time: {line}; {now}, and this wait has lasted {waited_s:.0f} s. An operation that is under way cannot be extended.",)


def _extensions(rank: RankState, member: Member) -> list[tuple[float, float]]:
    """Those that concern this group: NCCL's, made before the extension."""
    if "nccl" not in member.group.backend:
        return []
    return [(seconds, wall) for seconds, wall in rank.timeouts.extensions if member.group.created_wall_at <= wall]


def _round(seconds: float) -> int:
    """Up to a number that people write."""
    step = 10 if seconds <= 120 else 60 if seconds <= 3600 else 600
    return int(-(-seconds // step) * step)
