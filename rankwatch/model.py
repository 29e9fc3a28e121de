"""The frozen values that the supervisor's modules speak. Built by the reader, judged by diagnose, rendered by the rest.

Times named `*_at` are CLOCK_MONOTONIC seconds of the judging node unless the name says `wall` (unix seconds).
Nothing here does I/O, reads a clock or knows torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

VerdictName = Literal["slow", "stuck", "timeout_imminent", "failed", "diverged", "straggler", "recovered"]
Cause = Literal[
    "compiling",
    "not_entered",
    "mismatch",
    "group_order_deadlock",
    "all_entered",
    "exited",
    "killed",
    "oom_killed",
    "crashed",
    "stopped",
    "gil_held",
    "uninterruptible",
    "data_loading",
    "checkpointing",
    "external_io",
    "store_wait",
    "debugger",
    "unknown",
]
Domain = Literal["user_code", "node", "network", "storage", "scheduler", "unknown"]
Confidence = Literal["certain", "likely", "partial"]
PAGING: tuple[VerdictName, ...] = ("stuck", "failed", "timeout_imminent", "diverged")


# -- one rank, as seen at one moment ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """One process group as one rank knows it. `generation` counts the groups of this name that the process has made, from 0.

    set_at: line of the job that has set its timeout, "" where it is not known. checked: of a group whose collectives torch checks before they start
    (TORCH_DISTRIBUTED_DEBUG=DETAIL), its own number in gloo's recorder (-1 for none), then those of the groups that the checks run in; () for others.
    """

    name: str
    desc: str
    backend: str
    ranks: tuple[int, ...]
    timeout_s: float | None
    generation: int = 0
    created_wall_at: float = 0.0
    set_at: str = ""
    checked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """What a rank tells of timeouts beside its groups' own. `set_at` as in Group; None and "" where nothing is known.

    extensions: (seconds, unix seconds) that torch has added to what NCCL groups issue, until the first of that has completed.
    """

    join_s: float | None = None  # of init_process_group
    join_set_at: str = ""
    creation_s: float | None = None  # of the group in creation
    creation_set_at: str = ""
    extensions: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """One entry of torch's flight recorder, of the group's current generation.

    seq: collective sequence number within (group, generation), comparable between ranks. done: retired without a known failure.
    started: None where the recorder cannot tell (gloo, NCCL without timing).
    """

    group: str
    generation: int
    seq: int
    op: str  # "all_reduce", without the backend's prefix
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    created_wall_at: float = 0.0
    timeout_s: float | None = None
    done: bool = False
    started: bool | None = None
    is_p2p: bool = False
    duration_s: float | None = None  # NCCL with timing: from its start on the device, the wait for the others included


@dataclass(frozen=True, slots=True)
class CollectiveSum:
    """One rank's finished operations of one group, kind and size, as far as their durations were read: NCCL with TORCH_NCCL_ENABLE_TIMING.

    group: its name, "other" beyond a bound. bytes: as nccl-tests counts them. device_s: time on the rank's device, waits for the others included.
    bus_bytes over bus_s: bus bandwidth over all operations that were joined between the ranks of the node, without the waits (the shortest duration
    of each); bus_bytes_per_s: the same of the newest reading, None while there is none. whole: every rank of the group is of this node; else it is a
    lower bound. Source: nccl-tests doc/PERFORMANCE.md.
    """

    group: str
    op: str
    size_bucket: str
    count: int
    bytes: int
    device_s: float
    bus_bytes_per_s: float | None = None
    bus_bytes: float = 0.0
    bus_s: float = 0.0
    whole: bool = False


KIND_BYTES = 4


@dataclass(frozen=True, slots=True)
class Calls:
    """What a rank has called in one group, as far back as is remembered: `kinds` holds a number of KIND_BYTES, little-endian, for each seq from `first`.

    0: not known. known: what each number means, without what may differ between ranks. Equal numbers mean equal calls on every rank.
    """

    generation: int
    first: int
    kinds: bytes
    known: Mapping[int, Collective]

    @property
    def last(self) -> int:
        return self.first + len(self.kinds) // KIND_BYTES - 1


@dataclass(frozen=True, slots=True)
class Meeting:
    """A rank's newest monitored_barrier: the call's number within its group, and whether the rank is still inside."""

    group: str
    calls: int
    inside: bool
    since: float
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """The call of init_process_group that a rank is in, or that has failed. ours: for the world that torchrun has started; another one may be the job's own.

    store: "node05:29500", "" for a store object. shared: torchrun's own store, which it keeps over restarts. reached: the store has answered.
    """

    ours: bool
    rank: int | None
    world_size: int | None
    store: str
    shared: bool
    since: float
    reached: bool | None = None


@dataclass(frozen=True, slots=True)
class CompileActivity:
    """One thread that compiles now."""

    compile_id: str
    kind: str  # forward | backward | runtime
    frame: str  # "forward@model.py:31"
    phase: str  # one of wire.phases.PHASES
    raw_phase: str
    started_at: float
    phase_since: float
    recompile_reason: str = ""
    split: int = 0  # DDPOptimizer: split k of n, 0 of 0 when not splitting
    splits: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class KernelWait:
    """One thread of a suspect that sleeps in the kernel. Texts are "" and numbers -1 or 0 where the kernel does not tell.

    asleep_s: for how long it is known to be in this same sleep. target: the file behind the call's descriptor; mount: "nfs4 filer:/export at /ckpt".
    """

    tid: int
    state: str  # letter of /proc/PID/task/TID/stat
    asleep_s: float = 0.0
    wchan: str = ""
    call: str = ""  # "read", "fsync"
    fd: int = -1
    target: str = ""
    mount: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """The operating system's view of one process. `state` is the letter of /proc/PID/stat ("" once it is gone)."""

    pid: int
    alive: bool
    state: str = ""
    cpu_s: float = 0.0  # user + system of the process, without rankwatch's own threads where they are known
    tree_cpu_s: float = 0.0  # with its descendants, dead ones included as far as the parent has collected them
    io_bytes: int = 0  # rchar + wchar of the process and its descendants
    disk_bytes: int = 0  # to and from storage, mapped memory included; also of both
    net_bytes: int = 0  # over TCP connections that they opened, since it was first a suspect
    rss_bytes: int = 0
    exit_code: int | None = None  # negative: killed by that signal
    started_at: float = 0.0
    exited_at: float | None = None
    oom_killed: bool = False  # SIGKILL, and the kernel says that it was for lack of memory
    oom_note: str = ""  # where the kernel says so; of a SIGKILL that it says nothing of: what was read, "" where nothing could be
    wchan: str = ""
    name: str = ""
    # -- of suspects only
    main_wait: KernelWait | None = None
    blocked_threads: tuple[KernelWait, ...] = ()  # others that sleep uninterruptibly, longest first
    tracer: str = ""  # "gdb (pid 77)"
    children: tuple[str, ...] = ()  # names of living descendants, oldest first
    dead_children: tuple[tuple[int, int], ...] = ()  # pid and signal (0: none, or not known) of those that nobody has collected
    stopped_children: tuple[int, ...] = ()  # pids of those in state T
    main_cpu_s: float = 0.0  # of its main thread alone


