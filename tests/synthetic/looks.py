"""One look at the ranks of a node: what of each is visible now, as a monitor puts it together."""

from __future__ import annotations

from typing import Any

from activities import Frames
from parts import Rank
from quick import blank, quick
from recorder import Recorder
from sight import Sight, View
from world import World

from rankwatch.model import Process, RankState, Stack, Thread

STATUS_S = 1.0
HISTORY_S = 4.0
PING_FRESH_S = 6.0

_PROCESS = blank(Process, "pid alive state cpu_s tree_cpu_s io_bytes started_at wchan", rss_bytes=10**9, name="python3")
_STATE = blank(
    RankState,
    "rank local_rank node process stage stage_since heartbeat_at groups collectives lost_collectives calls enqueued completed "
    "probes steps step_s stack earlier_stack crash",
)
_STACK, _THREAD = quick(Stack, "pid at threads subprocesses"), quick(Thread, "name native_id frames active owns_gil")
_ARMED: dict[str, dict[str, Any]] = {"compile": {"status": "armed"}}
_UNPROBED: dict[str, dict[str, Any]] = {}


class Looks:
    """mono: what the monotonic clock showed when the attempt began. views: what is known of each rank."""

    def __init__(self, world: World, sight: Sight, attempt: int, mono: float) -> None:
        self.world, self.sight, self.mono = world, sight, mono
        self.views = [View(wants_read=sight.history and world.start > 0) for _ in world.ranks]
        for node, ranks in enumerate(sight.nodes):
            for local_rank, rank in enumerate(ranks):
                view = self.views[rank]
                view.node, view.local_rank, view.pid = f"node{node}", local_rank, 4000 + rank + 1000 * attempt
        self._watched = [[(world.ranks[rank], self.views[rank]) for rank in ranks] for ranks in sight.nodes]
        self._recorder = Recorder(world)
        self._suspected = [world.start] * len(sight.nodes)
        self._probes = _ARMED if sight.compile_probe else _UNPROBED

    def states(self, node: int) -> tuple[RankState, ...]:
        watched, state = self._watched[node], self._state
        suspicious = self.sight.suspicion and self._suspicious(node)
        return tuple([view.last or state(rank, view, suspicious) for rank, view in watched])

    def _suspicious(self, node: int) -> bool:
        """Whether operations of a rank have not moved for a second, and recorders were not just read for that."""
        now, found = self.world.now, False
        for _, view in self._watched[node]:
            completed = view.completed
            if view.enqueued != completed:
                if completed is not view.summed:  # equal numbers are the same objects most often
                    view.summed, done = completed, sum(completed.values())
                    if view.moved[0] != done:
                        view.moved = (done, now)
                found = found or now - view.moved[1] >= 1.0
        if found and now - self._suspected[node] >= 1.0 + 0.01 * len(self._watched[node]):
            self._suspected[node] = now
            return True
        return False

    def _state(self, rank: Rank, view: View, suspicious: bool) -> RankState:
        world, sight, mono, now = self.world, self.sight, self.mono, self.world.now
        act, alive, stage = rank.act, rank.exit_code is None, rank.stage
        if alive:
            beat_at = world.count(rank)
            if beat_at is not None:
                view.beat_at = mono + beat_at
                if not world.nccl and beat_at > view.told_at:
                    heard = world.beat(rank)
                    if heard is not None:
                        view.told_at, (view.enqueued, view.completed) = heard
        if alive and (stage == "joined" or stage == "left") and not act.frozen:
            if world.nccl and now - view.status_at >= STATUS_S:
                view.status_at = now
                view.enqueued, view.completed = world.numbers(rank)
            if suspicious or view.wants_read or (sight.history and now - (view.read_at or world.start) > HISTORY_S):
                self._recorder.read(rank, view)
        elif rank.crash is not None and view.read_version != rank.version and stage == "exiting":
            self._recorder.read(rank, view)  # its last words
        process = _PROCESS()
        process.pid = view.pid
        process.started_at = mono
        process.alive = alive
        process.state = act.shown_letter
        process.wchan = act.wchan
        process.cpu_s = rank.cpu_s
        process.tree_cpu_s = rank.cpu_s + rank.child_cpu_s
        process.io_bytes = int(rank.io_bytes)
        if not alive:
            process.state, process.exit_code, process.oom_killed = "", rank.exit_code, rank.oom_killed
            process.exited_at = None if rank.exited_at is None else mono + rank.exited_at
        process.__class__ = Process
        state = _STATE()
        state.rank = rank.number
        state.node = view.node
        state.local_rank = view.local_rank
        state.process = process
        state.stage = stage
        state.stage_since = mono + rank.stage_since
        state.heartbeat_at = view.beat_at
        state.groups = rank.shown_groups
        state.calls = view.calls
        state.enqueued = view.enqueued
        state.completed = view.completed
        state.collectives = view.read
        state.lost_collectives = view.lost
        read_at = view.read_at
        if read_at is not None:
            state.collectives_at = mono + read_at
            if now - read_at < PING_FRESH_S:
                state.ping_ok = True
                state.compile_witness = view.witness
        if view.ping is not None and now - view.ping[1] < PING_FRESH_S:
            state.ping_ok = view.ping[0]
        state.probes = self._probes
        state.steps = rank.steps
        state.step_s = rank.step_s
        if rank.step_at is not None:
            state.last_step_at = mono + rank.step_at
        state.stack = view.stack
        state.earlier_stack = view.earlier
        state.crash = rank.crash
        if stage == "armed":
            state.agent = "armed"
        elif rank.blocked == "group" and rank.creating is not None:
            _, state.group_in_creation, _, state.creation_ranks, _ = rank.creating
        if alive and act.compile is not None and sight.compile_probe:
            state.compiling = (act.compile.activity(mono + rank.act_since, mono + now),)
        state.__class__ = RankState
        if not alive:
            view.last = state
        return state  # type: ignore[no-any-return]

    def sample(self, rank: Rank) -> None:
        """A stack of it, taken now."""
        act, view, now = rank.act, self.views[rank.number], self.world.now
        if not rank.alive or not act.samples:
            return
        main: Frames = act.stack(now)
        thread = _THREAD("MainThread", 4000 + rank.number, main, act.cpu > 0.5, act.holds_gil)
        view.earlier = view.stack
        view.stack = _STACK(view.pid, self.mono + now, (thread,), act.children)
