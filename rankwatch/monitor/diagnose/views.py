"""One process group seen through all its ranks: who entered what, who has it done, where the first gap lies.

The frontier of a group is the first sequence number that some seen member has not done. A member whose last entered number lies
before it is missing; one with an open entry at or past it waits. A member without a report is unknown, never missing.

Status numbers (last enqueued, last completed) and recorder entries are both lower bounds of the truth, taken at different moments:
the larger one counts. An entry at or below the last completed number is done whatever its flag says (a dropped handle).

In a mixed group (RankState.mixed) a rank that has called more than was read is unsettled: where it is now is not known until its entries are
read again. It neither waits nor is missing, and has no part in the frontier.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwatch.model import Collective, Group, JobSnapshot, RankState

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_SCAN = 300  # newest entries looked at; waits are among the newest
_SCAN_DONE = 40  # so many finished ones in a row end the scan
_CLOCKS_S = 0.2  # how far two nodes' clocks may be apart
_SETTLED_S = 1.0  # what a member has entered before its end is done on the others by then
# complete on no rank before all have entered
EXCHANGES = frozenset(
    {
        "all_reduce", "allreduce", "allreduce_coalesced", "all_reduce_coalesced", "all_reduce_barrier", "barrier",
        "all_gather", "allgather", "_all_gather_base", "_allgather_base", "all_gather_into_tensor", "allgather_coalesced",
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor",
        "all_to_all", "alltoall", "alltoall_base", "all_to_all_single",
    }
)  # fmt: skip

GroupKey = tuple[str, int, int, int, int]  # name, then size, first, last rank and a hash of all of them


@dataclass(frozen=True, slots=True)
class Kept:
    """The newest entries of one rank in one generation of a group. opens: numbers of those that are not done, in order."""

    entries: dict[int, Collective]
    newest: int
    opens: tuple[int, ...]


Sorted = tuple[tuple[Collective, ...], dict[tuple[str, int], Kept]]  # a rank's entries as they were read, and by group and generation
_NOTHING = Kept({}, 0, ())


@dataclass(slots=True)
class Member:
    """One rank in one group. `open` is its oldest entry that is not done, where the recorder was read."""

    rank: int
    group: Group
    entered: int = 0
    done: int = 0
    open: Collective | None = None
    entries: Mapping[int, Collective] = field(default_factory=dict)  # by seq, newest ones
    opens: tuple[int, ...] = ()  # of these
    stale: bool = False  # belongs to an earlier group of this name than the others are in
    mixed: bool = False
    unsettled: bool = False

    @property
    def waiting(self) -> bool:
        return self.entered > self.done


@dataclass(slots=True)
class View:
    """One group. frontier is 0 while nobody has anything open.

    mixed: whether some numbers here are only as new as the entries that were read. stale: whether some member is still in an earlier group of this name.
    """

    key: GroupKey
    group: Group
    members: dict[int, Member] = field(default_factory=dict)
    absent: tuple[int, ...] = ()  # reported members that do not have this group (any more)
    unknown: tuple[int, ...] = ()
    frontier: int = 0
    missing: tuple[int, ...] = ()
    waiters: tuple[int, ...] = ()
    unsettled: tuple[int, ...] = ()
    mixed: bool = False
    stale: bool = False

    @property
    def label(self) -> str:
        return label(self.group)

    @property
    def first(self) -> bool:
        """Whether the frontier is the group's first collective."""
        return self.frontier == 1

    def at_frontier(self) -> dict[int, Collective]:
        """What each rank calls at the frontier, as far as it was read."""
        return {rank: member.entries[self.frontier] for rank, member in self.members.items() if self.frontier in member.entries}


def label(group: Group) -> str:
    """Its description, where it has one: "default_pg"."""
    return group.desc if group.desc and group.desc != "undefined" else f"group {group.name}"


def wall_to_mono(snapshot: JobSnapshot, wall: float, offset_s: float = 0.0) -> float:
    """Monotonic time of the judging node for a wall time taken on a node whose clock differs by offset_s; never in the future."""
    return min(snapshot.now, snapshot.now - (snapshot.wall_at - (wall + offset_s)))


def fresh_ranks(snapshot: JobSnapshot, report_stale_s: float) -> tuple[dict[int, RankState], dict[int, float]]:
    """Ranks whose node reports, and the clock offset of each. Ranks of a node that went silent are unknown, but for those that have ended: that stays so."""
    ranks: dict[int, RankState] = {}
    offsets: dict[int, float] = {}
    for node in snapshot.nodes:
        fresh = node.report_age_s <= report_stale_s
        for rank in node.ranks:
            if fresh or (rank.process is not None and rank.process.exit_code is not None):
                ranks[rank.rank] = rank
                offsets[rank.rank] = node.clock_offset_s
    return ranks, offsets


def alive(rank: RankState) -> bool:
    """Whether its process runs, as far as is known."""
    return rank.process is None or (rank.process.alive and rank.process.exit_code is None)


