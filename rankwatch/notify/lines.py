"""The lines on stderr: logfmt after a fixed tag, or one JSON object a line with `as_json`.

    [rankwatch] 0.1.0 watching 4 ranks on 1 node; compile ok, ddp ok, collectives ok, stacks ok; status http://127.0.0.1:27435 run=...
    [rankwatch] all 4 ranks stepping after 74 s (compile 61 s; slowest rank 3, +9 s); smallest timeout 600 s
    [rankwatch] 03:12:44Z STUCK rank=1 host=node05 pid=21107 cause=not_entered domain=user_code at=train.py:31:load_batch for=60s ...
    [rankwatch] done 3h12m: 0 stuck, 2 slow; 41 rank-min lost waiting (rank 3 recompiling block.forward: 31 min)

Every function gives whole lines without the last newline. Nothing that a job wrote can break a line or move a cursor.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rankwatch import __version__, shown
from rankwatch.model import PAGING, Incident, Status, Straggling, Verdict
from rankwatch.notify.failed import failed_block
from rankwatch.shown import TAG

__all__ = ["action", "blind", "compiles", "done", "failed_block", "notice", "numerics", "stepping", "verdict", "watching"]

CAPABILITIES = ("compile", "ddp", "collectives", "stacks")
MAX_VALUE = 200
MAX_JSON_RANKS = 64
MAX_JSON_ROWS = 20
MAX_PARTS = 3
_PLAIN = re.compile(r"[^\s\"'=\\]+\Z")


def watching(status: Status, *, as_json: bool = False) -> str:
    """The first line: what is watched, how well, where to look."""
    job = status.job
    known = job.capabilities
    more = (name for name, reason in known.items() if reason != "ok" and not reason.startswith("absent"))
    told = {name: known.get(name, "unknown") for name in (*CAPABILITIES, *more)}
    alike: dict[str, list[str]] = {}
    for name, reason in told.items():
        alike.setdefault(name if reason in ("ok", "unknown") else reason, []).append(name)
    words = [f"{', '.join(names)}{':' if len(names) > 1 else ''} {told[names[0]]}" for names in alike.values()]
    if as_json:
        fields = {"version": __version__, "world_size": job.world_size, "nnodes": job.nnodes, **{f"can_{name}": reason for name, reason in known.items()}}
        return _json("watching", status, {**fields, "status": job.status_url or "off", "run": job.run_dir})
    text = f"{__version__} watching {shown.plural(job.world_size, 'rank')} on {shown.plural(job.nnodes, 'node')}; {', '.join(words)}"
    return shown.one_line(f"{TAG} {text}; status {job.status_url or 'off'} run={quoted(job.run_dir)}")


def stepping(
    status: Status,
    *,
    after_s: float | None = None,
    compile_s: float | None = None,
    slowest_rank: int | None = None,
    slowest_by_s: float | None = None,
    as_json: bool = False,
) -> str:
    """The second line, once every rank has stepped. What is not given is read from the picture or left out."""
    snapshot = status.snapshot
    if after_s is None and snapshot is not None:
        after_s = snapshot.now - snapshot.started_at
    if compile_s is None:
        compile_s = _compile_s(status)
    timeout_s = shown.smallest_timeout_s(snapshot)
    if as_json:
        fields = {"world_size": status.job.world_size, "after_s": after_s, "compile_s": compile_s, "slowest_rank": slowest_rank, "slowest_by_s": slowest_by_s}
        return _json("stepping", status, {**fields, "timeout_s": timeout_s})
    notes = [f"compile {_s(compile_s)}"] if compile_s else []
    if slowest_rank is not None and slowest_by_s is not None:
        notes.append(f"slowest rank {slowest_rank}, +{_s(slowest_by_s)}")
    ranks = status.job.world_size
    text = f"{TAG} {'the 1 rank' if ranks == 1 else 'both ranks' if ranks == 2 else f'all {ranks} ranks'} stepping"
    text += f" after {_s(after_s)}" if after_s is not None else ""
    text += f" ({'; '.join(notes)})" if notes else ""
    return text + (f"; smallest timeout {_s(timeout_s)}" if timeout_s is not None else "")


def verdict(incident: Incident, status: Status, report: str = "", repeat: int = 0, *, as_json: bool = False) -> str:
    """One line about an incident as it stands: opened, escalated, repeated, or recovered once it is closed.

    report: where its report lies; by default report.txt of the incident in the run directory. repeat: how often nothing new was said before.
    """
    closed = incident.closed_at is not None
    at = (incident.closed_wall_at if closed else None) or (status.snapshot.wall_at if status.snapshot and not closed else incident.updated_wall_at)
    word = "recovered" if closed else incident.verdict.verdict
    fields = _verdict_fields(incident, status, report, repeat)
    if as_json:
        return _json(word, status, {**_exact(incident), **{name: value for name, value in fields.items() if name not in _WORDS_FOR_PEOPLE}}, at)
    fields = {name: value for name, value in fields.items() if name not in _NUMBERS_FOR_PROGRAMS}
    return f"{TAG} {shown.utc(at, date=False)} {word.upper()} " + " ".join(f"{key}={quoted(value)}" for key, value in fields.items())


_WORDS_FOR_PEOPLE = ("rank", "pid", "for", "waiting", "timeout_in", "lost", "compiling_for", "split", "was", "why", "late_by")
_NUMBERS_FOR_PROGRAMS = ("for_s", "compiling_for_s", "late_by_s")


def _exact(incident: Incident) -> dict[str, Any]:
    """What the JSON line says in numbers where the other one has words."""
    judged = incident.verdict
    summary = shown.public_line(judged.summary)
    return {
        "incident": incident.id,
        "culprit_ranks": sorted(judged.culprit_ranks)[:MAX_JSON_RANKS],
        "pid": [incident.pids[rank] for rank in sorted(judged.culprit_ranks)[:MAX_JSON_RANKS] if rank in incident.pids],
        "waiting_ranks": sorted(judged.waiting_ranks)[:MAX_JSON_RANKS],
        "num_waiting": len(judged.waiting_ranks),
        "timeout_in_s": judged.timeout_left_s if incident.closed_at is None else None,
        "timeout_known": judged.timeout_known,
        "lost_rank_s": round(incident.lost_rank_s, 3),
        "was_ranks": sorted(incident.was_ranks)[:MAX_JSON_RANKS],
        "summary": shown.past(summary) if incident.closed_at is not None else summary,
    }


def _verdict_fields(incident: Incident, status: Status, report: str, repeat: int) -> dict[str, Any]:
    """Both kinds of line are picked from these; numbers where they are numbers."""
    judged, snapshot = incident.verdict, status.snapshot
    since = shown.since(incident)
    ended_at = incident.closed_at if incident.closed_at is not None else snapshot.now if snapshot else since
    for_s = max(0.0, ended_at - since)
    fields: dict[str, Any] = {
        "rank": shown.short_ranks(judged.culprit_ranks),
        "was": shown.short_ranks(incident.was_ranks) if incident.was_ranks != judged.culprit_ranks and incident.closed_at is None else "",
        "host": _some(dict.fromkeys(incident.hosts[rank] for rank in judged.culprit_ranks if rank in incident.hosts)),
        "pid": _some(str(incident.pids[rank]) for rank in judged.culprit_ranks if rank in incident.pids),
        "cause": judged.cause,
        "domain": judged.domain,
        "at": shown.at(judged, incident.stacks),
        "for": f"{for_s:.0f}s",
        "for_s": float(round(for_s)),
    }
    if incident.times > 1:
        fields["times"] = incident.times
    if incident.closed_at is not None:
        fields["lost"] = shown.lost_words(incident.lost_rank_s)
        end = incident.kept.get("job") or {}
        if end.get("state") == "restarting":  # nothing has healed: other processes run now
            fields |= {"by": "restart", "attempt": end.get("attempt", "")}
        elif incident.into:
            fields |= {"by": "merge", "into": incident.into}
    else:
        fields |= _compile_fields(incident, status)
        fields["waiting"] = shown.short_ranks(judged.waiting_ranks)
        if judged.group:
            fields |= {"op": judged.group.op, "group": judged.group.desc or judged.group.name, "seq": judged.group.seq or ""}
        if judged.straggling:
            fields |= _straggling_fields(judged.straggling)
        if judged.timeout_left_s is not None:
            fields["timeout_in"] = f"{judged.timeout_left_s:.0f}s"
        elif not judged.timeout_known:
            fields["timeout_in"] = "unknown"
        seen = len(snapshot.ranks()) if snapshot else 0
        if seen and seen < status.job.world_size:
            fields["note"] = f"{seen} of {status.job.world_size} ranks seen"
        if judged.verdict in PAGING:
            fields["why"] = _why(judged)
        if judged.verdict in PAGING or judged.straggling:
            fields["do"] = shown.public_line(judged.advice[0]) if judged.advice else ""
    if repeat:
        fields["repeat"] = repeat
    fields["report"] = report or (f"{status.job.run_dir}/incidents/{incident.id}/report.txt" if status.job.run_dir else "")
    return {key: value for key, value in fields.items() if value not in ("", None)}


def _straggling_fields(found: Straggling) -> dict[str, Any]:
    """By how much a straggler is late, at what share of the collectives, and what that costs."""
    late = f"{1000 * found.late_by_s:.0f}ms" if found.late_by_s < 1 else f"{found.late_by_s:.1f}s"
    about = "" if found.measured else "~"
    numbers = {"costs_rank_s_per_min": round(found.rank_s_per_min, 1)}
    return {"late_by": about + late, "late_by_s": round(found.late_by_s, 3), "last_at": f"{found.last_ratio:.0%}", **numbers}


_SAID_BY_FIELDS = ("not_entered", "compiling", "data_loading", "checkpointing", "external_io", "stopped", "debugger")
_WHO_WAITS = re.compile(r"ranks? [\d,. ()-]+ (?:waits?|were waiting|was waiting)\Z")


def _why(judged: Verdict) -> str:
    """The summary without what the fields say anyhow; "" where they say it all."""
    if judged.cause in _SAID_BY_FIELDS and judged.verdict != "diverged":
        return ""
    return "; ".join(clause for clause in shown.without_countdown(shown.public_line(judged.summary)).split("; ") if not _WHO_WAITS.match(clause))


def _compile_fields(incident: Incident, status: Status) -> dict[str, Any]:
    """What the first culprit compiles: the newest picture where it still compiles, else as the incident keeps it."""
    if incident.verdict.cause != "compiling":
        return {}
    states = status.snapshot.ranks() if status.snapshot else {}
    for rank in incident.verdict.culprit_ranks:
        live = min(states[rank].compiling, key=lambda activity: activity.started_at, default=None) if rank in states else None
        activity = live or incident.compiling.get(rank)
        if activity:
            fields: dict[str, Any] = {"frame": activity.frame, "phase": activity.phase}
            if status.snapshot:
                compiling_s = max(0.0, status.snapshot.now - activity.started_at)
                fields |= {"compiling_for": f"{compiling_s:.0f}s", "compiling_for_s": float(round(compiling_s))}
            if activity.splits:
                fields["split"] = f"{activity.split}/{activity.splits}"
            return {**fields, "reason": shown.public_line(activity.recompile_reason)}
    return {}


def action(incident: Incident, status: Status, report: str = "", *, as_json: bool = False) -> str:
    """What was done about an incident: `03:12:54Z ACTION taken=exit rank=2 cause=mismatch why=...`; "" where nothing was."""
    taken, judged = incident.action, incident.verdict
    if taken is None:
        return ""
    why = shown.public_line(taken.why)
    if as_json:
        fields = {"incident": incident.id, "taken": taken.taken, "culprit_ranks": sorted(judged.culprit_ranks)[:MAX_JSON_RANKS], "cause": judged.cause}
        return _json("action", status, {**fields, "why": why, "report": report}, taken.at_wall)
    said = {"taken": taken.taken, "rank": shown.short_ranks(judged.culprit_ranks), "cause": judged.cause, "why": why, "report": report}
    return f"{TAG} {shown.utc(taken.at_wall, date=False)} ACTION " + " ".join(f"{key}={quoted(value)}" for key, value in said.items() if value)


def done(status: Status, *, as_json: bool = False) -> str:
    """The last line: how long, how it ended, incidents by the gravest verdict of each, what waiting has cost, the costliest three, where the files are."""
    everything = (*status.closed_incidents, *status.open_incidents)
    counts = Counter(shown.worst(incident) for incident in everything)
    counts.update(status.forgotten)
    words = [f"{counts[name]} {name}" for name in ("failed", "diverged", "timeout_imminent") if counts[name]]
    words += [f"{counts[name]} {name}" for name in ("stuck", "slow")]
    words += [f"{counts[name]} {name}" for name in ("straggler",) if counts[name]]
    words += [shown.plural(status.restarts, "restart")] if status.restarts else []
    lost_s = shown.waited_rank_s(status)
    lasted_s = max(0.0, shown.now_wall(status) - status.job.started_wall_at)
    signal = shown.ended_by_signal(status.snapshot.ending) if status.snapshot else ""
    if as_json:
        fields = {"lasted_s": round(lasted_s, 3), "exit_code": status.exit_code, "ended_by": signal, "restarts": status.restarts}
        costs = [{"rank": row.rank if row.rank >= 0 else None, "reason": shown.public_line(row.reason), "lost_rank_s": round(row.rank_s, 3)}
                 for row in status.waiting[:MAX_JSON_ROWS]]  # fmt: skip
        return _json("done", status, {**fields, "verdicts": dict(counts), "lost_rank_s": round(lost_s, 3), "waiting": costs, "run": status.job.run_dir})
    text = f"{TAG} done {shown.duration(lasted_s)}"
    text += f", ended by {signal}" if signal else ""
    text += f", {shown.exit_words(status.exit_code)}" if status.exit_code else ""
    text += f": {', '.join(words)}; {shown.lost_words(lost_s)} lost waiting"
    parts = _costs(status, lost_s) if status.waiting else _incident_costs(everything, lost_s)
    text += f" ({'; '.join(parts)})" if parts else ""
    return shown.one_line(text) + (f"; run={quoted(status.job.run_dir)}" if status.job.run_dir else "")


def _costs(status: Status, lost_s: float) -> list[str]:
    """Whom the ranks have waited for and why, costliest first; what has cost nothing to speak of is not told."""
    told = [row for row in status.waiting if not shown.lost_words(row.rank_s, lost_s).startswith("0 ")]
    parts = [f"{shown.waited_for(row)}{_cost(row.rank_s, lost_s)}" for row in told[:MAX_PARTS]]
    if len(told) > MAX_PARTS:
        parts.append(f"{len(told) - MAX_PARTS} more{_cost(sum(row.rank_s for row in told[MAX_PARTS:]), lost_s)}")
    return parts


def _incident_costs(everything: Iterable[Incident], lost_s: float) -> list[str]:
    """The same by incident, where nothing was sampled: several of one rank and reason are one."""
    costs: dict[str, float] = {}
    for incident in everything:
        costs[_what(incident)] = costs.get(_what(incident), 0.0) + incident.lost_rank_s
    costly = [(what, cost_s) for what, cost_s in sorted(costs.items(), key=lambda item: -item[1]) if _cost(cost_s, lost_s)]
    parts = [what + _cost(cost_s, lost_s) for what, cost_s in costly[:MAX_PARTS]]
    if len(costly) > MAX_PARTS:
        parts.append(f"{len(costly) - MAX_PARTS} more{_cost(sum(cost_s for _, cost_s in costly[MAX_PARTS:]), lost_s)}")
    return parts


def blind(rank: int, detail: str, *, as_json: bool = False) -> str:
    """A rank that lives but whose agent did not load."""
    if as_json:
        return json.dumps({"rankwatch": __version__, "event": "blind", "rank": rank, "detail": shown.one_line(detail)})
    return shown.one_line(f"{TAG} BLIND rank={rank}: agent did not load ({detail}); only its stacks and its exit are watched")


def notice(text: str, *, as_json: bool = False) -> str:
    """Anything else that must be said once: what failed, the checked cause, the next command."""
    if as_json:
        return json.dumps({"rankwatch": __version__, "event": "notice", "text": shown.one_line(text)})
    return f"{TAG} {shown.one_line(text)}"


def compiles(kind: str, frame: str, ranks: str, words: str, status: Status, *, as_json: bool = False) -> str:
    """A fact about torch.compile that slows the job or makes its ranks differ: a recompile limit, graphs split differently, nothing compiled."""
    fields = {"what": kind, "rank": ranks, "frame": shown.public_line(frame), "why": shown.public_line(words)}
    if as_json:
        return _json("compile", status, fields)
    fields["see"] = f"rankwatch compile {status.job.run_dir}"
    return f"{TAG} {shown.utc(shown.now_wall(status), date=False)} COMPILE " + " ".join(f"{key}={quoted(value)}" for key, value in fields.items() if value)


def numerics(kind: str, ranks: tuple[int, ...], step: int, words: str, status: Status, *, as_json: bool = False) -> str:
    """Numbers that are wrong, by `--probe numerics`: `NUMERICS rank=3 what=gradient step=120 why="first non-finite gradient norm at step 120 ..."`."""
    why = shown.public_line(words)
    if as_json:
        return _json("numerics", status, {"ranks": sorted(ranks)[:MAX_JSON_RANKS], "what": kind, "step": step, "why": why})
    fields = {"rank": shown.short_ranks(ranks), "what": kind, "step": step, "why": why}
    return f"{TAG} {shown.utc(shown.now_wall(status), date=False)} NUMERICS " + " ".join(f"{key}={quoted(value)}" for key, value in fields.items())


# -- words -----------------------------------------------------------------------------------------------------------


def quoted(value: object) -> str:
    """A logfmt value: bare where it has no blank, quote or equals sign, else in double quotes with escapes; cut at MAX_VALUE unless it is a path."""
    text = shown.one_line(value)
    if len(text) > MAX_VALUE and not text.startswith("/"):
        text = shown.cut(text, MAX_VALUE)
    if _PLAIN.match(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _json(event: str, status: Status, fields: Mapping[str, Any], at: float | None = None) -> str:
    record = {"rankwatch": __version__, "event": event, "time": at if at is not None else shown.now_wall(status), "job_id": status.job.job_id, **fields}
    return json.dumps({key: shown.one_line(value) if isinstance(value, str) else value for key, value in record.items()})


def _s(seconds: float) -> str:
    """Seconds as the second line says them: "600 s", never "10m00s"."""
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"


def _some(values: Iterable[str], limit: int = 4) -> str:
    found = list(values)
    return ",".join(found[:limit]) + (f",...({len(found)})" if len(found) > limit else "")


def _cost(part_s: float, whole_s: float) -> str:
    """ ": 31 rank-min", "" where that is nothing beside the whole."""
    words = shown.lost_words(part_s, whole_s)
    return "" if words.startswith("0 ") else f": {words}"


def _what(incident: Incident) -> str:
    """ "rank 3 recompiling forward@model.py:31", "rank 1 not_entered at train.py:31:load_batch"."""
    who = shown.rank_words(incident.verdict.culprit_ranks, 40)
    activity = next((incident.compiling[rank] for rank in incident.verdict.culprit_ranks if rank in incident.compiling), None)
    if incident.verdict.cause == "compiling" and activity:
        return f"{who} {'recompiling' if activity.recompile_reason else 'compiling'} {activity.frame}"
    if not incident.verdict.culprit_ranks:
        return f"{incident.verdict.cause} of {shown.rank_words(incident.verdict.waiting_ranks, 40)}"
    at = shown.at(incident.verdict, incident.stacks)
    return f"{who} {incident.verdict.cause}" + (f" at {at}" if at else "")


def _compile_s(status: Status) -> float | None:
    """The longest total compile time of a rank, over all stages."""
    tables = [state.compile_totals.get("seconds") for state in status.snapshot.ranks().values()] if status.snapshot else []
    return max((shown.compile_seconds(table) for table in tables if isinstance(table, Mapping)), default=None)