@dataclass(frozen=True, slots=True)
class Frame:
    name: str
    file: str
    line: int

    @property
    def short(self) -> str:
        """`train.py:31:load_batch`, as printed in `at=`."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}:{self.name}"


@dataclass(frozen=True, slots=True)
class Thread:
    name: str
    native_id: int
    frames: tuple[Frame, ...]  # innermost first
    active: bool = False
    owns_gil: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """What py-spy saw in one process, or its own worker server. `threads[0]` is the main thread. `error` explains an empty result."""

    pid: int
    at: float
    threads: tuple[Thread, ...] = ()
    text: str = ""  # as shown to people
    native: bool = False
    error: str = ""
    subprocesses: tuple[Stack, ...] = ()  # children worth a look: data-loader workers
    asked: bool = False  # the rank itself was asked: its worker server has written it

    @property
    def main(self) -> tuple[Frame, ...]:
        return self.threads[0].frames if self.threads else ()


@dataclass(frozen=True, slots=True)
class Crash:
    """The exception that ended a rank: from atexit in the rank, torchelastic's error file or the redirected log."""

    type: str
    message: str
    where: str = ""  # "train.py:31:load_batch", innermost frame in user code
    traceback: str = ""
    source: str = ""
    at_wall: float | None = None
    chain: tuple[tuple[str, str], ...] = ()  # (type, message) of what it was raised `from`, or while that was handled; the nearest first, at most 4


@dataclass(frozen=True, slots=True)
class Gpu:
    """One look of the driver (NVML) at the GPU of a rank; what the driver does not tell is None, () or 0.

    by: how it is known to be this rank's: "process" (the rank's process runs on it) or "order" (the local rank's place among the visible GPUs).
    throttled: why the hardware holds its clocks down: "hardware slowdown", "thermal slowdown", "power brake". xids: (code, at) seen by this monitor.
    ecc_uncorrected: since the driver was loaded; ecc_new: of those, since the job was first looked at.
    """

    index: int
    uuid: str
    at: float
    by: Literal["process", "order"] = "process"
    utilisation_ratio: float | None = None
    sm_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    throttled: tuple[str, ...] = ()
    ecc_uncorrected: int | None = None
    ecc_new: int = 0
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    xids: tuple[tuple[int, float], ...] = ()
    lost: str = ""  # "GPU is lost": the driver's own word


