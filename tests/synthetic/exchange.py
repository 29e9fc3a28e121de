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

FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
LOST_PEER = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:30611"
IN_TORCH = 'File "torch/distributed/distributed_c10d.py", line 3252, in all_reduce'


class Exchange(Engine):
    """An Engine whose ranks meet."""

    def _check(self, comm: Comm, seq: int) -> None:
        """Complete what can be completed of one operation."""
        if seq >= comm.hung_from:
            return
        entered = comm.calls[seq]
        if not self.lenient and len({entry.call.signature for entry in entered.values()}) > 1:
            comm.hung_from = seq
            return
        frozen = not comm.nccl and any(self.ranks[rank].act.frozen for rank in entered)
        if frozen:
            return
        call = next(iter(entered.values())).call
        root = comm.group.ranks[call.root % len(comm.group.ranks)]
        everyone = len(entered) == len(comm.members)
        if call.op in FROM_ROOT and not self.lenient:
            ready = [rank for rank in entered if root in entered]
        elif call.op in TO_ROOT and not self.lenient:
            ready = [rank for rank in entered if rank != root or everyone]
        else:
            ready = list(entered) if everyone else []
        ready = [rank for rank in ready if not entered[rank].done]
        if comm.nccl:  # one after the other on its stream; gloo has several threads
            ready = [rank for rank in ready if self.ranks[rank].completed.get(comm.group.name, 0) >= seq - 1]
        if ready:
            comm.free_at = max(comm.free_at, self.now + call.takes_s)
            self.at(comm.free_at, self._finish, comm, seq, ready)

    def _finish(self, comm: Comm, seq: int, ranks: list[int]) -> None:
        entered = comm.calls.get(seq)
        if entered is None or seq >= comm.hung_from:
            return
        if not comm.nccl and any(self.ranks[number].act.frozen for number in entered):
            return
        name = comm.group.name
        for number in ranks:
            entry, rank = entered[number], self.ranks[number]
            if entry.done or not rank.alive:
                continue
            entry.done, entry.shown = True, None
            rank.version += 1
            if name in rank.completed and comm.group.generation == rank.generations[name]:
                rank.completed[name] = max(rank.completed[name], seq)
            self._free(rank, entry)
        if comm.nccl and seq + 1 in comm.calls:
            self._check(comm, seq + 1)
        if len(entered) == len(comm.members) and all(entry.done for entry in entered.values()):
            del comm.calls[seq]

    def _free(self, rank: Rank, entry: Entry) -> None:
        if rank.held is not None:
            if rank.blocked_on is entry:
                rank.left_s = 0.0
            return
        if rank.blocked == "call" and rank.blocked_on is entry:
            self._wake(rank, self.now)
        elif rank.blocked == "wait":
            rank.handles = [each for each in rank.handles if not each.done]
            if not rank.handles:
                self._wake(rank, self.now)
            else:
                rank.blocked_on = rank.handles[0]

    def stop(self, rank: Rank, act: Act = activities.STOPPED) -> None:
        """From now on its program stands still. With act.frozen its gloo threads do as well."""
        rank.held, rank.left_s = rank.act, rank.wakes_at - self.now
        rank.token += 1
        samples = act.samples or rank.act.samples
        self.become(rank, Act(samples, cpu=act.cpu, letter=act.letter, wchan=act.wchan, frozen=act.frozen, holds_gil=act.holds_gil, compile=rank.act.compile))

    def resume(self, rank: Rank) -> None:
        if rank.held is None or not rank.alive:
            return
        self.become(rank, rank.held)
        rank.held = None
        self._wake(rank, self.now + max(0.0, rank.left_s))
        for comm in rank.groups.values():
            for seq in sorted(comm.calls):
                if rank.number in comm.calls[seq]:
                    self._check(comm, seq)

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
        rank.stage, rank.stage_since = "exiting", self.now
        rank.version += 1
        self.become(rank, Act(()))
        rank.token += 1
        self.at(self.now + self.rng.uniform(0.05, 0.8), self.end, rank, code)

    def end(self, rank: Rank, code: int, oom_killed: bool = False) -> None:
        """The process is gone."""
        if not rank.alive:
            return
        self.count(rank)
        rank.exit_code, rank.exited_at, rank.oom_killed = code, self.now, oom_killed
        self.dead += 1
        rank.blocked, rank.held = "", None
        rank.token += 1
        rank.version += 1
        if not self.nccl:
            for other in self.ranks:
                if other.alive and other.blocked in ("call", "wait") and other.blocked_on is not None and rank.number in other.blocked_on.comm.members:
                    self.at(self.now + self.rng.uniform(0.02, 0.4), self._lost, other, other.blocked_on)
        self.on_exit(rank)

    def _lost(self, rank: Rank, entry: Entry) -> None:
        if entry.done or not rank.alive or rank.held is not None:
            return
        if rank.blocked not in ("call", "wait"):
            return
        self.fail(rank, Crash("RuntimeError", LOST_PEER, "train.py:50:step", IN_TORCH, "slot", self.wall_of(rank)))

    def watch_timeouts(self) -> None:
        """Arm the watchdogs of those who wait; cheap enough for every look."""
        for rank in self.ranks:
            if rank.blocked in ("call", "wait", "join", "group") and not rank.timer and self.now - rank.blocked_since > 1.0:
                rank.timer = True
                entry = rank.blocked_on
                timeout = entry.comm.group.timeout_s if entry is not None else rank.creating[4] if rank.creating is not None else None
                since = entry.at if entry is not None else rank.blocked_since
                if timeout:
                    self.at(
                        since + timeout + (self.rng.uniform(0.5, 8.0) if self.nccl and entry is not None else 0.0), self._timed_out, rank, rank.token, timeout
                    )

    def _timed_out(self, rank: Rank, token: int, timeout_s: float) -> None:
        if token != rank.token or not rank.alive or rank.held is not None:
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
