"""incident.json: the contract that others parse, and the document that every report is rendered from.

Keys are only ever added within a schema. Everything in the document encodes as UTF-8 and as JSON: no lone surrogate, no infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rankwatch import __version__, gpu_memory, redact, shown, traces
from rankwatch.model import Action, CompileActivity, Crash, Gpu, Incident, JobSnapshot, RankState, Stack, Status, Straggling, Verdict, WaitedOn
from rankwatch.report import collectives, timeline
from rankwatch.wire.ranks import compress

SCHEMA = 1
MAX_STACK_CHARS = 200_000
MAX_TRACEBACK_CHARS = 20_000
MAX_RANKS_SHOWN = 64
MAX_CHILDREN = 4
MAX_GROUPS = 20
MAX_RANKS_BY_NODE = 512


def to_json(incident: Incident, status: Status) -> dict[str, Any]:
    """The document of one incident as of `status`. Times are unix seconds; ranks are global.

    `stacks` holds every culprit, with null where none could be taken. Accepts partial data: no snapshot, no group, no stack.
    """
    verdict = incident.verdict
    seen = incident.kept if "as_of" in incident.kept else picture(incident, status)
    end = job_end(incident, status)
    closed = closed_by(incident, status)
    over = closed is not None or end["ended_at"] is not None
    crashes = {**seen["crash"], **(_crashes(incident, status.snapshot) if incident.closed_at is None else {})}
    return {
        "schema": SCHEMA,
        "id": incident.id,
        "verdict": verdict.verdict,
        "cause": verdict.cause,
        "domain": verdict.domain,
        "culprit_ranks": sorted(verdict.culprit_ranks),
        "waiting_ranks": sorted(verdict.waiting_ranks),
        "unknown_ranks": sorted(verdict.unknown_ranks),
        "since": since_wall(incident, status),
        "opened_at": float(incident.opened_wall_at),
        "updated_at": float(incident.updated_wall_at),
        "closed_at": closed_at(incident, status),
        "closed_by": closed,
        "summary": shown.past(summary(verdict)) if over else summary(verdict),
        "advice": lines(verdict.advice),
        "group": _group(verdict.group),
        "timeout_s": number(verdict.timeout_s),
        "timeout_left_s": number(verdict.timeout_left_s) if not over else None,
        "compile": seen["compile"],
        "stacks": _stacks(incident),
        "stack_groups": stack_groups(incident),
        "confidence": verdict.confidence,
        "evidence": [shown.past_compile(line) if over else line for line in lines(verdict.evidence)],
        "missing_evidence": lines(verdict.missing_evidence),
        "history": [
            {"at": float(change.at_wall), "verdict": change.verdict, "cause": change.cause, "culprit_ranks": sorted(change.culprit_ranks)}
            for change in incident.history
        ],
        "action": _action(incident.action),
        # beyond the contract: what the reports show besides
        "straggling": _straggling(verdict.straggling),
        "at": seen["at"],
        "places": {str(rank): shown.one_line(place) for rank, place in verdict.places},
        "child_stacks": _child_stacks(incident),
        "as_of": float(shown.now_wall(status)),
        "lost_rank_s": number(incident.lost_rank_s) or 0.0,
        "times": incident.times,
        "was_ranks": sorted(incident.was_ranks),
        "into": incident.into,
        "timeout_known": verdict.timeout_known,
        "final": incident.final,
        "hosts": {str(rank): shown.one_line(host) for rank, host in sorted(incident.hosts.items())},
        "pids": {str(rank): pid for rank, pid in sorted(incident.pids.items())},
        "crash": crashes,
        "memory": seen.get("memory") or {},
        "nodes": seen.get("nodes") or [],
        "timeline": seen.get("timeline") or {},
        "ranks": seen["ranks"],
        "groups": seen["groups"],
        "collectives": seen.get("collectives") or [],
        "job": end,
        "seen_at": seen["as_of"],
        "timeout_at": seen["timeout_at"],
        "recorder_files": lines(incident.recorder_files),
        "run": run(status),
    }


def picture(incident: Incident, status: Status) -> dict[str, Any]:
    """The keys of the document that show the trouble itself, as of `status`: what an incident keeps (`Incident.kept`) once it is over."""
    verdict, as_of = incident.verdict, float(shown.now_wall(status))
    left_s = number(verdict.timeout_left_s)
    shows_trouble = incident.closed_at is None or incident.final  # after a recovery ranks have moved on
    return {
        "as_of": as_of,
        "at": shown.one_line(shown.at(verdict, incident.stacks)),
        "compile": {str(rank): compile_row(activity, status) for rank, activity in sorted(_compiling(incident, status).items())},
        "ranks": _ranks(incident, status) if shows_trouble else {},
        "groups": groups(status, (verdict,)) if shows_trouble else [],
        "collectives": collectives.rows(status),
        "crash": _crashes(incident, status.snapshot),
        "memory": _memory(incident, status.snapshot),
        "nodes": _nodes(status),
        "timeline": _timeline(incident, status, as_of),
        "timeout_at": float(incident.updated_wall_at) + left_s if left_s is not None else None,
    }


def _nodes(status: Status) -> list[dict[str, str]]:
    """Which ranks run where, for the map; [] for one node and for jobs that are drawn without nodes."""
    if status.snapshot is None or status.job.world_size > MAX_RANKS_BY_NODE or len(status.snapshot.nodes) < 2:
        return []
    return [
        {"node": shown.one_line(node.node), "ranks": compress((*node.silent_ranks, *(state.rank for state in node.ranks)))} for node in status.snapshot.nodes
    ]


def _timeline(incident: Incident, status: Status, until_wall: float) -> dict[str, Any]:
    """What the culprits, some that wait, some that are silent and, of a small job, all others did in the ten minutes before."""
    verdict = incident.verdict
    chosen = [*verdict.culprit_ranks[:8], *verdict.waiting_ranks[:6], *verdict.unknown_ranks[:2]]
    if status.job.world_size <= MAX_RANKS_SHOWN:
        chosen += range(status.job.world_size)
    return timeline.rows(status.timeline, [rank for rank in chosen if rank >= 0], until_wall)


def stack_groups(incident: Incident) -> list[dict[str, Any]]:
    """Equal stacks together, as the document has them."""
    if not incident.stack_groups:
        return list(incident.kept.get("stack_groups") or ())
    return [
        {"ranks": compress(group.ranks), "frames": [shown.clean(f"{frame.name} ({frame.file}:{frame.line})") for frame in group.frames], "role": group.role}
        for group in incident.stack_groups
    ]


def job_end(incident: Incident, status: Status) -> dict[str, Any]:
    """How the run, or the attempt that the incident belongs to, has ended: `ended_at` is null while it runs. ending: the reason, "" where none is known."""
    kept = incident.kept.get("job")
    if kept is not None:
        return dict(kept)
    over = status.state in ("done", "failed")
    return {
        "ended_at": float(shown.now_wall(status)) if over else None,
        "exit_code": status.exit_code,
        "ending": shown.one_line(status.snapshot.ending) if status.snapshot else "",
        "state": status.state,
    }


def closed_by(incident: Incident, status: Status) -> Literal["recovered", "merge", "restart", "job_ended"] | None:
    """Why it is open no more: healed, part of another one, its processes replaced, or the job has ended with it. None while it is open."""
    if incident.closed_at is None:
        return "job_ended" if status.state in ("done", "failed") else None
    if incident.into:
        return "merge"
    return "restart" if (incident.kept.get("job") or {}).get("state") == "restarting" else "recovered"


def closed_at(incident: Incident, status: Status) -> float | None:
    """When, in unix seconds: for one that was still open the end of the job."""
    return float(shown.now_wall(status)) if closed_by(incident, status) == "job_ended" else number(incident.closed_wall_at)


def summary(verdict: Verdict) -> str:
    """The one sentence; made from the parts where the judgement came without one."""
    text = shown.public_line(verdict.summary)
    if text:
        return text
    where = f" at {verdict.at}" if verdict.at else ""
    waiting = f"; {shown.rank_words(verdict.waiting_ranks)} waiting" if verdict.waiting_ranks else ""
    return shown.one_line(f"{shown.rank_words(verdict.culprit_ranks)} {verdict.cause}{where}{waiting}")


def stack_text(stack: Stack | None) -> str | None:
    """A stack as text without rankwatch's own threads, its children's below it; None where nothing was caught."""
    if stack is None:
        return None
    text = traces.without_own_threads(stack.text) or "\n\n".join(
        "\n".join((f"Thread {thread.native_id}: {thread.name}", *(f"    {frame.name} ({frame.file}:{frame.line})" for frame in thread.frames)))
        for thread in stack.threads
    )
    parts = [text.strip("\n"), *(f"-- child process {child.pid}\n{below.rstrip()}" for child in stack.subprocesses if (below := stack_text(child)))]
    whole = shown.clean("\n\n".join(filter(None, parts)))
    if len(whole) > MAX_STACK_CHARS:
        whole = f"{whole[:MAX_STACK_CHARS]}\n... cut at {MAX_STACK_CHARS} characters"
    return f"{whole}\n" if whole else None


def since_wall(incident: Incident, status: Status) -> float:
    """Start of the wait in unix seconds."""
    if incident.since_wall_at:
        return float(incident.since_wall_at)
    if status.snapshot:
        return float(shown.wall(status.snapshot, incident.verdict.since))
    return float(incident.opened_wall_at)


def number(value: float | None) -> float | None:
    """A number that JSON can say, else null."""
    return float(value) if value is not None and math.isfinite(value) else None


def lines(texts: Iterable[str]) -> list[str]:
    """Each text as one clean line without secrets."""
    return [shown.public_line(text) for text in texts]


def run(status: Status) -> dict[str, Any]:
    """Identity of the run: the part that run.json, the state and each incident share. Secrets are hidden."""
    job = status.job
    return {
        "rankwatch": __version__,
        "job_id": shown.clean(job.job_id),
        "run_dir": shown.clean(job.run_dir),
        "command": [shown.clean(text) for text in redact.command(job.command)],
        "node": shown.clean(job.node),
        "world_size": job.world_size,
        "nnodes": job.nnodes,
        "attempt": status.snapshot.attempt if status.snapshot else job.attempt,
        "versions": {shown.clean(name): shown.clean(text) for name, text in job.versions.items()},
        "labels": {shown.clean(name): shown.clean(text) for name, text in job.labels.items()},
        "started_at": float(job.started_wall_at),
        "status_url": shown.clean(job.status_url),
        "capabilities": {shown.clean(name): shown.one_line(text) for name, text in job.capabilities.items()},
    }


def groups(status: Status, verdicts: Iterable[Verdict] = ()) -> list[dict[str, Any]]:
    """Process groups with the span of their members' sequence numbers: those that verdicts name and those that lag, at most MAX_GROUPS."""
    waited = {(verdict.group.name, frozenset(verdict.group.ranks)) for verdict in verdicts if verdict.group}
    names = {name for name, _ in waited}
    found: dict[tuple[str, int, int, int], dict[str, Any]] = {}
    for state in status.snapshot.ranks().values() if status.snapshot else ():
        for group in state.groups:
            if not group.ranks:
                continue
            # members are told apart by their ends and number: comparing 16k lists of 16k ranks would take seconds
            key = (group.name, len(group.ranks), group.ranks[0], group.ranks[-1])
            row = found.get(key)
            if row is None:
                row = found[key] = {"group": group, "seqs": {}}
            if group.name in state.enqueued and not state.mixed.get(group.name):  # lower bounds would seem to be behind
                row["seqs"][state.rank] = state.enqueued[group.name]
    for (name, *_), row in found.items():
        row["low"], row["high"] = min(row["seqs"].values(), default=None), max(row["seqs"].values(), default=None)
        row["waited_on"] = name in names and (name, frozenset(row["group"].ranks)) in waited
    order = sorted(found.values(), key=lambda row: (not row["waited_on"], row["low"] == row["high"], shown.one_line(row["group"].name)))
    rows = []
    for row in order[:MAX_GROUPS]:
        seqs: Mapping[int, int] = row["seqs"]
        low, high = row["low"], row["high"]
        behind = [rank for rank, seq in seqs.items() if high is not None and seq < high]
        rows.append(
            {
                "name": shown.one_line(row["group"].name),
                "desc": shown.one_line(shown.group_label(row["group"])),
                "backend": shown.one_line(row["group"].backend),
                "ranks": shown.short_ranks(row["group"].ranks, 200),
                "timeout_s": number(row["group"].timeout_s),
                "seq_min": low,
                "seq_max": high,
                "behind": shown.short_ranks(behind, 200),
                "waited_on": row["waited_on"],
            }
        )
    return rows


