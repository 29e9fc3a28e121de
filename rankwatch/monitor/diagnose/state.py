"""What diagnose remembers between two looks. Frozen: every look makes a new one; bounded by ranks plus what is open now."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from rankwatch.model import Calls, Crash, RankState, Verdict
from rankwatch.monitor.frozen import constructor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwatch.monitor.diagnose.arrivals import Reading
    from rankwatch.monitor.diagnose.ledger import Ledger
    from rankwatch.monitor.diagnose.views import Sorted

WaitKey = tuple[object, ...]
NodeKey = tuple[int, str]  # group rank and name of a node


@dataclass(frozen=True, slots=True)
class Open:
    """One rank's oldest open entry in one group. sure: `since` comes from the recorder, not from our first sight of it."""

    seq: int
    since: float
    sure: bool = False
    deadline: float | None = None  # monotonic; when the group's own watchdog ends it, at the earliest
    timeout_s: float | None = None
    maybe_s: float = 0.0  # how much later that may be
    seen_at: float = 0.0  # the first look that showed it


@dataclass(frozen=True, slots=True)
class Spent:
    """An extension of a rank's timeouts in one group: the last number entered when it was first seen, and since when a later one is done."""

    entered: int
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Watch:
    """Progress of one suspect. A look compares CPU and bytes over Limits.look_s; marks and stacks count at once."""

    since: float
    look_at: float
    cpu_s: float
    io_bytes: int
    marks: tuple[object, ...]
    stack_at: float = 0.0
    looks: int = 0
    last_progress: float | None = None
    why: str = ""
    busy_ratio: float | None = None  # of a core, in the newest whole look
    disk_bytes: int = 0
    net_bytes: int = 0
    same_samples: int = 0  # samples in a row that show the same line as the one before
    same_since: float = 0.0  # when the first of those was taken
    silent: bool = False  # its heartbeat had stopped
    own_cpu_s: float = 0.0  # without its children
    main_cpu_s: float = 0.0  # of its main thread