@dataclass(frozen=True, slots=True)
class RasRank:
    """A rank in a line of NCCL's RAS. rank: global, where its process is one of ours; comm_rank: within its communicator."""

    comm_rank: int
    pid: int
    gpu: str
    node: str
    rank: int | None = None
    launched: int | None = None  # operations


@dataclass(frozen=True, slots=True)
class RasProblem:
    """One finding of RAS about one communicator. kind: MISMATCH, ERROR, INCOMPLETE, TIMEOUT; what: its sentence."""

    kind: str
    what: str
    communicator: str = ""
    ranks: tuple[RasRank, ...] = ()


@dataclass(frozen=True, slots=True)
class Ras:
    """NCCL's own RAS service as a second opinion. Only what two polls in a row have said alike is in `problems`.

    state: ok, problems, refused (nobody listens), silent (no answer in time), foreign (it speaks of another job's processes), off, unread (a format
    that is not known). processes: those that RAS counts in the job that has answered.
    """

    state: Literal["ok", "problems", "refused", "silent", "foreign", "off", "unread"]
    at: float = 0.0
    problems: tuple[RasProblem, ...] = ()
    processes: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Watchdog:
    """What NCCL's watchdog has printed in a rank's log, each with the moment at which it was read. readable: there is a log.

    ends_at: it takes the process down. aborts_at, aborted_at: the communicator. seq, op: what timed out, by its words ("allreduce").
    """

    readable: bool = False
    fired_at: float | None = None
    ends_at: float | None = None
    aborts_at: float | None = None
    aborted_at: float | None = None
    seq: int = 0
    op: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankState:
    """All that is known of one rank. `agent`: off (no slot), silent (nobody claimed), loaded (no torch yet), armed (not joined), claimed."""

    rank: int
    local_rank: int = 0
    node: str = ""
    agent: Literal["off", "silent", "loaded", "armed", "claimed"] = "claimed"
    agent_detail: str = ""
    process: Process | None = None  # the process that joined the group; the launcher's child until then
    stage: Literal["starting", "armed", "joining", "join_failed", "joined", "left", "exiting"] = "joined"
    stage_since: float = 0.0
    heartbeat_at: float | None = None  # last beat of the agent's Python thread
    ping_ok: bool | None = None  # worker server answered (C++, needs no GIL); None: not asked
    groups: tuple[Group, ...] = ()
    group_in_creation: str | None = None
    creation_ranks: tuple[int, ...] = ()  # of the group in creation
    timeouts: Timeouts = Timeouts()
    barrier: Meeting | None = None
    join: Join | None = None
    handling: Crash | None = None  # what its main thread handles now, for half a second at least: an error handler or a `finally` that waits
    collectives: tuple[Collective, ...] = ()  # newest last, per the last full read
    collectives_at: float | None = None  # when they were read
    lost_collectives: int = 0  # records that the recorder dropped between two reads
    collective_sums: tuple[CollectiveSum, ...] = ()  # longest first
    calls: dict[str, Calls] = field(default_factory=dict)  # group name -> what it called there, beyond the newest entries
    enqueued: dict[str, int] = field(default_factory=dict)  # group name -> last enqueued seq, by the cheap status read
    completed: dict[str, int] = field(default_factory=dict)
    mixed: dict[str, bool] = field(default_factory=dict)  # gloo groups that it sends and receives in, see numbering.py; True: it has called more than was read
    compiling: tuple[CompileActivity, ...] = ()
    compile_witness: bool | None = None  # torch's own wait counters say a compile is active
    compile_totals: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    cudagraph: dict[str, Any] = field(default_factory=dict)
    numerics: dict[str, Any] = field(default_factory=dict)  # only with --probe numerics
    memory: dict[str, Any] = field(default_factory=dict)  # of its GPU, as torch's allocator counts it; agent/probes/memory.py
    gpu: Gpu | None = None
    probes: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 0
    last_step_at: float | None = None
    step_s: float | None = None  # duration of the last step
    events_lost: int = 0
    stack: Stack | None = None  # newest sample
    earlier_stack: Stack | None = None  # the one before it
    native_stack: Stack | None = None  # the newest with native frames, taken once an incident
    crash: Crash | None = None
    watchdog: Watchdog = Watchdog()
    script_problem: str = ""  # "train.py does not exist": why Python cannot start the job's script


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One launcher's view. One node is n = 1, with age 0 and offset 0.

    A node whose launcher does not answer has no `ranks`: they are unknown. silent_ranks: those that it had, by its last answer or its announcement;
    report_age_s: since its last answer, or since it was announced; problem: why nothing comes ("timed out", "connection refused", another version).
    failing_since: when it was first asked in vain since its last answer, None while it answers; `ranks` are then as it has told them last.
    """

    node: str
    ranks: tuple[RankState, ...]
    group_rank: int = 0
    report_age_s: float = 0.0
    clock_offset_s: float = 0.0  # what to add to this node's wall clock to get the judge's
    gpu_note: str = ""  # why its ranks have no `gpu`, or none any more
    silent_ranks: tuple[int, ...] = ()
    problem: str = ""
    failing_since: float | None = None


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The whole job at `now`. A rank of the world without a report is unknown, never missing.

    ending: why a planned end is under way ("SIGTERM to the launcher", "torchrun stops the workers after rank 1 failed"), else "".
    gap_s: time since the snapshot before; a long one means a suspended clock, not a stuck job.
    """

    now: float
    wall_at: float
    world_size: int
    attempt: int
    nodes: tuple[NodeReport, ...]
    ending: str = ""
    gap_s: float = 0.0
    started_at: float = 0.0
    final: bool = False  # the job has ended; this is the last look
    restarting: bool = False  # with `final`: at these workers; torchrun starts others
    environment: Mapping[str, str] = field(default_factory=dict)  # of the ranks: what is set there of NCCL's watchdog
    ras: Ras | None = None  # None: not asked, nothing was suspected
    leaving: frozenset[int] = frozenset()  # ranks of other nodes that have told of a planned end, however long ago

    def ranks(self) -> dict[int, RankState]:
        """Every reported rank by number."""
        return {rank.rank: rank for node in self.nodes for rank in node.ranks}