def knows_collectives(rank: RankState) -> bool:
    """Whether this rank's silence about a group means something."""
    return rank.agent == "claimed" and (bool(rank.groups) or rank.stage in ("left", "exiting"))


def on_its_way(rank: RankState) -> bool:
    """Whether it lives and has not joined (again): it has still to come to everything."""
    return alive(rank) and not rank.groups and rank.agent in ("loaded", "armed", "claimed") and rank.stage in ("starting", "armed", "joining")


def sort_entries(before: Mapping[int, Sorted], ranks: Mapping[int, RankState]) -> dict[int, Sorted]:
    """Every rank's entries by group; work is done for those ranks only whose recorder was read since `before`."""
    found = {}
    for number, state in ranks.items():
        old = before.get(number)
        found[number] = old if old is not None and old[0] is state.collectives else (state.collectives, _entries(state.collectives))
    return found


def build(snapshot: JobSnapshot, ranks: Mapping[int, RankState], entries: Mapping[int, Sorted] | None = None) -> dict[GroupKey, View]:
    """Every group that any rank reports. entries: of sort_entries, where there are any from the look before. Linear in ranks x groups of a rank."""
    entries = sort_entries({}, ranks) if entries is None else entries
    views: dict[GroupKey, View] = {}
    places: dict[int, View] = {}  # by the identity of a group's value: ranks of a large job share it
    keys: dict[int, tuple[int, int, int, int]] = {}
    gone: dict[int, float | None] = {}  # ranks that have ended, and when
    for number, state in ranks.items():
        if not alive(state):
            gone[number] = state.process.exited_at if state.process is not None else None
        if not state.groups:
            continue
        kept = entries[number][1]
        for group in state.groups:
            view = places.get(id(group))
            if view is None:
                view = places[id(group)] = _view(group, views, keys)
            member = view.members[number] = _member(state, group, kept.get((group.name, group.generation), _NOTHING) if kept else _NOTHING, snapshot)
            if member.mixed:
                view.mixed = True
    for view in views.values():
        _find_frontier(view, ranks, gone, snapshot)
    return views


def _view(group: Group, views: dict[GroupKey, View], keys: dict[int, tuple[int, int, int, int]]) -> View:
    """The view that this group's value belongs to, made where it is the first. keys: parts of keys by the identity of a group's ranks."""
    part = keys.get(id(group.ranks))
    if part is None:
        members = group.ranks
        part = keys[id(members)] = (len(members), members[0], members[-1], hash(members)) if members else (0, 0, 0, 0)
    key: GroupKey = (group.name, *part)
    view = views.get(key)
    if view is None:
        view = views[key] = View(key, group)
    elif group.generation > view.group.generation:
        view.group = group
    return view


def _entries(collectives: tuple[Collective, ...]) -> dict[tuple[str, int], Kept]:
    found: dict[tuple[str, int], dict[int, Collective]] = {}
    run, name, generation = 0, "", -1
    kept: dict[int, Collective] = {}
    for entry in collectives[: -_SCAN - 1 : -1]:
        if run >= _SCAN_DONE:
            break
        if entry.is_p2p:
            continue
        run = run + 1 if entry.done else 0
        if entry.generation != generation or entry.group != name:  # of one group many follow each other
            name, generation = entry.group, entry.generation
            kept = found.setdefault((name, generation), {})
        if entry.seq not in kept:
            kept[entry.seq] = entry
    return {of: Kept(kept, max(kept), tuple(sorted([seq for seq, entry in kept.items() if not entry.done]))) for of, kept in found.items()}


def _member(state: RankState, group: Group, kept: Kept, snapshot: JobSnapshot) -> Member:
    enqueued, completed = state.enqueued.get(group.name), state.completed.get(group.name)
    recreated = group.generation and group.created_wall_at and group.backend == "gloo"
    if recreated and state.heartbeat_at is not None and wall_to_mono(snapshot, group.created_wall_at) > state.heartbeat_at:
        enqueued = completed = None  # numbers of the group of this name before, read ahead of the re-creation
    entries, newest, opens = kept.entries, kept.newest, kept.opens
    done_by_entries = opens[0] - 1 if opens else newest
    if opens and completed is not None and done_by_entries not in entries:
        done_by_entries = 0  # the oldest entry at hand is open: how many lie before it is not known from entries
    done = done_by_entries if done_by_entries > 0 else 0  # comparisons, not max(): of a large job this runs 65,000 times a look
    if completed is not None and completed > done:
        done = completed
    entered = newest if newest > done else done
    if enqueued is not None and enqueued > entered:
        entered = enqueued
    open_ = None
    for seq in opens:
        if seq > done:
            open_ = entries[seq]
            break
    behind = state.mixed.get(group.name) if state.mixed else None
    return Member(state.rank, group, entered, done, open_, entries, opens, False, behind is not None, bool(behind))


