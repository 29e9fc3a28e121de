"""The block below torchrun's own summary: torchrun names the first process that it saw exit, this names the cause."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from rankwatch import __version__, redact, shown, traces
from rankwatch.model import PAGING, Incident, RankState, Stack, Status
from rankwatch.shown import TAG

RULE = "=" * 60
MAX_TRACEBACK_LINES = 25
MAX_STACK_ROWS = 20
MAX_TAIL_LINES = 15
MAX_LINE = 300
JUST_OVER_S = 10.0
_OVER = re.compile(r"^recovered after [^:]*: ")


def failed_block(
    status: Status,
    log_tails: Mapping[int, str] | None = None,
    *,
    said: Mapping[str, str] | None = None,
    on_screen: Collection[int] = (),
    as_json: bool = False,
) -> str:
    """Several lines, culprit first; "" where nothing is known that torchrun has not said.

    log_tails: the end of a rank's log, shown where neither a traceback nor a stack of the culprit was caught.
    said: incident -> the advice that its line has given a moment ago. on_screen: ranks whose stderr comes out here, their tracebacks with it;
    neither is said again.
    as_json: the same rows as one JSON object on one line.
    """
    tails = log_tails or {}
    incident = first_cause(status)
    rows = _incident_rows(incident, status, tails, on_screen, (said or {}).get(incident.id, "")) if incident else _exit_rows(status, tails, on_screen)
    if not rows:
        return ""
    if as_json:
        return json.dumps(
            {"rankwatch": __version__, "event": "failed_block", "time": shown.now_wall(status), "job_id": shown.one_line(status.job.job_id), "lines": rows}
        )
    return "\n".join(f"{TAG} {row}".rstrip() for row in (RULE, *rows, RULE))


def first_cause(status: Status) -> Incident | None:
    """The incident that started it: of those that ever paged and had not recovered before, the earliest wait."""
    everything = (*status.open_incidents, *(incident for incident in status.closed_incidents if incident.final))
    paged = [incident for incident in everything if incident.verdict.verdict in PAGING or any(change.verdict in PAGING for change in incident.history)]
    return min(paged, key=lambda incident: (incident.verdict.since, incident.opened_at), default=None) or _just_over(status)


def _just_over(status: Status) -> Incident | None:
    """An incident that paged and was closed just before the end: ranks that waited in it have ended badly."""
    if status.snapshot is None:
        return None
    bad = {rank for rank, state in status.snapshot.ranks().items() if _ended_badly(state)}
    for incident in reversed(status.closed_incidents):
        recent = incident.closed_at is not None and status.snapshot.now - incident.closed_at <= JUST_OVER_S and not incident.into
        if recent and any(change.verdict in PAGING for change in incident.history) and bad.intersection(incident.verdict.waiting_ranks):
            return incident
    return None


def _ended_badly(state: RankState) -> bool:
    return state.crash is not None or (state.process is not None and not state.process.alive and state.process.exit_code not in (0, None))


def _incident_rows(incident: Incident, status: Status, tails: Mapping[int, str], on_screen: Collection[int], said: str) -> list[str]:
    judged = incident.verdict
    summary = _OVER.sub("", shown.without_countdown(judged.summary))
    rows = [f"{shown.worst(incident).upper()}: {_line(summary) or _line(judged.cause)}"]
    who = []
    for rank in judged.culprit_ranks[:4]:
        host = f" on {incident.hosts[rank]}" if rank in incident.hosts else ""
        pid = f" pid {incident.pids[rank]}" if rank in incident.pids else ""
        who.append(f"rank {rank}{host}{pid}")
    if who:
        more = f"; {len(judged.culprit_ranks) - 4} more" if len(judged.culprit_ranks) > 4 else ""
        rows.append(f"culprit: {_line('; '.join(who))}{more}; cause {judged.cause}, domain {judged.domain}")
    if judged.waiting_ranks:
        group = f" in {shown.group_call(judged.group.op, judged.group.seq, judged.group.desc or judged.group.name)}" if judged.group else ""
        rows.append(f"waited: {shown.rank_words(judged.waiting_ranks)}{_line(group)} (victims, whatever torchrun says above)")
    states = status.snapshot.ranks() if status.snapshot else {}
    for rank in judged.culprit_ranks[:2]:
        state = states.get(rank)
        rows += _last_words(rank, state, incident.stacks.get(rank) or (state.stack if state else None), tails, rank in on_screen, rows[0])
    rows += [f"to do: {_line(text)}" for text in judged.advice[:3] if text != said]
    if status.job.run_dir:
        rows.append(f"report: {_line(status.job.run_dir)}/incidents/{incident.id}/report.txt")
    return rows


def _exit_rows(status: Status, tails: Mapping[int, str], on_screen: Collection[int]) -> list[str]:
    """Without an incident: the rank that went first with an error, as the processes tell it."""
    states = status.snapshot.ranks() if status.snapshot else {}
    bad = [state for state in states.values() if _ended_badly(state)]
    first = min(bad, key=lambda state: (state.crash is None, _gone_at(state), state.rank), default=None)
    if first is None:
        return []
    code = shown.exit_words(first.process.exit_code) if first.process and not first.process.alive else "an exception"
    rows = [f"FAILED: rank {first.rank} went first, with {code}" + (f"; {shown.plural(len(bad) - 1, 'other rank')} failed after it" if len(bad) > 1 else "")]
    rows += _last_words(first.rank, first, first.stack, tails, first.rank in on_screen)
    if status.job.run_dir:
        rows.append(f"run directory: {_line(status.job.run_dir)}")
    return rows


def _gone_at(state: RankState) -> float:
    return state.process.exited_at if state.process and state.process.exited_at is not None else float("inf")


def _last_words(rank: int, state: RankState | None, stack: Stack | None, tails: Mapping[int, str], on_screen: bool, told: str = "") -> list[str]:
    """The best that is known of a rank's end: its traceback, else its last stack, else the end of its log. told: the summary."""
    crash = state.crash if state else None
    if crash and crash.traceback and on_screen:
        text = _line(f"{crash.type}: {crash.message}")
        where = f" at {_line(crash.where)}" if crash.where else ""
        return [f"exception of rank {rank}: its traceback is above" + ("" if text in told else f"; {_cut(text)}{where}")]
    if crash:
        body = traces.traceback_rows(crash.traceback, MAX_TRACEBACK_LINES) or f"{crash.type}: {crash.message}".splitlines()
        return [f"exception of rank {rank}:", *(f"    {_cut(line)}" for line in body)]
    if stack and stack.main:
        frames = traces.folded([f"{frame.name} ({frame.file}:{frame.line})" for frame in stack.main])[:MAX_STACK_ROWS]
        return [f"last stack of rank {rank} (innermost first):", *(f"    {_cut(frame)}" for frame in frames)]
    tail = tails.get(rank, "").strip("\n").splitlines()[-MAX_TAIL_LINES:]
    return [f"end of the log of rank {rank}:", *(f"    {_cut(line)}" for line in tail)] if tail else []


def _line(text: str) -> str:
    return shown.public_line(text) if not text.startswith(" ") else f" {shown.public_line(text)}"


def _cut(line: str) -> str:
    return shown.cut(redact.text(shown.clean(line.rstrip("\n"))), MAX_LINE)