# -- judgement ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WaitedOn:
    """The collective that the waiting ranks are in."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    op: str
    seq: int
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Straggling:
    """What a straggler costs. late_by_s: median distance to the last rank but it. last_ratio: share of the collectives with a clear last one.

    cost_ratio: share of its time that every waiting rank loses. measured: from arrival times; else estimated from how often the others wait.
    """

    late_by_s: float
    last_ratio: float
    cost_ratio: float
    rank_s_per_min: float
    measured: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judgement on one trouble at one moment. `key` names the trouble: equal keys are the same incident."""

    key: str
    verdict: VerdictName
    cause: Cause
    domain: Domain
    culprit_ranks: tuple[int, ...]
    waiting_ranks: tuple[int, ...]
    since: float  # start of the wait
    summary: str
    unknown_ranks: tuple[int, ...] = ()
    at: str = ""  # "train.py:31:load_batch"
    places: tuple[tuple[int, str], ...] = ()  # (rank, "train.py:31:load_batch") of each culprit, where they are not all in one place; `at` is "" then
    group: WaitedOn | None = None
    timeout_s: float | None = None
    timeout_left_s: float | None = None
    timeout_known: bool = True  # False: a timeout runs, and when it ends cannot be told; missing_evidence says why
    confidence: Confidence = "certain"
    advice: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    missing_evidence: tuple[str, ...] = ()
    straggling: Straggling | None = None


@dataclass(frozen=True, slots=True)
class Want:
    """Evidence that diagnose asks for; the loop fetches it into a later snapshot. kind: stacks | native_stack | recorder | ping."""

    kind: Literal["stacks", "native_stack", "recorder", "ping"]
    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class StackGroup:
    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]  # innermost first
    role: Literal["culprit", "waiting", "other"] = "other"


@dataclass(frozen=True, slots=True)
class Change:
    at_wall: float
    verdict: VerdictName
    cause: Cause
    culprit_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Action:
    """What rankwatch did about an incident. taken: "exit", the workers were ended."""

    taken: Literal["exit"]
    at_wall: float
    why: str