def _reopen(members: dict[int, Member], ranks: Mapping[int, RankState], gone: Mapping[int, float | None], snapshot: JobSnapshot) -> None:
    """Take back what cannot be done: an exchange that a member has not entered is open, even where a later number has completed.

    Later operations complete out of order where they need not everybody: a broadcast at its root, a reduce at the others. A member that has
    ended may have entered more than its last beat tells: what it has left open is found out by `_left_open`.
    """
    lowest = min((member.entered for rank, member in members.items() if rank not in gone), default=0)
    ends = {rank: at for rank, at in gone.items() if at is not None and rank in members}
    first = min((members[rank].entered for rank in ends), default=lowest)
    start = min(lowest, first)
    for member in members.values():
        if member.done <= start or not member.opens:
            continue
        end = min(member.done, lowest + _SCAN)
        for seq in member.opens:
            if not start < seq <= end or (entry := member.entries[seq]).op not in EXCHANGES:
                continue
            left = (at for rank, at in ends.items() if members[rank].entered < seq < member.done)
            if seq > lowest or any(_left_open(entry, member, at, ranks[member.rank], snapshot) for at in left):
                member.done, member.open = seq - 1, entry
                break


def _left_open(entry: Collective, member: Member, ended_at: float, waiter: RankState, snapshot: JobSnapshot) -> bool:
    """Whether an exchange that its entry shows open, and a later number has overtaken, is so for want of a member that ended at ended_at.

    It is if it was called after that end; else if the entry was read so long after it that it would be done by now, and others like it are
    marked as done: those of a handle that is dropped never are.
    """
    offset_s = next((node.clock_offset_s for node in snapshot.nodes if node.node == waiter.node), 0.0)
    if entry.created_wall_at and wall_to_mono(snapshot, entry.created_wall_at, offset_s) > ended_at + _CLOCKS_S:
        return True
    if waiter.collectives_at is None or waiter.collectives_at < ended_at + _SETTLED_S:
        return False
    return any(each.done and (each.op, each.input_sizes, each.dtypes) == (entry.op, entry.input_sizes, entry.dtypes) for each in member.entries.values())


def _still_to_come(view: View, current: dict[int, Member], others: list[int], ranks: Mapping[int, RankState], attempt: int) -> set[int]:
    """Those of the others that have no groups yet and are known to be missing: nothing in this group has come about without them.

    A gloo group exists once all have come: there it proves something of one that is seen joining, and of others only where a store of the
    attempt before may have let ranks through. Else the rank may work in a process that nobody sees.
    """
    if not others or any(member.done for member in current.values()):
        return set()
    early = attempt > 0 or "nccl" in view.group.backend
    return {rank for rank in others if rank in ranks and on_its_way(ranks[rank]) and (early or ranks[rank].stage == "joining")}


def _find_frontier(view: View, ranks: Mapping[int, RankState], gone: Mapping[int, float | None], snapshot: JobSnapshot) -> None:
    newest = view.group.generation
    current, unsettled = view.members, {}
    if newest and any(member.group.generation < newest for member in view.members.values()):
        started = [member.group.created_wall_at for member in view.members.values() if member.group.generation == newest and member.group.created_wall_at]
        for member in view.members.values():
            # ranks count generations on their own and may disagree by a group they were no member of; an old group is older by the clock too
            older = member.group.generation < newest and member.group.created_wall_at > 0 and bool(started)
            member.stale = older and member.group.created_wall_at < min(started) - 2.0
        current = {rank: member for rank, member in view.members.items() if not member.stale}
        view.stale = len(current) < len(view.members)
    settled = current
    if view.mixed and any(member.unsettled for member in current.values()):
        unsettled = {rank: member for rank, member in current.items() if member.unsettled}
        settled = {rank: member for rank, member in current.items() if not member.unsettled}
    if any(member.opens for member in settled.values()):
        _reopen(settled, ranks, gone, snapshot)
    others = [rank for rank in view.group.ranks if rank not in current]
    coming = _still_to_come(view, current, others, ranks, snapshot.attempt)
    view.absent = tuple(rank for rank in others if rank in coming or (rank in ranks and knows_collectives(ranks[rank])))
    view.unknown = tuple(rank for rank in others if rank not in coming and (rank not in ranks or not knows_collectives(ranks[rank])))
    view.unsettled = tuple(rank for rank in unsettled if rank not in gone)
    if not settled:
        return
    view.waiters = tuple(sorted([rank for rank, member in settled.items() if member.entered > member.done and rank not in gone]))
    if not view.waiters:
        return
    frontier = min(member.done for rank, member in settled.items() if rank not in gone) + 1  # the last beat of one that has ended may be behind
    if view.absent:
        # who has left counts as having done everything before the others' first open entry
        frontier = max(frontier, min(settled[rank].done for rank in view.waiters) + 1)
    view.frontier = frontier
    ended = {rank: member for rank, member in unsettled.items() if rank in gone}  # these call no more
    view.missing = tuple(sorted([rank for part in (settled, ended) for rank, member in part.items() if member.entered < frontier] + list(view.absent)))
