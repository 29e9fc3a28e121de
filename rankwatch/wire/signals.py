"""The catalogue of metrics: one row a metric, and the numbers that stand for phases and job states.

A metric that is not here is not exported; the exporter, the dashboards, the alert rules and their tests all read this table.

level: the smallest level that still exports it: low | default | full. Budget: at most 12 series a rank at low, 60 at default, 120 at full.
scope: R one series a rank of the node (times its other labels), N one a node, J one a job, from the judging launcher only.
labels: beyond `job_id`, which every series carries. Never a step, shape, guard text or stack.
source: where the value comes from, as attribute paths of rankwatch.model; `exporter` where it counts over the launcher's life.
stability: stable names change only with a major version; experimental ones may.
"""

from __future__ import annotations

from typing import NamedTuple


class Signal(NamedTuple):
    """One metric. `name` is the full name as scraped, `_total` included; `unit` is a Prometheus base unit or ""."""

    name: str
    type: str  # gauge | counter
    unit: str
    labels: tuple[str, ...]
    level: str
    scope: str
    help: str
    source: str
    stability: str = "stable"


LEVELS = ("low", "default", "full")
LEVEL_RANKS = (("full", 64), ("default", 2048))
"""`auto`: the first level whose number of ranks the job does not exceed, else low."""

PHASE_CODES = {
    "starting": 0,
    "running": 1,
    "compiling": 2,
    "collective_wait": 3,
    "data_wait": 4,
    "checkpoint": 5,
    "cudagraph_capture": 6,
    "shutdown": 7,
    "dead": 8,
    "unknown": 9,
}
JOB_STATE_CODES = {"starting": 0, "running": 1, "stuck": 2, "restarting": 3, "finishing": 4, "done": 5, "failed": 6}
VERDICTS = ("slow", "stuck", "timeout_imminent", "failed", "diverged", "straggler", "recovered")
COMPILE_REGIMES = ("not_used", "starting", "failing", "compiled_nothing", "fell_back", "compiles_for_ever", "compiled")
COMPILE_DIVERGENCES = ("lone_recompile", "different_graph", "different_guard", "different_split", "split_mode", "cache", "failed_alone")
COMPILE_STAGES = ("dynamo", "aot", "inductor", "triton", "autotune")
MAX_INCIDENTS = 16

_PHASES_TEXT = ", ".join(f"{code} {name}" for name, code in PHASE_CODES.items())
_STATES_TEXT = ", ".join(f"{code} {name}" for name, code in JOB_STATE_CODES.items())

