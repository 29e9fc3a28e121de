"""A small simulated job over fake time: rank scripts in, JobSnapshots out, the way the monitor sees real gloo ranks.

A script is a generator of actions made by the functions below (`coll`, `nap`, `burn`, ...). `Job.play` steps the world in ticks,
takes a snapshot per poll, fetches the evidence that diagnose wants into the next snapshot, folds incidents, and records all verdicts.
Status numbers are up to one heartbeat old, as in real ranks; recorder entries and stacks come only when asked for. gloo's status counts sends
and receives as well: ranks that have made any are read every few seconds, and their numbers come by way of the entries, as in the monitor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from rankwatch.model import (
    PAGING,
    Collective,
    CompileActivity,
    Crash,
    Frame,
    Group,
    Incident,
    IncidentChange,
    JobSnapshot,
    NodeReport,
    Process,
    RankState,
    Stack,
    Thread,
    Verdict,
    Want,
)
from rankwatch.monitor.diagnose import State, diagnose
from rankwatch.monitor.incidents import Book, fold
from rankwatch.monitor.numbering import Numbering
from rankwatch.monitor.policy import Limits

TICK = 0.05
HISTORY_S = 5.0
WALL = 1_796_000_000.0
MONO = 5_000.0
SITE = "/venv/lib/python3.11/site-packages/"

Action = tuple
Script = Callable[[int], Iterator[Action]]


# -- actions ---------------------------------------------------------------------------------------------------------------------


def frames(*lines: str) -> tuple[Frame, ...]:
    """`"train.py:31:load_batch"`, innermost first. A leading `@` puts the file into site-packages."""
    found = []
    for text in lines:
        file, line, name = text.rsplit(":", 2)
        found.append(Frame(name, SITE + file[1:] if file.startswith("@") else "/job/" + file, int(line)))
    return tuple(found)


MAIN = ("train.py:60:main", "train.py:70:<module>")


def nap(seconds: float, at: str = "train.py:40:main", *above: str) -> Action:
    return ("busy", seconds, {"frames": frames(*above, at, *MAIN)})


def burn(seconds: float, at: str = "train.py:41:work") -> Action:
    return ("busy", seconds, {"frames": frames(at, *MAIN), "cpu": 1.0})


def io(seconds: float, bytes_per_s: float, *lines: str) -> Action:
    return ("busy", seconds, {"frames": frames(*lines, *MAIN), "io": bytes_per_s})


def save(seconds: float, at: str = "train.py:30:save_checkpoint") -> Action:
    return io(seconds, 1.3e6, "train.py:20:write", "@torch/serialization.py:1220:_save", "@torch/serialization.py:960:save", at)


def load(seconds: float, at: str = "train.py:34:epoch") -> Action:
    lines = ("@torch/utils/data/dataloader.py:1291:_MultiProcessingDataLoaderIter._try_get_data", "@torch/utils/data/dataloader.py:730:__next__", at)
    worker = Stack(9, 0.0, (Thread("MainThread", 9, frames("train.py:22:__getitem__", "@torch/utils/data/_utils/fetch.py:54:fetch")),))
    return ("busy", seconds, {"frames": frames(*lines, *MAIN), "subprocesses": (worker,)})


def compiling(
    seconds: float, *, cpu: float = 0.0, phase_s: float | None = None, frame: str = "block@train.py:31", reason: str = "", compile_id: str = "0/1",
    inside: tuple[str, ...] = (), beside: tuple[str, ...] = (),
) -> Action:  # fmt: skip
    """phase_s: a new phase begins this often. inside: frames below the compiler's; beside: those of another thread."""
    stack = frames(*inside, "train.py:31:block", "@torch/_dynamo/convert_frame.py:700:compile_inner", "train.py:45:main")
    return ("busy", seconds, {"frames": stack, "cpu": cpu, "beside": frames(*beside),
                              "compile": (frame, compile_id, reason, phase_s)})  # fmt: skip


def gil(seconds: float, cpu: float = 0.0) -> Action:
    return ("busy", seconds, {"frames": frames("train.py:77:parse_native", *MAIN), "gil": True, "cpu": cpu})


def letter(seconds: float, state: str, at: str = "train.py:40:main") -> Action:
    return ("busy", seconds, {"frames": frames(at, *MAIN), "letter": state})


def coll(op: str = "all_reduce", size: int = 1000, group: str = "0", at: str = "train.py:50:step") -> Action:
    return ("coll", group, op, size, at)


def barrier(group: str = "0") -> Action:
    return ("coll", group, "barrier", None, "train.py:51:main")