@dataclass(frozen=True, slots=True)
class Trouble:
    """One hang over several looks. Its key is the incident's: it stays while the cause sharpens and the culprits change."""

    key: str
    waits: frozenset[WaitKey]
    culprits: frozenset[int]
    since: float
    seen: float
    agree: int = 0  # looks in a row with the same unhealable finding, each by newer reports
    finding: tuple[object, ...] = ()
    witness: Mapping[int, float] = field(default_factory=dict)  # when the ranks were seen that show it, see witnesses.py
    deadline: float | None = None
    native_asked: bool = False
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that ended. at: when, as well as it is known. after_ending: first seen when the job's end had begun.

    overdue: it sat in a collective whose own timeout had passed, as its watchdog's abort looks.
    """

    rank: int
    code: int
    at: float
    seen_at: float
    after_ending: bool
    overdue: bool = False


@dataclass(frozen=True, slots=True)
class Past:
    """How the attempt before ended, and how many in a row have ended so. key: cause, and line or ranks."""

    key: tuple[object, ...]
    times: int


@dataclass(frozen=True, slots=True)
class Lead:
    """How far each rank's numbers are ahead in one group. In polls in a row between which the numbers moved: polls: this very lead; apart: any lead.

    lowest: the number that all had reached at the last look; began: at the first look of `apart`.
    """

    leads: tuple[tuple[int, int], ...]
    polls: int
    lowest: int
    apart: int
    began: int


@dataclass(frozen=True, slots=True)
class Paired:
    """What was compared of one group: these histories, up to this number. hung: numbers at which different calls made the ranks hang.

    split_at: since when it is known that they differ, without a majority among those that were read.
    """

    lines: Mapping[int, Calls] = field(default_factory=dict)
    upto: int = 0
    hung: tuple[int, ...] = ()
    split_at: float | None = None


@dataclass(frozen=True, slots=True)
class Looks:
    """Collectives of one window at which a rank was found waiting, per rank, and what the windows before it have shown."""

    start: float
    looks: int = 0
    waiting: Mapping[int, int] = field(default_factory=dict)
    last: Mapping[int, int] = field(default_factory=dict)  # rank -> number at which it was last found waiting
    first_seq: int = 0
    culprit: int | None = None  # of the window before
    streak: int = 0  # windows in a row with it; over these: looks, waits of it, of the one that waits least beside it, and of all
    seen: int = 0
    own: int = 0
    least: int = 0
    total: int = 0
    pool: Pool | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """All windows since arrival times have shown this rank to come last, taken together: looks, and collectives at which each rank was found waiting."""

    suspect: int
    windows: int = 0
    seen: int = 0
    waits: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lateness:
    """Who is late in one group. seq: from where the next reading of the recorders starts. told: the straggler that is named now."""

    looks: Looks
    readings: tuple[Reading, ...] = ()
    read_at: float = 0.0
    seq: int | None = None
    steps: int = 0  # optimizer steps and seconds of compiling at the reading before
    compiled_s: float = 0.0
    told: int | None = None
    since: float = 0.0
    misses: int = 0
    suspect: int | None = None  # whose stack is looked at before it is named, since when, how often it was seen, and the newest sample
    suspect_since: float = 0.0
    samples: int = 0
    sampled_at: float = 0.0
    talks: bool = False  # it was found in a point-to-point call
    places: tuple[str, ...] = ()  # of its newest samples the line of the job, "" inside a collective


@dataclass(frozen=True, slots=True)
class State:
    """`State()` is the beginning. A new attempt of the workers begins anew, except for the keys that were given out."""

    attempt: int | None = None
    minted: int = 0
    past: Past | None = None  # of the attempts before
    quiet: int = 0
    pauses: tuple[tuple[float, float], ...] = ()  # (when it was seen, seconds lost), newest last; at most 16
    eras: tuple[tuple[float, float], ...] = ()  # (since when, wall clock minus monotonic clock), newest last; at most 8
    node_eras: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)  # the same of each node's wall clock, by its name
    long_gaps: int = 0  # looks in a row that came late
    suspended_at: float | None = None  # since when every rank is stopped
    extensions: Mapping[tuple[int, str, int, float], Spent] = field(default_factory=dict)
    ledger: Ledger | None = None  # of all attempts
    entries: Mapping[int, Sorted] = field(default_factory=dict)  # of each rank, as it was last read
    reported: Mapping[NodeKey, float] = field(default_factory=dict)  # when each node's newest report was made
    seen: Mapping[int, RankState] = field(default_factory=dict)  # every rank as it was at this look, those of silent nodes as they were seen last
    opens: Mapping[tuple[int, str, int], Open] = field(default_factory=dict)
    startups: Mapping[WaitKey, float] = field(default_factory=dict)
    watches: Mapping[int, Watch] = field(default_factory=dict)
    letters: Mapping[int, tuple[str, float, int]] = field(default_factory=dict)  # state letter, since when, looks
    troubles: tuple[Trouble, ...] = ()
    ahead: Mapping[int, tuple[tuple[int, int], float | None]] = field(default_factory=dict)  # waiting ranks that go on elsewhere, see ahead.py
    deaths: Mapping[int, Death] = field(default_factory=dict)
    joins_failed: Mapping[int, Crash] = field(default_factory=dict)  # ranks that have not joined since their init_process_group raised this
    failure: Verdict | None = None
    failure_weak: bool = False
    failure_held: bool = False  # a rank is dead; who is named depends on what its peers are about to say
    ending_at: float | None = None
    ending_planned: bool = False
    ending_seen: float | None = None  # the last look at which an end was under way
    excused: frozenset[int] = frozenset()  # ranks whose own end was planned or followed from that, while the job has gone on
    frozen: tuple[Verdict, ...] = ()
    frozen_at: float | None = None
    moved_at: float = 0.0  # when `idle_mark` changed last
    last: tuple[Verdict, ...] = ()
    asked: Mapping[tuple[str, int], float] = field(default_factory=dict)
    compiles: Mapping[tuple[int, str], tuple[str, float]] = field(default_factory=dict)  # (rank, compile id) -> frame, started
    frame_times: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # frame -> rank -> seconds, at most 64 frames
    leads: Mapping[tuple[object, ...], Lead] = field(default_factory=dict)
    paired: Mapping[tuple[object, ...], Paired] = field(default_factory=dict)
    diverged: Mapping[tuple[object, ...], Verdict] = field(default_factory=dict)  # proven, by group; for the rest of the attempt
    lateness: Mapping[tuple[object, ...], Lateness] = field(default_factory=dict)
    idle_since: float | None = None
    idle_mark: tuple[object, ...] = ()


_made = constructor(State)
_values = attrgetter(*(each.name for each in fields(State)))
_SETTERS = {each.name: getattr(State, each.name).__set__ for each in fields(State)}  # of its slots, which do not know that it is frozen


def changed(state: State, **changes: Any) -> State:
    """What `dataclasses.replace` gives, in a sixth of its time: every look makes some fifteen. A name that is no field is a KeyError."""
    made = _made(*_values(state))
    for name, value in changes.items():
        _SETTERS[name](made, value)
    return made


def age(pauses: tuple[tuple[float, float], ...], since: float, now: float) -> float:
    """Seconds since `since` that we could watch. A long pause starts the age anew, a short one is taken off."""
    lost = 0.0
    for at, gap in pauses:
        if at > since:
            if gap >= 10.0:
                since, lost = at, 0.0
            else:
                lost += gap
    return max(0.0, now - since - lost)
