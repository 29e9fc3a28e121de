"""Status -> samples of the metrics in wire.signals. Knows no client library.

A value that nobody has seen gives no sample: absent is honest, zero is a claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rankwatch import shown
from rankwatch.model import Incident, NodeReport, RankState, Status
from rankwatch.wire.ranks import expand
from rankwatch.wire.signals import COMPILE_DIVERGENCES, COMPILE_REGIMES, COMPILE_STAGES, JOB_STATE_CODES, MAX_INCIDENTS, PHASE_CODES, VERDICTS

Sample = tuple[str, tuple[str, ...], float]
"""(metric, values of its labels in the order of wire.signals, value)."""

RECOVERED_SHOWN_S = 60.0
MAX_LABEL = 60
_MOST = 1e300  # beyond it an int is no float any more
MAX_BY_NAME = 256  # incidents; one that no Status has shown for so many others never comes back


class Ledger:
    """What only grows, over the life of a launcher: Status keeps a bounded number of closed incidents, counters must not shrink."""

    def __init__(self) -> None:
        self._reached: dict[str, set[str]] = {}
        self._lost_s: dict[str, float] = {}
        self._over: Counter[str] = Counter()  # verdicts of those that are kept by name no more
        self._over_lost_s = 0.0
        self._waited_s = 0.0

    def note(self, status: Status) -> None:
        """Takes in the incidents of a picture and what waiting has cost; the same picture twice changes nothing."""
        self._waited_s = max(self._waited_s, sum(row.rank_s for row in status.waiting))
        for incident in (*status.closed_incidents, *status.open_incidents):
            reached = {change.verdict for change in incident.history} | {incident.verdict.verdict}
            self._reached.setdefault(incident.id, set()).update(reached)
            self._lost_s[incident.id] = max(self._lost_s.get(incident.id, 0.0), incident.lost_rank_s)
        if len(self._reached) > MAX_BY_NAME:
            shown_now = {incident.id for incident in (*status.closed_incidents, *status.open_incidents)}
            for name in [name for name in self._reached if name not in shown_now][: len(self._reached) - MAX_BY_NAME]:
                self._over.update(self._reached.pop(name))
                self._over_lost_s += self._lost_s.pop(name)

    def count(self, verdict: str) -> int:
        """Incidents that have reached `verdict`."""
        return self._over[verdict] + sum(verdict in reached for reached in self._reached.values())

    @property
    def lost_rank_s(self) -> float:
        """Rank-seconds lost waiting: all that was seen of it, at least what the incidents cost."""
        return max(self._waited_s, self._over_lost_s + sum(self._lost_s.values()))


def samples(status: Status, ledger: Ledger, last_render_s: float) -> Iterator[Sample]:
    """Every sample of this launcher at the highest level: its node's ranks, its node, and the job where it judges the job."""
    own = own_reports(status)
    if not own or any(report.group_rank == 0 for report in own):
        yield from _job(status, ledger)
    yield from _node(status, own, last_render_s)
    if own:
        views = shown.rank_views(status)
        for report in own:
            for state in report.ranks:
                yield from _rank(state, report, views[state.rank], status)


def own_reports(status: Status) -> tuple[NodeReport, ...]:
    """The launcher's own report: the sole one, or the first of that host name (a judge's own comes first; two launchers may share a host)."""
    nodes = status.snapshot.nodes if status.snapshot else ()
    return nodes if len(nodes) == 1 else tuple(report for report in nodes if report.node == status.job.node)[:1]


# -- the job ---------------------------------------------------------------------------------------------------------