@dataclass(frozen=True, slots=True)
class Incident:
    """One trouble from its first verdict to its end. `verdict` is the newest judgement, `history` holds every change."""

    id: str
    verdict: Verdict
    opened_at: float
    opened_wall_at: float
    updated_wall_at: float
    history: tuple[Change, ...]
    closed_at: float | None = None
    closed_wall_at: float | None = None
    since_wall_at: float = 0.0
    stacks: Mapping[int, Stack] = field(default_factory=dict)
    stack_groups: tuple[StackGroup, ...] = ()
    compiling: dict[int, CompileActivity] = field(default_factory=dict)
    lost_rank_s: float = 0.0  # waiting ranks x time
    hosts: dict[int, str] = field(default_factory=dict)  # rank -> node
    pids: dict[int, int] = field(default_factory=dict)
    recorder_files: tuple[str, ...] = ()
    times: int = 1  # stalls that it stands for
    was_ranks: tuple[int, ...] = ()  # who was blamed before `verdict.culprit_ranks`, once that was said
    into: str = ""  # closed because it turned out to be a part of this incident
    final: bool = False  # the job ended while it was open
    action: Action | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)  # once it is over: report.incident.picture of its last moment, `job` where the attempt ended with it


@dataclass(frozen=True, slots=True)
class IncidentChange:
    """quiet: a stall that has come again and again, its line was said. renamed: other ranks are blamed than was said."""

    kind: Literal["opened", "updated", "escalated", "closed"]
    incident: Incident
    quiet: bool = False
    renamed: bool = False


@dataclass(frozen=True, slots=True)
class JobInfo:
    """Identity of the run: what run.json and the first line hold."""

    job_id: str
    run_dir: str
    command: tuple[str, ...]
    node: str
    world_size: int
    nnodes: int
    attempt: int
    versions: dict[str, str]
    set_environment: dict[str, str]
    started_wall_at: float
    status_url: str = ""
    archive_url: str = ""  # of this run in the archive, with a "/" at its end; "" unless --archive-dir and --external-url are given
    archive_failed: bool = False  # the archive took the newest page not: links do not lead there
    capabilities: dict[str, str] = field(default_factory=dict)  # compile|ddp|collectives|stacks|... -> "ok" or the reason
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MonitorHealth:
    """What the monitor costs and what it lost, for /metrics and the status page."""

    polls: int = 0
    last_poll_s: float = 0.0
    cpu_s: float = 0.0
    errors: int = 0
    events_lost: int = 0
    writes_dropped: int = 0
    stack_dumps: dict[str, int] = field(default_factory=dict)  # ok | failed | timeout -> count
    last_stack_dump_s: float = 0.0
    last_error: str = ""
    store_calls: int = 0  # what torchrun's store was asked to find the other nodes' launchers, over all attempts
    store_bytes: int = 0
    notifications: dict[tuple[str, str], int] = field(default_factory=dict)  # (alertmanager | webhook | on_incident, ok | failed | dropped) -> count


@dataclass(frozen=True, slots=True)
class Waited:
    """Rank-seconds that ranks have lost waiting for `rank` (-1: for no single one) so far, by reason."""

    rank: int
    reason: str  # "recompiling forward@model.py:31", "data_loading at train.py:31:batch", "straggling"
    rank_s: float


@dataclass(frozen=True, slots=True)
class PhaseLook:
    """What every rank did from `at_wall` (unix seconds) on, until the next look: (phase or `culprit` or `no_report`, ranks as "0-3,7").

    seen_wall: when it was last seen to be so.
    """

    at_wall: float
    kinds: tuple[tuple[str, str], ...]
    seen_wall: float


@dataclass(frozen=True, slots=True)
class Status:
    """One consistent picture for everything that is shown: pages, API, metrics, lines. Replaced as a whole every poll."""

    job: JobInfo
    snapshot: JobSnapshot | None
    verdicts: tuple[Verdict, ...] = ()
    open_incidents: tuple[Incident, ...] = ()
    closed_incidents: tuple[Incident, ...] = ()  # newest last, bounded
    forgotten: dict[str, int] = field(default_factory=dict)  # closed incidents beyond that bound, by gravest verdict
    forgotten_lost_rank_s: float = 0.0
    waiting: tuple[Waited, ...] = ()  # over the whole run, costliest first
    judge: str = ""  # another launcher judges the whole job: its status page, or its node; verdicts and incidents are there
    compile: Mapping[str, Any] = field(default_factory=dict)  # what all ranks compiled, see monitor/compiles; {} while nothing is known
    numerics: dict[str, Any] = field(default_factory=dict)  # monitor/numerics.py's document; {} while the probe is off
    timeline: tuple[PhaseLook, ...] = ()  # the last ten minutes, oldest first, bounded by monitor/timeline.py
    health: MonitorHealth = MonitorHealth()
    state: Literal["starting", "running", "stuck", "restarting", "finishing", "done", "failed"] = "starting"
    restarts: int = 0
    exit_code: int | None = None
