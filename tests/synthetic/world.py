"""A job as a discrete-event simulation: ranks run programs of work and collectives over groups, on gloo or NCCL semantics.

A program is an iterator of operations, tuples that begin with a name of World's `_op_` methods:
    ("work", seconds, Act)              busy; inf: for ever
    ("call", key, Call)                 a collective of the group that the rank knows by this key
    ("wait",)                           until all own handles are done
    ("join", timeout_s)                 init_process_group
    ("group", key, name, desc, members, timeout_s), ("destroy", key or None)
    ("send", mailbox), ("recv", mailbox)    point-to-point, which no recorder shows
    ("step",), ("mark", what), ("do", callable), ("exit", code), ("raise", type, message, where)
The world knows no judge and no poll; `observer` looks at it.
"""

from __future__ import annotations

from collections.abc import Callable

import activities
from exchange import NOTHING, Exchange
from parts import Call, Comm, Operation, Rank, entered
from quick import quick

from rankwatch.model import Crash, Group

SHOWN_GROUP = quick(Group)


class World(Exchange):
    """A job: an Exchange whose ranks have the operations above."""

    def _op_step(self, rank: Rank) -> bool:
        rank.step_s = self.now - rank.step_at if rank.step_at is not None else None
        rank.steps, rank.step_at = rank.steps + 1, self.now
        return True

    def _op_mark(self, rank: Rank, what: str) -> bool:
        """The fault begins here, on this rank."""
        self.marks.setdefault(what, self.now)
        self.reached.add(rank.number)
        return True

    def _op_do(self, rank: Rank, call: Callable[[World, Rank], None]) -> bool:
        call(self, rank)
        return rank.alive and not rank.held

    def _op_exit(self, rank: Rank, code: int) -> bool:
        if rank.stage != "left":
            self._enter(rank, "exiting")
        self.at(self.now + self.rng.uniform(0.02, 0.3), self.end, rank, code)
        self.become(rank, NOTHING)
        rank.token = 0
        return False

    def _op_raise(self, rank: Rank, kind: str, message: str, where: str) -> bool:
        self.fail(rank, Crash(kind, message, where, f'File "{where}"', "slot", self.wall_of(rank)))
        return False

    def _op_send(self, rank: Rank, box: str) -> bool:
        other = self.receivers.get(box)
        if other is not None and other.blocked == "recv" and other.box == box and not other.held:
            self._wake(other, self.now + 0.001)
        else:
            self.mail[box] = self.mail.get(box, 0) + 1
        return True

    def _op_recv(self, rank: Rank, box: str) -> bool:
        if self.mail.get(box, 0) > 0:
            self.mail[box] -= 1
            return True
        rank.box, self.receivers[box] = box, rank
        self._block(rank, "recv", activities.RECEIVING)
        if self.dead and not self.ranks[self.sender(rank)].alive:
            self.at(self.now + self.rng.uniform(0.01, 0.2), self.unheard, rank, rank.token)
        return False

    def _op_join(self, rank: Rank, timeout_s: float) -> bool:
        self._enter(rank, "joining")
        self._block(rank, "join", activities.IN_STORE)
        rank.creating = ("0", "0", "default_pg", tuple(range(self.size)), timeout_s)
        self._arrive("join", rank, self.size)
        return False

    def _op_group(self, rank: Rank, key: str, name: str, desc: str, members: tuple[int, ...], timeout_s: float) -> bool:
        if rank.number not in members:
            return True
        rank.creating = (key, name, desc, members, timeout_s)
        self._block(rank, "group", activities.IN_NEW_GROUP)
        self._arrive("group " + name, rank, len(members))
        return False

    def _arrive(self, where: str, rank: Rank, size: int) -> None:
        """gloo connects all members as a group is made; NCCL waits with that for the first collective (TORCH_DIST_INIT_BARRIER is 0 by default)."""
        arrived = self._arrived.setdefault(where, [])
        arrived.append(rank)
        if self.nccl:
            self.at(self.now + self.rng.uniform(0.01, 0.2), self._made, rank)
            arrived.clear()
        elif len(arrived) == size:
            del self._arrived[where]
            for other in arrived:
                self.at(self.now + self.rng.uniform(0.01, 0.2), self._made, other)

    def _made(self, rank: Rank) -> None:
        if not rank.alive or rank.creating is None:
            return
        key, name, desc, members, timeout_s = rank.creating
        rank.creating = None
        if rank.stage == "joining":
            self._enter(rank, "joined")
        if rank.number in members:
            comm = self.comm(name, desc, rank.generations.get(name, -1) + 1, members, timeout_s)
            self._changes(rank)
            self.give(rank, key, comm, self.wall_of(rank))
        if not rank.held:
            self._wake(rank, self.now)

    def comm(self, name: str, desc: str, generation: int, members: tuple[int, ...], timeout_s: float) -> Comm:
        """The one that its members share."""
        comm = self._comms.get((name, generation, members))
        if comm is None:
            group = Group(name, desc, "nccl" if self.nccl else "gloo", members, timeout_s, generation, 0.0)
            comm = self._comms[name, generation, members] = Comm(group, self.nccl)
        return comm

    def give(self, rank: Rank, key: str, comm: Comm, made_wall_at: float, done: int = 0) -> None:
        """The rank is a member from now on, and has done so many calls there."""
        group = comm.group
        rank.groups = {**rank.groups, key: comm}
        shown = SHOWN_GROUP(group.name, group.desc, group.backend, group.ranks, group.timeout_s, group.generation, made_wall_at)
        rank.shown_groups = (*rank.shown_groups, shown)
        rank.generations[group.name] = group.generation
        rank.entered[group.name] = rank.completed[group.name] = done

    def settle(self, rank: Rank, joined_at: float) -> None:
        """It has joined before anything is played."""
        rank.stage, rank.stage_since = "joined", joined_at
        rank.mute, rank.beats_from = False, joined_at
        rank.version += 1

    def _op_destroy(self, rank: Rank, key: str | None) -> bool:
        self._changes(rank)
        gone = [key] if key is not None else list(rank.groups)
        names = [rank.groups[each].name for each in gone]
        for name in names:
            rank.entered.pop(name, None)
            rank.completed.pop(name, None)
        rank.groups = {known: comm for known, comm in rank.groups.items() if known not in gone}
        rank.shown_groups = tuple(group for group in rank.shown_groups if group.name not in names)
        if key is None:
            self._enter(rank, "left")
        return True

    def _op_wait(self, rank: Rank) -> bool:
        rank.handles = [entry for entry in rank.handles if not entry.done]
        if not rank.handles:
            return True
        first = rank.handles[0]
        return self._block(rank, "wait", activities.waiting(first.call.op, first.call.line, self.nccl, True), first)

    def _op_call(self, rank: Rank, key: str, call: Call) -> bool:
        comm = rank.groups.get(key)
        if comm is None:
            return True
        self._changes(rank)
        name, number, now = comm.name, rank.number, self.now
        seq = rank.entered[name] = rank.entered[name] + 1
        entry = entered(comm, number, seq, call, self.wall + now + self.offsets[number], now)
        rank.entries.append(entry)
        rank.recorded += 1
        operation = comm.calls.get(seq)
        if operation is None:
            operation = comm.calls[seq] = Operation(call)
        elif call is not operation.call and not call.pairs_with(operation.call):
            operation.mixed = True
        operation.entered[number] = entry
        if self.dead and not comm.nccl and any(not self.ranks[other].alive for other in comm.members):
            self.at(now + self.rng.uniform(0.01, 0.2), self._lost, rank, entry)
        if len(operation.entered) == comm.size or operation.mixed or call.one_sided:
            self._check(comm, seq)
        mode = call.mode
        if mode == "async":
            rank.handles.append(entry)
        return mode != "sync" or self._block(rank, "call", activities.waiting(call.op, call.line, comm.nccl, call.backward), entry)