def _job(status: Status, ledger: Ledger) -> Iterator[Sample]:
    job, snapshot = status.job, status.snapshot
    states = tuple(state for node in snapshot.nodes for state in node.ranks) if snapshot else ()
    versions = job.versions
    backend = next((group.backend for state in states if (group := shown.default_group(state.groups))), "")
    yield (
        "rankwatch_job_info",
        (
            versions.get("rankwatch", ""),
            versions.get("torch", ""),
            versions.get("cuda", ""),
            versions.get("nccl", ""),
            backend,
            str(job.world_size),
            str(job.nnodes),
        ),
        1,
    )
    yield "rankwatch_world_size", (), job.world_size
    yield "rankwatch_job_state", (), JOB_STATE_CODES[status.state]
    yield "rankwatch_job_start_timestamp_seconds", (), job.started_wall_at
    yield "rankwatch_job_restarts_total", ("torchelastic",), status.restarts
    yield from _verdicts(status, ledger)
    yield from _compiles(status.compile)
    if any(group.get("compared") for group in status.numerics.get("replicas", ())):
        yield "rankwatch_replica_mismatch_ranks", (), len({r for group in status.numerics["replicas"] for r in expand(group["differ"])})
    if snapshot is None:
        return
    yield "rankwatch_ranks_seen", (), len(states)
    yield "rankwatch_blind_ranks", (), sum(state.agent in ("off", "silent") for state in states)
    yield "rankwatch_peer_report_age_seconds", (), max((node.report_age_s for node in snapshot.nodes), default=0.0)
    yield from _optional("rankwatch_job_step_seconds", (), shown.median_step_s(snapshot))
    yield from _optional("rankwatch_collective_timeout_seconds", (), shown.smallest_timeout_s(snapshot))
    compiling = [activity.started_at for state in states for activity in state.compiling]
    alone = compiling and any(not state.compiling for state in states)
    yield "rankwatch_job_compile_skew_seconds", (), max(0.0, snapshot.now - min(compiling)) if alone else 0.0


def _compiles(doc: Mapping[str, Any]) -> Iterator[Sample]:
    """What the compile document says of the job; nothing before there is one."""
    if not doc:
        return
    regime = str(_table(doc.get("regime")).get("name"))
    kinds = [str(found.get("kind")) for found in doc.get("divergence") or ()]
    for name in COMPILE_REGIMES:
        yield "rankwatch_compile_regime", (name,), name == regime
    for kind in COMPILE_DIVERGENCES:
        yield "rankwatch_compile_divergence", (kind,), kinds.count(kind)
    graphs = _table(doc.get("cudagraphs"))
    if graphs:
        yield "rankwatch_cudagraph_growing_frames", (), sum(bool(_table(row).get("growing")) for row in graphs.get("frames") or ())
    yield from _from("rankwatch_compile_waited_rank_seconds_total", (), _table(doc.get("totals")), "waited_rank_s")


def _verdicts(status: Status, ledger: Ledger) -> Iterator[Sample]:
    ledger.note(status)
    active = {incident.verdict.verdict for incident in status.open_incidents}
    wall = shown.now_wall(status)
    if any(incident.closed_wall_at is not None and wall - incident.closed_wall_at < RECOVERED_SHOWN_S for incident in status.closed_incidents):
        active.add("recovered")
    for verdict in VERDICTS:
        yield "rankwatch_verdict", (verdict,), verdict in active
        yield "rankwatch_incidents_total", (verdict,), ledger.count(verdict)
    yield "rankwatch_lost_rank_seconds_total", (), ledger.lost_rank_s
    for incident in status.open_incidents[-MAX_INCIDENTS:]:
        judged = incident.verdict
        rank = shown.short_ranks(judged.culprit_ranks, MAX_LABEL)
        yield "rankwatch_incident_info", (incident.id, judged.verdict, judged.cause, judged.domain, rank, hosts(incident)), 1
        yield "rankwatch_incident_open_timestamp_seconds", (incident.id, judged.verdict), incident.opened_wall_at
    desync: dict[str, set[int]] = {}
    for judged in shown.current_verdicts(status):
        if judged.cause == "mismatch":
            desync.setdefault((judged.group.desc or judged.group.name) if judged.group else "", set()).update(judged.culprit_ranks)
    for group, ranks in (desync or {"default_pg": set[int]()}).items():
        yield "rankwatch_job_desync_ranks", (group,), len(ranks)


def hosts(incident: Incident) -> str:
    """Nodes of the culprits, as one short label value."""
    names = list(dict.fromkeys(incident.hosts[rank] for rank in incident.verdict.culprit_ranks if rank in incident.hosts))
    return ",".join(names[:3]) + (f",...({len(names)})" if len(names) > 3 else "")


# -- the node --------------------------------------------------------------------------------------------------------