def _group(group: WaitedOn | None) -> dict[str, Any] | None:
    if group is None:
        return None
    return {
        "name": shown.one_line(group.name),
        "desc": shown.one_line(group.desc),
        "ranks": list(group.ranks),
        "op": shown.one_line(group.op),
        "seq": group.seq,
        "sizes": [list(size) for size in group.sizes],
        "dtypes": lines(group.dtypes),
    }


def _action(action: Action | None) -> dict[str, Any] | None:
    return {"taken": action.taken, "at": float(action.at_wall), "why": shown.public_line(action.why)} if action is not None else None


def _straggling(found: Straggling | None) -> dict[str, Any] | None:
    if found is None:
        return None
    numbers = {name: number(getattr(found, name)) for name in ("late_by_s", "last_ratio", "cost_ratio", "rank_s_per_min")}
    return {**numbers, "measured": found.measured}


def _compiling(incident: Incident, status: Status) -> dict[int, CompileActivity]:
    """What compiles: as the incident keeps it, and what the culprits and a few others compile at this moment."""
    now: dict[int, CompileActivity] = {}
    if status.snapshot and incident.closed_at is None:
        for state in status.snapshot.ranks().values():
            if state.compiling and (state.rank in incident.verdict.culprit_ranks or len(now) < MAX_RANKS_SHOWN):
                now[state.rank] = min(state.compiling, key=lambda activity: activity.started_at)
    return {**incident.compiling, **now}