def handle(op: str = "all_reduce", size: int = 1000, group: str = "0") -> Action:
    """Asynchronous; the handle is never waited for."""
    return ("async", group, op, size)


def recv(key: str) -> Action:
    return ("recv", key)


def awaited(key: str, at: str = "train.py:53:receive") -> Action:
    """`work.wait()` of an irecv: a native call of the job's own line."""
    return ("recv", key, at)


def send(key: str) -> Action:
    return ("send", key)


def stepped() -> Action:
    return ("stepped",)


def init(timeout: float = 600.0) -> Action:
    return ("init", timeout)


def group(name: str, ranks: tuple[int, ...], timeout: float = 600.0) -> Action:
    return ("group", name, ranks, timeout)


def destroy() -> Action:
    return ("destroy",)


def die(code: int, kind: str = "", message: str = "") -> Action:
    return ("die", code, kind, message)


# -- the job -----------------------------------------------------------------------------------------------------------------


@dataclass
class _Rank:
    rank: int
    script: Iterator[Action]
    stage: str = "starting"
    stage_since: float = 0.0
    action: Action | None = None
    until: float = 0.0
    began: float = 0.0
    cpu: float = 0.3
    io: float = 0.0
    steps: int = 0
    step_at: float | None = None
    groups: dict[str, Group] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)
    entries: list[dict] = field(default_factory=list)
    messages: int = 0  # sends and receives so far
    exit_code: int | None = None
    exited_at: float | None = None
    crash: Crash | None = None
    beat: float | None = None
    status: tuple[dict, dict] = field(default_factory=lambda: ({}, {}))
    read: tuple[tuple[Collective, ...], float] | None = None
    stacks: list[Stack] = field(default_factory=list)
    native: Stack | None = None
    ping: bool | None = None
    creating: str | None = None
    frozen: bool = False  # stopped from outside

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def busy(self) -> dict:
        return self.action[2] if self.action is not None and self.action[0] == "busy" else {}


@dataclass(frozen=True)
class Seen:
    at: float  # seconds since the start of the job
    verdict: Verdict