def _node(status: Status, own: tuple[NodeReport, ...], last_render_s: float) -> Iterator[Sample]:
    versions, health = status.job.versions, status.health
    yield "rankwatch_build_info", (versions.get("rankwatch", ""), versions.get("python", ""), status.job.node), 1
    yield "rankwatch_monitor_polls_total", (), health.polls
    yield "rankwatch_monitor_poll_duration_seconds", (), health.last_poll_s
    yield "rankwatch_monitor_cpu_seconds_total", (), health.cpu_s
    yield "rankwatch_monitor_errors_total", (), health.errors
    yield "rankwatch_writes_dropped_total", (), health.writes_dropped
    for told, count in sorted(health.notifications.items()):
        yield "rankwatch_notifications_total", told, count
    for result in dict.fromkeys(("ok", "failed", "timeout", *sorted(health.stack_dumps))):
        yield "rankwatch_stack_dumps_total", (result,), health.stack_dumps.get(result, 0)
    yield "rankwatch_stack_dump_duration_seconds", (), health.last_stack_dump_s
    yield "rankwatch_agent_collect_duration_seconds", (), last_render_s
    states = [state for report in own for state in report.ranks]
    for probe in sorted({probe for state in states for probe in state.probes}):
        yield "rankwatch_probe_ranks_down", (probe,), sum(probe_up(state.probes.get(probe, {})) is False for state in states)
    rates: dict[tuple[str, str], float] = {}
    for each in (each for state in states for each in state.collective_sums):
        if (rate := each.bus_bytes_per_s) is not None:
            place = (each.op, each.size_bucket)
            rates[place] = min(rate, rates.get(place, rate))
    for place, rate in sorted(rates.items())[:24]:
        yield "rankwatch_collective_bus_bandwidth_bytes_per_second", place, rate
    cache: dict[tuple[str, str], float] = {}
    for state in states:
        for name, results in _table(state.compile_totals.get("cache")).items():
            for result, count in _table(results).items():
                if (value := _number(count)) is not None:
                    cache[(str(name), str(result))] = cache.get((str(name), str(result)), 0.0) + value
    for labels, value in sorted(cache.items())[:24]:
        yield "rankwatch_compile_cache_events_total", labels, value
    guards = _table(_table(status.compile.get("totals")).get("guards"))
    for guard in sorted(guards)[:16]:
        yield from _from("rankwatch_recompiles_by_guard_total", (str(guard),), guards, guard)


def probe_up(probe: Mapping[str, Any]) -> bool | None:
    """True while a probe works, False once it failed or found no hook, None where it was switched off or has said nothing."""
    status = probe.get("status")
    return {"armed": True, "failed": False, "missing": False}.get(str(status))


# -- one rank --------------------------------------------------------------------------------------------------------


def _rank(state: RankState, report: NodeReport, view: shown.RankView, status: Status) -> Iterator[Sample]:
    snapshot = status.snapshot
    assert snapshot is not None, "a rank is only reported by a snapshot"

    def wall(at: float) -> float:
        return shown.wall(snapshot, at)

    rank = (str(state.rank),)
    pid = str(state.process.pid) if state.process else ""
    yield "rankwatch_rank_info", (*rank, str(state.local_rank), state.node or report.node, pid, str(snapshot.attempt)), 1
    if state.process:
        yield "rankwatch_rank_up", rank, state.process.alive
        yield "rankwatch_process_resident_memory_bytes", rank, state.process.rss_bytes
        yield "rankwatch_process_cpu_seconds_total", rank, state.process.cpu_s
    yield "rankwatch_rank_phase", rank, PHASE_CODES[view.phase]
    yield from _optional("rankwatch_rank_phase_start_timestamp_seconds", rank, view.since, wall)
    yield from _optional("rankwatch_rank_heartbeat_timestamp_seconds", rank, state.heartbeat_at, wall)
    yield "rankwatch_rank_stuck", rank, view.stuck
    yield "rankwatch_rank_waiting", rank, view.waiting
    yield "rankwatch_rank_steps_total", rank, state.steps
    yield from _optional("rankwatch_rank_last_step_timestamp_seconds", rank, state.last_step_at, wall)
    yield from _optional("rankwatch_rank_step_seconds", rank, state.step_s)
    for probe, found in sorted(state.probes.items())[:12]:
        yield from _optional("rankwatch_probe_up", (*rank, probe), probe_up(found))
    yield "rankwatch_events_dropped_total", rank, state.events_lost

    yield from _optional("rankwatch_collective_seq", rank, view.seq)
    yield from _optional("rankwatch_collective_lag", rank, view.lag)
    yield "rankwatch_collective_inflight_seconds", rank, view.inflight_s
    yield "rankwatch_collective_timeout_ratio", rank, view.inflight_s / view.timeout_s if view.timeout_s else 0.0
    if state.completed:
        yield "rankwatch_collectives_total", rank, sum(max(0, seq) for seq in state.completed.values())
    yield "rankwatch_process_groups", rank, len(state.groups)
    if state.collective_sums:
        yield "rankwatch_collective_device_seconds_total", rank, sum(each.device_s for each in state.collective_sums)
    if state.collectives_at is not None:
        yield "rankwatch_collective_records_lost_total", rank, state.lost_collectives

    started = min((activity.started_at for activity in state.compiling), default=None)
    yield "rankwatch_compile_active", rank, started is not None
    yield "rankwatch_compile_start_timestamp_seconds", rank, wall(started) if started is not None else 0.0
    yield from _compile(state, rank)
    yield from _ddp(state, rank)
    yield from _numerics(state, rank)
    yield from _from("rankwatch_cudagraph_recordings_total", rank, state.cudagraph, "recordings")
    yield from _from("rankwatch_cudagraph_rerecordings_total", rank, state.cudagraph, "rerecords")
    yield from _from("rankwatch_cudagraph_skips_total", rank, state.cudagraph, "skips")
    yield from _from("rankwatch_cudagraph_pool_bytes", rank, state.cudagraph, "pool_bytes")
    yield from _gpu(state, rank)