def compile_row(activity: CompileActivity, status: Status) -> dict[str, Any]:
    """One compile as the reports and the API show it. Elapsed counts to the picture's time."""
    now = status.snapshot.now if status.snapshot else activity.phase_since
    return {
        "frame": shown.one_line(activity.frame),
        "compile_id": shown.one_line(activity.compile_id),
        "phase": activity.phase,
        "elapsed_s": round(max(0.0, now - activity.started_at), 3),
        "reason": shown.public_line(activity.recompile_reason),
        "kind": activity.kind,
        "raw_phase": shown.one_line(activity.raw_phase),
        "phase_s": round(max(0.0, now - activity.phase_since), 3),
        "split": activity.split,
        "splits": activity.splits,
        "detail": shown.one_line(activity.detail),
    }


def _stacks(incident: Incident) -> dict[str, str | None]:
    ranks = sorted({*incident.stacks, *incident.verdict.culprit_ranks})
    return {str(rank): stack_text(incident.stacks.get(rank)) for rank in ranks if rank >= 0}


def _child_stacks(incident: Incident) -> dict[str, list[dict[str, Any]]]:
    """What the culprits' sampled children do, at most four a rank: {"1": [{"pid": 77, "frames": [...]}]}."""
    found = {}
    for rank in sorted(incident.verdict.culprit_ranks)[:MAX_RANKS_SHOWN]:
        stack = incident.stacks.get(rank)
        rows = [
            {"pid": child.pid, "frames": [shown.clean(f"{frame.name} ({frame.file}:{frame.line})") for frame in child.main]}
            for child in (stack.subprocesses[:MAX_CHILDREN] if stack is not None else ()) if child.main
        ]  # fmt: skip
        if rows:
            found[str(rank)] = rows
    return found


