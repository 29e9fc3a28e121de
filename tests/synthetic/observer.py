"""What a monitor gets to see of a World, and when: beats, status numbers, entries and stacks on request, late reports, node by node.

Status numbers are those of the last beat (gloo) or of a question once a second (NCCL). Entries are read when the judge wants them, when
a rank's operations have not moved for a second, and every few seconds for the history of calls. Stacks are sampled a moment after they were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from activities import Frames
from parts import Entry, Rank
from sight import Sight, View
from world import World

from rankwatch.model import KIND_BYTES, Calls, Collective, JobSnapshot, NodeReport, Process, RankState, Stack, Thread, Want

MONO = 5_000.0
BEAT_S = 0.5
STATUS_S = 1.0
HISTORY_S = 4.0
KEEP_PER_GROUP = 64
PING_FRESH_S = 6.0


class Observer:
    """One attempt of the job as its monitor sees it. `snapshots` ends with the final look."""

    def __init__(self, world: World, sight: Sight, rng: Random, attempt: int = 0, began: float = 0.0) -> None:
        self.world, self.sight, self.rng, self.attempt = world, sight, rng, attempt
        self.mono = MONO + sight.mono_shift_s + began
        self.views = [View() for _ in world.ranks]
        self.node_of = {rank: node for node, ranks in enumerate(sight.nodes) for rank in ranks}
        self.ending = ""
        self.held = False
        self._pauses = list(sight.pauses)
        self._bad: list[int] = []
        self._kinds: dict[int, Collective] = {}
        self._kind_numbers: dict[tuple[object, ...], int] = {}
        self._stopping = False
        self._suspected = [0.0] * len(sight.nodes)
        self._reports: list[tuple[float, tuple[RankState, ...]] | None] = [None] * len(sight.nodes)
        self._pull_at = [rng.uniform(0.0, sight.pull_s) for _ in sight.nodes]
        self._launcher_gone: dict[int, float] = {}
        world.on_exit = self._exited
        for rank in world.ranks:
            world.at(rng.uniform(0.0, BEAT_S), self._beat, rank, self.views[rank.number])

    # -- looking

    def snapshots(self) -> Iterator[JobSnapshot]:
        world = self.world
        target, before, stop_at, urged = 0.3, 0.0, 1e18, False
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
            step = self.sight.poll_s if world.now < self.sight.slow_after_s else 1.9
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
        world = self.world
        while world.now < target:
            node = min(range(1, len(self.sight.nodes)), key=lambda each: self._pull_at[each], default=0)
            until = min(target, self._pull_at[node]) if node else target
            bad = len(self._bad)
            world.run_until(max(until, world.now))
            world.watch_timeouts()
            if len(self._bad) > bad:
                world.run_until(world.now + 0.01)
                return
            if node and world.now >= self._pull_at[node]:
                silent = any(which == node and start <= world.now < end for which, start, end in self.sight.silences)
                if not silent and world.now < self._launcher_gone.get(node, 1e18):
                    self._reports[node] = (world.now, self._states(node))
                self._pull_at[node] = world.now + self.sight.pull_s * self.rng.uniform(0.8, 1.2)

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
            silent = any(which == node and start <= self.world.now < end for which, start, end in self.sight.silences)
            if not silent and self.world.now < self._launcher_gone.get(node, 1e18):
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
        suspicious = False
        if self.sight.suspicion:
            for number in numbers:
                view = self.views[number]
                if view.enqueued != view.completed:
                    done = sum(view.completed.values())
                    if view.moved[0] != done:
                        view.moved = (done, now)
                    suspicious = suspicious or now - view.moved[1] >= 1.0
            if suspicious and now - self._suspected[node] >= 1.0 + 0.01 * len(numbers):
                self._suspected[node] = now
            else:
                suspicious = False
        return tuple(self._state(world.ranks[number], self.views[number], suspicious) for number in numbers)

    def _state(self, rank: Rank, view: View, suspicious: bool) -> RankState:
        if view.last is not None:
            return view.last
        world, now = self.world, self.world.now
        act, alive = rank.act, rank.exit_code is None
        shift = self.mono
        world.count(rank)
        joined = rank.stage in ("joined", "left")
        if alive and joined and not act.frozen:
            if world.nccl and now - view.status_at >= STATUS_S:
                view.status_at = now
                self._numbers(rank, view)
            history = self.sight.history and now - (view.read_at or 0.0) > HISTORY_S
            if view.wants_read or suspicious or history:
                self._read(rank, view)
        elif rank.crash is not None and view.read_version != rank.version and rank.stage == "exiting":
            self._read(rank, view)  # its last words
        letter = act.letter or ("R" if act.cpu > 0.5 else "S")
        process = Process(
            pid=4000 + rank.number + 1000 * self.attempt, alive=alive, state=letter if alive else "",
            cpu_s=rank.cpu_s, tree_cpu_s=rank.cpu_s + rank.child_cpu_s, io_bytes=int(rank.io_bytes), rss_bytes=10**9,
            exit_code=rank.exit_code, started_at=self.mono, exited_at=shift + rank.exited_at if rank.exited_at is not None else None,
            oom_killed=rank.oom_killed, wchan=act.wchan, name="python3",
        )  # fmt: skip
        compiles = act.compile is not None and alive
        compiling = (act.compile.activity(shift + rank.act_since, shift + now),) if compiles and act.compile is not None and self.sight.compile_probe else ()
        fresh = view.read_at is not None and now - view.read_at < PING_FRESH_S
        state = RankState(
            rank=rank.number, local_rank=rank.number - self.sight.nodes[self.node_of[rank.number]][0], node=f"node{self.node_of[rank.number]}",
            agent="armed" if rank.stage == "armed" else "claimed", process=process, stage=rank.stage,  # type: ignore[arg-type]
            stage_since=shift + rank.stage_since, heartbeat_at=self.mono + view.beat_at if view.beat_at is not None else None,
            ping_ok=view.ping[0] if view.ping is not None and now - view.ping[1] < PING_FRESH_S else True if fresh else None,
            groups=tuple(rank.shown_groups.values()),
            group_in_creation=rank.creating[1] if rank.creating is not None and rank.blocked == "group" else None,
            creation_ranks=rank.creating[3] if rank.creating is not None and rank.blocked == "group" else (),
            calls=view.calls, collectives=view.read, collectives_at=self.mono + view.read_at if view.read_at is not None else None, lost_collectives=view.lost,
            enqueued=view.enqueued, completed=view.completed, compiling=compiling, compile_witness=view.witness if fresh else None,
            probes={"compile": {"status": "armed"}} if self.sight.compile_probe else {}, steps=rank.steps,
            last_step_at=shift + rank.step_at if rank.step_at is not None else None, step_s=rank.step_s, stack=view.stack, earlier_stack=view.earlier,
            crash=rank.crash,
        )  # fmt: skip
        if not alive:
            view.last = state
        return state

    # -- evidence

    def _beat(self, rank: Rank, view: View) -> None:
        if not rank.alive:
            return
        now = self.world.now
        if rank.stage in ("joined", "left") and not rank.act.holds_gil and not rank.act.frozen:
            view.beat_at = now
            if not self.world.nccl:
                self._numbers(rank, view)
        self.world.at(now + BEAT_S, self._beat, rank, view)

    def _numbers(self, rank: Rank, view: View) -> None:
        if view.version != rank.version:
            view.version = rank.version
            view.enqueued, view.completed = dict(rank.entered), dict(rank.completed)

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
        counts: dict[str, int] = {}
        found = []
        for entry in reversed(rank.entries):
            group = entry.comm.group
            if rank.generations.get(group.name) != group.generation:
                continue
            number = counts[group.name] = counts.get(group.name, 0) + 1
            if number <= KEEP_PER_GROUP:
                found.append(self._shown(entry))
        found.reverse()
        view.read = tuple(found)
        if rank.stage in ("joined", "left"):
            self._numbers(rank, view)

    def _learn(self, rank: Rank, view: View) -> None:
        """Add what was called since the read before to the history, as far as the buffer still holds it."""
        fresh = min(rank.recorded - view.recorded, len(rank.entries))
        for entry in list(rank.entries)[len(rank.entries) - fresh :]:
            group = entry.comm.group
            generation, first, kinds = view.lines.get(group.name, (-1, 0, bytearray()))
            if generation > group.generation:
                continue
            if generation < group.generation or entry.seq < first:
                generation, first, kinds = group.generation, entry.seq, bytearray()
            at = (entry.seq - first) * KIND_BYTES
            kinds.extend(bytes(max(0, at - len(kinds))))
            kinds[at : at + KIND_BYTES] = self._kind(entry).to_bytes(KIND_BYTES, "little")
            view.lines[group.name] = (generation, first, kinds)
        if fresh:
            view.calls = {name: Calls(generation, first, bytes(kinds), self._kinds) for name, (generation, first, kinds) in view.lines.items()}

    def _kind(self, entry: Entry) -> int:
        call = entry.call
        equal = call.op in ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
        kind = Collective("", 0, 0, call.op, tuple((size,) for size in call.sizes), (), (call.dtype,)) if equal else Collective("", 0, 0, call.op)
        number = self._kind_numbers.setdefault((kind.op, kind.input_sizes, kind.dtypes), len(self._kind_numbers) + 1)
        self._kinds[number] = kind
        return number

    def _shown(self, entry: Entry) -> Collective:
        if entry.shown is None or (self.world.timing and not entry.done):
            call, group = entry.call, entry.comm.group
            started = None
            if entry.comm.nccl and (entry.done or self.world.timing):
                started = entry.done or self.world.runs_on_device(entry)
            sizes = tuple((size,) for size in call.sizes)
            entry.shown = Collective(
                group.name, group.generation, entry.seq, call.op, sizes, sizes, (call.dtype,) if sizes else (), entry.created, group.timeout_s, entry.done,
                started,
            )  # fmt: skip
        return entry.shown

    def _sample(self, rank: Rank, view: View) -> None:
        if not rank.alive or not rank.act.samples:
            return
        now = self.world.now
        main: Frames = rank.act.stack(now)
        thread = Thread("MainThread", 4000 + rank.number, main, rank.act.cpu > 0.5, rank.act.holds_gil)
        view.earlier = view.stack
        view.stack = Stack(4000 + rank.number + 1000 * self.attempt, self.mono + now, (thread,), subprocesses=rank.act.children)

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