def _gpu(state: RankState, rank: tuple[str, ...]) -> Iterator[Sample]:
    memory = state.memory
    yield from _from("rankwatch_device_memory_allocated_bytes", rank, memory, "allocated")
    yield from _from("rankwatch_device_memory_reserved_bytes", rank, memory, "reserved")
    yield from _from("rankwatch_device_memory_peak_bytes", rank, memory, "peak_allocated")
    yield from _from("rankwatch_device_memory_fragmented_bytes", rank, memory, "inactive_split")
    yield from _from("rankwatch_gpu_ooms_total", rank, memory, "ooms")
    if state.gpu is not None:
        yield "rankwatch_rank_gpu_info", (*rank, str(state.gpu.index), state.gpu.uuid), 1
        yield from _optional("rankwatch_gpu_utilization_ratio", rank, state.gpu.utilisation_ratio)


def _compile(state: RankState, rank: tuple[str, ...]) -> Iterator[Sample]:
    totals = state.compile_totals
    seconds = _table(totals.get("seconds"))
    for stage in COMPILE_STAGES:
        yield from _from("rankwatch_compile_seconds_total", (*rank, stage), seconds, stage)
    yield from _from("rankwatch_compiled_frames_total", rank, totals, "frames")
    yield from _from("rankwatch_recompiles_total", rank, totals, "recompiles")
    yield from _from("rankwatch_recompile_limit_hits_total", rank, totals, "limit_hits")
    yield from _from("rankwatch_graph_breaks_total", rank, totals, "graph_breaks")
    yield from _from("rankwatch_compile_failures_total", rank, totals, "failures")
    yield from _from("rankwatch_autotune_configs_total", rank, totals, "configs_tried")


def _ddp(state: RankState, rank: tuple[str, ...]) -> Iterator[Sample]:
    yield from _from("rankwatch_ddp_graph_splits", rank, state.ddp, "splits")
    if (mark := _mark(state.ddp.get("fingerprint"))) is not None:
        yield "rankwatch_ddp_graph_split_hash", rank, mark
    yield from _from("rankwatch_ddp_split_failures_total", rank, state.ddp, "failures")
    yield from _from("rankwatch_ddp_not_split_total", rank, state.ddp, "not_applied")


def _numerics(state: RankState, rank: tuple[str, ...]) -> Iterator[Sample]:
    for what, name in (("gradient", "grad"), ("loss", "loss")):
        series = _table(state.numerics.get(name))
        if series.get("checks"):
            yield from _from("rankwatch_nonfinite_total", (*rank, what), series, "bad")
    yield from _from("rankwatch_gradient_norm", rank, _table(state.numerics.get("grad")), "value")


def _table(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    """A finite number that a rank wrote; None for anything else: a rank's JSON is not to be trusted with a scrape."""
    return float(value) if isinstance(value, (int, float)) and -_MOST <= value <= _MOST else None


def _mark(value: object) -> float | None:
    """48 bits that a rank wrote as hexadecimal digits: exact as a float."""
    try:
        return float(int(str(value), 16)) if value and len(str(value)) <= 12 else None
    except ValueError:
        return None


def _from(name: str, labels: tuple[str, ...], table: Mapping[str, Any], key: str) -> Iterator[Sample]:
    if (value := _number(table.get(key))) is not None:
        yield name, labels, value


def _optional(name: str, labels: tuple[str, ...], value: float | None, convert: Callable[[float], float] = float) -> Iterator[Sample]:
    if value is not None:
        yield name, labels, convert(value)
