"""How a monitor sees, and what it knows of one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwatch.model import Calls, Collective, RankState, Stack


@dataclass(slots=True)
class View:
    """What is known of one rank."""

    node: str = ""
    local_rank: int = 0
    pid: int = 0
    beat_at: float | None = None  # monotonic, as in the snapshots
    told_at: float = 0.0  # how old the numbers are
    enqueued: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)
    status_at: float = -9.0
    wants_read: bool = False
    read: tuple[Collective, ...] = ()
    read_at: float | None = None
    read_version: int = -1
    recorded: int = 0
    lost: int = 0
    witness: bool = False
    lines: dict[str, tuple[int, int, bytearray]] = field(default_factory=dict)  # group name -> generation, first number, kinds
    calls: dict[str, Calls] = field(default_factory=dict)
    moved: tuple[int, float] = (-1, 0.0)  # sum of completed numbers, since when
    summed: dict[str, int] | None = None  # the completed numbers of that sum
    stack: Stack | None = None
    earlier: Stack | None = None
    asked_at: float = -99.0
    asked: int = 0
    ping: tuple[bool, float] | None = None
    last: RankState | None = None  # of a rank that has ended


@dataclass(slots=True)
class Sight:
    """How this monitor sees: nodes[i] lists the ranks of node i, node 0 judges. errors_s: of the clock offsets. pull_s: between two reports of a node.

    silences: (node, from, to) when its reports do not come. pauses: (at, seconds, everything): the monitor alone, or all clocks' owners, stood still.
    """

    nodes: tuple[tuple[int, ...], ...]
    poll_s: float = 0.5
    slow_after_s: float = 1e9  # from here on polls are slow_s apart, at most as far as is no pause yet
    slow_s: float = 1.9
    pull_s: float = 1.5
    errors_s: tuple[float, ...] = ()
    silences: tuple[tuple[int, float, float], ...] = ()
    pauses: tuple[tuple[float, float, bool], ...] = ()
    history: bool = True
    suspicion: bool = True
    compile_probe: bool = True
    mono_shift_s: float = 0.0
    ends_at: float = 3600.0  # when somebody ends the job
    ending: str = "SIGTERM to the launcher"
