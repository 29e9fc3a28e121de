"""Ranks that have joined and wait for some that have not: NCCL's init_process_group returns before all have come.

The early ones then sit in their first collective, which makes the communicator first: until that exists nothing is enqueued, nothing is
recorded and no watchdog runs. That they wait is shown by their stacks alone. Source: torch 2.9-2.14, ProcessGroupNCCL.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankwatch.model import Group, RankState
from rankwatch.monitor.diagnose import inside
from rankwatch.monitor.diagnose.views import alive, on_its_way

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SAMPLED = 4  # of those that may wait


@dataclass(frozen=True, slots=True)
class Early:
    """waiting: joined rank -> when it was first found in a call, or when it joined while no stack has told. late: ranks that they need.

    calls: rank -> the call that its stack shows; () while none does, and then `ask` are to be sampled before anything is said.
    """

    waiting: Mapping[int, float]
    late: tuple[int, ...]
    calls: Mapping[int, str]
    ask: tuple[int, ...]

    @property
    def why(self) -> str:
        """`rank 0 is in barrier, ranks 1-2 are in all_reduce: NCCL connects ...`; "" without calls."""
        return f"{inside.together(self.calls)}: NCCL connects the ranks of a group in its first collective" if self.calls else ""


def untouched(rank: RankState) -> bool:
    """Whether it has joined and has completed nothing since that anybody counts."""
    return rank.stage == "joined" and not rank.steps and not any(rank.completed.values()) and not any(entry.done for entry in rank.collectives)


def at_its_first(rank: RankState) -> bool:
    """Whether it has joined the world that others still join: it is in its first collective, or has an NCCL group in which none has begun."""
    return untouched(rank) and (any(rank.enqueued.values()) or bool(rank.collectives) or bool(_nccl(rank)))


def look(ranks: Mapping[int, RankState], before: Mapping[tuple[object, ...], float], now: float) -> Early | None:
    """The joined ranks that wait, None where nobody does or nobody is late. before: `sight_key` -> when a rank was first found in a call."""
    may = {rank: other for rank, other in ranks.items() if _may_wait(other)}
    late = {rank for rank, other in ranks.items() if _late(other)} if may else set()
    if not late:
        return None
    worlds = {id(group.ranks): group.ranks for other in may.values() for group in _nccl(other)}
    needed = {rank for members in worlds.values() for rank in late.intersection(members)}
    if not needed:
        return None
    joined = {rank: other.stage_since or now for rank, other in may.items()}
    calls = {rank: call for rank, other in may.items() if (call := _call(other, joined[rank]))}
    found = {rank: before.get(sight_key(rank), stack.at if (stack := may[rank].stack) else now) for rank in calls}
    return Early(found or joined, tuple(sorted(needed)), calls, tuple(sorted(may)[:_SAMPLED]))


def sight_key(rank: int) -> tuple[object, ...]:
    return ("early", rank)


def _nccl(rank: RankState) -> list[Group]:
    return [group for group in rank.groups if "nccl" in group.backend]


def _late(rank: RankState) -> bool:
    """Whether it has not joined, or has ended without that: one that joins is on its way, one that has joined keeps its groups until it leaves."""
    ended = rank.stage in ("starting", "armed", "exiting") and not alive(rank) and not rank.groups and rank.agent in ("loaded", "armed", "claimed")
    return ended or (on_its_way(rank) and rank.stage != "joining")


def _may_wait(rank: RankState) -> bool:
    idle = not any(rank.enqueued.values()) and not rank.collectives and not rank.group_in_creation and not rank.compiling
    return idle and alive(rank) and untouched(rank) and bool(_nccl(rank))


def _call(rank: RankState, since: float) -> str:
    call = inside.call(rank.stack) if rank.stack is not None and rank.stack.at >= since else ""
    return call if call != "destroy_process_group" else ""