_R = ("rank",)
SIGNALS: tuple[Signal, ...] = (
    # -- the job
    Signal(
        "rankwatch_job_info",
        "gauge",
        "",
        ("version", "torch", "cuda", "nccl", "backend", "world_size", "nnodes"),
        "low",
        "J",
        "Identity of the job; always 1. Carries --label pairs as label_NAME.",
        "Status.job",
    ),
    Signal("rankwatch_world_size", "gauge", "", (), "low", "J", "Ranks of the job.", "Status.job.world_size"),
    Signal("rankwatch_ranks_seen", "gauge", "", (), "low", "J", "Ranks of the job that some launcher reports.", "Status.snapshot"),
    Signal(
        "rankwatch_blind_ranks", "gauge", "", (), "low", "J", "Ranks that run without the agent: only stacks and exits are known of them.", "RankState.agent"
    ),
    Signal("rankwatch_job_state", "gauge", "", (), "low", "J", f"State of the job: {_STATES_TEXT}.", "Status.state"),
    Signal("rankwatch_job_start_timestamp_seconds", "gauge", "seconds", (), "low", "J", "When the launcher started.", "Status.job.started_wall_at"),
    Signal("rankwatch_job_restarts_total", "counter", "", ("reason",), "low", "J", "Restarts of the workers by torchelastic.", "Status.restarts"),
    Signal("rankwatch_job_step_seconds", "gauge", "seconds", (), "low", "J", "Median over ranks of the duration of the last step.", "RankState.step_s"),
    Signal(
        "rankwatch_job_desync_ranks",
        "gauge",
        "",
        ("group",),
        "low",
        "J",
        "Ranks whose operation, shape or order differs from the rest of the group.",
        "Verdict",
    ),
    Signal(
        "rankwatch_job_compile_skew_seconds",
        "gauge",
        "seconds",
        (),
        "low",
        "J",
        "Age of the longest running compile while at least one other rank does not compile; 0 otherwise.",
        "RankState.compiling",
    ),
    Signal("rankwatch_collective_timeout_seconds", "gauge", "seconds", (), "low", "J", "Smallest timeout of any process group.", "RankState.groups"),
    # -- verdicts
    Signal(
        "rankwatch_verdict", "gauge", "", ("verdict",), "low", "J", "1 for each verdict that an open incident has now; recovered is 1 for a minute.", "Incident"
    ),
    Signal(
        "rankwatch_incident_info",
        "gauge",
        "",
        ("incident", "verdict", "cause", "domain", "rank", "node"),
        "low",
        "J",
        f"An open incident; always 1, absent once it closes. At most {MAX_INCIDENTS}.",
        "Incident",
    ),
    Signal(
        "rankwatch_incident_open_timestamp_seconds",
        "gauge",
        "seconds",
        ("incident", "verdict"),
        "low",
        "J",
        f"When an open incident was opened; absent once it closes. At most {MAX_INCIDENTS}.",
        "Incident.opened_wall_at",
    ),
    Signal("rankwatch_incidents_total", "counter", "", ("verdict",), "low", "J", "Incidents that have reached this verdict.", "exporter"),
    Signal("rankwatch_lost_rank_seconds_total", "counter", "seconds", (), "low", "J", "Rank-seconds lost waiting, short waits included.", "exporter"),
    # -- one rank
    Signal("rankwatch_rank_info", "gauge", "", ("rank", "local_rank", "node", "pid", "restart"), "default", "R", "Who a rank is; always 1.", "RankState"),
    Signal(
        "rankwatch_rank_up", "gauge", "", _R, "low", "R", "1 while the rank's process lives; a dead rank stays at 0 until the restart.", "RankState.process"
    ),
    Signal("rankwatch_rank_phase", "gauge", "", _R, "low", "R", f"What the rank does: {_PHASES_TEXT}.", "RankState"),
    Signal(
        "rankwatch_rank_phase_start_timestamp_seconds",
        "gauge",
        "seconds",
        _R,
        "low",
        "R",
        "Since when the rank is in its phase; for running, the end of its last step.",
        "RankState",
    ),
    Signal(
        "rankwatch_rank_heartbeat_timestamp_seconds",
        "gauge",
        "seconds",
        _R,
        "low",
        "R",
        "Last beat of the agent's Python thread; it stops while something holds the GIL.",
        "RankState.heartbeat_at",
    ),
    Signal("rankwatch_rank_stuck", "gauge", "", _R, "low", "R", "1 while the rank is judged the cause of a paging verdict.", "Verdict.culprit_ranks"),
    Signal("rankwatch_rank_waiting", "gauge", "", _R, "low", "R", "1 while the rank is judged to wait for another one.", "Verdict.waiting_ranks"),
    Signal("rankwatch_rank_steps_total", "counter", "", _R, "low", "R", "Steps that the rank has finished.", "RankState.steps"),
    Signal("rankwatch_rank_last_step_timestamp_seconds", "gauge", "seconds", _R, "default", "R", "End of the rank's last step.", "RankState.last_step_at"),
    Signal("rankwatch_rank_step_seconds", "gauge", "seconds", _R, "default", "R", "Duration of the rank's last step.", "RankState.step_s"),
    Signal(
        "rankwatch_probe_up",
        "gauge",
        "",
        ("rank", "probe"),
        "default",
        "R",
        "1 while the probe works, 0 once it failed or found no hook; absent if switched off.",
        "RankState.probes",
    ),
    # -- collectives
    Signal("rankwatch_collective_seq", "gauge", "", _R, "low", "R", "Last sequence number enqueued in the default group.", "RankState.enqueued"),
    Signal("rankwatch_collective_lag", "gauge", "", _R, "low", "R", "How far that number is behind the job's highest.", "RankState.enqueued"),
    Signal("rankwatch_collective_inflight_seconds", "gauge", "seconds", _R, "low", "R", "Age of the oldest unfinished collective.", "RankState.collectives"),
    Signal("rankwatch_collective_timeout_ratio", "gauge", "", _R, "low", "R", "That age as a share of its timeout.", "RankState.collectives"),
    Signal("rankwatch_collectives_total", "counter", "", _R, "default", "R", "Collectives finished in the groups that exist now.", "RankState.completed"),
    Signal("rankwatch_process_groups", "gauge", "", _R, "default", "R", "Process groups that the rank is in.", "RankState.groups"),
    Signal(
        "rankwatch_collective_device_seconds_total",
        "counter",
        "seconds",
        _R,
        "default",
        "R",
        "Time of finished NCCL collectives on the rank's GPU, as far as it was read, waits for other ranks included: the rank with the least comes last.",
        "RankState.collective_sums.device_s",
        "experimental",
    ),
    Signal(
        "rankwatch_collective_bus_bandwidth_bytes_per_second",
        "gauge",
        "bytes_per_second",
        ("op", "size"),
        "default",
        "N",
        "Bus bandwidth (nccl-tests) of the newest collectives that were read, without the wait for other ranks; of the slowest group.",
        "RankState.collective_sums.bus_bytes_per_s",
        "experimental",
    ),
    Signal(
        "rankwatch_collective_records_lost_total",
        "counter",
        "",
        _R,
        "default",
        "R",
        "Records that torch's recorder dropped before they were read.",
        "RankState.lost_collectives",
        "experimental",
    ),
    # -- torch.compile
    Signal("rankwatch_compile_active", "gauge", "", _R, "default", "R", "1 while a thread of the rank compiles.", "RankState.compiling"),
    Signal(
        "rankwatch_compile_start_timestamp_seconds",
        "gauge",
        "seconds",
        _R,
        "default",
        "R",
        "Since when it compiles; 0 while it does not.",
        "RankState.compiling",
    ),
    Signal(
        "rankwatch_compile_seconds_total", "counter", "seconds", ("rank", "stage"), "default", "R", "Time spent compiling.", "RankState.compile_totals.seconds"
    ),
    Signal("rankwatch_compiled_frames_total", "counter", "", _R, "default", "R", "Frames compiled.", "RankState.compile_totals.frames"),
    Signal(
        "rankwatch_recompiles_total", "counter", "", _R, "default", "R", "Frames compiled again because a guard failed.", "RankState.compile_totals.recompiles"
    ),
    Signal(
        "rankwatch_recompile_limit_hits_total",
        "counter",
        "",
        _R,
        "default",
        "R",
        "Frames that fell back to eager at the recompile limit.",
        "RankState.compile_totals.limit_hits",
    ),
    Signal("rankwatch_graph_breaks_total", "counter", "", _R, "default", "R", "Graph breaks.", "RankState.compile_totals.graph_breaks"),
    Signal(
        "rankwatch_autotune_configs_total",
        "counter",
        "",
        _R,
        "default",
        "R",
        "Choices and configurations that were benchmarked for kernels, at run time too.",
        "RankState.compile_totals.configs_tried",
        "experimental",
    ),
    Signal("rankwatch_compile_failures_total", "counter", "", _R, "default", "R", "Compiles that raised.", "RankState.compile_totals.failures"),
    Signal(
        "rankwatch_compile_cache_events_total",
        "counter",
        "",
        ("cache", "result"),
        "default",
        "N",
        "Compile cache lookups of the node's ranks.",
        "RankState.compile_totals.cache",
    ),
    Signal(
        "rankwatch_recompiles_by_guard_total",
        "counter",
        "",
        ("guard_class",),
        "default",
        "N",
        "Recompiles of the node's ranks by the kind of guard that failed; the texts are in the run directory.",
        "Status.compile.totals.guards",
        "experimental",
    ),
    Signal(
        "rankwatch_compile_regime",
        "gauge",
        "",
        ("regime",),
        "default",
        "J",
        "1 for what torch.compile does for this job.",
        "Status.compile.regime",
        "experimental",
    ),
    Signal(
        "rankwatch_compile_divergence",
        "gauge",
        "",
        ("kind",),
        "default",
        "J",
        "Frames, or DDP splits, that ranks of the same program compiled differently.",
        "Status.compile.divergence",
        "experimental",
    ),
    Signal(
        "rankwatch_compile_waited_rank_seconds_total",
        "counter",
        "seconds",
        (),
        "default",
        "J",
        "Rank-seconds that ranks waited for others to compile.",
        "Status.compile.totals.waited_rank_s",
        "experimental",
    ),
    # -- DDPOptimizer
    Signal("rankwatch_ddp_graph_splits", "gauge", "", _R, "default", "R", "Subgraphs of DDPOptimizer's last split; 1: one bucket.", "RankState.ddp.splits"),
    Signal(
        "rankwatch_ddp_graph_split_hash",
        "gauge",
        "",
        _R,
        "default",
        "R",
        "48 bits of that split's signature; compare for equality only.",
        "RankState.ddp.fingerprint",
    ),
    Signal("rankwatch_ddp_split_failures_total", "counter", "", _R, "default", "R", "Splits that raised.", "RankState.ddp.failures"),
    Signal(
        "rankwatch_ddp_not_split_total",
        "counter",
        "",
        _R,
        "default",
        "R",
        "Compiles of a DDP forward that is larger than a bucket and was not split.",
        "RankState.ddp.not_applied",
    ),
    # -- CUDA graphs
    Signal("rankwatch_cudagraph_recordings_total", "counter", "", _R, "default", "R", "CUDA graphs recorded.", "RankState.cudagraph.recordings"),
    Signal(
        "rankwatch_cudagraph_rerecordings_total",
        "counter",
        "",
        _R,
        "default",
        "R",
        "CUDA graphs recorded for a function that had one.",
        "RankState.cudagraph.rerecords",
    ),
    Signal("rankwatch_cudagraph_skips_total", "counter", "", _R, "default", "R", "Functions that were not captured.", "RankState.cudagraph.skips"),
    Signal("rankwatch_cudagraph_pool_bytes", "gauge", "bytes", _R, "default", "R", "Memory in private graph pools.", "RankState.cudagraph.pool_bytes"),
    # -- memory and state of its GPU; what dcgm-exporter gives of a device is left to it
    Signal(
        "rankwatch_device_memory_allocated_bytes",
        "gauge",
        "bytes",
        _R,
        "default",
        "R",
        "GPU memory that torch's allocator has handed out, at the last look (at a step, every 10 s).",
        "RankState.memory.allocated",
    ),
    Signal(
        "rankwatch_device_memory_reserved_bytes",
        "gauge",
        "bytes",
        _R,
        "default",
        "R",
        "GPU memory that torch's allocator holds.",
        "RankState.memory.reserved",
    ),
    Signal(
        "rankwatch_device_memory_peak_bytes",
        "gauge",
        "bytes",
        _R,
        "default",
        "R",
        "Most GPU memory handed out at one time, since the start or the job's own reset of it.",
        "RankState.memory.peak_allocated",
    ),
    Signal(
        "rankwatch_device_memory_fragmented_bytes",
        "gauge",
        "bytes",
        _R,
        "full",
        "R",
        "GPU memory that is free in parts of blocks in use: it can be handed out, not given back.",
        "RankState.memory.inactive_split",
    ),
    Signal("rankwatch_gpu_ooms_total", "counter", "", _R, "default", "R", "Allocations of GPU memory that failed, caught or not.", "RankState.memory.ooms"),
    Signal(
        "rankwatch_rank_gpu_info",
        "gauge",
        "",
        ("rank", "gpu", "uuid"),
        "default",
        "R",
        "Which GPU a rank has; always 1. Joins dcgm-exporter's rows.",
        "RankState.gpu",
    ),
    Signal("rankwatch_gpu_utilization_ratio", "gauge", "", _R, "full", "R", "The driver's utilisation of the rank's GPU.", "RankState.gpu.utilisation_ratio"),
    Signal(
        "rankwatch_cudagraph_growing_frames",
        "gauge",
        "",
        (),
        "default",
        "J",
        "Frames of which a CUDA graph is recorded for every new size, and new sizes still come.",
        "Status.compile.cudagraphs",
        "experimental",
    ),
    # -- numbers, with --probe numerics
    Signal(
        "rankwatch_nonfinite_total",
        "counter",
        "",
        ("rank", "what"),
        "default",
        "R",
        "Losses (log_loss) and gradient norms that were looked at and not finite.",
        "RankState.numerics",
        "experimental",
    ),
    Signal(
        "rankwatch_gradient_norm", "gauge", "", _R, "default", "R", "Last finite gradient norm that was looked at.", "RankState.numerics.grad", "experimental"
    ),
    Signal(
        "rankwatch_replica_mismatch_ranks",
        "gauge",
        "",
        (),
        "low",
        "J",
        "Ranks whose parameters differed from their DDP replicas' when last compared; all of them where there is no majority.",
        "Status.numerics.replicas",
        "experimental",
    ),
    # -- the rank's process
    Signal(
        "rankwatch_process_resident_memory_bytes", "gauge", "bytes", _R, "default", "R", "Resident memory of the rank's process.", "RankState.process.rss_bytes"
    ),
    Signal("rankwatch_process_cpu_seconds_total", "counter", "seconds", _R, "default", "R", "Processor time of the rank's process.", "RankState.process.cpu_s"),
    # -- rankwatch itself
    Signal(
        "rankwatch_build_info", "gauge", "", ("version", "python", "node"), "low", "N", "The rankwatch that watches this node; always 1.", "Status.job.versions"
    ),
    Signal(
        "rankwatch_probe_ranks_down", "gauge", "", ("probe",), "low", "N", "Ranks of the node on which the probe failed or found no hook.", "RankState.probes"
    ),
    Signal("rankwatch_peer_report_age_seconds", "gauge", "seconds", (), "default", "J", "Age of the oldest node report.", "NodeReport.report_age_s"),
    Signal("rankwatch_monitor_polls_total", "counter", "", (), "low", "N", "Polls of the ranks' state.", "MonitorHealth.polls"),
    Signal("rankwatch_monitor_poll_duration_seconds", "gauge", "seconds", (), "low", "N", "Duration of the last poll.", "MonitorHealth.last_poll_s"),
    Signal("rankwatch_monitor_cpu_seconds_total", "counter", "seconds", (), "low", "N", "Processor time of the launcher's monitor.", "MonitorHealth.cpu_s"),
    Signal("rankwatch_monitor_errors_total", "counter", "", (), "low", "N", "Errors that the monitor swallowed.", "MonitorHealth.errors"),
    Signal(
        "rankwatch_writes_dropped_total",
        "counter",
        "",
        (),
        "low",
        "N",
        "File writes given up: the run directory, or where other exporters read, was too slow or full.",
        "MonitorHealth.writes_dropped",
    ),
    Signal(
        "rankwatch_notifications_total",
        "counter",
        "",
        ("channel", "result"),
        "low",
        "N",
        "Messages to alertmanager, webhook and on_incident, where they are set: attempts that were ok or failed, messages that were dropped.",
        "MonitorHealth.notifications",
    ),
    Signal(
        "rankwatch_events_dropped_total",
        "counter",
        "",
        _R,
        "default",
        "R",
        "Events that a rank's ring lost before the monitor read them.",
        "RankState.events_lost",
    ),
    Signal("rankwatch_stack_dumps_total", "counter", "", ("result",), "low", "N", "py-spy runs.", "MonitorHealth.stack_dumps"),
    Signal("rankwatch_stack_dump_duration_seconds", "gauge", "seconds", (), "low", "N", "Duration of the last py-spy run.", "MonitorHealth.last_stack_dump_s"),
    Signal("rankwatch_agent_collect_duration_seconds", "gauge", "seconds", (), "low", "N", "Time that the previous exposition took to render.", "exporter"),
)

BY_NAME = {signal.name: signal for signal in SIGNALS}


def level_for(level: str, world_size: int) -> str:
    """The level in force: `level` itself, or the one that `auto` means at this size. ValueError names an unknown level."""
    if level == "auto":
        return next((name for name, ranks in LEVEL_RANKS if world_size <= ranks), "low")
    if level not in LEVELS:
        raise ValueError(f"metrics level {level!r} is none of auto, {', '.join(LEVELS)}")
    return level


def exported(level: str) -> frozenset[str]:
    """Names that a level exports."""
    return frozenset(signal.name for signal in SIGNALS if LEVELS.index(signal.level) <= LEVELS.index(level))
