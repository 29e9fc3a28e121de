"""What a monitor gets to see of a World, and when: beats, status numbers, entries and stacks on request, late reports, node by node.

Status numbers are those of the last beat (gloo) or of a question once a second (NCCL). Entries are read when the judge wants them, when
a rank's operations have not moved for a second, and every few seconds for the history of calls. Stacks are sampled a moment after they were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from looks import Looks
from parts import Rank
from quick import blank, quick
from sight import Sight
from world import World

from rankwatch.model import JobSnapshot, NodeReport, RankState, Want

MONO = 5_000.0
NEVER = 1e18
EARLIEST, LATEST = 0.9, 1.05  # a look comes after this much of the time between two
_JOB = blank(JobSnapshot, "now wall_at world_size attempt nodes ending gap_s started_at final")
_JUDGING, _OTHER = quick(NodeReport, "node ranks"), quick(NodeReport, "node ranks group_rank report_age_s clock_offset_s")


class Observer:
    """One attempt of the job as its monitor sees it. `snapshots` ends with the final look."""

    def __init__(self, world: World, sight: Sight, rng: Random, attempt: int = 0, began: float = 0.0) -> None:
        self.world, self.sight, self.rng, self.attempt = world, sight, rng, attempt
        self.mono = MONO + sight.mono_shift_s + began
        self.looks = Looks(world, sight, attempt, self.mono)
        self.node_of = {rank: node for node, ranks in enumerate(sight.nodes) for rank in ranks}
        self.ending = ""
        self.held = False
        self._pauses = list(sight.pauses)
        self._bad: list[int] = []
        self._stop_at, self._urged = NEVER, False
        self._local = [world.ranks[rank] for rank in sight.nodes[0]]
        self._reports: list[tuple[float, tuple[RankState, ...]] | None] = [None] * len(sight.nodes)
        self._pull_at = [world.start + rng.uniform(0.0, sight.pull_s) for _ in sight.nodes]
        self._next_pull = self._first_pull()
        self._launcher_gone: dict[int, float] = {}
        world.on_exit = self._exited

    # -- looking

    def snapshots(self) -> Iterator[JobSnapshot]:
        world, sight, bad, draw = self.world, self.sight, self._bad, self.rng.random
        target, before, urgent, final = world.start + 0.3, world.start, False, False
        while not final:
            self._run(target)
            now = world.now
            if bad:
                urgent = self._fails(now)
            if now >= sight.ends_at and not self.ending:
                self._stop(sight.ending)
            if world.dead and self._over():
                final = True
                self._ask_once_more()
            yield self._look(now - before, final, urgent)
            before = now
            step = sight.poll_s if now < sight.slow_after_s else sight.slow_s
            if bad:
                step = 0.1 if urgent else min(step, 0.25)
            target = now + step * (EARLIEST + (LATEST - EARLIEST) * draw())
            if now < self._stop_at < target:
                target = self._stop_at
            if now < sight.ends_at < target:
                target = sight.ends_at
            if self._pauses and target >= self._pauses[0][0]:
                target = self._pause(target)

    def _fails(self, now: float) -> bool:
        """A rank has failed. Whether torchrun is about to end the others, and waits until we have looked."""
        if self._stop_at == NEVER:
            self._stop_at = now + self.rng.uniform(0.05, 0.5)
        urgent = now >= self._stop_at and not self.ending
        if urgent and self._urged and not (self.held and now < self._stop_at + 1.3):
            self._stop(f"torchrun stops the workers after rank {self._bad[0]} failed")
        self._urged = self._urged or urgent
        return urgent

    def _pause(self, target: float) -> float:
        """The next pause begins. When it looks again."""
        _, length, everything = self._pauses.pop(0)
        if not everything:
            return max(target, self.world.now) + length
        self.world.suspend(length)
        self._pull_at = [at + length for at in self._pull_at]
        self._next_pull = self._first_pull()
        return max(target, self.world.now)

    def want(self, wants: Iterable[Want], held: bool = False) -> None:
        """What the judge asked for at the look before. held: it needs to hear dying ranks out before the others are ended."""
        now, self.held = self.world.now, held
        for want in wants:
            for number in want.ranks:
                view, rank = self.looks.views[number], self.world.ranks[number]
                if want.kind == "recorder":
                    view.wants_read = True
                elif want.kind == "stacks" and rank.alive:
                    if now - view.asked_at > 60.0:
                        view.asked = 0
                    if now - view.asked_at >= (1.0 if view.asked < 10 else 5.0):
                        view.asked_at, view.asked = now, view.asked + 1
                        far = 0.5 if self.node_of[number] else 0.0
                        self.world.at(now + far + self.rng.uniform(0.03, 0.4), self.looks.sample, rank)
                elif want.kind == "ping" and rank.alive:
                    view.ping = (not rank.act.frozen, now)

    def _run(self, target: float) -> None:
        """To the target or to the first bad exit on the judging node, with the reports of the other nodes on the way."""
        world, bad = self.world, len(self._bad)
        while world.now < target:
            at, node = self._next_pull
            world.run_until(target if target <= at else max(at, world.now))
            world.watch_timeouts()
            if len(self._bad) > bad:
                world.run_until(world.now + 0.01)
                return
            if world.now >= at:
                self._pull(node)

    def _pull(self, node: int) -> None:
        now = self.world.now
        if self._answers(node):
            self._reports[node] = (now, self.looks.states(node))
        self._pull_at[node] = now + self.sight.pull_s * self.rng.uniform(0.8, 1.2)
        self._next_pull = self._first_pull()

    def _first_pull(self) -> tuple[float, int]:
        """When the next report of another node is due, and of which."""
        return min(((at, node) for node, at in enumerate(self._pull_at) if node), default=(NEVER, 0))

    def _answers(self, node: int) -> bool:
        now = self.world.now
        silent = any(which == node and start <= now < end for which, start, end in self.sight.silences)
        return not silent and now < self._launcher_gone.get(node, NEVER)

    def _over(self) -> bool:
        """Whether the judging launcher is done: its ranks have ended, and if they ended well, so have all others (torchrun's exit barrier)."""
        local = self._local
        if any(rank.alive for rank in local):
            return False
        done = any(rank.exit_code for rank in local) or all(not rank.alive for rank in self.world.ranks)
        return done or self.world.now - max(rank.exited_at or 0.0 for rank in local) > 300.0

    def _ask_once_more(self) -> None:
        """Before its last look the judge asks the other nodes; those whose launcher is gone do not answer."""
        for node in range(1, len(self.sight.nodes)):
            if self._answers(node):
                self._reports[node] = (self.world.now, self.looks.states(node))

    def _look(self, gap_s: float, final: bool, urgent: bool) -> JobSnapshot:
        world, sight, now = self.world, self.sight, self.world.now
        if urgent:
            for view in self.looks.views:
                view.wants_read = True
        nodes = (_JUDGING("node0", self.looks.states(0)),)
        if len(sight.nodes) > 1:
            nodes += self._other_nodes(now)
        job, mono = _JOB(), self.mono
        job.now = mono + now
        job.wall_at = world.wall + now
        job.started_at = mono
        job.gap_s = gap_s
        job.world_size = world.size
        job.attempt = self.attempt
        job.nodes = nodes
        job.ending = self.ending
        job.final = final
        job.__class__ = JobSnapshot
        return job  # type: ignore[no-any-return]

    def _other_nodes(self, now: float) -> tuple[NodeReport, ...]:
        nodes, sight = [], self.sight
        for node, report in enumerate(self._reports):
            if report is not None:
                error = sight.errors_s[node] if sight.errors_s else 0.0
                nodes.append(_OTHER(f"node{node}", report[1], node, now - report[0], error - self.world.offsets[sight.nodes[node][0]]))
        return tuple(nodes)

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