class Job:
    """One attempt of a job of `world` ranks that all run `script(rank)`.

    gloo semantics: a collective completes when all members have entered the same number with the same operation and size; a dead
    peer or a timeout raises in the waiting ranks; torchrun ends the rest after the first bad exit.
    """

    def __init__(
        self, script: Script, world: int, *, limits: Limits | None = None, seen: tuple[int, ...] | None = None, poll: float = 0.5, nccl: bool = False,
        native: bool = True,
    ) -> None:  # fmt: skip
        self.world, self.limits, self.poll, self.nccl = world, limits or Limits(), poll, nccl
        self.native = native  # whether py-spy may pause a rank
        self.ranks = {rank: _Rank(rank, script(rank)) for rank in range(world)}
        self.seen_ranks = seen if seen is not None else tuple(range(world))
        self.t = 0.0
        self.mail: set[str] = set()
        self.state, self.book = State(), Book()
        self.history: list[Seen] = []
        self.changes: list[tuple[float, IncidentChange]] = []
        self.wants: list[tuple[float, Want]] = []
        self.ending = ""
        self.failed: int | None = None
        self.marks: dict[str, float] = {}
        self.snapshots = 0

    # -- results

    def pages(self) -> list[Seen]:
        return [seen for seen in self.history if seen.verdict.verdict in PAGING]

    def first(self, verdict: str, cause: str | None = None) -> Seen | None:
        return next((s for s in self.history if s.verdict.verdict == verdict and cause in (None, s.verdict.cause)), None)

    def kinds(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Distinct (verdict, cause, culprits) in order of appearance."""
        return list(dict.fromkeys((s.verdict.verdict, s.verdict.cause, s.verdict.culprit_ranks) for s in self.history))

    @property
    def incidents(self) -> tuple[Incident, ...]:
        return (*self.book.closed, *self.book.open)

    # -- running

    def play(self, seconds: float) -> Job:
        """Runs until every rank has ended or `seconds` have passed, then takes the final look if all have ended."""
        next_poll = 0.0
        ticks = int(seconds / TICK)
        for _ in range(ticks):
            self._tick()
            if self.failed is None and (bad := [r.rank for r in self.ranks.values() if r.exit_code not in (None, 0)]):
                self.failed = bad[0]
                self.look()  # workers_failing: one evidence pass while the peers live
                self.ending = f"torchrun stops the workers after rank {bad[0]} failed"
                for rank in self.ranks.values():
                    if rank.alive:
                        self._end(rank, -15)
            if self.t >= next_poll:
                self.look()
                next_poll = self.t + self.poll
            if all(not rank.alive for rank in self.ranks.values()):
                self.look(final=True)
                break
        return self

    def look(self, final: bool = False, gap: float = 0.0, ending: str | None = None) -> JobSnapshot:
        snapshot = self.snapshot(final=final, gap=gap, ending=self.ending if ending is None else ending)
        self.state, verdicts, wanted = diagnose(self.state, snapshot, snapshot.now, self.limits)
        self.book, changes = fold(self.book, verdicts, snapshot, snapshot.now, self.limits)
        self.history += [Seen(self.t, verdict) for verdict in verdicts]
        self.changes += [(self.t, change) for change in changes]
        self.wants += [(self.t, want) for want in wanted]
        for want in wanted:
            self._fetch(want)
        self.snapshots += 1
        return snapshot

    def snapshot(self, final: bool = False, gap: float = 0.0, ending: str = "") -> JobSnapshot:
        states = tuple(self._state(self.ranks[rank]) for rank in self.seen_ranks)
        return JobSnapshot(
            now=MONO + self.t, wall_at=WALL + self.t, world_size=self.world, attempt=0, nodes=(NodeReport("node05", states),), ending=ending,
            gap_s=gap or self.poll, started_at=MONO, final=final,
        )  # fmt: skip

    def _state(self, rank: _Rank) -> RankState:
        busy = rank.busy()
        letter_ = "" if not rank.alive else "T" if rank.frozen else busy.get("letter", "R" if busy.get("cpu") else "S")
        process = Process(
            pid=4000 + rank.rank, alive=rank.alive, state=letter_, cpu_s=rank.cpu, tree_cpu_s=rank.cpu, io_bytes=int(rank.io), exit_code=rank.exit_code,
            exited_at=MONO + rank.exited_at if rank.exited_at is not None else None, name="python3",
        )  # fmt: skip
        compile_ = ()
        if rank.alive and (found := busy.get("compile")):
            frame, compile_id, reason, every = found
            phases = ("dynamo", "aot", "inductor", "kernel_compile")
            number = int((self.t - rank.began) / every) if every else 0
            since = rank.began + number * every if every else rank.began
            phase = phases[number % 4] if every else "backend"
            compile_ = (CompileActivity(compile_id, "forward", frame, phase, phase + str(number), MONO + rank.began, MONO + since, reason),)
        entered, done, mixed = self._numbers(rank)
        return RankState(
            rank=rank.rank, local_rank=rank.rank, node="node05", agent="claimed" if rank.stage != "starting" else "armed", process=process,
            stage="armed" if rank.stage == "starting" else rank.stage, stage_since=MONO + rank.stage_since,
            heartbeat_at=MONO + rank.beat if rank.beat is not None else None, ping_ok=rank.ping, groups=tuple(rank.groups.values()),
            group_in_creation=rank.creating, collectives=rank.read[0] if rank.read else (), collectives_at=MONO + rank.read[1] if rank.read else None,
            enqueued=entered, completed=done, mixed=mixed, compiling=compile_, steps=rank.steps,
            last_step_at=MONO + rank.step_at if rank.step_at is not None else None, step_s=0.5 if rank.steps else None,
            stack=rank.stacks[-1] if rank.stacks else None, earlier_stack=rank.stacks[-2] if len(rank.stacks) > 1 else None, crash=rank.crash,
            native_stack=rank.native,
        )  # fmt: skip

    # -- evidence

    def _fetch(self, want: Want) -> None:
        for number in want.ranks:
            rank = self.ranks[number]
            if not rank.alive:
                continue
            if want.kind == "ping":
                rank.ping = not rank.frozen
            elif want.kind == "recorder" and not rank.frozen:
                rank.cpu += 0.05  # what a dump of ours costs in the rank
                self._read(rank)
            elif want.kind in ("stacks", "native_stack"):
                beside = tuple(Thread("Thread-2", 2, found) for found in [rank.busy().get("beside", ())] if found)
                main = Thread("MainThread", 1, self._frames(rank), owns_gil=bool(rank.busy().get("gil")))
                stack = Stack(4000 + number, MONO + self.t, (main, *beside), text="...", subprocesses=rank.busy().get("subprocesses", ()))
                if want.kind == "stacks":
                    rank.stacks = [*rank.stacks[-1:], stack]
                elif self.native:
                    rank.native = replace(stack, threads=(replace(main, frames=(*self._below(rank), *main.frames)), *beside), native=True)
                else:
                    rank.native = Stack(4000 + number, MONO + self.t, error="py-spy may not pause it")

    def _read(self, rank: _Rank) -> None:
        rank.read = (tuple(Collective(**{key: value for key, value in entry.items() if key != "op_id"}) for entry in rank.entries[-300:]), self.t)

    def _below(self, rank: _Rank) -> tuple[Frame, ...]:
        """Native frames under the innermost line."""
        handle = rank.action is not None and rank.action[0] == "recv" and len(rank.action) > 2
        names = ("gloo::transport::tcp::UnboundBuffer::waitRecv", "c10d::ProcessGroupGloo::RecvWork::wait") if handle else ("pthread_cond_wait",)
        return tuple(Frame(name, "libtorch_cpu.so", 0) for name in names)

    def _frames(self, rank: _Rank) -> tuple[Frame, ...]:
        if rank.busy():
            return rank.busy()["frames"]
        kind = rank.action[0] if rank.action else ""
        if kind == "coll" and not self.nccl:
            return frames(f"@torch/distributed/distributed_c10d.py:3252:{rank.action[2]}", rank.action[4], *MAIN)
        if kind == "recv" and len(rank.action) > 2:
            return frames(rank.action[2], *MAIN)
        if kind == "recv":
            return frames("@torch/distributed/distributed_c10d.py:2600:recv", "train.py:52:main", *MAIN)
        return frames(rank.action[4] if kind == "coll" else "train.py:60:main", *MAIN)

    # -- the world

    def _tick(self) -> None:
        self.t = round(self.t + TICK, 6)
        for rank in self.ranks.values():
            if not rank.alive or rank.frozen:
                continue
            busy = rank.busy()
            rank.cpu += busy.get("cpu", 1.0 if self.nccl and rank.action and rank.action[0] == "coll" else 0.0) * TICK + 0.0002
            rank.io += busy.get("io", 0.0) * TICK
            if (
                not busy.get("gil")
                and busy.get("letter") not in ("T", "t")
                and rank.stage == "joined"
                and (rank.beat is None or self.t - rank.beat >= 0.5 - 0.03 * rank.rank)
            ):
                rank.beat = self.t
                self._publish(rank)
                if rank.messages and not self.nccl and (rank.read is None or self.t - rank.read[1] >= HISTORY_S):
                    self._read(rank)
            if self.nccl:
                self._publish(rank)  # read through the socket, not by a Python thread
            self._advance(rank)
        self._complete()
        self._lose_peers()

    def _publish(self, rank: _Rank) -> None:
        mine = {name: [e for e in rank.entries if e["group"] == name and e["generation"] == g.generation] for name, g in rank.groups.items()}
        done = {name: max((e["op_id"] for e in entries if e["done"]), default=0) for name, entries in mine.items()}
        rank.status = ({name: max((e["op_id"] for e in entries), default=0) for name, entries in mine.items()}, done)

    def _numbers(self, rank: _Rank) -> tuple[dict, dict, dict]:
        """What the monitor makes of the status: enqueued, completed, mixed."""
        entered, done, mixed = dict(rank.status[0]), dict(rank.status[1]), {}
        if not rank.messages or self.nccl:
            return entered, done, mixed
        numbering = Numbering()
        for number, (name, group_) in enumerate(rank.groups.items()):
            read = [
                e
                for e in rank.entries
                if rank.read and (e["group"], e["generation"]) == (name, group_.generation) and e["created_wall_at"] <= WALL + rank.read[1]
            ]
            numbering.learn({"op_id": e["op_id"], "collective_seq_id": e["seq"], "pg_id": number} for e in read)
            if number in numbering.mixed:
                mixed[name] = numbering.behind(number, entered[name])
                entered[name], done[name] = numbering.collectives(number, entered[name], done[name])
        return entered, done, mixed

    def _advance(self, rank: _Rank) -> None:
        for _ in range(100):
            if rank.action is not None:
                kind = rank.action[0]
                if (kind == "busy" and self.t < rank.until) or kind in ("coll", "init", "group", "hang"):
                    return
                if kind == "recv" and rank.action[1] not in self.mail:
                    return
            rank.action = next(rank.script, ("end",))
            rank.began = self.t
            self._start(rank, rank.action)
            if not rank.alive:
                return

    def _start(self, rank: _Rank, action: Action) -> None:
        kind = action[0]
        if kind == "busy":
            rank.until = self.t + action[1]
        elif kind in ("coll", "async"):
            self._enter(rank, action[1], action[2], action[3])
        elif kind in ("send", "recv"):
            rank.messages += 1
            if kind == "send":
                self.mail.add(action[1])
        elif kind == "stepped":
            rank.steps, rank.step_at = rank.steps + 1, self.t
        elif kind == "init":
            rank.stage, rank.stage_since = "joining", self.t
        elif kind == "group":
            rank.creating = action[1]
        elif kind == "destroy":
            rank.groups, rank.entered, rank.status = {}, {}, ({}, {})
            rank.stage, rank.stage_since = "left", self.t
        elif kind == "mark":
            self.marks[action[1]] = self.t
        elif kind == "die":
            if action[2]:
                rank.crash = Crash(action[2], action[3], where="train.py:50:step", traceback="torch/distributed", source="slot", at_wall=WALL + self.t)
            self._end(rank, action[1])
        elif kind == "end":
            self._end(rank, 0)

    def _enter(self, rank: _Rank, name: str, op: str, size: int | None) -> None:
        group_ = rank.groups[name]
        rank.entered[name] = rank.entered.get(name, 0) + 1
        sizes = ((size,),) if size is not None else ()
        rank.entries.append(
            {
                "group": name, "generation": group_.generation, "seq": rank.entered[name], "op": op, "input_sizes": sizes, "output_sizes": sizes,
                "dtypes": ("Float",) if sizes else (), "created_wall_at": WALL + self.t, "timeout_s": group_.timeout_s, "done": False,
                "op_id": rank.entered[name] + (rank.messages if name == "0" and not self.nccl else 0),
            }
        )  # fmt: skip

    def _end(self, rank: _Rank, code: int) -> None:
        rank.exit_code, rank.exited_at = code, self.t
        if rank.stage == "joined":
            rank.stage = "exiting" if code == 0 else "joined"

    def _complete(self) -> None:
        living = list(self.ranks.values())
        joining = [r for r in living if r.alive and r.action and r.action[0] == "init"]
        if len(joining) == self.world:
            for r in joining:
                self._join(r, "0", "default_pg", tuple(range(self.world)), r.action[1])
                r.stage, r.stage_since, r.action = "joined", self.t, None
        making = [r for r in living if r.alive and r.action and r.action[0] == "group"]
        if len(making) == self.world:
            for r in making:
                if r.rank in r.action[2]:
                    self._join(r, r.action[1], "undefined", r.action[2], r.action[3])
                r.creating, r.action = None, None
        pending: dict[tuple, list[tuple[_Rank, dict]]] = {}
        for r in living:
            for entry in r.entries[-40:]:
                if not entry["done"]:
                    group_ = r.groups.get(entry["group"])
                    if group_ is not None and group_.generation == entry["generation"]:
                        pending.setdefault((entry["group"], group_.ranks, entry["seq"]), []).append((r, entry))
        for (name, members, _), found in pending.items():
            same = len({(entry["op"], entry["input_sizes"]) for _, entry in found}) == 1
            if len(found) == len(members) and same and all(r.alive and not r.frozen for r, _ in found):
                for r, entry in found:
                    entry["done"] = True
                    if r.action and r.action[0] == "coll" and r.action[1] == name:
                        r.action = None
                continue
            for r, entry in found:
                if r.alive and self.nccl is False and self.t - (entry["created_wall_at"] - WALL) >= entry["timeout_s"]:
                    entry["done"] = True
                    r.crash = Crash(
                        "RuntimeError", f"gloo: Timed out waiting {entry['timeout_s'] * 1000:.0f}ms for recv operation to complete", at_wall=WALL + self.t
                    )
                    self._end(r, 1)

    def _join(self, rank: _Rank, name: str, desc: str, members: tuple[int, ...], timeout: float) -> None:
        generation = rank.generations.get(name, -1) + 1
        rank.generations[name] = generation
        rank.groups = {**rank.groups, name: Group(name, desc, "nccl" if self.nccl else "gloo", members, timeout, generation, WALL + self.t)}
        rank.entered[name] = 0

    def _lose_peers(self) -> None:
        if self.nccl:
            return
        dead = {r.rank: r for r in self.ranks.values() if not r.alive and r.exited_at is not None and self.t - r.exited_at >= 0.1}
        for r in self.ranks.values():
            if r.alive and not r.frozen and r.action and r.action[0] == "coll" and set(r.groups[r.action[1]].ranks) & set(dead):
                r.crash = Crash(
                    "RuntimeError",
                    "[pair.cc:537] Read error [127.0.0.1]:30611: Connection reset by peer.",
                    traceback="torch/distributed",
                    at_wall=WALL + self.t,
                )
                self._end(r, 1)


def mark(name: str) -> Action:
    return ("mark", name)


def hang() -> Action:
    return ("hang",)


__all__ = [name for name in dir() if not name.startswith("_")]
