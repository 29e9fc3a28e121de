"""What a monitor gets to see of a World, and when: beats, status numbers, entries and stacks on request, late reports, node by node.

Status numbers are those of the last beat (gloo) or of a question once a second (NCCL). Entries are read when the judge wants them, when
a rank's operations have not moved for a second, and every few seconds for the history of calls. Stacks are sampled a moment after they were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from random import Random
from typing import Any

from activities import Frames
from engine import BEATING
from parts import Call, Entry, Rank
from quick import quick
from sight import Sight, View
from world import World

from rankwatch.model import KIND_BYTES, Calls, Collective, JobSnapshot, NodeReport, Process, RankState, Stack, Thread, Want

MONO = 5_000.0
STATUS_S = 1.0
HISTORY_S = 4.0
KEEP_PER_GROUP = 64
PING_FRESH_S = 6.0


_STATE, _PROCESS, _COLLECTIVE, _STACK, _THREAD = quick(RankState), quick(Process), quick(Collective), quick(Stack), quick(Thread)
_ARMED: dict[str, dict[str, Any]] = {"compile": {"status": "armed"}}
_MAPPED = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")  # ops whose sizes are equal on all ranks


class Observer:
    """One attempt of the job as its monitor sees it. `snapshots` ends with the final look."""

    def __init__(self, world: World, sight: Sight, rng: Random, attempt: int = 0, began: float = 0.0) -> None:
        self.world, self.sight, self.rng, self.attempt = world, sight, rng, attempt
        self.mono = MONO + sight.mono_shift_s + began
        self.views = [View(wants_read=sight.history and world.start > 0) for _ in world.ranks]
        self.node_of = {rank: node for node, ranks in enumerate(sight.nodes) for rank in ranks}
        self.ending = ""
        self.held = False
        self._pauses = list(sight.pauses)
        self._bad: list[int] = []
        self._kinds: dict[int, Collective] = {}
        self._kind_numbers: dict[tuple[object, ...], int] = {}
        self._kind_of: dict[Call, bytes] = {}
        self._stopping = False
        self._suspected = [world.start] * len(sight.nodes)
        self._reports: list[tuple[float, tuple[RankState, ...]] | None] = [None] * len(sight.nodes)
        self._pull_at = [world.start + rng.uniform(0.0, sight.pull_s) for _ in sight.nodes]
        self._launcher_gone: dict[int, float] = {}
        self._places = [(f"node{self.node_of[rank.number]}", rank.number - sight.nodes[self.node_of[rank.number]][0]) for rank in world.ranks]
        world.on_exit = self._exited

    # -- looking

    def snapshots(self) -> Iterator[JobSnapshot]:
        world = self.world
        target, before, stop_at, urged = world.start + 0.3, world.start, 1e18, False
        while True:
            self._run(target)
            if self._bad and not self._stopping:
                self._stopping = True
                stop_at = world.now + self.rng.uniform(0.05, 0.5)
            urgent = world.now >= stop_at and not self.ending  # torchrun is about to end the others, and waits until we have looked
            if urgent and urged and not (self.held and world.now < stop_at + 1.3):
                self._stop(f"torchrun stops the workers after rank {self._bad[0]} failed")
            urged = urged or urgent
            if world.now >= self.sight.ends_at and not self.ending:
                self._stop(self.sight.ending)
            final = self._over()
            if final:
                self._ask_once_more()
            yield self._look(world.now - before, final, urgent)
            before = world.now
            if final:
                return
            step = self.sight.poll_s if world.now < self.sight.slow_after_s else self.sight.slow_s
            if self._stopping:
                step = 0.1 if urgent else min(step, 0.25)
            target = world.now + step * self.rng.uniform(0.9, 1.05)
            target = min((when for when in (stop_at, self.sight.ends_at) if world.now < when < target), default=target)
            if self._pauses and target >= self._pauses[0][0]:
                _, length, everything = self._pauses.pop(0)
                if everything:
                    world.suspend(length)
                    self._pull_at = [at + length for at in self._pull_at]
                target = max(target, world.now) + (0.0 if everything else length)

    def want(self, wants: Iterable[Want], held: bool = False) -> None:
        """What the judge asked for at the look before. held: it needs to hear dying ranks out before the others are ended."""
        now, self.held = self.world.now, held
        for want in wants:
            for number in want.ranks:
                view, rank = self.views[number], self.world.ranks[number]
                if want.kind == "recorder":
                    view.wants_read = True
                elif want.kind == "stacks" and rank.alive:
                    if now - view.asked_at > 60.0:
                        view.asked = 0
                    if now - view.asked_at >= (1.0 if view.asked < 10 else 5.0):
                        view.asked_at, view.asked = now, view.asked + 1
                        far = 0.5 if self.node_of[number] else 0.0
                        self.world.at(now + far + self.rng.uniform(0.03, 0.4), self._sample, rank, view)
                elif want.kind == "ping" and rank.alive:
                    view.ping = (not rank.act.frozen, now)

    def _run(self, target: float) -> None:
        """To the target or to the first bad exit on the judging node, with the reports of the other nodes on the way."""
        world, pull_at = self.world, self._pull_at
        while world.now < target:
            at, node = min((pull_at[node], node) for node in range(1, len(pull_at))) if len(pull_at) > 1 else (target, 0)
            bad = len(self._bad)
            world.run_until(max(min(target, at), world.now))
            world.watch_timeouts()
            if len(self._bad) > bad:
                world.run_until(world.now + 0.01)
                return
            if node and world.now >= at:
                if self._answers(node):
                    self._reports[node] = (world.now, self._states(node))
                pull_at[node] = world.now + self.sight.pull_s * self.rng.uniform(0.8, 1.2)

    def _answers(self, node: int) -> bool:
        now = self.world.now
        silent = any(which == node and start <= now < end for which, start, end in self.sight.silences)
        return not silent and now < self._launcher_gone.get(node, 1e18)

    def _over(self) -> bool:
        """Whether the judging launcher is done: its ranks have ended, and if they ended well, so have all others (torchrun's exit barrier)."""
        local = [self.world.ranks[rank] for rank in self.sight.nodes[0]]
        if any(rank.alive for rank in local):
            return False
        done = any(rank.exit_code for rank in local) or all(not rank.alive for rank in self.world.ranks)
        return done or self.world.now - max(rank.exited_at or 0.0 for rank in local) > 300.0

    def _ask_once_more(self) -> None:
        """Before its last look the judge asks the other nodes; those whose launcher is gone do not answer."""
        for node in range(1, len(self.sight.nodes)):
            if self._answers(node):
                self._reports[node] = (self.world.now, self._states(node))

    def _look(self, gap_s: float, final: bool, urgent: bool) -> JobSnapshot:
        world, now = self.world, self.world.now
        if urgent:
            for view in self.views:
                view.wants_read = True
        nodes = [NodeReport("node0", self._states(0))]
        for node in range(1, len(self.sight.nodes)):
            report = self._reports[node]
            if report is not None:
                first = world.ranks[self.sight.nodes[node][0]]
                error = self.sight.errors_s[node] if self.sight.errors_s else 0.0
                nodes.append(NodeReport(f"node{node}", report[1], node, now - report[0], error - world.offsets[first.number]))
        return JobSnapshot(self.mono + now, world.wall + now, world.size, self.attempt, tuple(nodes), self.ending, gap_s, self.mono, final)

    def _states(self, node: int) -> tuple[RankState, ...]:
        world, now = self.world, self.world.now
        numbers = self.sight.nodes[node]
        views, ranks = self.views, world.ranks
        suspicious = False
        if self.sight.suspicion:
            for number in numbers:
                view = views[number]
                if view.enqueued != view.completed:
                    done = sum(view.completed.values())
                    if view.moved[0] != done:
                        view.moved = (done, now)
                    suspicious = suspicious or now - view.moved[1] >= 1.0
            if suspicious and now - self._suspected[node] >= 1.0 + 0.01 * len(numbers):
                self._suspected[node] = now
            else:
                suspicious = False
        return tuple([views[number].last or self._state(ranks[number], views[number], suspicious) for number in numbers])

    def _state(self, rank: Rank, view: View, suspicious: bool) -> RankState:
        world, sight, mono = self.world, self.sight, self.mono
        now, act, alive, stage = world.now, rank.act, rank.exit_code is None, rank.stage
        if alive:
            world.count(rank)
            heard = world.beat(rank)
            if heard is not None:
                view.beat_at = mono + heard[0]
                if heard[0] > view.told_at and not world.nccl:
                    view.told_at = heard[0]
                    view.enqueued, view.completed = heard[1]
        if alive and not act.frozen and (stage == "joined" or stage == "left"):
            if world.nccl and now - view.status_at >= STATUS_S:
                view.status_at = now
                view.enqueued, view.completed = world.numbers(rank)
            if view.wants_read or suspicious or (sight.history and now - (view.read_at or world.start) > HISTORY_S):
                self._read(rank, view)
        elif rank.crash is not None and view.read_version != rank.version and stage == "exiting":
            self._read(rank, view)  # its last words
        process = _PROCESS(
            pid=4000 + rank.number + 1000 * self.attempt, alive=alive, state=(act.letter or ("R" if act.cpu > 0.5 else "S")) if alive else "",
            cpu_s=rank.cpu_s, tree_cpu_s=rank.cpu_s + rank.child_cpu_s, io_bytes=int(rank.io_bytes), rss_bytes=10**9,
            exit_code=rank.exit_code, started_at=mono, exited_at=None if rank.exited_at is None else mono + rank.exited_at,
            oom_killed=rank.oom_killed, wchan=act.wchan, name="python3",
        )  # fmt: skip
        compiling = (act.compile.activity(mono + rank.act_since, mono + now),) if act.compile is not None and alive and sight.compile_probe else ()
        fresh = view.read_at is not None and now - view.read_at < PING_FRESH_S
        creating = rank.creating if rank.blocked == "group" else None
        node, local_rank = self._places[rank.number]
        state = _STATE(
            rank=rank.number, local_rank=local_rank, node=node, agent="armed" if stage == "armed" else "claimed", process=process, stage=stage,
            stage_since=mono + rank.stage_since, heartbeat_at=view.beat_at,
            ping_ok=view.ping[0] if view.ping is not None and now - view.ping[1] < PING_FRESH_S else True if fresh else None,
            groups=tuple(rank.shown_groups.values()),
            group_in_creation=creating[1] if creating is not None else None, creation_ranks=creating[3] if creating is not None else (),
            calls=view.calls, collectives=view.read, collectives_at=None if view.read_at is None else mono + view.read_at, lost_collectives=view.lost,
            enqueued=view.enqueued, completed=view.completed, compiling=compiling, compile_witness=view.witness if fresh else None,
            probes=_ARMED if sight.compile_probe else {}, steps=rank.steps,
            last_step_at=None if rank.step_at is None else mono + rank.step_at, step_s=rank.step_s, stack=view.stack, earlier_stack=view.earlier,
            crash=rank.crash,
        )  # fmt: skip
        if not alive:
            view.last = state
        return state

    # -- evidence

    def _read(self, rank: Rank, view: View) -> None:
        """A whole read of its recorder, as far as the buffer holds it."""
        view.wants_read = False
        view.read_at = self.world.now
        view.witness = rank.act.compile is not None
        rank.cpu_s += 0.03
        if view.read_version == rank.version:
            return
        view.read_version = rank.version
        self._learn(rank, view)
        if view.recorded:
            view.lost += max(0, rank.recorded - len(rank.entries) - view.recorded)
        view.recorded = rank.recorded
        left = dict.fromkeys(rank.generations, KEEP_PER_GROUP)
        room = sum(left.values())
        found = []
        for entry in reversed(rank.entries):
            group = entry.comm.group
            if rank.generations[group.name] != group.generation or not left[group.name]:
                continue
            left[group.name] -= 1
            shown = entry.shown
            found.append(self._shown(entry) if shown is None or not entry.done else shown)
            room -= 1
            if not room:
                break
        found.reverse()
        view.read = tuple(found)
        if rank.stage in BEATING:
            view.told_at = self.world.now
            view.enqueued, view.completed = self.world.numbers(rank)

    def _learn(self, rank: Rank, view: View) -> None:
        """Add what was called since the read before to the history, as far as the buffer still holds it."""
        fresh = min(rank.recorded - view.recorded, len(rank.entries))
        for entry in reversed(list(islice(reversed(rank.entries), fresh))):
            group, seq = entry.comm.group, entry.seq
            generation, first, kinds = view.lines.get(group.name) or (-1, 0, bytearray())
            if generation > group.generation:
                continue
            if generation < group.generation or seq < first:
                generation, first, kinds = group.generation, seq, bytearray()
                view.lines[group.name] = (generation, first, kinds)
            at = (seq - first) * KIND_BYTES
            if at > len(kinds):
                kinds.extend(bytes(at - len(kinds)))
            kinds[at : at + KIND_BYTES] = self._kind_of.get(entry.call) or self._kind(entry.call)
        if fresh:
            view.calls = {name: Calls(generation, first, bytes(kinds), self._kinds) for name, (generation, first, kinds) in view.lines.items()}

    def _kind(self, call: Call) -> bytes:
        kind = Collective("", 0, 0, call.op, call.shapes, (), (call.dtype,)) if call.op in _MAPPED else Collective("", 0, 0, call.op)
        number = self._kind_numbers.setdefault((kind.op, kind.input_sizes, kind.dtypes), len(self._kind_numbers) + 1)
        self._kinds[number] = kind
        found = self._kind_of[call] = number.to_bytes(KIND_BYTES, "little")
        return found

    def _shown(self, entry: Entry) -> Collective:
        if entry.shown is None or (self.world.timing and not entry.done):
            call, group = entry.call, entry.comm.group
            started = None
            if entry.comm.nccl and (entry.done or self.world.timing):
                started = entry.done or self.world.runs_on_device(entry)
            entry.shown = _COLLECTIVE(
                group.name, group.generation, entry.seq, call.op, call.shapes, call.shapes, call.dtypes, entry.created, group.timeout_s, entry.done, started
            )
        return entry.shown

    def _sample(self, rank: Rank, view: View) -> None:
        if not rank.alive or not rank.act.samples:
            return
        now = self.world.now
        main: Frames = rank.act.stack(now)
        thread = _THREAD("MainThread", 4000 + rank.number, main, rank.act.cpu > 0.5, rank.act.holds_gil)
        view.earlier = view.stack
        view.stack = _STACK(4000 + rank.number + 1000 * self.attempt, self.mono + now, (thread,), subprocesses=rank.act.children)

    # -- the launchers

    def _exited(self, rank: Rank) -> None:
        if not rank.exit_code:
            return
        node = self.node_of[rank.number]
        if node:
            if node not in self._launcher_gone:
                self._launcher_gone[node] = self.world.now + self.rng.uniform(4.0, 6.0)
                self.world.at(self.world.now + self.rng.uniform(0.2, 2.0), self._end_node, node)
        elif not self.ending:
            self._bad.append(rank.number)
            self.world.halt = True

    def _stop(self, reason: str) -> None:
        """SIGTERM to every worker that is still there."""
        self.ending = reason
        planned = not self._bad
        for node in range(len(self.sight.nodes) if planned else 1):
            self._end_node(node)

    def _end_node(self, node: int) -> None:
        for number in self.sight.nodes[node]:
            rank = self.world.ranks[number]
            if rank.alive:
                stuck = rank.act.frozen or rank.act.letter == "D" or rank.act.holds_gil
                self.world.at(self.world.now + self.rng.uniform(0.05, 0.6) + (4.0 if stuck else 0.0), self.world.end, rank, -9 if stuck else -15)