def _crashes(incident: Incident, snapshot: JobSnapshot | None) -> dict[str, Any]:
    states = snapshot.ranks() if snapshot else {}
    return {str(rank): _crash(crash) for rank in sorted(incident.verdict.culprit_ranks) if rank in states and (crash := states[rank].crash) is not None}


def _memory(incident: Incident, snapshot: JobSnapshot | None) -> dict[str, Any]:
    """Of the culprits' GPUs, bytes; `line` is for people. Ranks without a record are left out."""
    states = snapshot.ranks() if snapshot else {}
    found = {}
    for rank in sorted(incident.verdict.culprit_ranks)[:MAX_RANKS_SHOWN]:
        if rank in states and (numbers := gpu_memory.numbers(states[rank].memory)):
            if "oom" in numbers:
                numbers["oom"]["where"] = shown.one_line(numbers["oom"]["where"])
            found[str(rank)] = {"line": gpu_memory.line(numbers), **numbers}
    return found


def with_crashes(kept: Mapping[str, Any], incident: Incident, snapshot: JobSnapshot) -> dict[str, Any]:
    """A kept picture with the exceptions that became known since."""
    return {**kept, "crash": {**kept["crash"], **_crashes(incident, snapshot)}}


def _crash(crash: Crash) -> dict[str, Any]:
    return {
        "type": shown.one_line(crash.type),
        "message": shown.cut(redact.text(shown.clean(crash.message)), 4000),
        "where": shown.one_line(crash.where),
        "traceback": redact.text(shown.clean(traces.clip_traceback(crash.traceback, MAX_TRACEBACK_CHARS))),
        "source": shown.one_line(crash.source),
        "at": number(crash.at_wall),
    }


