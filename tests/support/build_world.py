"""Snapshots of a large job on many nodes, built directly: healthy ones, and such in which one thing is wrong.

Eight ranks a node; a rank is in the world, in the tensor-parallel group of its node, in a data-parallel group and in a pipeline of point-to-point
calls. A step takes STEP_S and ends in an all_reduce of the world, in which everybody waits once something is wrong. The values are as the recorder and
the agent give them (NCCL, the newest `entries` of each group); members of a group share its frozen values, as the reports' reader makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from build_status import COMPILE, CUDAGRAPH, DDP
from quick import quick

from rankwatch.model import KIND_BYTES, Calls, Collective, Crash, Frame, Group, JobSnapshot, NodeReport, Process, RankState, Stack, Thread, Want

MONO, WALL = 5_000.0, 1_796_000_000.0
STEP_S = 1.0
NODE_RANKS = 8
BEFORE = 200  # steps that were done before the first look
STALE_S = 10.0
HISTORY = 512  # calls of a group that are remembered
_STATE, _PROCESS, _COLLECTIVE, _NODE = quick(RankState), quick(Process), quick(Collective), quick(NodeReport)
_ENDS_S = {("dead", True): 0.2, ("crashed", True): 0.2, ("crashed", False): 0.7}  # (fault, whether it is the culprit) -> second of its end
_OWN_CRASH = Crash("ValueError", "bad shard 17", "train.py:31:load_batch", 'File "train.py", line 31', "slot", WALL + 0.1)
_LOST_PEER = Crash("DistBackendError", "NCCL error: remote process exited or there was a network error", "train.py:50:step", "", "slot", WALL + 0.6)
_PROBES: dict[str, dict[str, Any]] = {name: {"status": "armed"} for name in ("collectives", "compile", "cudagraph", "ddp", "steps")}
_NO_GRAPHS = {**CUDAGRAPH, "warmups": 0, "recordings": 0}
_KINDS = {1: Collective("", 0, 0, "all_reduce", ((4096, 1024),), (), ("BFloat16",))}
_SITE = "/venv/lib/python3.11/site-packages/"
ELSEWHERE = (Frame("load_batch", "/job/train.py", 31), Frame("main", "/job/train.py", 60), Frame("<module>", "/job/train.py", 90))
IN_CALL = (
    Frame("all_reduce", _SITE + "torch/distributed/distributed_c10d.py", 3252),
    Frame("train_step", "/job/train.py", 50),
    Frame("main", "/job/train.py", 60),
    Frame("<module>", "/job/train.py", 90),
)

Fault = Literal["healthy", "asleep", "dead", "crashed", "mismatch", "silent", "hung", "storm"]
FAULTS: tuple[Fault, ...] = ("healthy", "asleep", "dead", "crashed", "mismatch", "silent", "hung", "storm")


@dataclass(slots=True)
class LargeJob:
    """A job of `size` ranks, a multiple of 8. fault: from second 0 on, of `culprit` (of its node where that falls silent; of nobody where the
    world is hung, all in; of all in a storm, in which no tensor-parallel group gets out of a call that all its ranks are in); before that all is well.

    ages: node -> how old its report is at every look. reads: whether recorders are read every 5 s while all is well.
    """

    size: int
    fault: Fault = "healthy"
    culprit: int = 0
    timeout_s: float = 60.0
    entries: int = 16
    backend: str = "nccl"
    reads: bool = True
    ages: Mapping[int, float] = field(default_factory=dict)
    _groups: list[tuple[Group, ...]] = field(default_factory=list)
    _read: list[tuple[Collective, ...]] = field(default_factory=list)
    _calls: list[dict[str, Calls]] = field(default_factory=list)
    _read_at: dict[int, float] = field(default_factory=dict)  # by node
    _stacks: dict[int, tuple[Stack | None, Stack]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = self.size // NODE_RANKS
        stages = next((count for count in (8, 4, 2) if nodes % count == 0 and nodes // count >= 2), 1)
        lines = nodes // stages

        def made(name: int, desc: str, ranks: Iterable[int]) -> Group:
            return Group(str(name), desc, self.backend, tuple(ranks), self.timeout_s, 0, WALL - 500.0)

        world = made(0, "default_pg", range(self.size))
        tensor = [made(1 + node, "tp", range(node * NODE_RANKS, (node + 1) * NODE_RANKS)) for node in range(nodes)]
        # node = line * stages + stage: the data-parallel group of a stage has the same slot on every line
        data = {
            (stage, slot): made(1 + nodes + stage * NODE_RANKS + slot, "dp", ((line * stages + stage) * NODE_RANKS + slot for line in range(lines)))
            for stage in range(stages) for slot in range(NODE_RANKS)
        }  # fmt: skip
        first = 1 + nodes + stages * NODE_RANKS
        pipe = {
            (line, slot): made(first + line * NODE_RANKS + slot, "pp", ((line * stages + stage) * NODE_RANKS + slot for stage in range(stages)))
            for line in range(lines) for slot in range(NODE_RANKS)
        }  # fmt: skip
        for rank in range(self.size):
            node, slot = divmod(rank, NODE_RANKS)
            line, stage = divmod(node, stages)
            found = (world, tensor[node], data[stage, slot], pipe[line, slot])
            self._groups.append(tuple(group for group in found if len(group.ranks) > 1))

    # -- what is told

    @property
    def nodes(self) -> int:
        return self.size // NODE_RANKS

    def looks(self, before_s: float, after_s: float, every_s: float = 1.0) -> Iterator[JobSnapshot]:
        """Snapshots from before the fault until after_s seconds after it."""
        count = int((before_s + after_s) / every_s)
        for number in range(count + 1):
            yield self.look(-before_s + number * every_s, every_s if number else 0.0)

    def look(self, t: float, gap_s: float = 1.0) -> JobSnapshot:
        """The job at second t."""
        self._refresh(t)
        reports = tuple(self._node(node, t) for node in range(self.nodes))
        return JobSnapshot(MONO + t, WALL + t, self.size, 0, reports, "", gap_s, MONO - 600.0)

    def want(self, wants: Iterable[Want], t: float) -> None:
        """Take the stacks that the judge asks for."""
        for want in wants:
            if want.kind == "stacks":
                for rank in want.ranks:
                    frames = ELSEWHERE if self.fault == "asleep" and rank == self.culprit else IN_CALL
                    stack = Stack(4000 + rank, MONO + t, (Thread("MainThread", 4000 + rank, frames),), text="stack")
                    self._stacks[rank] = (self._stacks[rank][1] if rank in self._stacks else None, stack)

    def _node(self, node: int, t: float) -> NodeReport:
        name, age = f"node{node:04d}", self.ages.get(node, 0.0)
        if self.fault == "silent" and node == self.culprit // NODE_RANKS and t >= 0:
            age = t + 0.1  # its last report is of a moment before; after ten seconds it counts no more
        if age > STALE_S:
            return _NODE(name, (), node, age, 0.0, "", tuple(range(node * NODE_RANKS, (node + 1) * NODE_RANKS)), "timed out")
        first = node * NODE_RANKS
        return _NODE(name, tuple([self._state(rank, name, t - age) for rank in range(first, first + NODE_RANKS)]), node, age)

    def _steps(self, t: float) -> int:
        """Steps that are done; the one of second 0 never ends where something is wrong."""
        done = BEFORE + int(t // STEP_S)
        return done if self.fault == "healthy" else min(done, BEFORE)

    def _state(self, rank: int, node: str, t: float) -> RankState:
        groups, steps = self._groups[rank], self._steps(t)
        hangs = self.fault != "healthy" and t >= 0.0
        completed = {group.name: steps * (4 if group.desc == "tp" else 1) for group in groups if group.desc != "pp"}
        enqueued = dict(completed)
        away = hangs and rank == self.culprit and self.fault in ("asleep", "dead", "crashed")
        if hangs and (self.fault == "storm" or (self.fault == "mismatch" and rank // NODE_RANKS == self.culprit // NODE_RANKS)):
            enqueued[groups[1].name] += 1
        elif hangs and not away:
            enqueued["0"] += 1
        ended_at = _ENDS_S.get((self.fault, rank == self.culprit))
        dead = hangs and ended_at is not None and t > ended_at
        waits = hangs and not away
        ran_s = BEFORE * STEP_S + t
        process = _PROCESS(
            pid=4000 + rank, alive=not dead, state="" if dead else "R" if waits else "S", cpu_s=ran_s if waits else 100.0, tree_cpu_s=ran_s if waits else 100.0,
            rss_bytes=2_400_000_000, exit_code=(-9 if self.fault == "dead" else 1) if dead else None, exited_at=MONO + ended_at if dead else None,
            name="python3",
        )  # fmt: skip
        earlier, stack = self._stacks.get(rank, (None, None))
        return _STATE(
            rank=rank, local_rank=rank % NODE_RANKS, node=node, process=process, stage="exiting" if dead else "joined", stage_since=MONO - 500.0,
            heartbeat_at=MONO + (ended_at if dead else t - 0.3), ping_ok=None, groups=groups, collectives=self._read[rank],
            collectives_at=MONO + self._read_at[rank // NODE_RANKS], calls=self._calls[rank], enqueued=enqueued, completed=completed,
            compile_totals=COMPILE, ddp=DDP, cudagraph=_NO_GRAPHS, probes=_PROBES, steps=steps, last_step_at=MONO + (steps - BEFORE) * STEP_S, step_s=STEP_S,
            stack=stack, earlier_stack=earlier, crash=(_OWN_CRASH if away else _LOST_PEER) if dead and self.fault == "crashed" else None,
        )  # fmt: skip

    # -- recorders

    def _refresh(self, t: float) -> None:
        """Read entries: every node every 5 s while all is well, in turns as they come about, and everybody twice after a fault."""
        well = self.fault == "healthy" or t < 0
        if not self._read:
            self._read, self._calls = [()] * self.size, [{}] * self.size
        for node in range(self.nodes):
            at = self._read_at.get(node)
            if at is None:
                self._read_at[node] = t - node % 5
            elif not (self.reads and t - at >= 5.0 if well else at < 0.0 < t or at < 2.0 <= t):
                continue
            else:
                self._read_at[node] = t
            done: dict[int, tuple[Collective, ...]] = {}
            steps = self._steps(self._read_at[node])
            for rank in range(node * NODE_RANKS, (node + 1) * NODE_RANKS):
                self._read[rank], self._calls[rank] = self._entries(rank, t, steps, done), self._history(rank, steps)

    def _entries(self, rank: int, t: float, steps: int, done: dict[int, tuple[Collective, ...]]) -> tuple[Collective, ...]:
        """Of collectives each rank has its own: ranks arrive up to 2 ms apart, in turn."""
        found: list[Collective] = []
        for group in self._groups[rank]:
            own = group.desc != "pp"
            if own or id(group) not in done:
                late_s = 0.002 * (((rank + 1) * 7919 + steps) % 97) / 97 if own else 0.0
                done[id(group)] = tuple(self._done(group, number, steps, late_s) for number in range(self.entries, 0, -1))
            found += done[id(group)]
        found.sort(key=lambda entry: entry.created_wall_at)
        if self.fault != "healthy" and t >= 0 and (open_ := self._open(rank)) is not None:
            found.append(open_)
        return tuple(found)

    def _history(self, rank: int, steps: int) -> dict[str, Calls]:
        """Of each group but the pipeline's, which calls nothing that is numbered; every rank has a copy of its own."""
        found = {}
        for group in self._groups[rank]:
            if group.desc != "pp":
                last = steps * (4 if group.desc == "tp" else 1)
                count = min(HISTORY, last)
                found[group.name] = Calls(0, last - count + 1, (1).to_bytes(KIND_BYTES, "little") * count, _KINDS)
        return found

    def _done(self, group: Group, ago: int, steps: int, late_s: float) -> Collective:
        """The operation that was the `ago`th last when so many steps were done."""
        each = 4 if group.desc == "tp" else 1
        at = WALL + (steps - BEFORE - (ago - 1) // each) * STEP_S - {"default_pg": 0.05, "dp": 0.1, "tp": 0.5, "pp": 0.7}[group.desc]
        op = {"default_pg": "all_reduce", "dp": "_reduce_scatter_base", "tp": "all_reduce", "pp": "send"}[group.desc]
        return _COLLECTIVE(
            group.name, 0, steps * each - ago + 1, op, ((4096, 1024),), ((4096, 1024),), ("BFloat16",), at + late_s + 0.01 * ((ago - 1) % each),
            self.timeout_s, True, None, group.desc == "pp",
        )  # fmt: skip

    def _open(self, rank: int) -> Collective | None:
        away = rank == self.culprit
        if self.fault == "storm" or (self.fault == "mismatch" and rank // NODE_RANKS == self.culprit // NODE_RANKS):
            size = ((4096, 512),) if away and self.fault == "mismatch" else ((4096, 1024),)
            return Collective(self._groups[rank][1].name, 0, 4 * BEFORE + 1, "all_reduce", size, size, ("BFloat16",), WALL + 0.1, self.timeout_s)
        if away and self.fault in ("asleep", "dead", "crashed"):
            return None
        return Collective("0", 0, BEFORE + 1, "all_reduce", ((1,),), ((1,),), ("Float",), WALL + 0.2, self.timeout_s)


def without(snapshot: JobSnapshot, nodes: Mapping[int, float]) -> JobSnapshot:
    """The same look, in which these nodes have not answered for so many seconds: their ranks are not known."""
    return replace(snapshot, nodes=tuple(
        replace(node, ranks=(), report_age_s=nodes[node.group_rank], silent_ranks=tuple(rank.rank for rank in node.ranks), problem="timed out")
        if node.group_rank in nodes else node for node in snapshot.nodes
    ))  # fmt: skip
