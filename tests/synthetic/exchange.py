"""Collectives and ends: when an operation completes and on whom, who loses a peer, whose watchdog fires.

gloo: a member that has ended or is stopped holds everybody up, peers of a dead one raise, operations may overtake each other. NCCL: one
after the other on the stream, nobody notices a dead peer, the watchdog aborts some seconds after the timeout.
"""

from __future__ import annotations

import activities
from activities import Act
from engine import Engine
from parts import Comm, Entry, Rank

from rankwatch.model import Crash

LOST_PEER = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:30611"
NOTHING = Act(())
IN_TORCH = 'File "torch/distributed/distributed_c10d.py", line 3252, in all_reduce'


class Exchange(Engine):
    """An Engine whose ranks meet."""

    def _check(self, comm: Comm, seq: int) -> None:
        """Complete what can be completed of one operation."""
        operation = comm.calls[seq]
        if seq >= comm.hung_from:
            return
        if operation.mixed and not self.lenient:
            comm.hung_from = seq
            return
        call, entered = operation.call, operation.entered
        everyone = len(entered) == comm.size
        ready = [rank for rank, entry in entered.items() if not entry.done] if operation.left else list(entered)
        if call.one_sided and not self.lenient:
            root = comm.group.ranks[call.root % comm.size]
            if call.from_root:
                ready = ready if root in entered else []
            elif not everyone:
                ready = [rank for rank in ready if rank != root]
        elif not everyone:
            return
        if self.frozen and not comm.nccl and not self.frozen.isdisjoint(entered):
            return
        if comm.nccl and seq > 1:  # one after the other on its stream; gloo has several threads
            name, before = comm.name, seq - 1
            ready = [rank for rank in ready if self.ranks[rank].completed.get(name, 0) >= before]
        if ready:
            comm.free_at = max(comm.free_at, self.now + call.takes_s)
            self.at(comm.free_at, self._finish, comm, seq, ready)

    def _finish(self, comm: Comm, seq: int, ready: list[int]) -> None:
        operation = comm.calls.get(seq)
        if operation is None or seq >= comm.hung_from:
            return
        entered, ranks = operation.entered, self.ranks
        if self.frozen and not comm.nccl and not self.frozen.isdisjoint(entered):
            return
        name, generation, free = comm.name, comm.generation, []
        for number in ready:
            entry, rank = entered[number], ranks[number]
            if entry.done or rank.exit_code is not None:
                continue
            entry.done, entry.shown = True, None
            operation.left += 1
            self._changes(rank)
            if rank.completed.get(name, seq) < seq and generation == rank.generations[name]:
                rank.completed[name] = seq
            if rank.blocked and self._frees(rank, entry):
                free.append(rank)
        if comm.nccl and seq + 1 in comm.calls:
            self._check(comm, seq + 1)
        if operation.left == comm.size:
            del comm.calls[seq]
        if free:
            self._release(free)

    def _frees(self, rank: Rank, entry: Entry) -> bool:
        """Whether the rank has waited for no more than this."""
        if rank.held:
            return False
        if rank.blocked == "call":
            return rank.blocked_on is entry
        if rank.blocked == "wait":
            rank.handles = [each for each in rank.handles if not each.done]
            if not rank.handles:
                return True
            rank.blocked_on = rank.handles[0]
        return False

    def stop(self, rank: Rank, act: Act = activities.STOPPED) -> None:
        """From now on its program stands still. With act.frozen its gloo threads do as well."""
        rank.held, rank.token = True, 0
        samples = act.samples or rank.act.samples
        if act.frozen:
            self.frozen.add(rank.number)
        self.become(rank, Act(samples, cpu=act.cpu, letter=act.letter, wchan=act.wchan, frozen=act.frozen, holds_gil=act.holds_gil, compile=rank.act.compile))

    def block_device(self, rank: Rank) -> None:
        """Its device finishes nothing any more; what its peers share with it hangs."""
        self.blocked_devices.add(rank.number)
        for comm in rank.groups.values():
            self.hang(comm)

    def runs_on_device(self, entry: Entry) -> bool:
        """Whether an NCCL kernel has started for it: nothing before it on its stream is open. It may wait for its peers in there."""
        if entry.rank in self.blocked_devices:
            return False
        return self.ranks[entry.rank].completed.get(entry.comm.group.name, 0) >= entry.seq - 1

    def hang(self, comm: Comm) -> None:
        """The network of this group does nothing from now on."""
        comm.hung_from = min(comm.calls, default=1 + max(self.ranks[number].completed.get(comm.group.name, 0) for number in comm.members))

    def fail(self, rank: Rank, crash: Crash, code: int = 1) -> None:
        """Its Python ends by an exception: said in the slot at once, the process takes a moment."""
        if not rank.alive or rank.stage == "exiting":
            return
        rank.crash = crash
        rank.version += 1
        self._enter(rank, "exiting")
        self.become(rank, NOTHING)
        rank.token = 0
        self.at(self.now + self.rng.uniform(0.05, 0.8), self.end, rank, code)

    def end(self, rank: Rank, code: int, oom_killed: bool = False) -> None:
        """The process is gone."""
        if not rank.alive:
            return
        self.count(rank)
        self._hush(rank, True)
        rank.exit_code, rank.exited_at, rank.oom_killed = code, self.now, oom_killed
        self.dead += 1
        rank.blocked, rank.held = "", False
        rank.token = 0
        rank.version += 1
        if not self.nccl:
            for other in self.ranks:
                if other.alive and other.blocked in ("call", "wait") and other.blocked_on is not None and rank.number in other.blocked_on.comm.members:
                    self.at(self.now + self.rng.uniform(0.02, 0.4), self._lost, other, other.blocked_on)
                elif other.alive and other.blocked == "recv" and self.sender(other) == rank.number:
                    self.at(self.now + self.rng.uniform(0.02, 0.4), self.unheard, other, other.token)
        self.on_exit(rank)

    def _lost(self, rank: Rank, entry: Entry) -> None:
        if entry.done or not rank.alive or rank.held:
            return
        if rank.blocked not in ("call", "wait"):
            return
        self._fail_of_lost_peer(rank)

    def sender(self, rank: Rank) -> int:
        """Of the message that it waits for: its mailbox lies between it and a neighbour."""
        low = int(rank.box.split("/")[0])
        return low if rank.number != low else low + 1

    def unheard(self, rank: Rank, token: int) -> None:
        """It receives from one that has ended."""
        if token == rank.token and rank.alive and not rank.held:
            self._fail_of_lost_peer(rank)

    def _fail_of_lost_peer(self, rank: Rank) -> None:
        self.fail(rank, Crash("RuntimeError", LOST_PEER, "train.py:50:step", IN_TORCH, "slot", self.wall_of(rank)))

    def watch_timeouts(self) -> None:
        """Arm the watchdogs of those who wait; cheap enough for every look."""
        for rank in self.ranks:
            if rank.blocked and not rank.timer and rank.blocked != "recv" and self.now - rank.blocked_since > 1.0:
                rank.timer = True
                entry = rank.blocked_on
                timeout = entry.comm.group.timeout_s if entry is not None else rank.creating[4] if rank.creating is not None else None
                since = entry.at if entry is not None else rank.blocked_since
                if timeout:
                    self.at(
                        since + timeout + (self.rng.uniform(0.5, 8.0) if self.nccl and entry is not None else 0.0), self._timed_out, rank, rank.token, timeout
                    )

    def _timed_out(self, rank: Rank, token: int, timeout_s: float) -> None:
        if token != rank.token or not rank.alive or rank.held:
            return
        if rank.blocked in ("join", "group"):
            text = (
                f"Timed out initializing process group in store based barrier on rank: {rank.number}, for key: store_based_barrier_key:1 "
                f"(world_size={self.size}, num_workers_joined={self.size - 1}, timeout=0:{timeout_s / 60:02.0f}:00 "
                f"error=wait timeout after {timeout_s * 1000:.0f}ms)"
            )
            trace = f'File "torch/distributed/distributed_c10d.py", line 1750, in {"init_process_group" if rank.blocked == "join" else "new_group"}\n'
            self.fail(rank, Crash("torch.distributed.DistStoreError", text, "train.py:12:setup", trace, "slot", self.wall_of(rank)))
        elif self.nccl:
            self.end(rank, -6)
        else:
            text = f"[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting {timeout_s * 1000:.0f}ms for recv operation to complete"
            self.fail(rank, Crash("RuntimeError", text, "train.py:50:step", IN_TORCH, "slot", self.wall_of(rank)))