def _ranks(incident: Incident, status: Status) -> dict[str, Any]:
    """What the culprits and some others do: at most MAX_RANKS_SHOWN, culprits first."""
    snapshot = status.snapshot
    if snapshot is None:
        return {}
    states, views = snapshot.ranks(), shown.rank_views(status)
    verdict = incident.verdict
    order = [*verdict.culprit_ranks, *verdict.waiting_ranks, *sorted(states)]
    chosen = [rank for rank in dict.fromkeys(order) if rank in states][:MAX_RANKS_SHOWN]
    return {str(rank): rank_row(states[rank], views[rank], status) for rank in chosen}


def _gpu(gpu: Gpu | None) -> dict[str, Any] | None:
    """What the driver says of a rank's GPU; what it does not tell is null."""
    if gpu is None:
        return None
    return {
        "index": gpu.index,
        "uuid": shown.one_line(gpu.uuid),
        "by": gpu.by,
        "utilisation_ratio": number(gpu.utilisation_ratio),
        "sm_clock_hz": number(gpu.sm_clock_hz),
        "power_w": number(gpu.power_w),
        "temperature_c": number(gpu.temperature_c),
        "memory_used_bytes": gpu.memory_used_bytes,
        "throttled": lines(gpu.throttled),
        "ecc_uncorrected": gpu.ecc_uncorrected,
        "xids": sorted({code for code, _at in gpu.xids}),
        "lost": shown.one_line(gpu.lost),
    }


def rank_row(state: RankState, view: shown.RankView, status: Status) -> dict[str, Any]:
    """One rank as the pages and the API show it."""
    snapshot = status.snapshot
    assert snapshot is not None, "a rank is only reported by a snapshot"
    process = state.process
    return {
        "rank": state.rank,
        "local_rank": state.local_rank,
        "node": shown.one_line(state.node),
        "pid": process.pid if process else None,
        "phase": view.phase,
        "label": view.label,
        "kind": view.kind,
        "phase_s": round(max(0.0, snapshot.now - view.since), 3) if view.since is not None else None,
        "detail": view.detail,
        "culprit": view.culprit,
        "waiting": view.waiting,
        "seq": view.seq,
        "lag": view.lag,
        "inflight_s": round(view.inflight_s, 3),
        "timeout_s": number(view.timeout_s),
        "steps": state.steps,
        "step_s": number(state.step_s),
        "last_step_at": number(shown.wall(snapshot, state.last_step_at)) if state.last_step_at is not None else None,
        "process_state": process.state if process else "",
        "exit_code": process.exit_code if process else None,
        "cpu_s": number(process.cpu_s) if process else None,
        "rss_bytes": process.rss_bytes if process else None,
        "gpu_memory": gpu_memory.line(gpu_memory.numbers(state.memory)),
        "gpu": _gpu(state.gpu),
        "agent": state.agent,
        "agent_detail": shown.one_line(state.agent_detail),
        "stage": state.stage,
    }
