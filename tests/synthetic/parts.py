"""What a World is made of: calls, recorder entries, communicators and ranks, without behaviour."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import activities
from activities import Act

from rankwatch.model import Collective, Crash, Group

Numbers = tuple[dict[str, int], dict[str, int]]  # entered and completed, by group name


FROM_ROOT = ("broadcast", "scatter")
ONE_SIDED = (*FROM_ROOT, "reduce", "gather")


@dataclass(slots=True, eq=False)
class Call:
    """mode: "sync" blocks the caller (on NCCL it is followed by a stream wait), "async" is waited for by ("wait",), "leak" never.

    All ranks that do the same call share one Call, which nobody changes.
    """

    op: str = "all_reduce"
    sizes: tuple[int, ...] = (1024,)
    dtype: str = "Float"
    mode: str = "sync"
    root: int = 0  # index among the members
    line: int = 50
    backward: bool = False
    takes_s: float = 0.002
    shapes: tuple[tuple[int, ...], ...] = field(init=False)  # sizes and dtypes as a recorder shows them
    dtypes: tuple[str, ...] = field(init=False)
    one_sided: bool = field(init=False)  # some members can be done before all have entered
    from_root: bool = field(init=False)

    def __post_init__(self) -> None:
        self.shapes = tuple([(size,) for size in self.sizes])
        self.dtypes = (self.dtype,) if self.sizes else ()
        self.one_sided, self.from_root = self.op in ONE_SIDED, self.op in FROM_ROOT

    def pairs_with(self, other: Call) -> bool:
        return self is other or (self.op, self.sizes, self.dtype) == (other.op, other.sizes, other.dtype)


BARRIER = Call("barrier", (), "Float")


class Entry:
    """One recorder entry, see `entered`. `shown` is its frozen form, made again when it changes."""

    __slots__ = ("at", "call", "comm", "created", "done", "rank", "seq", "shown")
    comm: Comm
    rank: int
    seq: int
    call: Call
    created: float
    at: float
    done: bool
    shown: Collective | None


def entered(comm: Comm, rank: int, seq: int, call: Call, created: float, at: float) -> Entry:
    """A new one: two thirds of the time of a class with __init__."""
    entry = Entry()
    entry.comm = comm
    entry.rank = rank
    entry.seq = seq
    entry.call = call
    entry.created = created
    entry.at = at
    entry.done = False
    entry.shown = None
    return entry


class Operation:
    """One number of a group: who has entered it, and whether all of these call the same."""

    __slots__ = ("call", "entered", "left", "mixed")

    def __init__(self, call: Call) -> None:
        self.call = call  # of whoever came first
        self.entered: dict[int, Entry] = {}
        self.left = 0  # entries that are done
        self.mixed = False


class Comm:
    """One generation of one group, shared by its members. hung_from: operations from this number on never complete."""

    __slots__ = ("calls", "free_at", "generation", "group", "hung_from", "members", "name", "nccl", "size")

    def __init__(self, group: Group, nccl: bool) -> None:
        self.group, self.name, self.generation, self.nccl = group, group.name, group.generation, nccl
        self.members, self.size = frozenset(group.ranks), len(group.ranks)
        self.calls: dict[int, Operation] = {}
        self.hung_from: float = inf
        self.free_at = 0.0


@dataclass(slots=True, eq=False)
class Rank:
    """Truth about one rank; what of it is visible, and when, is the observer's business."""

    number: int
    program: Iterator[tuple[Any, ...]]
    phase_s: float  # of its agent's beats
    entries: deque[Entry]  # of its recorder, newest last
    stage: str = "armed"
    stage_since: float = 0.0
    act: Act = activities.IMPORTING
    act_since: float = 0.0
    token: int = 0  # of the event that wakes it; others are void
    blocked: str = ""  # "" busy, "call", "wait", "join", "group", "recv"
    blocked_since: float = 0.0
    blocked_on: Entry | None = None
    timer: bool = False
    held: bool = False  # it is stopped, for ever
    cpu_s: float = 1.0
    child_cpu_s: float = 0.0
    io_bytes: float = 0.0
    counted_at: float = 0.0
    steps: int = 0
    step_at: float | None = None
    step_s: float | None = None
    groups: dict[str, Comm] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    entered: dict[str, int] = field(default_factory=dict)  # by group name, of its current generation
    completed: dict[str, int] = field(default_factory=dict)
    handles: list[Entry] = field(default_factory=list)
    recorded: int = 0
    creating: tuple[str, str, str, tuple[int, ...], float] | None = None
    box: str = ""  # that it receives from
    shown_groups: tuple[Group, ...] = ()  # as this rank knows them
    exit_code: int | None = None
    exited_at: float | None = None
    oom_killed: bool = False
    crash: Crash | None = None
    version: int = 0  # rises whenever numbers, entries or groups change
    # -- beats of the agent's thread, worked out when somebody looks
    mute: bool = True  # it does not beat now
    beats_from: float = 0.0
    tick: int = -1  # the beat after which the numbers have changed last, and what they were at that beat
    before: Numbers = field(default_factory=lambda: ({}, {}))
    copied: Numbers = ({}, {})  # of this version
    copied_version: int = -1
    heard: tuple[float, Numbers] | None = None  # the last beat before it fell mute

    @property
    def alive(self) -> bool:
        return self.exit_code is None
